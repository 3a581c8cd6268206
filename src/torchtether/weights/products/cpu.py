"""Calls of the compiled kernels, which check every size, stride, dtype, device and address themselves.

Each answers ``None``, with nothing computed, where the kernel is missing or does not suit: the general path is right.
A microsecond here is a fifth of a product with a small weight: hence nothing is asked in Python that they can ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .binding import Kernels
from .build import FOUND, load
from .layout import DTYPES, Layout


def _nothing(*_: Any) -> None:
    return None


Shortcut = Callable[[tuple[Any, ...], dict[str, Any] | None], Tensor | None]

shortcut_linear: Shortcut = _nothing
"""Of the arguments ``(x, weight, bias)`` what ``linear`` gives for a Weight whose kernel has been called before.

It runs no Python of ours. ``None`` for all others, where a graph is recorded, and where something looks on: then the
rules find out what to do.
"""
shortcut_gather: Shortcut = _nothing
"""Of the arguments ``(index, weight)`` what ``gather`` gives, likewise."""


def _found(kind: str, *, build: bool = True) -> Kernels | None:
    global shortcut_linear, shortcut_gather
    kernels = FOUND.get(kind) or load(kind, build=build)
    if kernels is not None and shortcut_linear is _nothing:  # those of any kind serve all
        shortcut_linear, shortcut_gather = kernels.shortcut_linear, kernels.shortcut_gather
    return kernels


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by the kernel that reads the parts as they lie, without a graph.

        x (..., K) float32, bfloat16 or float16, any strides; bias (N,) of the same dtype    result (..., N)

    ``parts`` are in the order of ``layout.parts``. Sums, with the bias, are float32 and rounded once to the dtype of
    ``x``; where codes are integers and inputs have 16 bits, these move by at most 2**-15 of the largest of their block
    of columns. Inputs that are not finite give nan.
    """
    kernels = _found(layout.kind)
    if kernels is None:
        return None
    made = kernels.linear(layout.address, x, bias, *parts)
    if made is NotImplemented:
        made = kernels.linear(layout.address, x.contiguous(), bias, *parts)
    return made  # type: ignore[no-any-return]


def decode(
    layout: Layout,
    parts: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    start: int = 0,
    stop: int | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Return the rows ``start`` to ``stop``, with the bits of ``Scheme.decode``.

        (stop - start, K) of ``dtype``, which is float32, bfloat16 or float16

    Written into the beginning of ``out`` where that is given.
    """
    kernels, stop = _found(layout.kind, build=False), layout.rows if stop is None else stop
    if kernels is None or dtype not in DTYPES:
        return None
    some = None if out is None else out[: stop - start]
    return kernels.decode(layout.address, DTYPES[dtype], None, start, stop, some, *parts)  # type: ignore[no-any-return]


def gather(layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, index: Tensor) -> Tensor | None:
    """Return the rows that ``index`` (int64 or int32, any shape and strides) names, as ``Scheme.decode`` does.

        (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    Raises IndexError where an index names no row.
    """
    kernels, number = _found(layout.kind, build=False), DTYPES.get(dtype)
    if kernels is None or number is None:
        return None
    made = kernels.decode(layout.address, number, index, 0, 0, None, *parts)
    if made is NotImplemented:
        made = kernels.decode(layout.address, number, index.contiguous(), 0, 0, None, *parts)
    return made  # type: ignore[no-any-return]
