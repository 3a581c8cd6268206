"""Scales that lose less than those of the plain range: each block tries some, and keeps the one with the least error.

Clipping the few largest values of a block makes the steps of all others finer.  The error is the sum of squares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .blocks import Grid, rows

FITS = ("range", "mse")
"""How scales are found: from the extremes of a block, or by the least squared error among ``RATIOS`` of them."""

RATIOS = tuple(1 - 0.02 * i for i in range(26))
"""What part of its range a block may keep; 1 comes first, and wins where others are no better."""

SMALLEST = RATIOS[-1]

Fitted = dict[str, Tensor]


def least_squares(
    grid: Grid,
    values: Tensor,
    fitted: Callable[[float], Fitted],
    rounded: Callable[[Tensor, Fitted, int, int], Tensor],
    g_idx: Tensor | None = None,
) -> Fitted:
    """For each block those of the candidates ``fitted(ratio)`` under which its values lose least.

    ``rounded(x, fitted, start, stop)`` is what the float32 rows ``x``, from ``start`` to ``stop``, decode to.  Scratch
    is a few chunks of rows, and a few tensors of one entry per block.
    """
    best = fitted(RATIOS[0])
    least = _error(grid, values, best, rounded, g_idx)
    for ratio in RATIOS[1:]:
        other = fitted(ratio)
        error = _error(grid, values, other, rounded, g_idx)
        better = error < least
        least = torch.where(better, error, least)
        best = {name: torch.where(better, other[name], part) for name, part in best.items()}
    return best


def _error(
    grid: Grid,
    values: Tensor,
    fitted: Fitted,
    rounded: Callable[[Tensor, Fitted, int, int], Tensor],
    g_idx: Tensor | None,
) -> Tensor:
    def squares(start: int, stop: int) -> Tensor:
        x = rows(values, start, stop).float()
        return (x - rounded(x, fitted, start, stop)).square_()

    return grid.reduce_rows(squares, torch.sum, values.device, g_idx)
