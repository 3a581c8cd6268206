"""Finding the blocks that already decode to given values, and the blocks of zeros."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .blocks import Grid, rows


def find_zeros(grid: Grid, decoded: Tensor, scale: Tensor, g_idx: Tensor | None) -> Tensor:
    """Return where a block holds only zeros, with scale 1: bools of the shape of ``decoded``."""
    amax = grid.reduce(decoded, torch.amax, magnitude=True, g_idx=g_idx)
    return (grid.expand(amax, g_idx) == 0) & (scale == 1)


def find_unchanged(
    decode: Callable[[int, int], Tensor], grid: Grid, values: Tensor, g_idx: Tensor | None = None
) -> Tensor:
    """Return which blocks of ``values`` are equal to the rows that ``decode(start, stop)`` returns.

    The result has one bool for each block, in ``grid.scale_shape``.
    """
    moved = torch.empty((grid.rows, grid.columns), dtype=torch.uint8, device=values.device)
    for start, stop in grid.chunks():
        moved[start:stop] = decode(start, stop).to(values.dtype) != rows(values, start, stop)
    return grid.reduce(moved.view(grid.shape), torch.amax, g_idx=g_idx) == 0
