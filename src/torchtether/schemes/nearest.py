"""Rounding to the nearest of a few values: from numbers to codes of a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from ..torch_private.observers import cached, is_direct


def count_above(x: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return how many of the ascending ``thresholds`` (at most 255) lie strictly below each element, uint8.

    >>> count_above(torch.tensor([0.0, 0.5, 2.0]), (0.5, 1.0)).tolist()
    [0, 0, 2]
    """
    if 6 < len(thresholds) < _UNSURE and is_direct() and x.device.type == "cpu" and x.numel() >= _MANY:
        return _looked_up(x, tuple(thresholds))
    if len(thresholds) > 32:
        edges = torch.tensor(thresholds, dtype=x.dtype, device=x.device)
        return torch.bucketize(x, edges, out_int32=True).to(torch.uint8)
    return _compared(x, thresholds)


def nearest_code(x: Tensor, thresholds: Sequence[float], order: Sequence[int]) -> Tensor:
    """Return the code nearest to each element of ``x``, uint8; the other arguments are from ``nearest_codes``.

    >>> nearest_code(torch.tensor([0.4, -0.4]), *nearest_codes((1.0, -1.0))).tolist()
    [0, 1]
    """
    place = count_above(x, thresholds)
    if tuple(order) == tuple(range(len(order))):
        return place
    codes = torch.tensor(order, dtype=torch.uint8, device=x.device)
    return codes.index_select(0, place.reshape(-1).int()).view(place.shape)


def half_gaps(table: tuple[float, ...]) -> list[float]:
    """Return, for each code, the largest distance from its value to a number within [-1, 1] that rounds to it."""
    thresholds, order = nearest_codes(table)
    edges = (-1.0, *thresholds, 1.0)
    gaps = {table[code]: max(table[code] - edges[i], edges[i + 1] - table[code]) for i, code in enumerate(order)}
    return [gaps[value] for value in table]


_CELLS = 2**15 - 1
"""Cells of equal width on either side of 0, up to the largest threshold."""

_UNSURE = 128
"""The table entry of a cell in which a threshold lies."""

_MANY = 2**13  # elements; for fewer, making the table costs more


def _looked_up(x: Tensor, thresholds: tuple[float, ...]) -> Tensor:
    """Return ``count_above`` by a table of narrow cells; numbers in a cell with a threshold are compared."""
    table, reach = _cells(thresholds)
    flat = x.reshape(-1).float()
    count = table.index_select(0, _cell(flat, reach))
    whole = count.numel() // _RUN * _RUN
    runs = count[:whole].view(torch.int64)
    unsure = (runs & _ANY_UNSURE).nonzero().view(-1)
    if unsure.numel():
        some = flat[:whole].view(-1, _RUN).index_select(0, unsure)
        runs.index_copy_(0, unsure, _compared(some, thresholds).view(torch.int64).view(-1))
    count[whole:] = _compared(flat[whole:], thresholds)
    return count.view(x.shape)


_RUN = 8
"""Numbers whose counts are tested together, as one integer, and compared if one of them is unsure."""

_ANY_UNSURE = -0x7F7F7F7F7F7F7F80  # the highest bit of every byte


def _compared(x: Tensor, thresholds: Sequence[float]) -> Tensor:
    """Return ``count_above`` by comparisons in the dtype of ``x``: a few are faster than a search."""
    count, is_above = x.new_zeros(x.shape), x.new_empty(x.shape)
    for threshold in thresholds:
        count += torch.gt(x, threshold, out=is_above)
    return count.to(torch.uint8)


@lru_cache(maxsize=64)
def _cells(thresholds: tuple[float, ...]) -> tuple[Tensor, float]:
    """Return the number of thresholds below each cell, and the magnitude beyond which no threshold lies.

    The products and roundings that map numbers to cells keep their order, so a threshold in a lower cell is smaller.
    """
    edges = torch.tensor(thresholds, dtype=torch.float32, device="cpu")
    reach = float(edges.abs().max()) * (1 + 2.0**-10)  # beyond it there is a cell without a threshold
    own = _cell(edges, reach)
    every = torch.arange(2 * _CELLS + 3, dtype=torch.int32, device="cpu")
    table = torch.bucketize(every, own.long(), out_int32=True).to(torch.uint8)
    table[own] = _UNSURE
    return table, reach


def _cell(x: Tensor, reach: float) -> Tensor:
    return x.clamp(-reach, reach).mul_(_CELLS / reach).add_(_CELLS + 1).to(torch.int32)


@cached
def nearest_codes(table: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the thresholds between the values of ``table``, ascending, and the code of each value between them.

    A number halfway goes to the lower value.  Of equal values (0 and -0) the first code is used.

    >>> nearest_codes((1.0, -1.0))
    ((0.0,), (1, 0))
    """
    first: dict[float, int] = {}
    for code, value in enumerate(table):
        first.setdefault(value, code)
    ascending = sorted(first)
    values = [_float32(value) for value in ascending]
    middles = tuple(_float32(low + high) / 2 for low, high in pairwise(values))
    return middles, tuple(first[value] for value in ascending)


def _float32(number: float) -> float:
    """Return the float32 nearest to ``number``, in plain Python, because a compiler may be tracing torch."""
    step = 2.0 ** max(math.frexp(number)[1] - 24, -149)
    return round(number / step) * step
