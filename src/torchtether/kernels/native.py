"""Calls of the compiled kernels: every size, stride, dtype and device is checked here, because they check nothing.

Each answers ``None``, with nothing computed, where the kernel is missing or does not suit: the general path is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .build import load
from .layout import DTYPES, Layout

Ordered = Sequence[Tensor | None]
_PLAIN = (Tensor, torch.nn.Parameter)
_LIKE = {dtype: torch.empty(0, dtype=dtype, device="cpu") for dtype in DTYPES}
"""``new_empty`` of these takes half as long as with a dtype, and does not ask for the default device as ``empty``."""


def linear(layout: Layout, parts: Ordered, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x @ weight.T + bias``, by the kernel that reads the parts as they lie, without a graph.

        x (..., K) float32, bfloat16 or float16, any strides; bias (N,) of the same dtype    result (..., N)

    ``parts`` are in the order of ``layout.parts``. Sums are float32 and rounded once to the dtype of ``x``; where codes
    are integers and inputs have 16 bits, these move by at most 2**-16 of the largest of their block of columns. Inputs
    that are not finite give nan.
    """
    if not layout.can_multiply:
        return None
    library = load(layout.kind)
    if library is None or (held := _addresses(layout, parts)) is None:
        return None
    dtype, columns = x.dtype, layout.columns
    number = DTYPES.get(dtype)
    if number is None or type(x) not in _PLAIN or x.dim() == 0 or x.shape[-1] != columns or not x.is_cpu:
        return None
    if not (x.dim() == 2 and x.stride(1) == 1) and not x.is_contiguous():
        x = x.contiguous()
    rows = x.numel() // columns
    address = x.data_ptr()
    if address == 0 or x.is_neg():  # nothing to read, or something that reads otherwise
        return None
    shift = None
    if bias is not None:
        fits = bias.dtype is dtype and bias.dim() == 1 and bias.shape[0] == layout.rows and type(bias) in _PLAIN
        if not fits or not bias.is_cpu or not bias.is_contiguous() or bias.is_neg():
            return None
        shift = bias.data_ptr()
    if x.dim() == 2:
        stride, out = x.stride(0), x.new_empty(rows, layout.rows)  # torch.empty would ask for the default device
    else:
        stride, out = columns, x.new_empty(*x.shape[:-1], layout.rows)
    library.tether_linear(layout.address, *held, address, rows, stride, number, shift, out.data_ptr())
    return out


def decode(
    layout: Layout,
    parts: Ordered,
    dtype: torch.dtype,
    *,
    start: int = 0,
    stop: int | None = None,
    index: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """The rows ``start`` to ``stop``, or those that the int64 ``index`` names, with the bits of ``Scheme.decode``.

        (stop - start, K) or (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    Written into the beginning of ``out`` where that is given. Raises IndexError where an index names no row.
    """
    number, library = DTYPES.get(dtype), load(layout.kind, build=False)
    if number is None or library is None or (held := _addresses(layout, parts)) is None:
        return None
    where, stop = None, layout.rows if stop is None else stop
    count = stop - start
    if index is not None:
        if index.dtype is not torch.int64 or type(index) not in _PLAIN or not (index.is_cpu and index.is_contiguous()):
            return None
        where, count = index.data_ptr(), index.numel()
        if count == 0:
            return None
    if out is None:
        shape = (count,) if index is None else index.shape
        out = _LIKE[dtype].new_empty(*shape, layout.columns)
    else:
        out = out[:count]
    if library.tether_decode(layout.address, *held, where, start, count, number, out.data_ptr()):
        raise IndexError("index out of range in self")
    return out


def _addresses(layout: Layout, parts: Ordered) -> list[int | None] | None:
    """Where the parts lie; ``None`` if one is not the whole, plain, contiguous tensor that the layout means."""
    found: list[int | None] = []
    for expected, part in zip(layout.parts, parts, strict=True):
        if part is None:
            if expected is not None:
                return None
            found.append(None)
            continue
        if expected is None or part.dtype is not expected[1] or part.numel() != expected[2]:
            return None
        if type(part) not in _PLAIN or not (part.is_cpu and part.is_contiguous()):
            return None
        address = part.data_ptr()
        if address == 0:  # freed, as FSDP does between uses
            return None
        found.append(address)
    return found
