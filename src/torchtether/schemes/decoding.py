"""What the schemes with blocks share when they decode: walking rows, taking rows, and asking whether a view will do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .. import compiled
from ..errors import SchemeError
from ..geometry.views import Shape
from .blocks import Block, Grid, grid_over, rows
from .scheme import Part, Parts, Scheme


def decode_rows(
    some: Callable[[int, int], Tensor],
    grid: Grid,
    codes: Tensor,
    dtype: torch.dtype,
    is_decoded: Callable[[int, int, Tensor], bool] | None = None,
) -> Tensor:
    """A new tensor of the shape of ``grid``, filled from ``some(start, stop)``: float32 rows, in bounded scratch.

    ``is_decoded(start, stop, out)`` may write those rows itself, and says whether it has.
    """
    if 0 in grid.shape:
        return torch.empty(grid.shape, dtype=dtype, device=codes.device)
    if is_decoded is not None and compiled.is_at_hand(codes):
        out = torch.empty((grid.rows, grid.columns), dtype=dtype, device=codes.device)
        if is_decoded(0, grid.rows, out):
            return out.view(grid.shape)
    chunks = [(0, grid.rows)] if codes.is_meta else grid.chunks()
    if len(chunks) == 1:
        return some(0, grid.rows).to(dtype).contiguous().view(grid.shape)
    out = torch.empty((grid.rows, grid.columns), dtype=dtype, device=codes.device)
    for start, stop in chunks:
        out[start:stop].copy_(some(start, stop))
    return out.view(grid.shape)


def take_rows(
    layout: dict[str, Part], parts: Parts, shape: Shape, block: Block, index: Tensor
) -> tuple[dict[str, Tensor], Block]:
    """The parts of the dim-0 slices named by ``index``, and the block under which they are a valid encoding.

    Rows that were neighbours in a block of several rows are so no more: each takes a copy of its scale along.
    """
    tall = block[0] is not None and block[0] > 1 and len(shape) == 2
    taken = {}
    for name, part in parts.items():
        span = layout[name].span
        if span == 0:
            taken[name] = part
        else:
            taken[name] = part.index_select(0, index // (span // math.prod(shape[1:])) if tall else index)
    return taken, ((1, block[1]) if tall else block)


def reshapable(scheme: Scheme, block: Block, old: Shape, new: Shape) -> bool:
    """Whether blocks, and padding to whole bytes, lie over ``new`` as over ``old`` (same last dimension and count)."""
    if block[0] is not None and block[0] > 1 and old[-2:] != new[-2:]:
        return False
    try:
        before, after = scheme.layout(old), scheme.layout(new)
    except SchemeError:
        return False
    return all(math.prod(before[name].shape) == math.prod(after[name].shape) for name in before)


def quiet(grid: Grid, decoded: Tensor, scale: Tensor, g_idx: Tensor | None) -> Tensor:
    """Where a block holds nothing but zeros: its scale is 1 and every value decodes to 0."""
    amax = grid.reduce(decoded, torch.amax, magnitude=True, g_idx=g_idx)
    return (grid.expand(amax, g_idx) == 0) & (scale == 1)


def unmoved(some: Callable[[int, int], Tensor], grid: Grid, values: Tensor, g_idx: Tensor | None = None) -> Tensor:
    """Which blocks hold what ``some(start, stop)``, rows as they decode, gives: bools of ``grid.scale_shape``."""
    moved = torch.empty((grid.rows, grid.columns), dtype=torch.uint8, device=values.device)
    for start, stop in grid.chunks():
        moved[start:stop] = some(start, stop).to(values.dtype) != rows(values, start, stop)
    return grid.reduce(moved.view(grid.shape), torch.amax, g_idx=g_idx) == 0


class Blocked(Scheme):
    """What the families share whose codes, ``qdata``, lie in blocks of rows and columns with a scale each.

    They say how some rows decode (``_rows``), and perhaps how compiled loops do it (``_is_decoded``).
    """

    block: Block

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """The rows from ``start`` to ``stop``, float32."""
        raise NotImplementedError(f"{type(self).__name__}._rows")

    def _is_decoded(self, grid: Grid, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        """Whether ``out`` holds those rows now; if not, nothing was written."""
        return False

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        grid = grid_over(shape, self.block)
        return decode_rows(
            lambda start, stop: self._rows(grid, parts, start, stop),
            grid,
            parts["qdata"],
            dtype,
            lambda start, stop, out: self._is_decoded(grid, parts, start, stop, out),
        )

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        grid = grid_over(shape, self.block)
        if not self._is_decoded(grid, parts, start, stop, out):
            out.copy_(self._rows(grid, parts, start, stop))

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        if len(shape) == 1:
            return super().gather(parts, shape, index, dtype)
        some, block = take_rows(self.layout(shape), parts, shape, self.block, index)
        again = replace(self, block=block)  # type: ignore[type-var]
        return again.decode(some, (index.shape[0], *shape[1:]), dtype)

    def can_view(self, old: Shape, new: Shape) -> bool:
        return super().can_view(old, new) and reshapable(self, self.block, old, new)
