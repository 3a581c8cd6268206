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
from ..torch_private.observers import is_direct
from . import blocks
from .bits import lookup, pack, table_of
from .blocks import (
    SIXTEEN,
    TINY,
    Bare,
    Grid,
    check_finite,
    code_part,
    flat,
    fold,
    grid_over,
    pieces,
    rows,
    source,
    stream_part,
)
from .decoding import decode_rows, reshapable, take_rows
from .nearest import count_above, nearest_codes
from .scheme import Part, Parts, Scheme
from .search import FITS, RATIOS, SMALLEST
from .tables import DYNAMIC


@dataclass(frozen=True)
class Codebook(Scheme):
    """Holds codes so that ``w ≈ table[code] * absmax``, with one absmax per ``block_size`` elements.

        qdata (ceil(n * bits / 8),) uint8          a dense stream over the flattened tensor, low bits first
        absmax (ceil(n / block_size),) float32     with ``nested``: uint8 codes of the 8-bit dynamic type, and
        nested_absmax (ceil(blocks / nested_block_size),) float32
        nested_offset () float32                   absmax = dynamic[code] * nested_absmax + nested_offset

    With ``flat=False`` blocks end with their row: qdata (*lead, ceil(K * bits / 8)), absmax (*lead, blocks of K); not
    nested.  A table whose bits (3, 5, 6, 7) do not divide 8 keeps its flat stream as (ceil(n / 8), bits).

    ``table`` holds 2 to 256 values within [-1, 1], in any order; a number goes to the nearest, halfway ones down.
    A code of another writer that is beyond a shorter table decodes to 0: looking for one would cost loads a pass.
    Double quantization follows bitsandbytes: the offset is the mean absmax.  Where some absmax is more than 16 times
    the mean, that would drown the small blocks, so the offset is 0 and only their own ``nested_absmax`` limits them.
    ``fit="mse"`` clips the range of each block where that lowers the sum of squared errors, as ``Affine`` does.

    Error: ``absmax`` times half the gap around the value; nested, the error of absmax besides; at the ends of the table
    what was clipped.

    Encoding decoded values keeps the codes where the table holds -1 and 1 (the largest value is kept exactly); the
    codes of a nested absmax may move.

    >>> parts = Codebook((-1.0, 0.0, 0.5, 1.0), block_size=4).encode(torch.tensor([2.0, -2.0, 1.1, 0.1]))
    >>> parts["qdata"].tolist(), parts["absmax"].tolist()
    ([99], [2.0])
    """

    kind: ClassVar[str] = "codebook"
    _nearest: ClassVar[tuple[tuple[float, ...], tuple[int, ...]]]  # of the instance: thresholds, and codes between them

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
        if self.nested and not self.flat:
            raise SchemeError("nested needs flat blocks", name="Codebook", fix="Use flat=True.")
        object.__setattr__(self, "_nearest", nearest_codes(self.table))  # once, and outside of compiled graphs

    @property
    def bits(self) -> int:
        """Bits per code."""
        return (len(self.table) - 1).bit_length()

    # -- the interface ------------------------------------------------------------------------------------------

    def layout(self, shape: Shape) -> dict[str, Part]:
        grid = grid_over(shape, (1, self.block_size))
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

    def encode(self, values: Tensor, *, like: Parts | None = None) -> dict[str, Tensor]:
        """The parts of ``values``; ``like``: parts whose absmax is used again, values beyond it clip."""
        values = source(values)
        parts = self.empty(tuple(values.shape), values.dtype, values.device)
        if values.is_meta:
            return parts
        self._encode(values, parts, like)
        return parts

    def encode_into(self, values: Tensor, parts: Parts) -> None:
        values = source(values)
        if not values.is_meta:
            self._encode(values, parts, None)

    def recipe(self, shape: Shape, dtype: torch.dtype) -> compiled.Recipe | None:
        if self.nested or self.fit != "range" or self.bits != 4 or 0 in shape:
            return None
        columns, (thresholds, order) = shape[-1], self._nearest
        if self.flat:  # blocks follow each other, whatever the shape: those that are whole as rows of their own
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
        )

    def _encode(self, values: Tensor, parts: Parts, like: Parts | None) -> None:
        if like is None and self._is_encoded(values, parts):
            return
        grid = self._grid(tuple(values.shape))
        amax = self._amax(grid, values)
        check_finite(amax, values)
        amax = torch.where(amax > 0, amax.clamp_min(TINY), 0.0)  # so that 1 / absmax is a number
        if like is None and self.fit != "range":
            amax = self._least_squares(grid, values, amax)
        if like is not None:
            for name in parts.keys() - {"qdata"}:
                parts[name].copy_(like[name])
            amax = parts["absmax"]
            if self.flat:
                amax = self._absmax(parts, self._blocks(0, values.numel(), values.device))
        elif self.nested:
            self._nest(amax, parts)
        else:
            parts["absmax"].copy_(amax)
        self._quantize(grid, values, amax, parts["qdata"])

    def reencode(self, values: Tensor, held: Parts) -> dict[str, Tensor]:
        """As ``encode``, with the held absmax in blocks whose largest value it still reaches."""
        values = source(values)
        if values.is_meta or values.numel() == 0:
            return self.encode(values)
        grid = self._grid(tuple(values.shape))
        amax, absmax = self._amax(grid, values), held["absmax"]
        if self.flat:
            absmax = self._absmax(held, self._blocks(0, values.numel(), values.device))
        ends = [end for end in (max(self.table), -min(self.table)) if end > 0]  # what the largest value decodes to
        keep = (amax >= absmax * (min(ends) * (1 - _KEEP))) & (amax <= absmax * (1 + _KEEP))
        if self.nested and 0.0 in self.table:  # a nested absmax is not 0 above zeros, and suits them as any does
            keep |= amax == 0
        if keep.all():
            return self.encode(values, like=held)
        if self.nested:  # an absmax of 8 bits can be so far off that no value of its block decodes to it
            again = self.encode(values, like=held)
            if torch.equal(self.decode(again, tuple(values.shape), values.dtype), values):
                return again
        parts = self.encode(values)  # checks the values, too
        if not keep.any():
            return parts
        chosen = torch.where(keep, absmax, parts["absmax"] if not self.nested else amax)
        if self.nested:
            self._nest(chosen, parts)
        else:
            parts["absmax"].copy_(chosen)
        return self.encode(values, like=parts)

    def decode(self, parts: Parts, shape: Shape, dtype: torch.dtype) -> Tensor:
        grid = self._grid(tuple(shape))
        if not self.flat:
            return decode_rows(
                lambda start, stop: self._rows(grid, parts, start, stop),
                grid,
                parts["qdata"],
                dtype,
                lambda start, stop, out: self._is_decoded(grid, parts, start, stop, out),
            )
        count = math.prod(shape)
        if compiled.is_at_hand(parts["qdata"]):
            out = torch.empty((1, count), dtype=dtype, device=parts["qdata"].device)
            if self._is_stretch_decoded(parts, 0, out):
                return out.view(shape)
        ranges = self._ranges(count)
        if len(ranges) == 1:
            return self._stretch(parts, 0, count).to(dtype).view(shape)
        out = torch.empty(count, dtype=dtype, device=parts["qdata"].device)
        for start, stop in ranges:
            out[start:stop].copy_(self._stretch(parts, start, stop))
        return out.view(shape)

    def decode_into(self, parts: Parts, shape: Shape, start: int, stop: int, out: Tensor) -> None:
        grid = self._grid(tuple(shape))
        if not self.flat:
            if not self._is_decoded(grid, parts, start, stop, out):
                out.copy_(self._rows(grid, parts, start, stop))
            return
        first, last = start * grid.columns, stop * grid.columns
        if first % self._unit == 0 and out.is_contiguous() and self._is_stretch_decoded(parts, first, out.view(1, -1)):
            return
        begin = first // self._unit * self._unit  # a block and a byte begin there; the last ones may be cut
        out.copy_(self._stretch(parts, begin, last)[first - begin :].view(stop - start, grid.columns))

    def gather(self, parts: Parts, shape: Shape, index: Tensor, dtype: torch.dtype) -> Tensor:
        if len(shape) == 1 or 0 in shape:
            return super().gather(parts, shape, index, dtype)
        new = (index.shape[0], *shape[1:])
        if not self.flat:
            some, _ = take_rows(self.layout(shape), parts, shape, (1, self.block_size), index)
            return self.decode(some, new, dtype)
        each = math.prod(shape[1:])
        if each % self.block_size or each * self.bits % 8:  # blocks or bytes cross the slices
            return super().gather(parts, shape, index, dtype)
        size = each * self.bits // 8
        taken = parts["qdata"].reshape(-1)[: shape[0] * size].view(shape[0], size).index_select(0, index)
        per_slice = each // self.block_size
        which = index.to(torch.int64).unsqueeze(-1) * per_slice + torch.arange(per_slice, device=index.device)
        single = replace(self, nested=False)
        return single.decode({"qdata": taken, "absmax": self._absmax(parts, which.view(-1))}, new, dtype)

    def can_view(self, old: Shape, new: Shape) -> bool:
        if self.flat:
            return len(old) > 0 < len(new) and math.prod(old) == math.prod(new)
        return super().can_view(old, new) and reshapable(self, (1, self.block_size), old, new)

    def bound(self, parts: Parts, shape: Shape) -> Tensor:
        """Half the gap around each value times absmax, and the value times what double quantization did to absmax."""
        if 0 in shape:
            return torch.zeros(shape, device=parts["qdata"].device)
        device = parts["qdata"].device
        values = torch.tensor(self.table, device=device).abs()
        gaps = torch.tensor(_half_gaps(self.table), device=device)
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
        return (gap + (value + gap) * _ARITHMETIC) * grid.expand(parts["absmax"])

    # -- how it is done -----------------------------------------------------------------------------------------

    def _grid(self, shape: Shape) -> Grid:
        return grid_over(shape, (1, self.block_size))

    @property
    def _unit(self) -> int:
        """A stretch of so many elements, from the start, ends with a block and with a byte."""
        return self.block_size * 8

    def _ranges(self, count: int) -> list[tuple[int, int]]:
        """Pieces of the flattened tensor that cut no block and no byte."""
        unit = self._unit
        size = max(1, blocks.CHUNK // unit) * unit
        if torch.compiler.is_compiling() or count <= size:
            return [(0, count)]
        return pieces(0, count, size)

    def _rows(self, grid: Grid, parts: Parts, start: int, stop: int) -> Tensor:
        """The rows from ``start`` to ``stop``, float32, where blocks end with their row."""
        codes = parts["qdata"].reshape(grid.rows, -1)[start:stop]
        x = lookup(codes, self._table(codes.device), self.bits, grid.columns)
        x, absmax = grid.align(x, grid.pick(parts["absmax"], start, stop))
        return x.mul_(absmax).reshape(stop - start, grid.columns)

    def _stretch(self, parts: Parts, start: int, stop: int) -> Tensor:
        """The elements from ``start``, with which a block and a byte begin, to ``stop``, float32, where flat."""
        stream = parts["qdata"].reshape(-1)
        x = lookup(stream[start * self.bits // 8 :], self._table(stream.device), self.bits, stop - start)
        return self._scaled(x, self._absmax(parts, self._blocks(start, stop, x.device)))

    def _is_decoded(self, grid: Grid, parts: Parts, start: int, stop: int, out: Tensor) -> bool:
        """Whether a compiled loop has done what ``_rows`` does, into ``out``."""
        codes, absmax = parts["qdata"].reshape(grid.rows, -1)[start:stop], grid.pick(parts["absmax"], start, stop)
        return self._looked_up(codes, grid.run, absmax, out)

    def _is_stretch_decoded(self, parts: Parts, start: int, out: Tensor) -> bool:
        """Whether a compiled loop has done what ``_stretch`` does, into ``out`` (1, count)."""
        codes = parts["qdata"].reshape(1, -1)[:, start * self.bits // 8 :]
        index = self._blocks(start, start + out.shape[1], codes.device)
        return self._looked_up(codes, self.block_size, self._absmax(parts, index).view(1, -1), out)

    def _looked_up(self, codes: Tensor, width: int, absmax: Tensor, out: Tensor) -> bool:
        if self.bits not in (4, 8) or not compiled.is_at_hand(codes):
            return False
        table = F.pad(self._table(codes.device), (0, (1 << self.bits) - len(self.table)))
        return compiled.decode_table(codes, width, absmax, table, out, bits=self.bits)

    def _table(self, device: torch.device) -> Tensor:
        return table_of(self.table, device)

    def _blocks(self, start: int, stop: int, device: torch.device) -> Tensor:
        """The numbers of the blocks that lie over the elements from ``start``, which begins one, to ``stop``."""
        return torch.arange(start // self.block_size, -(-stop // self.block_size), device=device)

    def _scaled(self, x: Tensor, absmax: Tensor) -> Tensor:
        """``x``, flat and from the start of a block, times the ``absmax`` of each block, in place."""
        if absmax.shape[0] * self.block_size == x.shape[0]:
            return x.view(absmax.shape[0], self.block_size).mul_(absmax.unsqueeze(-1)).view(-1)
        return x.mul_(absmax.repeat_interleave(self.block_size)[: x.shape[0]])

    def _absmax(self, parts: Parts, index: Tensor) -> Tensor:
        """The absmax, float32, of the flat blocks that ``index`` names."""
        absmax = parts["absmax"].index_select(0, index)
        if not self.nested:
            return absmax
        scale = parts["nested_absmax"].index_select(0, index // self.nested_block_size)
        return _dynamic(absmax).mul_(scale).add_(parts["nested_offset"])

    def _absmax_error(self, parts: Parts, index: Tensor) -> Tensor:
        """How far the absmax of the blocks that ``index`` names may be from that of the values."""
        if not self.nested:
            return _ARITHMETIC * parts["absmax"].index_select(0, index)
        scale = parts["nested_absmax"].index_select(0, index // self.nested_block_size)
        gaps = torch.tensor(_half_gaps(DYNAMIC), device=index.device)
        gap = gaps.index_select(0, parts["absmax"].index_select(0, index).int())
        return gap * scale + _ARITHMETIC * (scale + parts["nested_offset"].abs())

    def _amax(self, grid: Grid, values: Tensor) -> Tensor:
        if not self.flat:
            return grid.reduce(values, torch.amax, magnitude=True)
        if compiled.can_read(values):
            found = compiled.magnitudes(values.view(1, -1), self.block_size)
            if found is not None:
                return found.view(-1)
        amax = torch.zeros(-(-values.numel() // self.block_size), dtype=torch.float32, device=values.device)
        memory = Bare()
        for start, stop in self._ranges(values.numel()) if values.numel() else ():
            x = flat(values, start, stop)
            if x.dtype in SIXTEEN and is_direct():
                stats = fold(memory.of(x), self.block_size, 0, torch.amax).view(x.dtype)
            else:
                stats = fold((x.float() if x.dtype.itemsize == 1 else x).abs(), self.block_size, 0, torch.amax)
            amax[start // self.block_size :][: stats.shape[0]].copy_(stats)
        return amax

    def _nest(self, amax: Tensor, parts: Parts) -> None:
        """Writes ``amax`` as codes of the dynamic type."""
        if amax.numel() == 0:
            parts["nested_offset"].zero_()
            return
        mean = amax.mean()
        mean = torch.where(mean.isfinite(), mean, (amax * 2.0**-64).mean() * 2.0**64)  # a sum that leaves float32
        offset = torch.where(amax.max() > _EXTREME * mean, torch.zeros_like(mean), mean)
        rest = amax - offset
        scale = fold(rest.abs(), self.nested_block_size, 0, torch.amax)
        each = scale.repeat_interleave(self.nested_block_size)[: rest.shape[0]]
        parts["absmax"].copy_(count_above(rest * _reciprocal(each), _DYNAMIC_THRESHOLDS))
        parts["nested_absmax"].copy_(scale)
        parts["nested_offset"].copy_(offset)

    def _least_squares(self, grid: Grid, values: Tensor, amax: Tensor) -> Tensor:
        """For each block the part of ``amax`` under which its values lose least."""
        if 0 in values.shape:
            return amax
        best = amax.clone()
        entries = best.view(-1) if self.flat else best.view(grid.rows, -1)
        for start, stop in self._ranges(values.numel()) if self.flat else grid.chunks():
            at = slice(start // self.block_size, -(-stop // self.block_size)) if self.flat else slice(start, stop)
            x = (flat(values, start, stop) if self.flat else rows(values, start, stop)).float()
            least, whole = torch.full_like(entries[at], torch.inf), entries[at].clone()
            for ratio in RATIOS:
                error = self._squares(x, whole * ratio)
                better = error < least
                least = torch.where(better, error, least)
                entries[at] = torch.where(better, whole * ratio, entries[at])
        return best

    def _squares(self, x: Tensor, absmax: Tensor) -> Tensor:
        """The sum of squared errors of each block of ``x`` along its last dimension, under ``absmax``."""
        wide = absmax.repeat_interleave(self.block_size, -1)[..., : x.shape[-1]]
        thresholds, order = self._nearest
        ascending = torch.tensor([self.table[code] for code in order], device=x.device)
        nearest = count_above((x * _reciprocal(wide)).contiguous(), thresholds)
        decoded = ascending.index_select(0, nearest.view(-1).int()).view(x.shape)
        return fold((x - decoded * wide).square_(), self.block_size, x.dim() - 1, torch.sum)

    def _coded(self, x: Tensor) -> Tensor:
        """The stream of the codes nearest to ``x``."""
        thresholds, order = self._nearest
        nearest = count_above(x, thresholds)
        if order != tuple(range(len(order))):
            codes = torch.tensor(order, dtype=torch.uint8, device=x.device)
            nearest = codes.index_select(0, nearest.view(-1).int()).view(nearest.shape)
        return pack(nearest, self.bits)

    def _is_quantized(self, grid: Grid, values: Tensor, amax: Tensor, qdata: Tensor) -> bool:
        """Whether a compiled loop knows this table, and has written the codes."""
        if self.bits != 4 or not compiled.can_read(values):
            return False
        thresholds, order = self._nearest
        rows, scale = (1, amax.view(1, -1)) if self.flat else (grid.rows, amax.view(grid.rows, -1))
        x, width = values.view(rows, -1), self.block_size if self.flat else grid.run
        codes = qdata.view(rows, -1)
        return compiled.encode_nearest(
            x, width, _reciprocal(scale), codes, divides=False, thresholds=thresholds, order=order
        )

    def _quantize(self, grid: Grid, values: Tensor, amax: Tensor, qdata: Tensor) -> None:
        if values.numel() == 0 or self._is_quantized(grid, values, amax, qdata):
            return
        if not self.flat:
            table = qdata.view(grid.rows, -1)
            for start, stop in grid.chunks():
                x, absmax = grid.align(rows(values, start, stop).float(), _reciprocal(grid.pick(amax, start, stop)))
                packed = self._coded((x * absmax).reshape(stop - start, grid.columns))
                table[start:stop, : packed.shape[1]].copy_(packed)
                table[start:stop, packed.shape[1] :].zero_()
            return
        stream, memory = qdata.view(-1), None
        for start, stop in self._ranges(values.numel()):
            x = flat(values, start, stop)
            if memory is None or torch.compiler.is_compiling():
                memory = torch.empty(x.shape, dtype=torch.float32, device=x.device)
            x = memory[: stop - start].copy_(x)
            index = slice(start // self.block_size, -(-stop // self.block_size))
            packed = self._coded(self._scaled(x, _reciprocal(amax[index])))
            at = start * self.bits // 8
            stream[at : at + packed.shape[0]].copy_(packed)
            if stop == values.numel():
                stream[at + packed.shape[0] :].zero_()


_DYNAMIC_THRESHOLDS, _ = nearest_codes(DYNAMIC)
_ARITHMETIC = 2.0**-20  # what float32 products and quotients may add, relative to absmax
_KEEP = 2.0**-10  # how far, relative to absmax, the largest value of a block may move before absmax follows
_EXTREME = 16.0  # Gaussian weights stay below 3, and weights with 20-fold outliers below 8


def _dynamic(codes: Tensor) -> Tensor:
    return table_of(DYNAMIC, codes.device).index_select(0, codes.int())


def _reciprocal(absmax: Tensor) -> Tensor:
    """``1 / absmax``, and 1 where there is nothing to divide."""
    return 1.0 / torch.where(absmax.abs() < TINY, 1.0, absmax)


def _half_gaps(table: tuple[float, ...]) -> list[float]:
    """For each code, how far from its value a number within [-1, 1] may lie that is nearest to it."""
    thresholds, order = nearest_codes(table)
    edges = (-1.0, *thresholds, 1.0)
    gaps = {table[code]: max(table[code] - edges[i], edges[i + 1] - table[code]) for i, code in enumerate(order)}
    return [gaps[value] for value in table]
