"""Calls of the compiled kernels, which check every size, stride, dtype, device and address themselves.

Each answers ``None``, with nothing computed, where the kernel is missing or does not suit: the general path is right.
A microsecond here is a fifth of a product with a small weight: hence nothing is asked in Python that they can ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import compiled
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


def _found() -> ModuleType | None:
    global shortcut_linear, shortcut_gather
    module = compiled.native()
    if module is not None and shortcut_linear is _nothing:
        shortcut_linear, shortcut_gather = module.shortcut_linear, module.shortcut_gather
    return module


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by the kernel that reads the parts as they lie, without a graph.

        x (..., K) float32, bfloat16 or float16, any strides; bias (N,) of the same dtype    result (..., N)

    ``parts`` are in the order of ``layout.parts``. Sums, with the bias, are float32 and rounded once to the dtype of
    ``x``; where codes are integers and inputs have 16 bits, these move by at most 2**-15 of the largest of their block
    of columns. Inputs that are not finite give nan.
    """
    module = _found()
    if module is None:
        return None
    made = module.linear(layout.bound(), x, bias, *parts)
    if made is NotImplemented:
        made = module.linear(layout.bound(), x.contiguous(), bias, *parts)
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
    module, stop = _found(), layout.rows if stop is None else stop
    if module is None or dtype not in DTYPES:
        return None
    some = None if out is None else out[: stop - start]
    return module.decode(layout.bound(), DTYPES[dtype], None, start, stop, some, *parts)  # type: ignore[no-any-return]


def gather(layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, index: Tensor) -> Tensor | None:
    """Return the rows that ``index`` (int64 or int32, any shape and strides) names, as ``Scheme.decode`` does.

        (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    Raises IndexError where an index names no row.
    """
    module, number = _found(), DTYPES.get(dtype)
    if module is None or number is None:
        return None
    made = module.decode(layout.bound(), number, index, 0, 0, None, *parts)
    if made is NotImplemented:
        made = module.decode(layout.bound(), number, index.contiguous(), 0, 0, None, *parts)
    return made  # type: ignore[no-any-return]


def remember(weight: str, layout: Layout, parts: int, order: Sequence[int]) -> None:
    """Let the op ``torchtether::linear`` multiply ``weight`` without Python from now on.

    It is given that many ``parts``; ``order`` says which of them the kernels take, in the order in which they do.
    """
    if (module := _found()) is not None:
        module.remember(weight, layout.bound(), parts, tuple(order))
