"""One product with a Weight: by a kernel of the table, or with decoded values, a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...errors import UnsupportedOpError
from ...geometry.views import Shape
from ...schemes import ColumnScaled
from ...schemes.column_scaled import COLUMNS
from ...torch_private.observers import is_autocasting, is_observed, untraced
from ...torch_private.tensors import any_requires_grad, as_plain
from ..products import bitsandbytes_4bit, chunks, cpu, decoding, gpu, int8pack, int_mm, rounding, scaled_mm
from ..products.layout import DTYPES, Layout, layout_of
from ..products.table import ANY, kernels_for
from ..weight import Weight
from ..wrapping import Wrapping
from .rows import cut_rows

SCRATCH = 32 * 2**20
"""Bytes of decoded weight above which products decode row chunks instead of the whole."""

CACHED = 8 * 2**20
"""The same for 16-bit dtypes, so that chunks stay in the cache. In float32 the bits of one whole product matter more
than speed."""

ON_CUDA = 128 * 2**20
"""The same on CUDA: a chunk costs about four launches, and 8192 x 28672 in 16 bits is four chunks. On an H100,
64 to 512 MiB take the same time."""

MANY = 512
"""Rows of gradients from which on torch's own product with a weight that is decoded as a whole is faster (AMX: 1024 x
1024, 64 rows 2.0 and 0.94 of dense, 512 rows 1.4 and 1.5)."""

KERNELS: dict[str, Callable[[Layout, Sequence[Tensor], Tensor, Tensor | None], Tensor | None]] = {
    "compiled": cpu.linear,
    "blocks": cpu.linear,
    "int8pack": int8pack.linear,
    "int_mm": int_mm.linear,
    "scaled_mm": scaled_mm.linear,
    "triton": gpu.linear,
    "bitsandbytes": bitsandbytes_4bit.linear,
}


def records_graph(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any_requires_grad(*tensors)


def traced(weight: Weight) -> Tensor:
    """Return the values as a constant of the trace, which cannot hold a Weight."""
    if records_graph(weight):
        fix = "Call requires_grad_(False) on it, or trace inside torch.no_grad()."
        raise UnsupportedOpError("torch.jit.trace cannot follow a Weight that requires grad", fix=fix)
    with untraced():
        return weight.values_of()


def plain_linear(op: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    with as_plain():
        if isinstance(weight, Wrapping) and is_batch(input):
            folded: Tensor = op(input.flatten(0, -2), weight, bias)
            return folded.view(*input.shape[:-1], weight.shape[0])
        made: Tensor = op(input, weight, bias)
    return made


def is_batch(x: Any) -> bool:
    """Return whether torch may repeat a wrapper for each matrix of ``x`` rather than make ``x`` one matrix.

    It does for some strides, also of dimensions of size 1.
    """
    is_plain = isinstance(x, Tensor) and not isinstance(x, Wrapping) and not x.is_nested
    return is_plain and x.layout is torch.strided and x.dim() > 2


def by_kernel(
    layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor | None:
    """Return the product by the first kernel of the table that takes it, ``None`` if none does."""
    if x.dtype is not dtype:
        return None
    for kernel, most in (x.is_cpu and layout.choices.get(dtype)) or kernels_for(layout, dtype, x.device.type):
        if most == ANY or x.numel() <= most * layout.columns:
            made = KERNELS[kernel](layout, parts, x, bias)
            if made is not None:
                return made
    return None


def by_parts(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the product by a kernel that reads the parts directly, ``None`` if none does."""
    layout = weight.kernel_layout
    if layout is None:
        return by_columns(weight, x, bias)
    return by_kernel(layout, layout.pick_from(weight), x, bias, weight._spec.dtype)


