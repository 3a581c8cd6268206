"""Weights encoded from plain tensors of a checkpoint, some rows at a time, while those are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .. import compiled
from ..errors import SchemeError
from ..files import Batch, Scratch, allocate
from ..geometry.views import Shape
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..schemes import Part, Scheme
from ..weights.ops.rows import part_rows
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .steps import Step

_ROWS = 2**21
"""Elements that are read and then encoded at once. Fewer would have threads wait for each other more often."""

_COMPILED_ROWS = 2**23
"""Bytes of rows for which the compiled loops are called once; they need no scratch of that size."""

_READ = 2**19
"""Bytes that are read at once where the loops read for themselves: they stay in the cache of one core."""

_LARGEST_ROWS = 2**22
"""Elements beyond which rows that share a block are encoded with the whole tensor."""


def encode_by_rows(
    step: Step, given: RenamedCheckpoint, batch: Batch, encode_whole: Callable[[], object]
) -> Weight | None:
    """Return a Weight, with its tie, that ``batch`` reads and encodes some rows at a time.

    ``None`` is returned if its rows cannot be encoded one by one, or if several members would share it.
    ``encode_whole`` is called for values that cannot be encoded, and raises the error that counts them in all rows.
    """
    held, scheme = step.held, step.scheme
    if isinstance(held, Weight) or len(step.component.members) > 1:
        return None
    parts = encode_rows_into(step, given, batch, encode_whole)
    if parts is None:
        return None
    assert scheme is not None
    return Weight(parts, WeightSpec.of(tuple(held.shape), step.dtype, scheme, step.tie))


def encode_rows_into(
    step: Step,
    given: RenamedCheckpoint,
    batch: Batch,
    encode_whole: Callable[[], object],
    parts: Mapping[str, Tensor] | None = None,
) -> Mapping[str, Tensor] | None:
    """Have ``batch`` read and encode rows of ``step`` into ``parts``, new ones by default, and return those.

    ``None`` is returned if its rows cannot be encoded one by one. For ``encode_whole`` see ``encode_by_rows``.
    """
    scheme, place, shape = step.scheme, given.rows_in(step.sources[0].name), tuple(step.held.shape)
    if place is None or step.kept is not None or step.device.type != "cpu":
        return None
    assert scheme is not None
    key, first = place[0], place[1] or 0
    store = given.checkpoint.store
    stored, layout = store.stored(key).dtype, scheme.layout(shape)
    count = _rows_at_once(layout, shape, stored)
    if count is None:
        return None
    if parts is None:
        parts = {role: allocate(part.shape, part.dtype or stored, step.device) for role, part in layout.items()}
    encoder = _RowEncoder(step.name, scheme, parts, encode_whole)
    for rows, recipe, cuts in _jobs(scheme, layout, shape, stored, count):
        encode, encode_file = partial(encoder.encode, cuts=cuts), None
        if recipe is not None:
            units = len(rows) * math.prod(shape[1:]) * stored.itemsize // recipe.row
            encode_file = partial(encoder.encode_file, recipe=recipe, rows=units, cuts=cuts)
        batch.rows(store.file_of(key), key, first + rows.start, first + rows.stop, encode, encode_file)
    return parts


def _rows_at_once(layout: Mapping[str, Part], shape: Shape, stored: torch.dtype) -> int | None:
    """Return the number of rows that one job encodes, whole blocks; ``None`` if only all rows can be encoded."""
    spans = [part.span for part in layout.values()]
    if len(shape) < 2 or 0 in shape or 0 in spans or not stored.is_floating_point:
        return None
    if any(part.dtype is None for part in layout.values()):
        return None
    row = math.prod(shape[1:])
    unit = math.lcm(*(span // math.gcd(span, row) for span in spans))
    count = max(_ROWS // row // unit, 1) * unit
    if count * row > _LARGEST_ROWS:
        return None
    if compiled.is_at_hand():
        count = max(count, _COMPILED_ROWS // (row * stored.itemsize) // unit * unit)
    return count


def _jobs(
    scheme: Scheme, layout: Mapping[str, Part], shape: Shape, stored: torch.dtype, count: int
) -> Iterator[tuple[range, compiled.Recipe | None, Mapping[str, slice | None]]]:
    """Yield the rows of each job, the recipe of the compiled loops for them, and the slices of each part."""
    recipes = {n: scheme.recipe((n, *shape[1:]), stored) for n in (count, shape[0] % count) if n}
    for start in range(0, shape[0], count):
        rows = range(start, min(start + count, shape[0]))
        yield rows, recipes[len(rows)], part_rows(layout, shape, rows.start, rows.stop)


@dataclass(frozen=True)
class _RowEncoder:
    """Encode rows of one stored tensor into slices of ``parts``."""

    name: str
    scheme: Scheme
    parts: Mapping[str, Tensor]
    encode_whole: Callable[[], object]

    def encode(self, values: Tensor, cuts: Mapping[str, slice | None]) -> None:
        """Encode the rows ``values`` into ``cuts`` of the parts, with torch ops or compiled loops."""
        try:
            self.scheme.encode_into(values, {role: part[cuts[role]] for role, part in self.parts.items()})
        except SchemeError as error:
            self.encode_whole()  # raises it for the whole tensor, with its counts
            raise error.named(self.name) from None

    def encode_file(
        self,
        descriptor: int,
        at: int,
        scratch: Scratch,
        recipe: compiled.Recipe,
        rows: int,
        cuts: Mapping[str, slice | None],
    ) -> bool:
        """Return whether the compiled loops have read the rows at ``at`` and encoded them into ``cuts``."""
        buffer = scratch.take((max(_READ, recipe.row),), torch.uint8, at)
        outs = {role: self.parts[role][cuts[role]] for role in recipe.parts}
        return compiled.encode_file(recipe, descriptor, at, rows, buffer, outs)


def encoder_name() -> str:
    """Return ``LoadReport.encoder`` of a load that encodes: ``compiled`` loops, or ``torch ops`` and why."""
    return "compiled" if compiled.native() is not None else f"torch ops ({compiled.state()})"
