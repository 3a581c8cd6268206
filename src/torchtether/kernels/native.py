"""Calls of the compiled kernels, which check every size, stride, dtype, device and address themselves.

Each answers ``None``, with nothing computed, where the kernel is missing or does not suit: the general path is right.
What costs a microsecond here is a fifth of a product with a small weight, so a call is one piece of packed memory, in
which tensors are named by the address of what torch knows of them, and the kernel asks torch (``tensors.h``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from .._torch import empty_on_cpu
from .build import load
from .layout import DTYPES, Layout

DONE, UNFIT, APART, WILD = range(4)  # Answer of tensors.h

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_are_plain = _PLAIN.issuperset  # subclasses know better than their memory what they are
_named = attrgetter("_cdata")

Call = Callable[[bytes], int]
_LINEAR: dict[str, Call] = {}
_DECODE: dict[str, Call] = {}


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x @ weight.T + bias``, by the kernel that reads the parts as they lie, without a graph.

        x (..., K) float32, bfloat16 or float16, any strides; bias (N,) of the same dtype    result (..., N)

    ``parts`` are in the order of ``layout.parts``. Sums are float32 and rounded once to the dtype of ``x``; where codes
    are integers and inputs have 16 bits, these move by at most 2**-16 of the largest of their block of columns. Inputs
    that are not finite give nan.
    """
    if not layout.can_multiply:
        return None
    call = _LINEAR.get(layout.kind) or _find_linear(layout.kind)
    if call is None or type(x) not in _PLAIN or not _are_plain(map(type, parts)) or x.is_neg():
        return None  # is_neg: it reads otherwise than it lies
    dtype, shape, rows = x.dtype, x.shape, layout.rows
    if dtype not in DTYPES or not x.is_cpu:
        return None
    if bias is None:
        shift = 0
    elif type(bias) in _PLAIN and not bias.is_neg():
        shift = bias._cdata  # type: ignore[attr-defined]
    else:
        return None
    if len(shape) == 2:
        out = empty_on_cpu((shape[0], rows), (rows, 1), dtype)
    else:
        out = x.new_empty(*shape[:-1], rows)
    named = layout.address, *map(_named, parts)
    answer = call(layout.pack_linear(*named, x._cdata, shift, out._cdata))  # type: ignore[attr-defined]
    if answer == APART:
        x = x.contiguous()
        answer = call(layout.pack_linear(*named, x._cdata, shift, out._cdata))  # type: ignore[attr-defined]
    return out if answer == DONE else None


def decode(
    layout: Layout,
    parts: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    start: int = 0,
    stop: int | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """The rows ``start`` to ``stop``, with the bits of ``Scheme.decode``.

        (stop - start, K) of ``dtype``, which is float32, bfloat16 or float16

    Written into the beginning of ``out`` where that is given.
    """
    call = _DECODE.get(layout.kind) or _find_decode(layout.kind)
    if call is None or dtype not in DTYPES or not _are_plain(map(type, parts)):
        return None
    count = (layout.rows if stop is None else stop) - start
    if out is None:
        out = empty_on_cpu((count, layout.columns), (layout.columns, 1), dtype)
    else:
        out = out[:count]
        if out.dtype is not dtype or type(out) is not Tensor:
            return None
    named = layout.address, *map(_named, parts)
    done = call(layout.pack_decode(*named, 0, start, count, out._cdata)) == DONE  # type: ignore[attr-defined]
    return out if done else None


def gather(layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, index: Tensor) -> Tensor | None:
    """The rows that ``index`` (int64 or int32, any shape and strides) names, with the bits of ``Scheme.decode``.

        (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    Raises IndexError where an index names no row.
    """
    call = _DECODE.get(layout.kind) or _find_decode(layout.kind)
    if call is None or dtype not in DTYPES or type(index) not in _PLAIN or not _are_plain(map(type, parts)):
        return None
    shape, columns = index.shape, layout.columns
    if len(shape) == 1:
        out = empty_on_cpu((shape[0], columns), (columns, 1), dtype)
    else:
        count = index.numel()
        out = empty_on_cpu((count, columns), (columns, 1), dtype).view(*shape, columns)
    named = layout.address, *map(_named, parts)
    answer = call(layout.pack_decode(*named, index._cdata, 0, 0, out._cdata))  # type: ignore[attr-defined]
    if answer == APART:
        index = index.contiguous()
        answer = call(layout.pack_decode(*named, index._cdata, 0, 0, out._cdata))  # type: ignore[attr-defined]
    if answer == WILD:
        raise IndexError("index out of range in self")
    return out if answer == DONE else None


def _find_linear(kind: str) -> Call | None:
    library = load(kind)
    if library is None:
        return None
    return _LINEAR.setdefault(kind, library.tether_linear)


def _find_decode(kind: str) -> Call | None:
    library = load(kind, build=False)
    if library is None:
        return None
    return _DECODE.setdefault(kind, library.tether_decode)
