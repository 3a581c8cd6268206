"""Codes that index a table of values, scaled by the largest magnitude of each block: nf4, fp4 and any other table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import compiled
from ..errors import SchemeError
from ..geometry.views import Shape
from . import encoders
from .bits import lookup, pack, pack_into, table_of
from .blocks import (
    Block,
    Grid,
    check_finite,
    code_part,
    flat,
    flat_magnitudes,
    flat_ranges,
    grid_over,
    stream_part,
)
from .looking import is_true
from .nearest import half_gaps, nearest_code, nearest_codes
from .nested import ARITHMETIC, nest, nesting_error, unnest
from .scales import TINY, reciprocal
from .scheme import Part, Parts, check_flags
from .search import FITS, SMALLEST, Search, find_scales
from .table_updates import TableUpdates


@dataclass(frozen=True)
class Codebook(TableUpdates):
    """Hold codes so that ``w ≈ table[code] * absmax``, with one absmax per ``block_size`` elements.

        qdata (ceil(n * bits / 8),) uint8          a dense stream over the flattened tensor, low bits first
        absmax (ceil(n / block_size),) float32     with ``nested``: uint8 codes of the 8-bit dynamic type, and
        nested_absmax (ceil(blocks / nested_block_size),) float32
        nested_offset () float32                   absmax = dynamic[code] * nested_absmax + nested_offset

    With ``flat=False`` blocks end with their row: qdata (*lead, ceil(K * bits / 8)), absmax (*lead, blocks of K); not
    nested.  A table whose bits (3, 5, 6, 7) do not divide 8 keeps its flat stream as (ceil(n / 8), bits).

    ``table`` holds 2 to 256 values within [-1, 1], in any order; numbers are rounded to the nearest, ties down.
    Codes of other writers beyond the end of a shorter table decode to 0: a check would need one more pass at load.
    Double quantization follows bitsandbytes: the offset is the mean absmax.  If some absmax is more than 16 times the
    mean, an offset would make small blocks inexact; so it is 0, and their error depends on their ``nested_absmax``.
    ``fit="mse"`` reduces the absmax of a block if that reduces the sum of its squared errors, as in ``Affine``.

    Error: ``absmax`` times half the gap around the value, plus the error of a nested absmax; at the ends of the table
    also the clipped amount.

    Encoding decoded values keeps the codes if the table holds -1 and 1 (the largest value is kept exactly); the codes
    of a nested absmax may change.

    >>> parts = Codebook((-1.0, 0.0, 0.5, 1.0), block_size=4).encode(torch.tensor([2.0, -2.0, 1.1, 0.1]))
    >>> parts["qdata"].tolist(), parts["absmax"].tolist()
    ([99], [2.0])
    """

    kind: ClassVar[str] = "codebook"
    _nearest: ClassVar[tuple[tuple[float, ...], tuple[int, ...]]]  # per instance: thresholds, codes between them

    table: tuple[float, ...]
    block_size: int = 64
    flat: bool = True
    nested: bool = False
    nested_block_size: int = 256
    fit: str = field(default="range", compare=False)

    def __post_init__(self) -> None:
        table = self.table
        if not isinstance(table, tuple) or not 2 <= len(table) <= 256:
            raise SchemeError("table must be a tuple of 2 to 256 numbers", name="Codebook")
        if not all(isinstance(value, int | float) and abs(value) <= 1 for value in table):
            raise SchemeError("table must hold numbers within [-1, 1]", name="Codebook", fix="Divide by the largest.")
        object.__setattr__(self, "table", tuple(float(value) for value in table))
        for name in ("block_size", "nested_block_size"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise SchemeError(f"{name} must be a positive int, got {size!r}", name="Codebook")
        if self.fit not in FITS:
            raise SchemeError(f"fit must be one of {', '.join(FITS)}, got {self.fit!r}", name="Codebook")
        check_flags(self, "flat", "nested")
        if self.nested and not self.flat:
            raise SchemeError("nested needs flat blocks", name="Codebook", fix="Use flat=True.")
        object.__setattr__(self, "_nearest", nearest_codes(self.table))  # here, not in compiled graphs

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        grid = self._grid(shape)
        if not self.flat:
            return {"qdata": code_part(shape, self.bits), "absmax": grid.scale_part(torch.float32)}
        count = math.prod(shape)
        number = -(-count // self.block_size)
        parts = {"qdata": stream_part(count, self.bits)}
        parts["absmax"] = Part((number,), torch.uint8 if self.nested else torch.float32, self.block_size)
        if self.nested:
            span = self.block_size * self.nested_block_size
            parts["nested_absmax"] = Part((-(-number // self.nested_block_size),), torch.float32, span)
            parts["nested_offset"] = Part((), torch.float32, 0)
        return parts

    def recipe(self, shape: Shape, dtype: torch.dtype) -> compiled.Recipe | None:
        if self.nested or self.bits != 4 or 0 in shape:
            return None
        columns, (thresholds, order) = shape[-1], self._nearest
        if self.flat:  # blocks ignore the ends of rows: if all are whole, each of them is a row for the loop
            count = math.prod(shape)
            columns = self.block_size if count % self.block_size == 0 and self.block_size % 2 == 0 else count
        return compiled.recipe(
            compiled.NEAREST,
            dtype,
            columns,
            min(self.block_size, columns),
            parts=("qdata", "absmax"),
            bits=4,
            thresholds=thresholds,
            order=order,
            unit=_UNIT,
            **(self._search.fields if self.fit != "range" else {}),
        )

    def _reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """Return the parts as by ``encode``; keep the held absmax in blocks whose largest value still matches it."""
        grid = self._grid(tuple(values.shape))
        amax, absmax = self._amax(grid, values), held["absmax"]
        if self.flat:
            absmax = self._absmax(held, self._blocks(0, values.numel(), values.device))
        # the largest value decodes to absmax times one of these
        ends = [end for end in (max(self.table), -min(self.table)) if end > 0]
        keep = (amax >= absmax * (min(ends) * (1 - _KEEP))) & (amax <= absmax * (1 + _KEEP))
        if self.nested and 0.0 in self.table:  # the nested absmax of a block of zeros is not 0, and any absmax fits
            keep |= amax == 0
        if is_true(keep.all(), unseen=False):
            return self.encode(values, like=held)
        if self.nested:  # an 8-bit absmax may be so inexact that no value of its block decodes to it
            again = self.encode(values, like=held)
            if is_true((self.decode(again, tuple(values.shape), values.dtype) == values).all(), unseen=False):
                return again
        parts = self.encode(values)  # checks the values, too
        if not is_true(keep.any(), unseen=True):
            return parts
        chosen = torch.where(keep, absmax, parts["absmax"] if not self.nested else amax)
        self._store_absmax(chosen, parts)
        return self.encode(values, like=parts)

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        if not self.flat:
            return super().decode(parts, shape, dtype)
        count = math.prod(shape)
        if compiled.is_at_hand(parts["qdata"]):
            out = torch.empty((1, count), dtype=dtype, device=parts["qdata"].device)
            if self._try_decode_flat(parts, 0, out):
                return out.view(shape)
        ranges = flat_ranges(count, self.block_size)
        if len(ranges) == 1:
            return self._stretch(parts, 0, count).to(dtype).view(shape)
        out = torch.empty(count, dtype=dtype, device=parts["qdata"].device)
        for start, stop in ranges:
            out[start:stop].copy_(self._stretch(parts, start, stop))
        return out.view(shape)

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        if not self.flat:
            super().decode_into(parts, shape, start, stop, out)
            return
        grid = self._grid(tuple(shape))
        first, last = start * grid.columns, stop * grid.columns
        if first % self._unit == 0 and out.is_contiguous() and self._try_decode_flat(parts, first, out.view(1, -1)):
            return
        begin = first // self._unit * self._unit  # a block and a byte begin here; the last ones may be incomplete
        out.copy_(self._stretch(parts, begin, last)[first - begin :].view(stop - start, grid.columns))

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        if not self.flat:
            return super().gather(parts, shape, index, dtype)
        each = math.prod(shape[1:])
        is_cut = each % self.block_size or each * self.bits % 8  # blocks or bytes cross the slices
        if len(shape) == 1 or 0 in shape or is_cut:
            return self.decode(parts, shape, dtype).index_select(0, index)
        size = each * self.bits // 8
        taken = parts["qdata"].reshape(-1)[: shape[0] * size].view(shape[0], size).index_select(0, index)
        per_slice = each // self.block_size
        blocks = index.to(torch.int64).unsqueeze(-1) * per_slice + torch.arange(per_slice, device=index.device)
        single = replace(self, nested=False)
        absmax = self._absmax(parts, blocks.view(-1))
        return single.decode({"qdata": taken, "absmax": absmax}, (index.shape[0], *shape[1:]), dtype)

    def can_view(self, old: Shape, new: Shape) -> bool:
        if self.flat:
            return len(old) > 0 < len(new) and math.prod(old) == math.prod(new)
        return super().can_view(old, new)

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Return half the gap around each value times absmax, plus the value times the error of a nested absmax."""
        if 0 in shape:
            return torch.zeros(shape, device=parts["qdata"].device)
        device = parts["qdata"].device
        values = torch.tensor(self.table, device=device).abs()
        gaps = torch.tensor(half_gaps(self.table), device=device)
        if self.fit != "range":
            ends = torch.tensor([value in (min(self.table), max(self.table)) for value in self.table], device=device)
            gaps = gaps + ends * (1 / SMALLEST - 1)
        if self.flat:
            count = math.prod(shape)
            index = self._blocks(0, count, device)
            absmax, error = self._absmax(parts, index).abs(), self._absmax_error(parts, index)
            code = [lookup(parts["qdata"].reshape(-1), each, self.bits, count) for each in (values, gaps)]
            return (self._scaled(code[1], absmax + error) + self._scaled(code[0], error)).view(shape)
        grid = self._grid(tuple(shape))
        stream = parts["qdata"].reshape(grid.rows, -1)
        value, gap = (lookup(stream, each, self.bits, grid.columns).reshape(shape) for each in (values, gaps))
        return (gap + (value + gap) * ARITHMETIC) * grid.expand(parts["absmax"])

    # -- implementation -----------------------------------------------------------------------------------------

    @property
    def _block(self) -> Block:
        return 1, self.block_size

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        if like is None and self._try_encode(values, parts):
            return
        grid = self._grid(tuple(values.shape))
        amax = self._amax(grid, values)
        check_finite(amax, values)
        amax = torch.where(amax > 0, amax.clamp_min(TINY), 0.0)  # so that 1 / absmax is finite
        if like is None and self.fit != "range":
            amax = self._searched(grid, values, amax)
        if like is not None:
            for name in parts.keys() - {"qdata"}:
                parts[name].copy_(like[name])
            amax = parts["absmax"]
            if self.flat:
                amax = self._absmax(parts, self._blocks(0, values.numel(), values.device))
        else:
            self._store_absmax(amax, parts)
        self._quantize(grid, values, {"qdata": parts["qdata"], "absmax": amax})

    def _try_encode(self, values: Tensor, parts: Parts) -> bool:
        if not self.nested or not encoders.can_read(values):
            return super()._try_encode(values, parts)
        amax = torch.empty(parts["absmax"].shape, dtype=torch.float32, device=values.device)
        if not replace(self, nested=False)._try_encode(values, {"qdata": parts["qdata"], "absmax": amax}):
            return False
        nest(amax, self.nested_block_size, parts)
        return True

    def _store_absmax(self, amax: Tensor, parts: Parts) -> None:
        if self.nested:
            nest(amax, self.nested_block_size, parts)
        else:
            parts["absmax"].copy_(amax)

    def _grid(self, shape: Shape) -> Grid:
        return grid_over(shape, self._block)

    @property
    def _unit(self) -> int:
        """Return a number of elements at whose multiples both a block and a byte begin."""
        return self.block_size * 8

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """Return the decoded rows, (stop - start, K) float32, if blocks end with their row."""
        codes = parts["qdata"].reshape(grid.rows, -1)[start:stop]
        x = lookup(codes, self._table(codes.device), self.bits, grid.columns)
        x, absmax = grid.align(x, grid.pick(parts["absmax"], start, stop))
        return x.mul_(absmax).reshape(stop - start, grid.columns)

    def _stretch(self, parts: Parts, start: int, stop: int) -> Tensor:
        """Return the decoded flat elements ``start`` to ``stop``, float32; a block and a byte begin at ``start``."""
        stream = parts["qdata"].reshape(-1)
        x = lookup(stream[start * self.bits // 8 :], self._table(stream.device), self.bits, stop - start)
        return self._scaled(x, self._absmax(parts, self._blocks(start, stop, x.device)))

    def _try_decode(self, grid: Grid, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        codes, absmax = parts["qdata"].reshape(grid.rows, -1)[start:stop], grid.pick(parts["absmax"], start, stop)
        return self._try_look_up(codes, grid.run, absmax, out)

    def _try_decode_flat(self, parts: Parts, start: int, out: Tensor) -> bool:
        """Write the elements of ``_stretch`` to ``out`` (1, count) by a compiled loop; return False without a loop."""
        codes = parts["qdata"].reshape(1, -1)[:, start * self.bits // 8 :]
        index = self._blocks(start, start + out.shape[1], codes.device)
        return self._try_look_up(codes, self.block_size, self._absmax(parts, index).view(1, -1), out)

    def _try_look_up(self, codes: Tensor, width: int, absmax: Tensor, out: Tensor) -> bool:
        if self.bits not in (4, 8) or not compiled.is_at_hand(codes):
            return False
        table = F.pad(self._table(codes.device), (0, (1 << self.bits) - len(self.table)))
        return compiled.decode_table(codes, width, absmax, table, out, bits=self.bits)

    def _table(self, device: torch.device) -> Tensor:
        return table_of(self.table, device)

    def _blocks(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Return the indices of the blocks over the elements ``start`` to ``stop``; a block begins at ``start``."""
        return torch.arange(start // self.block_size, -(-stop // self.block_size), device=device)

    def _scaled(self, x: Tensor, absmax: Tensor) -> Tensor:
        """Multiply ``x``, flat and from the start of a block, by the ``absmax`` of each block, in place."""
        if absmax.shape[0] * self.block_size == x.shape[0]:
            return x.view(absmax.shape[0], self.block_size).mul_(absmax.unsqueeze(-1)).view(-1)
        return x.mul_(absmax.repeat_interleave(self.block_size)[: x.shape[0]])

    def _absmax(self, parts: Parts, index: Tensor) -> Tensor:
        """Return the absmax, float32, of the flat blocks ``index``."""
        if self.nested:
            return unnest(parts, self.nested_block_size, index)
        return parts["absmax"].index_select(0, index)

    def _absmax_error(self, parts: Parts, index: Tensor) -> Tensor:
        """Return the largest error of the absmax of the flat blocks ``index``."""
        if self.nested:
            return nesting_error(parts, self.nested_block_size, index)
        return ARITHMETIC * parts["absmax"].index_select(0, index)

    def _amax(self, grid: Grid, values: Tensor) -> Tensor:
        if not self.flat:
            return grid.reduce(values, torch.amax, magnitude=True)
        return flat_magnitudes(values, self.block_size)

    @property
    def _search(self) -> Search:
        thresholds, order = self._nearest
        return Search(4, 0, 0, _UNIT, torch.float32, tuple(self.table[code] for code in order), thresholds)

    def _searched(self, grid: Grid, values: Tensor, amax: Tensor) -> Tensor:
        """Return, for each block, the absmax found by the search between half of its ``amax`` and ``amax``."""
        if not self.flat:
            return find_scales(self._search, grid, values, amax, amax, None)
        found = torch.empty_like(amax)
        for start, stop in flat_ranges(values.numel(), self.block_size):
            at = slice(start // self.block_size, -(-stop // self.block_size))
            piece = grid_over((stop - start,), self._block)
            found[at] = find_scales(self._search, piece, flat(values, start, stop), amax[at], amax[at], None)
        return found

    def _try_quantize(self, grid: Grid, values: Tensor, parts: Parts) -> bool:
        if self.bits != 4:
            return False
        thresholds, order = self._nearest
        rows, width = (1, self.block_size) if self.flat else (grid.rows, grid.run)
        x, scale, codes = values.view(rows, -1), parts["absmax"].view(rows, -1), parts["qdata"].view(rows, -1)
        return encoders.encode_nearest(
            x, width, reciprocal(scale), codes, divides=False, thresholds=thresholds, order=order
        )

    def _store_codes(self, grid: Grid, x: Tensor, parts: Parts, start: int, stop: int, out: Tensor) -> None:
        x, scale = grid.align(x, reciprocal(grid.pick(parts["absmax"], start, stop)))
        codes = nearest_code((x * scale).reshape(stop - start, grid.columns), *self._nearest)
        pack_into(codes, self.bits, out)

    def _quantize(self, grid: Grid, values: Tensor, parts: Parts) -> None:
        if not self.flat:
            super()._quantize(grid, values, parts)
            return
        if values.numel() == 0 or (encoders.can_read(values) and self._try_quantize(grid, values, parts)):
            return
        stream, memory = parts["qdata"].view(-1), None
        for start, stop in flat_ranges(values.numel(), self.block_size):
            x = flat(values, start, stop)
            if memory is None or torch.compiler.is_compiling():
                memory = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            x = memory[: stop - start].copy_(x)
            index = slice(start // self.block_size, -(-stop // self.block_size))
            x = self._scaled(x, reciprocal(parts["absmax"][index]))
            packed = pack(nearest_code(x, *self._nearest), self.bits)
            at = start * self.bits // 8
            stream[at : at + packed.shape[0]].copy_(packed)
            if stop == values.numel():
                stream[at + packed.shape[0] :].zero_()


_UNIT = 2.0**-13  # the unit of the values of the table in a search for scales
_KEEP = 2.0**-10  # how far, relative to absmax, the largest value of a block may move before absmax follows
