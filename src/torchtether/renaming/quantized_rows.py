"""Composition of a Weight from rows of stored Weights: it copies entries of their parts, without decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .._dtypes import copyable
from ..checkpoint.reader import Checkpoint
from ..errors import SchemeError, UnsupportedOpError
from ..geometry.views import Shape, contiguous_stride
from ..progress import Tick
from ..schemes import Scheme, part_rows, view_parts
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .pieces import CompositeTensor, Piece, in_halves

_FIX = "Load it from a float checkpoint, or dequantize it first."


@dataclass(frozen=True)
class Run:
    """Rows of a stored Weight, viewed in ``shape``, that are consecutive in the composite Weight, too.

    With ``heads``, the indices refer to the stored rows as reordered by ``in_halves(heads)``.
    """

    key: str
    shape: Shape
    start: int
    stop: int
    at: int
    heads: int = 0

    def cuts(self, scheme: Scheme) -> dict[str, slice | None]:
        """Return the entries of each stored part that hold the rows; ``None`` for a part that all rows share."""
        return part_rows(scheme.layout(self.shape), self.shape, self.start, self.stop)


@dataclass(frozen=True)
class RowPlan:
    """The runs that fill parts laid out for ``shape``, which become those of a composite Weight of ``spec``."""

    spec: WeightSpec
    shape: Shape
    runs: tuple[Run, ...]

    def count(self, checkpoint: Checkpoint) -> int:
        """Return the bytes that ``read`` reads."""
        return sum(self._nbytes(run, checkpoint) for run in self.runs)

    def _nbytes(self, run: Run, checkpoint: Checkpoint) -> int:
        rows = (0, run.shape[0]) if run.heads else (run.start, run.stop)
        apart = checkpoint.rows_nbytes(run.key, run.shape, *rows)
        if apart is not None:
            return apart
        total, layout, dtype = 0, self.spec.scheme.layout(run.shape), self.spec.dtype
        for name, cut in run.cuts(self.spec.scheme).items():
            part = layout[name]
            shape = part.shape if cut is None else (cut.stop - cut.start, *part.shape[1:])
            total += math.prod(shape) * (part.dtype or dtype).itemsize
        return total

    def _places(self, run: Run) -> dict[str, slice | None]:
        layout = self.spec.scheme.layout(self.shape)
        return part_rows(layout, self.shape, run.at, run.at + run.stop - run.start)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise UnsupportedOpError if stored Weights differ in a part that all rows share, such as a global scale."""
        layout = self.spec.scheme.layout(self.shape)
        keys = list(dict.fromkeys(run.key for run in self.runs))
        for name in (name for name, part in layout.items() if part.span == 0):
            for key in keys[1:]:
                if not checkpoint.is_part_equal(keys[0], key, name):
                    raise UnsupportedOpError(
                        f"{keys[0]} and {key} differ in {name!r}, and one weight in {self.spec.scheme} has only one",
                        fix=_FIX,
                    )

    def read(self, checkpoint: Checkpoint, device: torch.device | str, tick: Tick) -> Weight:
        """Read the Weight into new memory on ``device``, one run at a time, to limit the memory for reading."""
        scheme = self.spec.scheme
        parts = scheme.empty(self.shape, self.spec.dtype, device)
        for run in self.runs:
            given = self._read_run(run, checkpoint)
            for name, place in self._places(run).items():
                copyable(parts[name] if place is None else parts[name][place]).copy_(copyable(given[name]))
            tick(self._nbytes(run, checkpoint))
        spec = self.spec
        return Weight(view_parts(scheme, parts, spec.base), spec)

    def _read_run(self, run: Run, checkpoint: Checkpoint) -> dict[str, Tensor]:
        if not run.heads:
            return checkpoint.read_rows(run.key, run.shape, run.start, run.stop)
        count = run.shape[0]
        given = checkpoint.read_rows(run.key, run.shape, 0, count)
        order = in_halves(count, run.heads)[run.start : run.stop]
        layout = self.spec.scheme.layout(run.shape)
        return {name: part.index_select(0, order) if layout[name].span else part for name, part in given.items()}