def by_columns(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the product with a column-scaled Weight: scaled inputs, times the inner scheme's codes by its kernel.

    ``None`` if no kernel takes it.  It is computed in float32 and rounded once: scaled 16-bit inputs would be rounded
    themselves.
    """
    layout, size = layout_below_columns(weight), weight.shape[-1]
    if layout is None or x.dtype is not weight.dtype or x.dtype not in DTYPES or x.shape[-1:] != (size,):
        return None
    if not any(x.numel() <= n * size for _, n in kernels_for(layout, torch.float32, x.device.type)):
        return None
    scaled, added = x.float() * weight.parts[COLUMNS], None if bias is None else bias.float()
    made = by_kernel(layout, layout.pick_from(weight), scaled, added, torch.float32)
    return None if made is None else made.to(x.dtype)


def layout_below_columns(weight: Weight) -> Layout | None:
    """Return the kernels' layout of the scheme below the column scales of ``weight``; ``None`` if there is none.

    Also ``None`` where inputs are rounded: they must be rounded before the column scales, so such products decode.
    """
    scheme, spec = weight.scheme.decoder, weight.spec
    if not isinstance(scheme, ColumnScaled) or spec.activations is not None or not spec.is_contiguous:
        return None
    return layout_of(scheme.scheme, spec.shape)


def decoded_linear(input: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    if weight.spec.activations is not None:
        return rounded_linear(input, weight, bias)
    step = rows_at_once(weight)
    if step is None or input.dtype is not weight.dtype or is_autocasting(input.device):
        return plain_linear(linear, input, weight.values_of(), bias)
    with as_plain():
        return chunks.linear(input, bias, weight.shape[0], weight.shape[1], step, decoder(weight))


def rounded_linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return the product of rounded inputs, for calls that no kernel takes; no autograd graph is recorded.

    The product is rounded once, at the end; on processors with fast 16-bit products, and on GPUs, it is also rounded
    before it is scaled and the bias is added.
    """
    kind = weight.spec.activations
    assert kind is not None
    fits = x.dim() > 0 and x.shape[-1] == weight.shape[-1] > 0 and x.is_floating_point()
    is_converted = not fits or x.dtype is not weight.dtype or is_autocasting(x.device)
    if not is_converted and not x.is_cpu and weight.kernel_layout is not None:
        made = by_parts(weight, x, bias)  # by torch's own ops, which modes and compilers see
        if made is not None:
            return made
    exact = weight.map(same, weight.spec.replace(activations=None))
    if is_converted:
        x = rounding.rounded(x, kind) if fits else x  # torch promotes, or raises its own error
        return plain_linear(linear, x, exact.values_of(), bias)
    units, scale = rounding.units_of(x, kind)
    if chunks.is_slow(x) or x.dtype is torch.float16:  # sums of float16, not scaled yet, may be infinite
        units, wide = units.float(), exact.to(torch.float32)
        assert isinstance(wide, Weight)
        exact = wide
    return rounding.scaled(_unrounded(units, exact), scale, x.dtype, bias)


def _unrounded(x: Tensor, weight: Weight) -> Tensor:
    if torch.compiler.is_compiling():
        return plain_linear(linear, x, weight.values_of(), None)
    made = None if is_observed() else by_parts(weight, x, None)
    return decoded_linear(x, weight, None) if made is None else made


def rows_at_once(weight: Weight) -> int | None:
    """Return how many rows to decode at once; ``None`` for all, if they are few or cannot be cut."""
    if weight.scheme.transparent or weight.dim() != 2 or not weight.spec.is_contiguous:
        return None
    step = rows_of_piece(weight.spec.shape, weight.dtype, weight.device.type)
    if step is None:
        return None
    columns = weight.shape[1]
    spans = [part.span for part in weight.scheme.layout(weight.spec.base).values()]
    return None if any(span and step * columns % span for span in spans) else step


def rows_of_piece(shape: Shape, dtype: torch.dtype, device: str) -> int | None:
    """Return how many rows of a matrix of ``shape`` a type of device decodes at once, ``None`` for all.

    >>> rows_of_piece((28672, 8192), torch.bfloat16, "cuda")
    8192
    """
    limit = ON_CUDA if device == "cuda" else SCRATCH
    if device == "cpu" and dtype.itemsize == 2:
        limit = min(SCRATCH, CACHED)
    row = shape[1] * dtype.itemsize
    return None if shape[0] * row <= limit else max(limit // row // 256 * 256, 256)


def decoder(weight: Weight) -> chunks.Decode:
    layout = None if is_observed() else weight.kernel_layout
    parts = layout.pick_from(weight) if layout is not None else ()

    def decode(start: int, stop: int, out: Tensor | None) -> Tensor:
        if layout is not None:
            made = decoding.decode(layout, parts, weight.dtype, (start, stop), out)
            if made is not None:
                return made
        shape = (stop - start, weight.shape[1])
        return weight.scheme.decode(cut_rows(weight, start, stop), shape, weight.dtype)

    return decode


def same(part: Tensor) -> Tensor:
    return part


def gradient(x: Tensor, base: Weight) -> Tensor:
    """Return ``x @ base``."""
    step, layout = rows_at_once(base), None if is_observed() or not x.is_cpu else base.kernel_layout
    if layout is not None and (step is not None or x.shape[0] < MANY):
        made = cpu.gradient(layout, layout.pick_from(base), x)
        if made is not None:
            return made
    if step is None:
        return chunks.times(x, base.values_of()).to(x.dtype)
    return chunks.product(x, base.shape[0], base.shape[1], step, decoder(base))
