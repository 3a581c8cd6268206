"""Optimizer updates of codes of a table: rounded stochastically, under an absmax that reaches all values."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocked import Blocked
from .blocks import Grid, grid_over, source
from .nested import nest_above, unnest
from .scales import TINY, divide, reciprocal
from .scheme import Parts
from .stochastic import neighbours


class TableUpdates(Blocked):
    """The base class of Codebook with its updates. The fields are those of Codebook."""

    table: tuple[float, ...]
    block_size: int
    flat: bool
    nested: bool
    nested_block_size: int

    @property
    def bits(self) -> int:
        """Return how many bits a code takes."""
        return (len(self.table) - 1).bit_length()

    def update(self, values: Tensor, held: Parts, *, shrink: bool = True) -> dict[str, Tensor] | None:
        """Return the update as ``Scheme.update`` defines it; flat blocks are updated as the rows of a matrix."""
        values = source(values)
        if not self.flat or values.is_meta or values.numel() == 0 or not self._can_cover:
            return super().update(values, held, shrink=shrink)
        if self.block_size * self.bits % 8:
            return None  # bytes cross blocks
        by_row: TableUpdates = replace(self, flat=False, nested=False)  # type: ignore[type-var]
        count = -(-values.numel() // self.block_size)
        table = F.pad(values.reshape(-1), (0, count * self.block_size - values.numel())).view(count, self.block_size)
        grid, width = grid_over(tuple(table.shape), (1, self.block_size)), self.block_size * self.bits // 8
        codes = held["qdata"].reshape(-1)
        codes = F.pad(codes, (0, count * width - codes.shape[0])).view(count, width)
        absmax = self._flat_absmax(held, count).view(count, 1)
        renewed = by_row._renew(grid, table, {"qdata": codes, "absmax": absmax}, shrink)["absmax"].view(count)
        parts = dict(held)
        if self.nested:
            parts |= nest_above(renewed, held, self.nested_block_size)
            renewed = self._flat_absmax(parts, count)
        else:
            parts["absmax"] = renewed
        made = by_row._round(grid, table, {"qdata": codes, "absmax": renewed.view(count, 1)})["qdata"].view(-1)
        made = made[: held["qdata"].numel()]
        if used := values.numel() * self.bits % 8:  # the bits of the last byte after the last code stay
            made[-1:] ^= (made[-1:] ^ held["qdata"].reshape(-1)[-1:]) & (0xFF & ~0 << used)
        return {**parts, "qdata": made.view(held["qdata"].shape)}

    def _flat_absmax(self, parts: Parts, count: int) -> Tensor:
        """Return the absmax, float32, of all ``count`` flat blocks."""
        absmax = parts["absmax"]
        if not self.nested:
            return absmax
        return unnest(parts, self.nested_block_size, torch.arange(count, device=absmax.device))

    @property
    def _can_cover(self) -> bool:
        return min(self.table) < 0 < max(self.table)

    def _ends(self, grid: Grid, parts: Parts) -> tuple[Tensor, Tensor]:
        return parts["absmax"] * min(self.table), parts["absmax"] * max(self.table)

    def _cover(self, grid: Grid, low: Tensor, high: Tensor, held: Parts) -> dict[str, Tensor]:
        absmax = torch.maximum(divide(low, min(self.table)), divide(high, max(self.table)))
        return {"absmax": torch.where(absmax > 0, absmax.clamp_min(TINY), 0.0)}

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        x, absmax = grid.align(x, grid.pick(parts["absmax"], start, stop))
        low, high = neighbours(x * reciprocal(absmax), sorted(set(self.table)))
        size = (stop - start, grid.columns)
        return (low * absmax).reshape(size), (high * absmax).reshape(size)