def plan_rows(made: CompositeTensor, checkpoint: Checkpoint) -> RowPlan:
    """Plan the composition of the Weight ``made`` from stored ones. Raise UnsupportedOpError if blocks would be cut.

    The plan merges as many leading dimensions of the parts as the scheme allows.
    """
    specs = {piece.key: checkpoint.spec(piece.key) for piece in made.pieces}
    orders = {_order(piece, specs[piece.key]) for piece in made.pieces}
    if 0 in made.shape:
        raise UnsupportedOpError(f"a weight in {made.scheme} of shape {made.shape} has no rows", fix=_FIX)
    if len(orders) != 1:
        raise UnsupportedOpError(f"its pieces are quantized in {made.scheme} along different dimensions", fix=_FIX)
    (order,) = orders
    base = tuple(made.shape[dim] for dim in order)
    spec = WeightSpec.of(base, made.dtype, made.scheme).permute(tuple(order.index(d) for d in range(len(order))))
    refusals = []
    for merged in range(len(base) - 1, 0, -1):
        tail = base[merged:]
        shape = (math.prod(base[:merged]), *tail)
        try:
            if _can_view(made.scheme, shape, base):
                found = RowPlan(spec, shape, tuple(_runs(made, order, tail, specs)))
                _check(found)
                return found
        except (UnsupportedOpError, SchemeError) as error:
            refusals.append(error.what)
    what = refusals[0] if refusals else f"a weight in {made.scheme} of shape {made.shape} cannot be cut or joined"
    raise UnsupportedOpError(what, fix=_FIX)


def _order(piece: Piece, spec: WeightSpec) -> tuple[int, ...]:
    """Return the composite dimensions: new ones, then the others in the order of the stored parts."""
    place = [-1 if dim is None else spec.order[dim] for dim in piece.dims]
    return tuple(sorted(range(len(place)), key=lambda dim: place[dim]))


def _runs(made: CompositeTensor, order: tuple[int, ...], tail: Shape, specs: dict[str, WeightSpec]) -> Iterator[Run]:
    row = math.prod(tail)
    steps = contiguous_stride(tuple(made.shape[dim] for dim in order))
    for piece in made.pieces:
        spec = specs[piece.key]
        base = spec.base
        shape = (math.prod(base) // row, *tail)
        if base[len(base) - len(tail) :] != tail:
            is_wide = base[-1] == tail[-1]
            what = f"be joined inside a block of {made.scheme}" if is_wide else "be cut along its last dimension"
            raise UnsupportedOpError(f"{piece.key} of shape {spec.shape} would {what}")
        if piece.heads and (piece.dim or shape != base or not _rows_are_apart(made.scheme, shape)):
            raise UnsupportedOpError(f"rows of {piece.key}, {made.scheme} of shape {base}, cannot be reordered")
        if not _can_view(made.scheme, base, shape):
            raise UnsupportedOpError(f"{piece.key}, {made.scheme} of shape {base}, cannot be viewed as {shape}")
        stored = contiguous_stride(base)
        start = sum(piece.box[dim][0] * stored[spec.order[dim]] for dim in range(len(piece.box)))
        at = sum(piece.at[dim] * step for dim, step in zip(order, steps, strict=True))
        sizes = [piece.size[dim] for dim in order]
        source = [0 if piece.dims[d] is None else stored[spec.order[piece.dims[d]]] for d in order]  # type: ignore[index]
        for offset, place, count in _contiguous(sizes, source, list(steps)):
            first, last, begin = start + offset, start + offset + count, at + place
            if first % row or last % row or begin % row:
                raise UnsupportedOpError(f"elements {first}:{last} of {piece.key} are not whole rows of {row}")
            yield Run(piece.key, shape, first // row, last // row, begin // row, piece.heads)


def _contiguous(sizes: list[int], source: list[int], target: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source offset, target offset, count) of the longest runs that are contiguous in both."""
    count, depth = 1, len(sizes)
    while depth and (sizes[depth - 1] == 1 or source[depth - 1] == target[depth - 1] == count):
        depth -= 1
        count *= sizes[depth]
    for index in itertools.product(*(range(size) for size in sizes[:depth])):
        offset = sum(i * step for i, step in zip(index, source[:depth], strict=True))
        place = sum(i * step for i, step in zip(index, target[:depth], strict=True))
        yield offset, place, count


def _check(found: RowPlan) -> None:
    """Raise UnsupportedOpError if an entry of a part would be cut, or has other blocks in source and target."""
    target = found.spec.scheme.layout(found.shape)
    for run in found.runs:
        source = found.spec.scheme.layout(run.shape)
        places = found._places(run)
        for name, cut in run.cuts(found.spec.scheme).items():
            one, other, place = source[name], target[name], places[name]
            entry = (one.span, one.shape[1:] if one.span else one.shape)
            if entry != (other.span, other.shape[1:] if other.span else other.shape) or (
                cut is not None and place is not None and cut.stop - cut.start != place.stop - place.start
            ):
                raise UnsupportedOpError(f"{name!r} of {run.key} has other blocks than {name!r} of the joined weight")


def _rows_are_apart(scheme: Scheme, shape: Shape) -> bool:
    """Return whether every part has one entry per row, or is shared by all rows."""
    return all(part.span in (0, math.prod(shape[1:])) for part in scheme.layout(shape).values())


def _can_view(scheme: Scheme, old: Shape, new: Shape) -> bool:
    return old == new or scheme.can_view(old, new)
