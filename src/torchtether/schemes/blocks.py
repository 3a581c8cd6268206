"""The layout of blocks over a tensor, and the walk over a large tensor in small pieces.

A tensor of ``shape`` is seen as M rows (every dimension but the last) of K columns.  A block is ``height`` rows by
``width`` columns, ``None`` meaning all of them; blocks at the edges may be smaller, and a height above 1 never crosses
the last two dimensions.  Tensors with one value per block (scales, zero points) have ``Grid.scale_shape``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .._dtypes import dtype_name, select_rows
from ..errors import SchemeError
from ..geometry.views import Shape
from ..torch_private.observers import is_direct
from . import encoders
from .looking import is_true
from .scheme import Part

CHUNK = 1 << 20
"""Elements that are computed at once: 4 MiB of float32, which stays in the cache."""

Block = tuple[int | None, int | None]
Reduction = Callable[..., Tensor]


class Grid(NamedTuple):
    """The blocks over a tensor of ``shape``; build it with ``grid_over``."""

    shape: Shape
    height: int | None
    width: int | None
    rows: int
    columns: int
    groups: int

    @property
    def scale_shape(self) -> Shape:
        """Return the shape of one entry per block: leading dimensions stay, or are 1 if a block covers all of them."""
        if self.height is None:
            return (*(1 for _ in self.shape[:-1]), self.groups)
        if self.height == 1:
            return (*self.shape[:-1], self.groups)
        return (*self.shape[:-2], -(-self.shape[-2] // self.height), self.groups)

    @property
    def run(self) -> int:
        """Return how many columns share a scale."""
        return self.columns if self.width is None else min(self.width, self.columns)

    @property
    def scale_rows(self) -> int:
        return math.prod(self.scale_shape[:-1])

    def scale_part(self, dtype: torch.dtype) -> Part:
        """Return the layout of a part that has one entry per block."""
        inner = math.prod(self.shape[1:])
        if len(self.shape) == 1:
            span = self.width or 0
        elif self.height is None:
            span = 0
        elif len(self.shape) == 2:
            span = self.height * inner
        else:
            span = inner
        return Part(self.scale_shape, dtype, span)

    def chunks(self, elements: int = CHUNK) -> list[tuple[int, int]]:
        """Return ranges of rows, about ``elements`` each, that cut no block (except those as high as the tensor)."""
        size = max(1, elements // max(1, self.columns))
        if torch.compiler.is_compiling() or self.rows <= size:
            return [(0, self.rows)]  # straight-line code for the compiler, which fuses anyway
        if self.height is None or self.height == 1:
            return pieces(0, self.rows, size)
        matrix = self.shape[-2]
        if matrix <= size:
            return pieces(0, self.rows, size // matrix * matrix)
        size = max(1, size // self.height) * self.height
        return [piece for start in range(0, self.rows, matrix) for piece in pieces(start, start + matrix, size)]

    def pick(self, part: Tensor, start: int, stop: int) -> Tensor:
        """Return the entries of a scale-shaped ``part`` for rows ``start`` to ``stop``: (stop - start or 1, groups)."""
        part = part.reshape(self.scale_rows, self.groups)
        if self.height is None:
            return part
        if self.height == 1:
            return part[start:stop]
        matrix = self.shape[-2]
        row = torch.arange(start, stop, device=part.device)
        blocks = row // matrix * self.scale_shape[-2] + row % matrix // self.height
        return select_rows(part, blocks)

    def align(self, x: Tensor, *scales: Tensor, g_idx: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return ``x`` (R, K) and the picked ``scales`` as views that broadcast (one copy if ragged)."""
        if g_idx is not None:
            return (x, *(scale.index_select(1, g_idx.to(torch.int64)) for scale in scales))
        if self.groups == 1:
            return (x, *scales)
        width = self.width or self.columns
        if width * self.groups == self.columns:
            return (x.unflatten(-1, (self.groups, width)), *(scale.unsqueeze(-1) for scale in scales))
        column = torch.arange(self.columns, device=x.device) // width
        return (x, *(scale.index_select(1, column) for scale in scales))

    def expand(self, part: Tensor, g_idx: Tensor | None = None) -> Tensor:
        """Return a scale-shaped float ``part`` repeated over its blocks: a tensor of ``shape``."""
        zeros = part.new_zeros(self.rows, self.columns)
        if zeros.numel() == 0:
            return zeros.view(self.shape)
        zeros, part = self.align(zeros, self.pick(part, 0, self.rows), g_idx=g_idx)
        return (zeros + part).reshape(self.shape)

    def reduce(self, values: Tensor, op: Reduction, *, magnitude: bool = False, g_idx: Tensor | None = None) -> Tensor:
        """Reduce every block by ``torch.amax`` or ``torch.amin``: float32 of ``scale_shape``, 0 for empty blocks.

        It runs in the dtype of ``values`` (or of their magnitudes): rounding to float32 is monotone, so the result is
        the extreme of the rounded values; NaN stays visible.
        """
        if magnitude and g_idx is None and op is torch.amax and encoders.can_read(values):
            found = encoders.magnitudes(values.view(self.rows, self.columns), self.run)
            if found is not None:
                return self._fold_rows(found, op)

        if magnitude and g_idx is None and values.dtype in SIXTEEN and self.run > _SHORT and is_direct():
            memory = Magnitudes()
            return self._reduce_all(
                lambda start, stop: memory.of(rows(values, start, stop)),
                (op,),
                values.device,
                back=lambda bits: bits.view(values.dtype),
            )[0]

        def some(start: int, stop: int) -> Tensor:
            x = rows(values, start, stop)
            x = x.float() if x.dtype.itemsize == 1 else x  # float8 has no reductions
            return x.abs() if magnitude else x

        return self.reduce_rows(some, op, values.device, g_idx)

    def extremes(self, values: Tensor, g_idx: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return ``reduce`` with ``torch.amin`` and with ``torch.amax``."""
        if g_idx is None and encoders.can_read(values):
            found = encoders.extremes(values.view(self.rows, self.columns), self.run)
            if found is not None:
                return self._fold_rows(found[0], torch.amin), self._fold_rows(found[1], torch.amax)
        is_wide = values.dtype.itemsize > 4  # rounding to float32 keeps the order, and may lose what is finite
        low, high = self._reduce_all(
            lambda start, stop: rows(values, start, stop) if is_wide else rows(values, start, stop).float(),
            (torch.amin, torch.amax),
            values.device,
            g_idx,
        )
        return low, high

    def _fold_rows(self, stats: Tensor, op: Reduction) -> Tensor:
        """Reduce ``stats`` (rows, groups), each of one row, to one entry per block."""
        if self.height is None:
            return op(stats, 0, keepdim=True).view(self.scale_shape)
        if self.height > 1:
            matrix = self.shape[-2]
            stats = fold(stats.unflatten(0, (self.rows // matrix, matrix)), self.height, 1, op)
        return stats.reshape(self.scale_shape)

    def reduce_rows(
        self,
        some: Callable[[int, int], Tensor],
        op: Reduction,
        device: torch.device,
        g_idx: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Reduce as ``reduce`` does, or by ``torch.sum``, the rows (R, K) that ``some(start, stop)`` returns."""
        return self._reduce_all(some, (op,), device, g_idx, None, dtype or torch.float32)[0]

    def _reduce_all(
        self,
        some: Callable[[int, int], Tensor],
        ops: tuple[Reduction, ...],
        device: torch.device,
        g_idx: Tensor | None = None,
        back: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Return ``reduce_rows`` with each of ``ops``; ``back`` converts reduced rows, such as bits, to numbers."""
        outs = [torch.zeros(self.scale_shape, dtype=dtype, device=device) for _ in ops]
        if 0 in self.shape:
            return outs
        tables = [out.view(self.scale_rows, self.groups) for out in outs]
        done = 0
        for start, stop in self.chunks():
            x, count = some(start, stop), 0
            for op, table in zip(ops, tables, strict=True):
                stats = self._fold_columns(x, op, g_idx)
                stats = stats if back is None else back(stats)
                if self.height is None:
                    stats = op(stats, 0, keepdim=True).to(dtype)
                    table.copy_(op(torch.stack((table, stats)), 0) if start else stats)
                    continue
                if self.height > 1:
                    matrix = min(self.shape[-2], stop - start)
                    stats = stats.unflatten(0, (stats.shape[0] // matrix, matrix))
                    stats = fold(stats, self.height, 1, op).flatten(0, 1)
                count = stats.shape[0]
                table[done : done + count].copy_(stats)
            done += count
        return outs

    def _fold_columns(self, x: Tensor, op: Reduction, g_idx: Tensor | None) -> Tensor:
        if g_idx is None:
            return fold(x, self.width, 1, op)
        out = x.new_zeros(x.shape[0], self.groups)
        index = g_idx.to(torch.int64).expand(x.shape[0], -1)
        return out.scatter_reduce(1, index, x, op.__name__, include_self=False)


SIXTEEN = (torch.bfloat16, torch.float16)
_SHORT = 32  # columns; torch reduces shorter runs of integers slowly


class Magnitudes:
    """The bits of 16-bit floats without their sign: integers in the same order, infinity and then NaN last.

    Torch reduces integers five times faster than such floats. Each piece reuses the memory of the one before it, whose
    pages are then mapped already.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        if self._memory is None or self._memory.shape[1:] != x.shape[1:] or self._memory.shape[0] < x.shape[0]:
            self._memory = torch.empty(x.shape, dtype=torch.int16, device=x.device)
        return torch.bitwise_and(x.view(torch.int16), 0x7FFF, out=self._memory[: x.shape[0]])


def grid_over(shape: Shape, block: Block) -> Grid:
    """Return the grid of ``block`` over ``shape``. Raise SchemeError where it does not fit."""
    height, width = block
    if len(shape) == 0:
        raise SchemeError("a tensor without dimensions has no blocks", fix="Use Plain(), or leave it unquantized.")
    if height is not None and height > 1 and len(shape) < 2:
        raise SchemeError(
            f"blocks of {height} rows need at least 2 dimensions, got shape {tuple(shape)}",
            fix="Use a block of 1 row.",
        )
    groups = 1 if width is None else -(-shape[-1] // width)
    return Grid(tuple(shape), height, width, math.prod(shape[:-1]), shape[-1], groups)


def code_part(shape: Shape, bits: int) -> Part:
    """Return the layout of codes that are packed along the last dimension, each row to whole bytes.

    A tensor of one dimension is one stream, so that it can be cut where a code begins with a byte.
    """
    if len(shape) > 1:
        return Part((*shape[:-1], -(-shape[-1] * bits // 8)), torch.uint8, math.prod(shape[1:]))
    return stream_part(shape[0], bits)


def stream_part(count: int, bits: int) -> Part:
    """Return the layout of a stream of ``count`` codes: bytes, or (runs of 8 codes, bits) where bytes cut codes."""
    if 8 % bits:
        return Part((-(-count // 8), bits), torch.uint8, 8)
    return Part((-(-count * bits // 8),), torch.uint8, 8 // bits)


def check_block(block: object, name: str) -> None:
    """Raise SchemeError unless ``block`` is a pair of positive ints or None."""
    pair = block if isinstance(block, tuple) and len(block) == 2 else (0,)
    if not all(size is None or (type(size) is int and size > 0) for size in pair):
        raise SchemeError(
            f"block must be (rows, columns) with positive ints or None, got {block!r}",
            name=name,
            fix="(1, None) is one scale per row, (1, 128) one per 128 columns, (None, None) one per tensor.",
        )


def pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Return the range from ``start`` to ``stop`` in pieces of ``size``, the last one perhaps smaller."""
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def fold(x: Tensor, size: int | None, dim: int, op: Reduction) -> Tensor:
    """Reduce runs of ``size`` along ``dim`` (``None``: all of it) by ``op``; the last run may be shorter."""
    length = x.shape[dim]
    if size is None or size >= length:
        return op(x, dim, keepdim=True)
    whole = length // size
    head = op(x.narrow(dim, 0, whole * size).unflatten(dim, (whole, size)), dim + 1)
    if whole * size == length:
        return head
    return torch.cat((head, op(x.narrow(dim, whole * size, length - whole * size), dim, keepdim=True)), dim)


def rows(values: Tensor, start: int, stop: int) -> Tensor:
    """Return the rows ``start`` to ``stop`` of ``values`` as (R, K): a view where strides allow, else a copy."""
    columns = values.shape[-1]
    while values.dim() != 2:
        if values.dim() == 1:
            values = values.unsqueeze(0)
            continue
        if values.is_contiguous():
            values = values.view(math.prod(values.shape[:-1]), columns)
            continue
        inner = math.prod(values.shape[1:-1])
        first, last = start // inner, -(-stop // inner)
        if last - first > 2:  # the slices are smaller than the piece
            return values[first:last].reshape(-1, columns)[start - first * inner : stop - first * inner]
        if last - first == 2:
            middle = (first + 1) * inner
            return torch.cat((rows(values, start, middle), rows(values, middle, stop)))
        values, start, stop = values[first], start - first * inner, stop - first * inner
    return values[start:stop]


def flat(values: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements ``start`` to ``stop`` of ``values`` in row-major order: a view where strides allow."""
    if values.is_contiguous():
        return values.view(-1)[start:stop]
    columns = values.shape[-1]
    first = start // columns
    return rows(values, first, -(-stop // columns)).reshape(-1)[start - first * columns : stop - first * columns]


def flat_ranges(count: int, block_size: int) -> list[tuple[int, int]]:
    """Return ranges of a flattened tensor that cut no block and no byte, about ``CHUNK`` elements each."""
    unit = block_size * 8
    size = max(1, CHUNK // unit) * unit
    if torch.compiler.is_compiling() or count <= size:
        return [(0, count)]
    return pieces(0, count, size)


def flat_magnitudes(values: Tensor, block_size: int) -> Tensor:
    """Return the largest magnitude of each block of the flattened ``values``, (blocks,) float32."""
    if encoders.can_read(values):
        found = encoders.magnitudes(values.view(1, -1), block_size)
        if found is not None:
            return found.view(-1)
    amax = torch.zeros(-(-values.numel() // block_size), dtype=torch.float32, device=values.device)
    memory = Magnitudes()
    for start, stop in flat_ranges(values.numel(), block_size) if values.numel() else ():
        x = flat(values, start, stop)
        if x.dtype in SIXTEEN and is_direct():
            stats = fold(memory.of(x), block_size, 0, torch.amax).view(x.dtype)
        else:
            stats = fold((x.float() if x.dtype.itemsize == 1 else x).abs(), block_size, 0, torch.amax)
        amax[start // block_size :][: stats.shape[0]].copy_(stats)
    return amax


def floats(grid: Grid, values: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Yield the rows of ``values`` in float32, a chunk at a time, with the start and stop of the chunk.

    The caller may write to a chunk; the next one reuses its memory, whose pages are then mapped already.
    """
    memory: Tensor | None = None
    for start, stop in grid.chunks():
        x = rows(values, start, stop)
        if torch.compiler.is_compiling():
            yield x.to(torch.float32, copy=True), start, stop
            continue
        if memory is None:
            memory = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        yield memory[: stop - start].copy_(x), start, stop


def source(values: Tensor) -> Tensor:
    """Return ``values`` detached. Raise SchemeError unless they are floating point."""
    if not values.dtype.is_floating_point:
        raise SchemeError(f"only floating point values can be encoded, got {dtype_name(values.dtype)}")
    return values.detach()


def check_finite(stats: Tensor, values: Tensor) -> None:
    """Raise SchemeError, unless ``stats`` (extremes of ``values``) are finite and below 2**127.

    Beyond that, a value that is rounded up may overflow float32.
    """
    if is_true((stats.abs() < 2.0**127).all(), unseen=True):
        return
    nan = infinite = 0
    for start, stop in pieces(0, values.numel(), CHUNK):
        piece = flat(values, start, stop)
        nan += int(piece.isnan().sum())
        infinite += int(piece.isinf().sum())
    if nan or infinite:
        raise SchemeError(
            f"{nan + infinite} of {values.numel()} values are not finite ({nan} nan, {infinite} inf)",
            fix="Repair the source, or leave this tensor unquantized.",
        )
    raise SchemeError(
        f"the values reach {float(stats.abs().max()):.4g}, too large for float32 to round them up",
        fix="Scale them down, or leave them unquantized.",
    )
