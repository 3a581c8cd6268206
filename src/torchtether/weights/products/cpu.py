"""Calls of the compiled kernels, which check every size, stride, dtype, device and address themselves.

Each returns ``None``, without computing, if the kernel is missing or does not fit; callers take the general path then.
A microsecond here is a fifth of a product with a small weight: so Python repeats none of the kernels' checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ... import compiled
from .layout import DTYPES, Layout, Rows


def _nothing(*_: Any) -> None:
    return None


Shortcut = Callable[[tuple[Any, ...], dict[str, Any] | None], Tensor | None]

shortcut_linear: Shortcut = _nothing
"""A function of ``(x, weight, bias)``: ``linear`` for a Weight whose kernel has been called before.

It runs no Python code of this package. It returns ``None`` for other Weights, if a graph is recorded, and if a mode or
tracer observes ops: then the dispatch rules decide.
"""
shortcut_gather: Shortcut = _nothing
"""A function of ``(index, weight)``: ``gather``, likewise."""


def _found() -> ModuleType | None:
    global shortcut_linear, shortcut_gather
    module = compiled.native()
    if module is not None and shortcut_linear is _nothing:
        shortcut_linear, shortcut_gather = module.shortcut_linear, module.shortcut_gather
    return module


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by a kernel that reads the parts in place, outside of autograd.

        x (..., K) float32, bfloat16 or float16, any strides; bias (N,) of the same dtype    result (..., N)

    ``parts`` are in the order of ``layout.parts``. Sums, with the bias, are float32 and rounded once to the dtype of
    ``x``; if codes are integers and inputs have 16 bits, the inputs are rounded, by at most 2**-15 of the largest in
    their block of columns. Inputs that are not finite give NaN.
    """
    module = _found()
    if module is None:
        return None
    made = module.linear(layout.bound(), x, bias, *parts)
    if made is NotImplemented:
        made = module.linear(layout.bound(), x.contiguous(), bias, *parts)
    return made  # type: ignore[no-any-return]


def gradient(layout: Layout, parts: Sequence[Tensor], x: Tensor) -> Tensor | None:
    """Return ``x @ weight`` with values decoded to bfloat16, as a dense weight would have them, and float32 sums.

    x (M, N) bfloat16    result (M, K)
    """
    module = _found()
    if module is None:
        return None
    made = module.gradient(layout.bound(), x, *parts)
    if made is NotImplemented:
        made = module.gradient(layout.bound(), x.contiguous(), *parts)
    return made  # type: ignore[no-any-return]


def decode(
    layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, rows: Rows = None, out: Tensor | None = None
) -> Tensor | None:
    """Return the ``rows``, with the bits of ``Scheme.decode``.

        (count of rows, K) of ``dtype``, which is float32, bfloat16 or float16

    The result is written to the beginning of ``out`` if that is given.
    """
    module, (start, stop) = _found(), rows or (0, layout.rows)
    if module is None or dtype not in DTYPES:
        return None
    some = None if out is None else out[: stop - start]
    return module.decode(layout.bound(), DTYPES[dtype], None, start, stop, some, *parts)  # type: ignore[no-any-return]


def gather(layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, index: Tensor) -> Tensor | None:
    """Return the decoded rows at ``index`` (int64 or int32, any shape and strides), with the bits of ``Scheme.decode``.

        (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    Raises IndexError for an index out of range.
    """
    module, number = _found(), DTYPES.get(dtype)
    if module is None or number is None:
        return None
    made = module.decode(layout.bound(), number, index, 0, 0, None, *parts)
    if made is NotImplemented:
        made = module.decode(layout.bound(), number, index.contiguous(), 0, 0, None, *parts)
    return made  # type: ignore[no-any-return]


def remember(weight: str, layout: Layout, parts: int, order: Sequence[int]) -> None:
    """Register ``weight``, so that the op ``torchtether::linear`` multiplies it without Python from now on.

    ``parts`` is the number of parts that the op gets; ``order`` has the indices of those for the kernels, in order.
    """
    if (module := _found()) is not None:
        module.remember(weight, layout.bound(), parts, tuple(order))
