"""The two ops that weights are for. Both are caught one Python hop above aten when no graph is recorded.

Where a graph is recorded, autograd runs on the Weight itself and calls ``mm`` and ``addmm`` with it, forward and
backward; those are answered here, too (``matrix_product``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedOpError
from ...torch_private.observers import is_observed, is_tracing, untraced
from ...torch_private.tensors import any_requires_grad
from ..dispatch import FOLDS, SHORTCUTS, rule
from ..products import ANY, Layout, binding, chunks, cpu, int8pack, kernels_for, layout_of, rounding
from ..spec import WeightSpec
from ..weight import Weight
from .rows import cut_rows

aten = torch.ops.aten
_is_compiling = torch.compiler.is_compiling

SCRATCH = 32 * 2**20
"""Bytes of decoded weight above which products decode row chunks instead of the whole."""

CACHED = 8 * 2**20
"""The same for dtypes of 16 bits, so that chunks stay in the cache. In float32 the bits of one product count more."""

KERNELS: dict[str, Callable[[Layout, Sequence[Tensor], Tensor, Tensor | None], Tensor | None]] = {
    "compiled": cpu.linear,
    "int8pack": int8pack.linear,
}


def _records_graph(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any_requires_grad(*tensors)


def _traced(weight: Weight) -> Tensor:
    """The values, which are a constant of the trace; it has no place for a Weight."""
    if _records_graph(weight):
        fix = "Call requires_grad_(False) on it, or trace inside torch.no_grad()."
        raise UnsupportedOpError("torch.jit.trace cannot follow a Weight that requires grad", fix=fix)
    with untraced():
        return weight.values_of()


@rule(torch.nn.functional.linear)
def linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input @ weight.T + bias``.

    Where a graph is recorded, autograd runs on the Weight itself: it saves the Weight, not its values, and lets the
    gradient of ``input`` through whether or not the Weight is frozen.
    """
    if not isinstance(weight, Weight):
        return _plain_linear(op, input, weight, bias)
    is_seen = is_observed()
    if is_seen and is_tracing():
        kind, values = weight.spec.activations, _traced(weight)
        return _plain_linear(op, input if kind is None else rounding.rounded(input, kind), values, bias)
    if _records_graph(input, weight, bias):
        return _plain_linear(op, input, weight, bias)
    layout = weight.kernel_layout
    if layout is not None and not is_seen:
        made = _by_kernel(layout, layout.pick_from(weight), input, bias, weight._spec.dtype)
        if made is not None:
            SHORTCUTS[op] = cpu.shortcut_linear  # next time
            return made
    input, bias = (t.values_of() if isinstance(t, Weight) else t for t in (input, bias))  # type: ignore[assignment]
    return _decoded_linear(op, input, weight, bias)


def _plain_linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(weight, Weight) and _is_batch(input):
            folded: Tensor = op(input.flatten(0, -2), weight, bias)
            return folded.view(*input.shape[:-1], weight.shape[0])
        made: Tensor = op(input, weight, bias)
    return made


def _is_batch(x: Any) -> bool:
    """Whether torch would rather repeat a Weight for each matrix of ``x`` than copy ``x`` to make it one matrix."""
    return _is_strided(x) and not x.is_contiguous()


def _is_strided(x: Any) -> bool:
    is_plain = isinstance(x, Tensor) and not isinstance(x, Weight) and not x.is_nested
    return is_plain and x.layout is torch.strided and x.dim() > 2


@rule(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__)
def matmul(op: Any, first: Any, second: Any, **kwargs: Any) -> Any:
    """The product, where the other factor is a batch of matrices one matrix with all of their rows."""
    with torch._C.DisableTorchFunctionSubclass():
        if op is Tensor.__rmatmul__:
            op, first, second = torch.matmul, second, first
        if not kwargs and _is_matrix(second) and _is_batch(first):
            return op(first.flatten(0, -2), second).view(*first.shape[:-1], second.shape[1])
        if not kwargs and _is_matrix(first) and _is_strided(second):
            turned = second.transpose(-1, -2)  # (A @ B).T is B.T @ A.T, so it is the rows of B.T that are one matrix
            return op(turned.flatten(0, -2), first.t()).view(*turned.shape[:-1], first.shape[0]).transpose(-1, -2)
        return op(first, second, **kwargs)


