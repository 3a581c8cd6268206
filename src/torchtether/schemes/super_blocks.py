"""Codes under scales that are quantized themselves, by super-blocks: GGUF's K-quants and its 4-bit tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import SchemeError
from ..geometry.views import Shape
from .bits import lookup, pack_into, table_of, unpack
from .blocked import Blocked
from .blocks import Block, Grid, check_finite, code_part, fold, grid_over
from .looking import is_true
from .nearest import nearest_code, nearest_codes
from .scales import TINY, divide
from .scheme import Part, Parts
from .stochastic import USED, neighbours
from .unchanged import find_unchanged

_HALF = torch.float16


@dataclass(frozen=True)
class SuperBlocks(Blocked):
    """Hold codes ``q`` so that ``w ≈ (super_scale * scale) * q - super_min * min``, or ``... * (q - offset)``, or
    ``... * table[q]``.

        qdata (*lead, ceil(K * bits / 8)) uint8            a dense stream of q
        scale (*lead, ceil(K / block_size)) int8           integers; uint8 with ``minimum``; absent if scale_bits is 0
        super_scale (*lead, ceil(K / super_block_size)) float16
        min, super_min                                     with ``minimum``, like scale and super_scale

    Scales are integers of ``scale_bits`` bits, one per ``block_size`` columns, under one float16 number per
    ``super_block_size`` columns. All steps are taken in float32, in the order above, and the result is rounded once.
    GGUF's types are

        Q2_K  bits=2, block_size=16, scale_bits=4, minimum    Q3_K    bits=3, block_size=16, scale_bits=6, offset=4
        Q4_K  bits=4, block_size=32, scale_bits=6, minimum    Q6_K    bits=6, block_size=16, scale_bits=8, offset=32
        Q5_K  bits=5, block_size=32, scale_bits=6, minimum    IQ4_XS  bits=4, block_size=32, scale_bits=6, table
        IQ4_NL  bits=4, block_size=super_block_size=32, scale_bits=0, table

    ``encode`` makes every scale just large enough that no value clips, and rounds to the nearest code; llama.cpp
    searches for scales that make the squared error smaller.

    Error: half the distance to the neighbours of a code.

    Writing back values decoded in float32 keeps every one (``reencode``, or ``encode`` with ``like=`` the parts). In
    bfloat16, where two codes of a block may decode to one value, a super-block may get new scales.

    >>> scheme = SuperBlocks(bits=4, minimum=True)
    >>> parts = scheme.encode(torch.tensor([[15.0, -1.0, 0.0, 7.0]]))
    >>> {name: tuple(part.shape) for name, part in parts.items()}
    {'qdata': (1, 2), 'scale': (1, 1), 'super_scale': (1, 1), 'min': (1, 1), 'super_min': (1, 1)}
    """

    kind: ClassVar[str] = "super_blocks"
    _levels: ClassVar[tuple[float, ...]]  # per instance: the value of each code before scale and minimum
    _nearest: ClassVar[tuple[tuple[float, ...], tuple[int, ...]]]  # thresholds between them, and codes

    bits: int = 4
    block_size: int = 32
    super_block_size: int = 256
    scale_bits: int = 6
    minimum: bool = False
    offset: int = 0
    table: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        name = "SuperBlocks"
        for field, low, high in (("bits", 1, 8), ("scale_bits", 0, 8), ("block_size", 1, 2**31)):
            value = getattr(self, field)
            if type(value) is not int or not low <= value <= high:
                raise SchemeError(f"{field} must be an int from {low} to {high}, got {value!r}", name=name)
        size = self.super_block_size
        fits = type(size) is int and size > 0 and size % self.block_size == 0
        if not fits or (not self.scale_bits and size != self.block_size):
            times = "a multiple of" if self.scale_bits else "without scale_bits"
            raise SchemeError(f"super_block_size must be {times} block_size {self.block_size}, got {size!r}", name=name)
        self._check_levels(name)
        levels = self.table if self.table is not None else tuple(range(-self.offset, (1 << self.bits) - self.offset))
        levels = tuple(float(level) for level in levels)
        object.__setattr__(self, "table", None if self.table is None else levels)
        object.__setattr__(self, "_levels", levels)
        object.__setattr__(self, "_nearest", nearest_codes(levels))  # not in compiled graphs

    def _check_levels(self, name: str) -> None:
        chosen = [self.minimum is True, self.offset != 0, self.table is not None]
        if type(self.minimum) is not bool or type(self.offset) is not int or sum(chosen) != 1:
            raise SchemeError("it needs one of minimum=True, an offset and a table", name=name)
        if not 0 <= self.offset < 1 << self.bits:
            raise SchemeError(f"offset must be from 1 to {(1 << self.bits) - 1}, got {self.offset}", name=name)
        if self.minimum and not self.scale_bits:
            raise SchemeError("minimum needs scale_bits", name=name)
        table = self.table
        if table is None:
            return
        if not isinstance(table, tuple) or not 2 <= len(table) <= 1 << self.bits:
            raise SchemeError(f"table must be a tuple of 2 to {1 << self.bits} numbers", name=name)
        if not all(isinstance(value, int | float) and abs(value) < 2.0**16 for value in table):
            raise SchemeError("table must hold numbers below 2**16", name=name)
        if not min(table) < 0 < max(table):
            raise SchemeError("table must hold numbers of both signs", name=name)

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        blocks, supers = self._grids(shape)
        parts = {"qdata": code_part(shape, self.bits)}
        if self.scale_bits:
            parts["scale"] = blocks.scale_part(torch.uint8 if self.minimum else torch.int8)
        parts["super_scale"] = supers.scale_part(_HALF)
        if self.minimum:
            parts |= {"min": parts["scale"], "super_min": parts["super_scale"]}
        return parts

    @property
    def _block(self) -> Block:
        return 1, self.block_size

    def _reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts as ``encode`` does; super-blocks keep held scales and minima that give values exactly."""
        again = self.encode(values, like=held)
        _, supers = self._grids(tuple(values.shape))
        keep = find_unchanged(lambda start, stop: self._rows(supers, again, start, stop), supers, values)
        if is_true(keep.all(), unseen=False):
            return again
        return self.encode(values, like=self._chosen(keep, supers, held, self._fit(values)))

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return half the larger gap next to the level of each code, times its scale, plus float32 arithmetic."""
        if 0 in shape:
            return torch.zeros(shape, device=parts["qdata"].device)
        grid, _ = self._grids(shape)
        half = torch.tensor(self._half_gaps(), device=parts["qdata"].device)
        gaps = lookup(parts["qdata"].reshape(grid.rows, -1), half, self.bits, grid.columns).reshape(shape)
        scale, low = self._scales(parts, grid, 0, grid.rows)
        step = grid.expand(scale.abs().view(grid.scale_shape))
        bound = gaps * step * (1 + 2.0**-14)
        if low is None:
            return bound
        lowest = grid.expand(low.abs().view(grid.scale_shape))
        return bound + (lowest + step * len(self._levels)) * 2.0**-21

    # -- implementation -----------------------------------------------------------------------------------------

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        blocks, _ = self._grids(tuple(values.shape))
        if like is None:
            like = self._fit(values)
        else:
            check_finite(blocks.reduce(values, torch.amax, magnitude=True), values)
        for name in parts.keys() - {"qdata"}:
            parts[name].copy_(like[name])
        self._quantize(blocks, values, parts)

    def _grids(self, shape: Shape) -> tuple[Grid, Grid]:
        """Return the blocks and the super-blocks over ``shape``."""
        return grid_over(tuple(shape), (1, self.block_size)), grid_over(tuple(shape), (1, self.super_block_size))

    def _over_blocks(self, part: Tensor, supers: Grid) -> Tensor:
        """Return ``part``, one entry per super-block, repeated for each of its blocks."""
        groups = -(-supers.columns // self.block_size)
        index = torch.arange(groups, device=part.device) // (self.super_block_size // self.block_size)
        return part.index_select(-1, index)

    def _scales(self, parts: Parts, grid: Grid, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return the factor and the subtrahend (or ``None``) of each block of the rows, float32."""
        blocks, supers = self._grids(grid.shape)
        scale = self._over_blocks(supers.pick(parts["super_scale"], start, stop).float(), supers)
        if self.scale_bits:
            scale = scale * blocks.pick(parts["scale"], start, stop).float()
        if not self.minimum:
            return scale, None
        low = self._over_blocks(supers.pick(parts["super_min"], start, stop).float(), supers)
        return scale, low * blocks.pick(parts["min"], start, stop).float()

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """Return the decoded rows from ``start`` to ``stop``, float32."""
        blocks, _ = self._grids(grid.shape)
        codes = parts["qdata"].reshape(grid.rows, -1)[start:stop]
        if self.table is not None:
            x = lookup(codes, table_of(self.table, codes.device), self.bits, grid.columns)
        else:
            x = unpack(codes, self.bits, grid.columns).float().sub_(self.offset)
        scale, low = self._scales(parts, grid, start, stop)
        if low is None:
            x, scale = blocks.align(x, scale)
            return (x * scale).reshape(stop - start, grid.columns)
        x, scale, low = blocks.align(x, scale, low)
        return (x * scale).sub_(low).reshape(stop - start, grid.columns)

    def _fit(self, values: Tensor) -> dict[str, Tensor]:
        """Return scales and minima so large that no value clips.

        Smaller ones, which clip the ends of each block by half a step, make the squared error of Gaussians a little
        smaller. But these errors of a block have one sign, and add up over many columns: the perplexity of SmolLM2 with
        4 bits and minima is 20.9 against 22.8, and that of its own Q4_1 weights 12.1 against 5e7.
        """
        blocks, supers = self._grids(tuple(values.shape))
        low, high = blocks.reduce(values, torch.amin), blocks.reduce(values, torch.amax)
        check_finite(torch.maximum(high.abs(), low.abs()), values)
        return self._fitted(supers, low, high)

    def _fitted(self, supers: Grid, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """Return the scales and minima with which the levels reach ``low`` and ``high``."""
        low, parts = -low, {}
        top, bottom = max(self._levels) or 0.5, -min(self._levels)  # one bit has no level above 0: half a step
        if self.minimum:
            parts["min"], parts["super_min"] = self._under_supers(low.clamp_min(0), supers)
            lowest = self._over_blocks(parts["super_min"].float(), supers) * parts["min"].float()
            scale = divide((high + lowest).clamp_min(0), top)
            scale = torch.where((high > 0) | (low > 0), scale, 0.0)
        else:
            scale = torch.maximum(divide(high, top), divide(low, bottom)).clamp_min(0)
        if self.scale_bits:
            parts["scale"], parts["super_scale"] = self._under_supers(scale, supers)
        else:
            parts["super_scale"] = _rounded_up(scale, empty=0)  # a table need not have a zero
        return parts

    @property
    def _can_cover(self) -> bool:
        return self.minimum or min(self._levels) < 0 < max(self._levels)

    def _ends(self, grid: Grid, parts: Parts) -> tuple[Tensor, Tensor]:
        scale, low = self._scales(parts, grid, 0, grid.rows)
        ends = (scale * end - (0.0 if low is None else low) for end in (min(self._levels), max(self._levels)))
        first, last = (end.view(grid.scale_shape) for end in ends)
        return first, last

    def _renew(self, grid: Grid, values: Tensor, held: Parts, shrink: bool) -> Parts:
        """Return ``held`` with new scales and minima for each super-block of which a block needs them."""
        _, supers = self._grids(grid.shape)
        low, high = grid.extremes(values)
        check_finite(torch.maximum(high.abs(), low.abs()), values)
        ends = self._ends(grid, held)
        first, last = torch.minimum(*ends), torch.maximum(*ends)
        keep = (low >= first) & (high <= last)
        if shrink:
            keep &= (high - low >= USED * (last - first)) | ((high >= USED * last) | (low <= USED * first))
        ratio = self.super_block_size // self.block_size
        whole = fold(keep.float(), ratio, keep.dim() - 1, torch.amin) > 0
        if is_true(whole.all(), unseen=False):
            return held
        whole |= find_unchanged(lambda start, stop: self._rows(supers, held, start, stop), supers, values)
        return {**held, **self._chosen(whole, supers, held, self._fitted(supers, low, high))}

    def _chosen(self, keep: Tensor, supers: Grid, held: Parts, other: Parts) -> dict[str, Tensor]:
        """Return scales and minima: those of ``held`` in the super-blocks to ``keep``, those of ``other`` elsewhere."""
        each = self._over_blocks(keep, supers)
        return {
            name: torch.where(keep if name.startswith("super") else each, held[name], part)
            for name, part in other.items()
        }

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        scale, low = self._scales(parts, grid, start, stop)
        size = (stop - start, grid.columns)
        if low is None:
            x, scale = grid.align(x, scale)
            below, above = neighbours(x / torch.where(scale == 0, 1.0, scale), sorted(set(self._levels)))
            return (below * scale).reshape(size), (above * scale).reshape(size)
        x, scale, low = grid.align(x, scale, low)
        code = self._above(x, scale, low).float()
        near = (code * scale).sub_(low)
        other = (code + torch.where((x > near) == (scale > 0), 1, -1)).clamp_(0, (1 << self.bits) - 1)
        return near.reshape(size), (other * scale).sub_(low).reshape(size)

    def _under_supers(self, scale: Tensor, supers: Grid) -> tuple[Tensor, Tensor]:
        """Return integers per block and a float16 number per super-block, whose products are at least ``scale``."""
        largest = (1 << (self.scale_bits if self.minimum else self.scale_bits - 1)) - 1
        ratio = self.super_block_size // self.block_size
        top = fold(scale, ratio, scale.dim() - 1, torch.amax) if scale.numel() else scale.new_zeros(supers.scale_shape)
        over = _rounded_up(divide(top, largest))
        times = (scale / self._over_blocks(over.float(), supers)).ceil().clamp(0, largest)
        return times.to(torch.uint8 if self.minimum else torch.int8), over

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        scale, low = self._scales(parts, grid, start, stop)
        if low is None:
            x, scale = grid.align(x, scale)
            codes = self._codes(x / torch.where(scale == 0, 1.0, scale))
        else:
            x, scale, low = grid.align(x, scale, low)
            codes = self._above(x, scale, low)
        pack_into(codes.reshape(stop - start, grid.columns), self.bits, out)

    def _codes(self, x: Tensor) -> Tensor:
        """Return the code whose level is nearest to each element of ``x``."""
        if self.table is None:
            return x.round().add_(self.offset).clamp_(0, (1 << self.bits) - 1).to(torch.uint8)
        return nearest_code(x, *self._nearest)

    def _above(self, x: Tensor, scale: Tensor, low: Tensor) -> Tensor:
        """Return the code that decodes nearest to ``x``; neighbours are tried, because ``x + low`` is rounded."""
        steps = (1 << self.bits) - 1
        middle = ((x + low) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(0, steps)
        middle = torch.where(scale == 0, 0.0, middle)
        best, error = middle, (middle * scale).sub_(low).sub_(x).abs_()
        for away in (-1, 1):
            other = (middle + away).clamp_(0, steps)
            its = (other * scale).sub_(low).sub_(x).abs_()
            best, error = torch.where(its < error, other, best), torch.minimum(its, error)
        return best.to(torch.uint8)

    def _half_gaps(self) -> list[float]:
        """Return, for each code, the largest distance from its level to a number that rounds to it, as if unclipped."""
        distinct = sorted(set(self._levels))
        place = {level: i for i, level in enumerate(distinct)}
        gaps = [(b - a) / 2 for a, b in itertools.pairwise(distinct)]
        sides = [gaps[max(i - 1, 0) : i + 1] for i in range(len(distinct))]
        return [max(sides[place[level]]) for level in self._levels]


def _rounded_up(scale: Tensor, empty: int = 1) -> Tensor:
    """Round ``scale`` up to float16, ``empty`` where it is 0. Raise SchemeError if it does not fit."""
    stored = scale.clamp_min(TINY).to(_HALF)
    bits = stored.view(torch.int16)  # of non-negative floats, the next larger one has the next bits
    stored = torch.where(stored.float() < scale, bits + 1, bits).clamp_min(1).view(_HALF)
    stored = torch.where(scale > 0, stored, torch.full_like(stored, empty))
    if not is_true(stored.isfinite().all(), unseen=True):
        raise SchemeError(
            f"a scale of {float(scale.max()):.4g} does not fit float16", fix="Leave this tensor unquantized."
        )
    return stored
