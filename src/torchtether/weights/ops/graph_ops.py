"""The custom ops that represent products with a Weight in a compiled graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..products import cpu, scaled_mm
from ..products.layout import Layout, layout_of
from ..products.table import kernels_for
from ..spec import WeightSpec
from ..weight import Weight
from .product import by_columns, by_kernel, decoded_linear, gradient, layout_below_columns

LIBRARY = torch.library.Library("torchtether", "DEF")
"""The library of the custom ops. They choose the kernel when they run, not when the graph is compiled.

``parts`` are those of the contiguous Weight, in the order of its scheme, and ``weight`` is its spec (``text_of``).
Once a kernel has run, ``linear`` runs on the CPU without Python (``cpu.remember``), and passes calls that the kernel
does not take to ``any_linear``.
A graph for export has none of them: it decodes with aten ops, so that it runs where torchtether is not installed.
"""

LIBRARY.define("linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor")
LIBRARY.define("any_linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor")
LIBRARY.define("gradient(Tensor x, Tensor[] parts, str weight) -> Tensor")


def in_graph(x: Tensor, base: Weight, bias: Tensor | None, is_gradient: bool) -> Tensor | None:
    """Return the product by one of these ops, ``None`` where the compiler does better with aten ops."""
    layout, dtype = base.kernel_layout, base.dtype
    if layout is None:
        layout, dtype = layout_below_columns(base), torch.float32
    if layout is None or torch.compiler.is_exporting() or not kernels_for(layout, dtype, device := base.device.type):
        return None  # the compiler fuses the decoding
    if device != "cpu" and base.spec.activations is not None and (is_gradient or scaled_mm.is_compiled(layout)):
        return None  # torch's own ops multiply, and the compiler fuses the rounding
    parts, weight = list(base.parts.values()), text_of(base.spec)
    if is_gradient:
        return torch.ops.torchtether.gradient.default(x, parts, weight)  # type: ignore[no-any-return]
    return torch.ops.torchtether.linear.default(x, bias, parts, weight)  # type: ignore[no-any-return]


_QUOTES = str.maketrans("'\"", "\"'")  # torch writes the text unescaped into C++, between double quotes


def text_of(spec: WeightSpec) -> str:
    """Return the argument ``weight`` of the ops: the spec without its tie, as JSON with single quotes."""
    return json.dumps(spec.replace(tie=None).to_json(), sort_keys=True).translate(_QUOTES)


class _Known(NamedTuple):
    spec: WeightSpec
    names: tuple[str, ...]
    layout: Layout | None
    order: tuple[int, ...]  # indices of the parts that the kernels take


@lru_cache(maxsize=4096)
def _known(weight: str) -> _Known:
    spec = WeightSpec.from_json(json.loads(weight.translate(_QUOTES)))
    names, layout = tuple(spec.scheme.layout(spec.shape)), layout_of(spec.scheme, spec.shape, spec.activations)
    return _Known(spec, names, layout, tuple(map(names.index, layout.parts)) if layout is not None else ())


def spec_from(weight: str) -> WeightSpec:
    """Return the spec from which ``text_of`` made ``weight``, without its tie."""
    return _known(weight).spec


def weight_from(weight: str, parts: Sequence[Tensor]) -> Weight:
    """Return a Weight of ``parts`` with the spec from which ``text_of`` made ``weight``."""
    known = _known(weight)
    return Weight(dict(zip(known.names, parts, strict=True)), known.spec)


def linear_in_graph(x: Tensor, bias: Tensor | None, parts: list[Tensor], weight: str) -> Tensor:
    """Return ``x @ weight.T + bias``."""
    known = _known(weight)
    if known.layout is not None:
        made = by_kernel(known.layout, [parts[i] for i in known.order], x, bias, x.dtype)
        if made is not None:
            if x.is_cpu:
                cpu.remember(weight, known.layout, len(parts), known.order)
            return made
    held = weight_from(weight, parts)
    made = by_columns(held, x, bias)
    return decoded_linear(x, held, bias) if made is None else made


torch.library.impl(LIBRARY, "linear", "CompositeExplicitAutograd")(linear_in_graph)
torch.library.impl(LIBRARY, "any_linear", "CPU")(linear_in_graph)


@torch.library.impl(LIBRARY, "gradient", "CompositeExplicitAutograd")
def gradient_in_graph(x: Tensor, parts: list[Tensor], weight: str) -> Tensor:
    """Return ``x @ weight``."""
    return gradient(x, weight_from(weight, parts))


@torch.library.register_fake("torchtether::linear", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_linear(x: Tensor, bias: Tensor | None, parts: list[Tensor], weight: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _known(weight).spec.shape[0]))


@torch.library.register_fake("torchtether::gradient", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_gradient(x: Tensor, parts: list[Tensor], weight: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _known(weight).spec.shape[1]))