def _is_matrix(weight: Any) -> bool:
    return isinstance(weight, Weight) and weight.dim() == 2


def _by_kernel(
    layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """The product by the first kernel of the table that takes it, ``None`` if none does."""
    if x.dtype is not dtype:
        return None
    for kernel, most in layout.choices.get(dtype) or kernels_for(layout, dtype):
        if most == ANY or x.numel() <= most * layout.columns:
            made = KERNELS[kernel](layout, parts, x, bias)
            if made is not None:
                return made
    return None


FOLDS.update(dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__), matmul))
FOLDS[torch.nn.functional.linear] = _plain_linear


# -- products by decoding ---------------------------------------------------------------------------------------------


def _decoded_linear(op: Any, input: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if weight.spec.activations is not None:
        return _rounded_linear(op, input, weight, bias)
    step = _step(weight)
    if step is None or input.dtype is not weight.dtype or torch.is_autocast_enabled(input.device.type):
        return _plain_linear(op, input, weight.values_of(), bias)
    with torch._C.DisableTorchFunctionSubclass():
        return chunks.linear(input, bias, weight.shape[0], weight.shape[1], step, _decoder(weight))


def _rounded_linear(op: Any, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """The same of rounded inputs, where no kernel rounds them itself; no graph is recorded of it.

    Rounded once, at the end; on processors with fast products of 16 bits, and on GPUs, the product is also rounded
    before it has its scale and the bias.
    """
    kind, exact = weight.spec.activations, weight.map(_same, weight.spec.replace(activations=None))
    assert kind is not None
    fits = x.dim() > 0 and x.shape[-1] == weight.shape[-1] > 0 and x.is_floating_point()
    if not fits or x.dtype is not weight.dtype or torch.is_autocast_enabled(x.device.type):
        x = rounding.rounded(x, kind) if fits else x  # what it becomes, or why it cannot, is torch's to say
        return _plain_linear(op, x, exact.values_of(), bias)
    made = _by_engine(kind, x, exact)
    if made is None:
        units, scale = rounding.units_of(x, kind)
        if chunks.is_slow(x):
            units, wide = units.float(), exact.to(torch.float32)
            assert isinstance(wide, Weight)
            exact = wide
        made = _unrounded(op, units, exact).to(scale.dtype) * scale
    return (made if bias is None else made + bias).to(x.dtype)


def _unrounded(op: Any, x: Tensor, weight: Weight) -> Tensor:
    if torch.compiler.is_compiling():
        return _plain_linear(op, x, weight.values_of(), None)
    layout = None if is_observed() else weight.kernel_layout
    made = None
    if layout is not None:
        made = _by_kernel(layout, layout.pick_from(weight), x, None, weight.dtype)
    return _decoded_linear(op, x, weight, None) if made is None else made


def _by_engine(kind: str, x: Tensor, weight: Weight) -> Tensor | None:
    """The product of 8-bit codes with 8-bit codes, ``None`` where torch has none for them."""
    if not x.is_cuda or not weight.is_cuda or not weight.spec.is_contiguous:
        return None
    rows = x.numel() // x.shape[-1]
    engine = rounding.engine_for(kind, weight.scheme, tuple(weight.shape), rows, x.dtype, capability(x.device))
    if engine is None:
        return None
    made = rounding.ENGINES[engine](x.reshape(rows, x.shape[-1]), weight.scheme, weight.parts)
    return made.view(*x.shape[:-1], made.shape[-1])


def capability(device: torch.device) -> tuple[int, int]:
    """What the GPU can do, (0, 0) where there is none: fake tensors have devices that are not there."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def _step(weight: Weight) -> int | None:
    """How many rows to decode at once; ``None``: all, because they are few, or because rows cannot be cut there."""
    limit = min(SCRATCH, CACHED) if weight.dtype.itemsize == 2 and weight.is_cpu else SCRATCH
    if weight.dim() != 2 or weight.scheme.transparent or not weight.spec.is_contiguous:
        return None
    if weight.numel() * weight.dtype.itemsize <= limit:
        return None
    columns = weight.shape[1]
    step = max(limit // (columns * weight.dtype.itemsize) // 256 * 256, 256)
    spans = [part.span for part in weight.scheme.layout(weight.spec.base).values()]
    return None if any(span and step * columns % span for span in spans) else step


def _decoder(weight: Weight) -> chunks.Decode:
    layout = None if is_observed() else weight.kernel_layout
    parts = layout.pick_from(weight) if layout is not None else ()

    def decode(start: int, stop: int, out: Tensor | None) -> Tensor:
        if layout is not None:
            made = cpu.decode(layout, parts, weight.dtype, start=start, stop=stop, out=out)
            if made is not None:
                return made
        shape = (stop - start, weight.shape[1])
        return weight.scheme.decode(cut_rows(weight, start, stop), shape, weight.dtype)

    return decode


# -- below autograd ---------------------------------------------------------------------------------------------------


def matrix_product(op: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """What ``mm``, ``addmm`` and ``linear`` of a matrix and a Weight give, without its values in whole.

    ``None`` for every other call, which is then answered with the decoded values.
    """
    bias: Tensor | None
    if op is aten.mm.default:
        (x, weight), bias = args, None
    elif op is aten.addmm.default and not kwargs and len(args) == 3:
        bias, x, weight = args
        if not isinstance(bias, Tensor) or bias.dim() != 1:
            return None
    elif op is aten.linear.default and not kwargs:
        x, weight, bias = (*args, None)[:3]
    else:
        return None
    if not isinstance(weight, Weight) or isinstance(x, Weight) or isinstance(bias, Weight):
        return None
    if weight.dim() != 2 or weight.scheme.transparent or x.dtype is not weight.dtype or x.dim() == 0:
        return None
    turned = op is not aten.linear.default  # (K, N), as mm takes it
    if weight.spec.is_contiguous is turned and not (turned and bias is None):
        return None
    is_gradient = turned and weight.spec.is_contiguous
    base = weight if weight.spec.is_contiguous else weight.map(_same, weight.spec.permute(weight.spec.order))
    if not base.spec.is_contiguous:
        return None
    if torch.compiler.is_compiling():
        made = _in_graph(x, base, bias, is_gradient)
        if made is None and base.spec.activations is not None and not is_gradient:
            return _rounded_linear(torch.nn.functional.linear, x, base, bias)
        return made
    if is_gradient:
        return _gradient(x, base)
    layout = None if is_observed() else base.kernel_layout
    made = None
    if layout is not None:
        made = _by_kernel(layout, layout.pick_from(base), x, bias, base.dtype)
    return _decoded_linear(torch.nn.functional.linear, x, base, bias) if made is None else made


def _same(part: Tensor) -> Tensor:
    return part


def _gradient(x: Tensor, base: Weight) -> Tensor:
    """``x @ base``."""
    step = _step(base)
    if step is None:
        return chunks.times(x, base.values_of()).to(x.dtype)
    return chunks.product(x, base.shape[0], base.shape[1], step, _decoder(base))


# -- in compiled graphs -----------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("torchtether", "DEF")
"""The ops that stand in a compiled graph for a product with a Weight: the kernel is chosen when they run.

``parts`` are those of the contiguous Weight, in the order of its scheme, and ``weight`` says what it is (``told``).
Once kernels are built, ``linear`` runs on the CPU without Python (``binding.remember``); what does not suit goes to
``any_linear``.
A graph for export has none of them: it decodes with aten ops, so that it runs where torchtether is not installed.
"""
LIBRARY.define("linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor")
LIBRARY.define("any_linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor")
LIBRARY.define("gradient(Tensor x, Tensor[] parts, str weight) -> Tensor")


def _in_graph(x: Tensor, base: Weight, bias: Tensor | None, is_gradient: bool) -> Tensor | None:
    layout = base.kernel_layout
    if layout is None or torch.compiler.is_exporting() or base.device.type != "cpu":
        return None  # the compiler fuses the decoding
    if not kernels_for(layout, base.dtype):
        return None
    parts, weight = list(base.parts.values()), told(base.spec)
    if is_gradient:
        return torch.ops.torchtether.gradient.default(x, parts, weight)  # type: ignore[no-any-return]
    return torch.ops.torchtether.linear.default(x, bias, parts, weight)  # type: ignore[no-any-return]


_QUOTES = str.maketrans("'\"", "\"'")  # torch writes the text into C++ as it is, between double quotes


def told(spec: WeightSpec) -> str:
    """What the ops are told of a Weight: its spec as JSON, with single quotes."""
    return json.dumps(spec.replace(tie=None).to_json(), sort_keys=True).translate(_QUOTES)


class _Known(NamedTuple):
    spec: WeightSpec
    names: tuple[str, ...]
    layout: Layout | None
    order: tuple[int, ...]  # which parts the kernels take


@lru_cache(maxsize=4096)
def _known(weight: str) -> _Known:
    spec = WeightSpec.from_json(json.loads(weight.translate(_QUOTES)))
    names, layout = tuple(spec.scheme.layout(spec.shape)), layout_of(spec.scheme, spec.shape, spec.activations)
    return _Known(spec, names, layout, tuple(map(names.index, layout.parts)) if layout is not None else ())


def _weight_of(known: _Known, parts: Sequence[Tensor]) -> Weight:
    return Weight(dict(zip(known.names, parts, strict=True)), known.spec)


def linear_in_graph(x: Tensor, bias: Tensor | None, parts: list[Tensor], weight: str) -> Tensor:
    """``x @ weight.T + bias``."""
    known = _known(weight)
    if known.layout is not None:
        made = _by_kernel(known.layout, [parts[i] for i in known.order], x, bias, x.dtype)
        if made is not None:
            binding.remember(weight, known.layout, len(parts), known.order)
            return made
    return _decoded_linear(torch.nn.functional.linear, x, _weight_of(known, parts), bias)


torch.library.impl(LIBRARY, "linear", "CompositeExplicitAutograd")(linear_in_graph)
torch.library.impl(LIBRARY, "any_linear", "CPU")(linear_in_graph)


@torch.library.impl(LIBRARY, "gradient", "CPU")
def gradient_in_graph(x: Tensor, parts: list[Tensor], weight: str) -> Tensor:
    """``x @ weight``."""
    return _gradient(x, _weight_of(_known(weight), parts))


@torch.library.register_fake("torchtether::linear", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_linear(x: Tensor, bias: Tensor | None, parts: list[Tensor], weight: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _known(weight).spec.shape[0]))


@torch.library.register_fake("torchtether::gradient", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_gradient(x: Tensor, parts: list[Tensor], weight: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _known(weight).spec.shape[1]))


# -- embedding --------------------------------------------------------------------------------------------------------


@rule(torch.nn.functional.embedding)
def embedding(op: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``weight[input]``: the rows are gathered first and decoded after, so the table is never decoded."""
    max_norm = kwargs.get("max_norm", args[1] if len(args) > 1 else None)
    if isinstance(weight, Weight) and is_tracing():
        return _plain_embedding(op, input, _traced(weight), *args, **kwargs)
    if isinstance(weight, Weight) and max_norm is None and not _records_graph(weight):
        padding = kwargs.get("padding_idx", args[0] if args else None)
        if isinstance(input, Tensor) and _is_row(weight, padding):  # or torch says what is wrong
            made = gather(weight, input)
            SHORTCUTS[op] = cpu.shortcut_gather  # next time
            return made
    return _plain_embedding(op, input, weight, *args, **kwargs)


def _is_row(weight: Weight, padding_idx: int | None) -> bool:
    return padding_idx is None or (weight.dim() > 0 and -weight.shape[0] <= padding_idx < weight.shape[0])


def _plain_embedding(op: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        made: Tensor = op(input, weight, *args, **kwargs)
    return made


@rule(aten.embedding.default)
def embedding_rows(op: Any, weight: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """As ``embedding``, below autograd."""
    if not isinstance(weight, Weight):
        raise TypeError("the indices of an embedding cannot be a Weight")
    return gather(weight, indices)


def gather(weight: Weight, indices: Tensor) -> Tensor:
    """The decoded rows that ``indices`` (any shape, integer) name: shape ``(*indices.shape, *weight.shape[1:])``."""
    layout = None if _is_compiling() else weight.kernel_layout  # none where strides are turned
    if layout is not None and not is_observed():
        made = cpu.gather(layout, layout.pick_from(weight), weight._spec.dtype, indices)
        if made is not None:
            return made
    if not weight.spec.is_contiguous or weight.scheme.transparent:
        return weight.values_of().index_select(0, indices.reshape(-1)).view(*indices.shape, *weight.shape[1:])
    rows = weight.scheme.gather(weight.parts, weight.spec.base, indices.reshape(-1), weight.dtype)
    return rows.view(*indices.shape, *weight.shape[1:])
