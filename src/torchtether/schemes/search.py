"""Searches for scales with less error than those of the range of a block. The error is the sum of squares of a block.

Clipping the few largest values of a block makes the steps of all others finer. Three or four candidate scales, that of
the range and smaller ones, give codes. For each set of codes the best scale is known: for numbers ``x`` whose codes
decode to ``level * scale`` it is sum(x * level) / sum(level**2), which reduces the sum of squares by
sum(x * level)**2 / sum(level**2). The best candidate is kept if its error is less than that of the plain scale by more
than rounding errors could explain.

Sums are over integers, so that they do not depend on the order: ``x`` is in units of the largest magnitude of its block
divided by 2**15 - 1. Products with an integer factor give the codes under the smaller scales. Where these are not the
nearest, encoding loses less than computed here; only the codes under the plain scale must be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiled
from .blocks import Grid, rows
from .nearest import count_above
from .scales import divide, smallest_scale

RANGE = "range"
"""The fit that keeps the range of a block, without a search."""

FITS = (RANGE, "mse")
"""The methods to find scales: from the extremes of a block, or by its squared error."""

SMALLEST = 0.5
"""The least fraction of its range that a block keeps."""

RATIOS = tuple(1 - 0.02 * i for i in range(26))
"""The fractions of its range that ``least_squares`` tries for a block; 1 is first, and wins ties."""

Fitted = dict[str, Tensor]


class Search(NamedTuple):
    """The values of codes: integers, or the values of a codebook if there are ``levels``."""

    bits: int
    lowest: int
    highest: int
    unit: float
    """A step is scale * unit."""
    scale_dtype: torch.dtype
    levels: tuple[float, ...] = ()
    """Ascending; the thresholds lie between them."""
    thresholds: tuple[float, ...] = ()

    @property
    def larger(self) -> tuple[float, ...]:
        """Return the reciprocals of the candidate fractions of the range of a block."""
        each = 0.08 if 3 <= self.bits <= 6 else 0.14
        return tuple(1 / (1 - i * each) for i in range(3 if self.levels else 4))

    @property
    def fields(self) -> Mapping[str, Any]:
        """Return the fields of ``compiled.Recipe`` for a search for scales."""
        return {
            "is_searched": 1,
            "kept": compiled.DTYPES[self.scale_dtype],
            "smallest": smallest_scale(self.scale_dtype),
            "levels": (*self.levels, *self.levels[-1:] * (16 - len(self.levels))),
            "larger": self.larger,
        }


def find_scales(
    search: Search,
    grid: Grid,
    values: Tensor,
    peak: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    g_idx: Tensor | None = None,
) -> Tensor:
    """Return, for each block, the ``scale`` of its range or a better one, in its dtype.

    ``peak``, float32, has the largest magnitude of each block, and ``zero`` its zero point, as float32.
    """
    if grid.height == 1 and g_idx is None and compiled.can_read(values):
        flat, x = (grid.rows, grid.groups), values.view(grid.rows, grid.columns)
        given = (peak.reshape(flat), scale.reshape(flat), None if zero is None else zero.reshape(flat))
        found = compiled.fit_scales(x, grid.run, *given, {**search._asdict(), **search.fields})
        if found is not None:
            return found.view(scale.shape).to(scale.dtype)

    step = scale.float() * search.unit
    is_worth = (peak >= 2.0**-100) & (step > 0)
    parts = torch.where(is_worth, peak.new_full((), _PARTS) / peak, 0.0)
    sums = _Sums(search, grid, values, parts, step, torch.zeros_like(step) if zero is None else zero, g_idx)
    squares, own = sums.squares(), step.double() * parts.double()
    pairs = [sums.of(i) for i in range(len(search.larger))]
    most, product, norm = torch.zeros_like(own), torch.zeros_like(own), torch.ones_like(own)
    for some in pairs:
        gain = some[0].square() / torch.where(some[1] > 0, some[1], 1.0)
        pairs_of = zip((gain, *some), (most, product, norm), strict=True)
        is_more = gain > most
        most, product, norm = (torch.where(is_more, new, old) for new, old in pairs_of)
    found = divide((product / (norm * parts.double())).float(), search.unit)
    found = torch.maximum(found, scale.float() * SMALLEST)
    if search.levels:
        found = torch.minimum(found, scale)
    found = found.clamp_min(smallest_scale(search.scale_dtype)).to(search.scale_dtype).float()
    by = (found * search.unit).double() * parts.double()
    before = squares - own * (2 * pairs[0][0] - own * pairs[0][1])
    after = squares - by * (2 * product - by * norm)
    sure = sums.counts() * (160.0 if search.levels else 1.6)
    is_better = before - after > sure + 2 * (sure * after.clamp_min(0)).sqrt()
    return torch.where(is_better & is_worth, found, scale.float()).to(scale.dtype)


class _Sums:
    """The exact sums over blocks that ``find_scales`` compares, as float64."""

    def __init__(
        self,
        search: Search,
        grid: Grid,
        values: Tensor,
        parts: Tensor,
        step: Tensor,
        zero: Tensor,
        g_idx: Tensor | None,
    ) -> None:
        self._search, self._grid, self._values, self._g_idx = search, grid, values, g_idx
        self._shift = 14 - search.bits
        power = 2.0**16 if search.levels else 2.0 ** (15 + self._shift)
        base = step.new_full((), power) / (step * parts)
        more = torch.tensor(search.larger, dtype=torch.float32, device=step.device)
        self._factors = [(base * one).clamp_max(_PARTS).round_() for one in more]
        self._parts, self._inverse, self._zero = parts, 1.0 / step, zero

    def squares(self) -> Tensor:
        return self._sum(lambda start, stop: self._in_parts(start, stop)[0].square())

    def counts(self) -> Tensor:
        one = torch.ones((), dtype=torch.int64, device=self._values.device)
        return self._sum(lambda start, stop: one.expand(stop - start, self._grid.columns))

    def of(self, i: int) -> tuple[Tensor, Tensor]:
        """Return sum(x * level) and sum(level**2) under candidate scale ``i``."""

        def products(start: int, stop: int) -> Tensor:
            x, level = self._levels(i, start, stop)
            return x * level

        return self._sum(products), self._sum(lambda start, stop: self._levels(i, start, stop)[1].square())

    def _sum(self, some: Callable[[int, int], Tensor]) -> Tensor:
        device = self._values.device
        return self._grid.reduce_rows(some, torch.sum, device, self._g_idx, torch.int64).double()

    def _in_parts(self, start: int, stop: int, *others: Tensor) -> tuple[Tensor, ...]:
        """Return the rows in integer units, int64 (R, K), and, aligned to blocks, the float32 rows and ``others``."""
        picked = (self._grid.pick(one, start, stop) for one in (self._parts, *others))
        x, parts, *rest = self._grid.align(rows(self._values, start, stop).float(), *picked, g_idx=self._g_idx)
        return (x * parts).round_().long().reshape(stop - start, self._grid.columns), x, *rest

    def _levels(self, i: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        search, shape = self._search, (stop - start, self._grid.columns)
        parts, x, inverse, zero, factor = self._in_parts(start, stop, self._inverse, self._zero, self._factors[i])
        if i == 0 and not search.levels:
            level = (x * inverse).add_(zero).round_().clamp_(search.lowest, search.highest).sub_(zero)
            return parts, level.reshape(shape).long()
        y = (parts.view(x.shape) * factor.long() + 2**14) >> 15
        if search.levels:
            levels, edges = ([round(one * size) for one in some] for some, size in zip(search[5:], _SIZES, strict=True))
            places = count_above(y.float().contiguous(), edges).view(-1).int()
            return parts, torch.tensor(levels, device=y.device).index_select(0, places).view(shape)
        below = zero.long() - search.lowest
        y = (y + (below << self._shift) + (1 << self._shift >> 1)) >> self._shift
        return parts, (y.clamp_(0, search.highest - search.lowest) - below).reshape(shape)


_PARTS = 2.0**15 - 1
_SIZES = 2**13, 2**14  # 1 as a value of a codebook, and as a threshold


def least_squares(
    grid: Grid,
    values: Tensor,
    fitted: Callable[[float], Fitted],
    rounded: Callable[[Tensor, Fitted, int, int], Tensor],
) -> Fitted:
    """Return, for each block, the candidate among ``fitted(ratio)`` with the least squared error.

    ``rounded(x, fitted, start, stop)`` returns the decoded values of the float32 rows ``x``, from ``start`` to
    ``stop``.  Scratch is a few chunks of rows, and a few tensors of one entry per block.
    """
    best = fitted(RATIOS[0])
    least = _error(grid, values, best, rounded)
    for ratio in RATIOS[1:]:
        other = fitted(ratio)
        error = _error(grid, values, other, rounded)
        better = error < least
        least = torch.where(better, error, least)
        best = {name: torch.where(better, other[name], part) for name, part in best.items()}
    return best


def _error(grid: Grid, values: Tensor, fitted: Fitted, rounded: Callable[[Tensor, Fitted, int, int], Tensor]) -> Tensor:
    def squares(start: int, stop: int) -> Tensor:
        x = rows(values, start, stop).float()
        return (x - rounded(x, fitted, start, stop)).double().square_()  # in float64 the order of a sum hardly matters

    return grid.reduce_rows(squares, torch.sum, values.device)


def half_quadratic(grid: Grid, values: Tensor, scale: Tensor, bias: Tensor, *, top: int, bias_first: bool) -> Tensor:
    """Return ``bias``, moved in each block by at most one step to reduce the 3/4-norm of the errors.

    Errors are measured in steps, of codes up to ``top``. Each round treats large errors in part as outliers, and moves
    the bias of a block by four times the mean of the rest: the mean alone converges slowly. Each block keeps its best
    bias of all rounds. No calibration data is needed.

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
        mean = mean.mul_(_RELAXATION / _MEAN_UNIT).div_(count)
        moved = now.float() + (mean if bias_first else mean * step)
        now = torch.minimum(torch.maximum(moved, own - limit), own + limit).to(bias.dtype)
    return best


_WEIGHTS = tuple(1 / (10 * 1.01**i) for i in range(12))
_RELAXATION = 4.0  # 12 rounds give less error than 21 rounds with a factor of 1
_NORM_UNIT, _MEAN_UNIT = 2.0**16, 2.0**20
_QUARTER = 0x4F57D000
