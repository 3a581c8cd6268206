"""The base class of the schemes with blocks: encoding, decoding, updates, rows and views."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .. import compiled
from .._dtypes import select_rows
from ..errors import SchemeError
from ..geometry.views import Shape
from . import encoders
from .blocks import Block, Grid, check_finite, floats, grid_over, rows, source
from .looking import is_true
from .scheme import Part, Parts, Scheme
from .stochastic import PIECE, USED, choose
from .unchanged import find_unchanged


class Blocked(Scheme):
    """The base class of schemes whose codes, ``qdata``, lie in blocks of rows and columns with a scale each.

    A subclass writes ``_encode``, ``_rows`` and ``_store_codes``.  If compiled loops support it, it also writes
    ``_try_quantize`` and ``_try_decode``: they do the work and return True, or write nothing and return False.
    """

    block: Block

    @property
    def _block(self) -> Block:
        """Return the rows and columns under one scale."""
        return self.block

    # -- for subclasses to write ------------------------------------------------------------------------------------

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        """Write the encoding of ``values`` into ``parts``, under the scales of ``like`` if it is given."""
        raise NotImplementedError(f"{type(self).__name__}._encode")

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """Return the decoded rows from ``start`` to ``stop``, (stop - start, K) float32."""
        raise NotImplementedError(f"{type(self).__name__}._rows")

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        """Write the codes of the float32 rows ``x``, from ``start`` to ``stop``, to ``out``; ``x`` may be changed."""
        raise NotImplementedError(f"{type(self).__name__}._store_codes")

    def _reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts of ``values``, which are not empty, under the scales of ``held`` that still fit."""
        raise NotImplementedError(f"{type(self).__name__}._reencode")

    def _ends(self, grid: Grid, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return the values of each block's first and last code, ``grid.scale_shape``, in either order."""
        raise NotImplementedError(f"{type(self).__name__}._ends")

    def _cover(self, grid: Grid, low: Tensor, high: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the scales, and the like, under which no value of blocks from ``low`` to ``high`` clips."""
        raise NotImplementedError(f"{type(self).__name__}._cover")

    def _between(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the two decoded neighbours of each element of the float32 rows ``x``, from ``start`` to ``stop``."""
        raise NotImplementedError(f"{type(self).__name__}._between")

    @property
    def _can_cover(self) -> bool:
        """Return whether there are scales under which values of either sign do not clip."""
        return True

    def _try_quantize(self, grid: Grid, values: Tensor, parts: Parts) -> bool:
        """Write the codes of ``values`` by a compiled loop; return whether there is one."""
        return False

    def _try_decode(self, grid: Grid, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        """Write the decoded rows to ``out`` by a compiled loop; return whether there is one."""
        return False

    # -- the interface ----------------------------------------------------------------------------------------------

    def encode(self, values: Tensor, *, like: Parts | None = None) -> dict[str, Tensor]:
        """Return the parts of ``values``; with ``like``, under the scales of those parts, which may clip values."""
        values = source(values)
        parts = self.empty(tuple(values.shape), values.dtype, values.device)
        if not values.is_meta:
            self._encode(values, parts, like)
        return parts

    def encode_into(self, values: Tensor, parts: Parts) -> None:
        values = source(values)
        if not values.is_meta:
            self._encode(values, parts, None)

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        grid, codes = grid_over(tuple(shape), self._block), parts["qdata"]
        size = (grid.rows, grid.columns)
        if 0 in grid.shape:
            return torch.empty(grid.shape, dtype=dtype, device=codes.device)
        if compiled.is_at_hand(codes):
            out = torch.empty(size, dtype=dtype, device=codes.device)
            if self._try_decode(grid, parts, 0, grid.rows, out):
                return out.view(grid.shape)
        chunks = [(0, grid.rows)] if codes.is_meta else grid.chunks()
        if len(chunks) == 1:
            return self._rows(grid, parts, 0, grid.rows).to(dtype).contiguous().view(grid.shape)
        out = torch.empty(size, dtype=dtype, device=codes.device)
        for start, stop in chunks:
            out[start:stop].copy_(self._rows(grid, parts, start, stop))
        return out.view(grid.shape)

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        grid = grid_over(tuple(shape), self._block)
        if not self._try_decode(grid, parts, start, stop, out):
            out.copy_(self._rows(grid, parts, start, stop))

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        if len(shape) == 1:
            return super().gather(parts, shape, index, dtype)
        some, block = _take_rows(self.layout(shape), parts, shape, self._block, index)
        scheme = self if block == self._block else replace(self, block=block)  # type: ignore[type-var]
        return scheme.decode(some, (index.shape[0], *shape[1:]), dtype)

    def can_view(self, old: Shape, new: Shape) -> bool:
        return super().can_view(old, new) and _is_reshapable(self, self._block, old, new)

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        values = source(values)
        return self.encode(values) if values.is_meta or values.numel() == 0 else self._reencode(values, held)

    def update(self, values: Tensor, held: Parts, *, shrink: bool = True) -> dict[str, Tensor] | None:
        values = source(values)
        if values.is_meta or values.numel() == 0:
            return self.reencode(values, held)
        if not self._can_cover:
            return None
        grid = grid_over(tuple(values.shape), self._block)
        return self._round(grid, values, self._renew(grid, values, held, shrink))

    # -- implementation ---------------------------------------------------------------------------------------------

    def _renew(self, grid: Grid, values: Tensor, held: Parts, shrink: bool) -> Parts:
        """Return ``held`` with scales that reach ``values``; with ``shrink``, also none that they hardly use."""
        g_idx = held.get("g_idx")
        low, high = grid.extremes(values, g_idx)
        check_finite(torch.maximum(high, -low), values)
        ends = self._ends(grid, held)
        first, last = torch.minimum(*ends), torch.maximum(*ends)
        fits = (low >= first) & (high <= last)
        keep = fits & self._is_used(low, high, first, last) if shrink else fits
        if is_true(keep.all(), unseen=False):
            return held
        keep |= find_unchanged(lambda start, stop: self._rows(grid, held, start, stop), grid, values, g_idx)
        return {**held, **_either(keep, held, self._cover(grid, low, high, held))}

    def _is_used(self, low: Tensor, high: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Return which blocks, with values from ``low`` to ``high``, use enough of the range ``first`` to ``last``."""
        return (high >= USED * last) | (low <= USED * first)

    def _round(self, grid: Grid, values: Tensor, like: Parts) -> dict[str, Tensor]:
        """Return the parts of ``values`` under the scales of ``like``, rounded stochastically."""
        rounded = torch.empty((grid.rows, grid.columns), dtype=torch.float32, device=values.device)
        for start, stop in grid.chunks(PIECE):
            x = rows(values, start, stop).float()
            rounded[start:stop] = choose(x, *self._between(grid, x, like, start, stop))
        return self.encode(rounded.view(grid.shape), like=like)

    def _quantize(self, grid: Grid, values: Tensor, parts: Parts) -> None:
        """Write the codes of ``values`` under the scales in ``parts``: by a compiled loop, or else by torch ops."""
        if values.numel() == 0 or (encoders.can_read(values) and self._try_quantize(grid, values, parts)):
            return
        table = parts["qdata"].view(grid.rows, -1)
        for x, start, stop in floats(grid, values):
            self._store_codes(grid, x, parts, start, stop, table[start:stop])


def _either(keep: Tensor, held: Parts, other: Parts) -> dict[str, Tensor]:
    """Return ``held`` where ``keep``, else ``other``, for each name in ``other``; float8 has no ``where``."""
    chosen = {}
    for name, part in other.items():
        is_small = part.is_floating_point() and part.itemsize == 1
        a, b = (held[name].float(), part.float()) if is_small else (held[name], part)
        chosen[name] = torch.where(keep, a, b).to(part.dtype)
    return chosen


def _take_rows(
    layout: dict[str, Part], parts: Parts, shape: Shape, block: Block, index: Tensor
) -> tuple[dict[str, Tensor], Block]:
    """Return the parts of the dim-0 slices ``index``, and the block size with which they decode.

    Rows of a block of several rows are no longer neighbours, so each gets a copy of the scale.
    """
    tall = block[0] is not None and block[0] > 1 and len(shape) == 2
    taken = {}
    for name, part in parts.items():
        span = layout[name].span
        if span == 0:
            taken[name] = part
        else:
            taken[name] = select_rows(part, index // (span // math.prod(shape[1:])) if tall else index)
    return taken, ((1, block[1]) if tall else block)


def _is_reshapable(scheme: Scheme, block: Block, old: Shape, new: Shape) -> bool:
    """Return whether blocks and padding lie over ``new`` as over ``old`` (same last dimension and element count).

    Blocks of several rows do, if the reshape joins or splits matrices only between two blocks.
    """
    height = block[0] or 0
    has_tiles = height > 1 and old[-2:] != new[-2:]
    if has_tiles and (not len(old) > 1 < len(new) or old[-2] % height or new[-2] % height):
        return False
    try:
        before, after = scheme.layout(old), scheme.layout(new)
    except SchemeError:
        return False
    return all(math.prod(before[name].shape) == math.prod(after[name].shape) for name in before)
