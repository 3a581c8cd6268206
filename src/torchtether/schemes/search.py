"""Scales that lose less than those of the plain range: each block tries some, and keeps the one with the least error.

Clipping the few largest values of a block makes the steps of all others finer.  The error is the sum of squares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import compiled
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
    """Return, for each block, the candidate of ``fitted(ratio)`` under which its values lose least.

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


def compiled_least_squares(
    grid: Grid,
    values: Tensor,
    ends: tuple[Tensor, Tensor],
    fitted: Callable[[Tensor, Tensor], Fitted],
    best: Callable[[Tensor, Fitted], Tensor | None],
) -> Fitted | None:
    """Return what ``least_squares`` does, by the compiled loops; ``None`` where they do not.

    ``ends`` are the extremes of the blocks, which ``fitted`` takes in any shape; ``best(x, tried)`` says which of the
    candidates (candidates, rows, groups) loses least in each block of the rows ``x``.
    """
    if grid.height != 1 or not compiled.can_read(values):
        return None
    ratios, (low, high) = torch.tensor(RATIOS), (end.reshape(grid.rows, grid.groups) for end in ends)
    kept = torch.empty_like(high)
    for start, stop in grid.chunks():
        tried = fitted(*(end[start:stop] * ratios.view(-1, 1, 1) for end in (low, high)))
        found = best(values.view(grid.rows, grid.columns)[start:stop], tried)
        if found is None:
            return None
        kept[start:stop] = ratios[found.long()]
    kept = kept.view(ends[1].shape)
    return fitted(ends[0] * kept, ends[1] * kept)


def _error(
    grid: Grid,
    values: Tensor,
    fitted: Fitted,
    rounded: Callable[[Tensor, Fitted, int, int], Tensor],
    g_idx: Tensor | None,
) -> Tensor:
    def squares(start: int, stop: int) -> Tensor:
        x = rows(values, start, stop).float()
        return (x - rounded(x, fitted, start, stop)).double().square_()  # the order of a sum then hardly matters

    return grid.reduce_rows(squares, torch.sum, values.device, g_idx)


def half_quadratic(
    grid: Grid,
    values: Tensor,
    fitted: Fitted,
    rounded: Callable[[Tensor, Fitted, int, int], Tensor],
    moved: Callable[[Fitted, Tensor], Fitted],
) -> Fitted:
    """Move the offsets of ``fitted``, block by block, to where the 0.7-norm of the errors is least.

    Each round takes large errors for outliers, in part, and moves the offset of a block by the mean of what is left:
    ``moved(fitted, distance)``.  A block stops at the best it has seen.  No data is needed.

    Source: Badri and Shaji, Half-Quadratic Quantization (2023), with errors counted in steps, so that the scale of the
    weights makes no difference.
    """
    ones = torch.ones((), device=values.device)
    count = grid.reduce_rows(lambda a, b: ones.expand(b - a, grid.columns), torch.sum, values.device).clamp_min(1)
    best, least, beta = fitted, _norm(grid, values, fitted, rounded), _BETA
    for _ in range(_ROUNDS):

        def regular(start: int, stop: int, now: Fitted = fitted, beta: float = beta) -> Tensor:
            x = rows(values, start, stop).float()
            (error, step) = grid.align(x - rounded(x, now, start, stop), _steps(grid, now, start, stop))
            error = error / step
            outlier = error.abs().sub_(error.abs().clamp_min(1e-6).pow_(_POWER - 1).div_(beta)).clamp_min_(0)
            return ((error - outlier.copysign_(error)) * step).reshape(stop - start, grid.columns).double()

        fitted = moved(fitted, grid.reduce_rows(regular, torch.sum, values.device) / count)
        norm = _norm(grid, values, fitted, rounded)
        better = norm < least
        least = torch.where(better, norm, least)
        best = {name: torch.where(better, fitted[name], part) for name, part in best.items()}
        beta *= _GROWTH
    return best


_POWER, _BETA, _GROWTH, _ROUNDS = 0.7, 10.0, 1.01, 20


def _steps(grid: Grid, fitted: Fitted, start: int, stop: int) -> Tensor:
    scale = grid.pick(fitted["scale"], start, stop).float()
    return torch.where(scale == 0, 1.0, scale)


def _norm(grid: Grid, values: Tensor, fitted: Fitted, rounded: Callable[[Tensor, Fitted, int, int], Tensor]) -> Tensor:
    def powers(start: int, stop: int) -> Tensor:
        x = rows(values, start, stop).float()
        error, step = grid.align(x - rounded(x, fitted, start, stop), _steps(grid, fitted, start, stop))
        return (error / step).abs_().pow_(_POWER).reshape(stop - start, grid.columns).double()

    return grid.reduce_rows(powers, torch.sum, values.device)
