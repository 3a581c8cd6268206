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
    """Return, for each block, the candidate among ``fitted(ratio)`` with the least squared error.

    ``rounded(x, fitted, start, stop)`` returns the decoded values of the float32 rows ``x``, from ``start`` to
    ``stop``.  Scratch is a few chunks of rows, and a few tensors of one entry per block.
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
        return (x - rounded(x, fitted, start, stop)).double().square_()  # in float64 the order of a sum hardly matters

    return grid.reduce_rows(squares, torch.sum, values.device, g_idx)


def half_quadratic(grid: Grid, values: Tensor, scale: Tensor, bias: Tensor, *, top: int, bias_first: bool) -> Tensor:
    """Return ``bias`` moved, in each block by at most a step, to where the 3/4-norm of the errors is least.

    Errors are measured in steps, of codes up to ``top``. Each round treats large errors in part as outliers, and moves
    the bias of a block by the mean of the rest. A block keeps the best bias that it has seen. No data is needed.

    Source: Badri and Shaji, Half-Quadratic Quantization (2023). Their power is 0.7. The power 3/4 needs no function
    whose last bits differ between processors, and errors are summed as integers, whose order does not matter.
    """
    if grid.height == 1 and compiled.can_read(values):
        x, flat = values.view(grid.rows, grid.columns), (grid.rows, grid.groups)
        numbers = scale.reshape(flat), bias.reshape(flat)
        found = compiled.fit_biased(x, grid.run, *numbers, bias_first=bias_first, top=top, weights=_WEIGHTS)
        if found is not None:
            return found.view(bias.shape)
    own, step = bias.float(), scale.float()
    limit = torch.ones_like(step) if bias_first else step
    ones = torch.ones((), device=values.device)
    count = grid.reduce_rows(lambda a, b: ones.expand(b - a, grid.columns), torch.sum, values.device).clamp_min(1)
    best = now = bias
    least: Tensor | None = None
    for weight in _WEIGHTS:
        away = now.float() - own if bias_first else (now.float() - own) / step

        def errors(start: int, stop: int, away: Tensor = away) -> tuple[Tensor, Tensor, Tensor]:
            picked = (grid.pick(part, start, stop) for part in (step, own, away))
            x, by, zero, distance = grid.align(rows(values, start, stop).float(), *picked)
            position = x / by - zero if bias_first else (x - zero) / by
            position = position.sub_(distance)
            error = position - position.clamp(0, top).round_()
            size = error.abs().clamp_max_(128)
            power = (_QUARTER - (size.view(torch.int32) >> 2)).view(torch.float32)
            square = power * power  # after a Newton step, size**0.75 is right to 0.3 %
            return error, size, power.mul_(1.25 - (size * square).mul_(square).mul_(0.25))

        def powers(start: int, stop: int) -> Tensor:
            _, size, power = errors(start, stop)
            return size.mul_(power).mul_(_NORM_UNIT).round_().reshape(stop - start, grid.columns).double()

        def regular(start: int, stop: int, weight: float = weight) -> Tensor:
            error, _, power = errors(start, stop)
            most = power.mul_(weight)
            kept = torch.maximum(torch.minimum(error, most), -most).mul_(_MEAN_UNIT).round_()
            return kept.reshape(stop - start, grid.columns).double()

        norm, mean = (grid.reduce_rows(some, torch.sum, values.device) for some in (powers, regular))
        better = torch.ones_like(norm, dtype=torch.bool) if least is None else norm < least
        least = norm if least is None else torch.where(better, norm, least)
        best = torch.where(better, now, best)
        mean = mean.mul_(1 / _MEAN_UNIT).div_(count)
        moved = now.float() + (mean if bias_first else mean * step)
        now = torch.minimum(torch.maximum(moved, own - limit), own + limit).to(bias.dtype)
    return best


_WEIGHTS = tuple(1 / (10 * 1.01**i) for i in range(21))
_NORM_UNIT, _MEAN_UNIT = 2.0**16, 2.0**20
_QUARTER = 0x4F57D000
