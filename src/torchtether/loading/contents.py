"""New contents for the tensors of one step, or new values in their present memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from .. import compiled
from ..errors import SchemeError
from ..files import STAGED, Batch, Doubt, Scratch, allocate
from ..geometry.blocks import STOCK
from ..geometry.views import Shape
from ..progress import Tick, no_tick
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..schemes import Part, Scheme, part_rows, row_unit
from ..schemes.looking import unchecked
from ..ties.components import Member
from ..ties.spans import member_view, plain_values
from ..weights.module_load import as_loaded, encoded_as
from ..weights.spec import WeightSpec, order_of
from ..weights.weight import Weight
from .steps import Step


def new_contents(step: Step, given: RenamedCheckpoint, tick: Tick, batch: Batch | None = None) -> Sequence[Tensor]:
    """Return new contents for every member of the component, over one memory; ``batch`` may fill it."""
    if batch is not None and step.scheme is None and len(step.component.members) == 1:
        made = _make_as_stored(step, given, batch)
        if made is not None:
            return [made]
    if step.is_given:
        weight = given.read_weight(step.sources[0].name, device=step.device, tick=tick)
        scheme = step.held.scheme if isinstance(step.held, Weight) else weight.scheme
        if scheme != weight.scheme and scheme.decoder == weight.scheme:  # the master's initial values
            weight = Weight.encode(weight, scheme)
        return _for_members(step, _computed_in(step.dtype, weight))
    if step.is_encoded:
        held, parts = step.held, None
        if batch is not None and not isinstance(held, Weight) and len(step.component.members) == 1:
            parts = encode_rows_into(step, given, batch)
        if parts is None:
            return _for_members(step, encode_whole(step, given, tick))
        assert step.scheme is not None
        return [Weight(parts, WeightSpec.of(tuple(held.shape), step.dtype, step.scheme, step.tie))]
    return _wrap(_read_plain(step, given, tick, batch=None if step.scheme else batch), step)


def mapped_contents(step: Step, given: RenamedCheckpoint, tick: Tick) -> Sequence[Tensor]:
    """Return the contents of every member, over private pages of the file."""
    made, members = given.map(step.sources[0].name), step.component.members
    tick(step.nbytes)
    if isinstance(made, Weight):
        return _for_members(step, _computed_in(step.dtype, made))
    if len(members) > 1:
        flat = made.view(-1)
        span = flat if step.component.dtype else flat.view(torch.uint8)
        return _wrap([member_view(span, member) for member in members], step)
    held = step.held
    return _wrap([held.around(made) if isinstance(held, Weight) else made], step)


def is_mappable(step: Step, given: RenamedCheckpoint) -> bool:
    """Return whether the stored bytes can be the memory of the component, which is on ``meta``, without conversion."""
    component, held = step.component, step.held
    if not held.is_meta or step.device.type != "cpu" or len(step.sources) != 1 or step.is_encoded:
        return False
    source = step.sources[0]
    if step.is_given or not given.is_mappable(source.name):
        return given.is_mappable(source.name)
    member = component.members[source.member]
    covers = component.nbytes in (0, member.tensor.nbytes) and member.view.offset == 0
    dtype = given.spec(source.name).dtype
    as_stored = step.dtype == dtype and (component.dtype is not None or member.tensor.dtype == dtype)
    return covers and as_stored and member.tensor.is_contiguous()


def fill(step: Step, given: RenamedCheckpoint, tick: Tick) -> None:
    """Write the values into the present tensors; the first source is written last and takes precedence."""
    for source in reversed(step.sources):
        held = step.component.members[source.member].tensor
        with torch.no_grad():
            if not isinstance(held, Weight):
                given.read_into(source.name, held, tick)
            elif held.scheme.transparent:
                given.read_into(source.name, held.values_of(), tick)
            elif step.kept is not None:
                held.set_parts(encode_whole(step, given, tick).parts)
            else:
                held.copy_(as_loaded(held, _read_values(source.name, held.device, given, tick)))


def encode_whole(step: Step, given: RenamedCheckpoint, tick: Tick) -> Weight:
    """Read the owner's values, in the dtype of the file to save memory, and return them encoded.

    Raises SchemeError, naming the step, if the scheme cannot hold the values.
    """
    assert step.scheme is not None
    held, name = step.held, step.sources[0].name
    if len(step.component.members) == 1 or step.component.nbytes == 0:
        values = _read_values(name, step.device, given, tick)
    else:
        owner = next(i for i, member in enumerate(step.component.members) if step.name in member.names)
        values = _read_plain(step, given, tick, dtype=given.spec(name).dtype)[owner]
    try:
        if isinstance(held, Weight) and held.scheme == step.scheme and step.kept is None:
            made = encoded_as(held, values)
        else:
            made = Weight.encode(plain_values(values), step.scheme)
    except SchemeError as error:
        raise error.named(step.name) from None
    del values
    if step.kept is not None:
        start, stop = step.kept
        rows = cast(Weight, made.narrow(0, start, stop - start))
        made = rows.map(Tensor.clone, cut=())  # so that the other rows are freed
    return _computed_in(step.dtype, made)


def _wrap(made: Sequence[Tensor], step: Step) -> Sequence[Tensor]:
    """Return plain contents, as Weights if the step has a transparent scheme; Weights get their tie record."""
    if step.scheme is not None:
        made = [Weight.encode(plain_values(tensor), step.scheme) for tensor in made]
    return [new.map(Tensor.detach, new.spec.replace(tie=step.tie)) if isinstance(new, Weight) else new for new in made]


def _computed_in(dtype: torch.dtype, weight: Weight) -> Weight:
    """Return ``weight`` with the compute dtype ``dtype``, over the same parts, which no other tensor may use.

    ``Weight.to`` would copy the parts.
    """
    if weight.dtype is dtype:
        return weight
    return weight.with_parts(weight.scheme.convert(weight.parts, dtype), weight.spec.replace(dtype=dtype))


def _for_members(step: Step, weight: Weight) -> Sequence[Tensor]:
    """Return one Weight per member, all over the parts of ``weight``, which no other tensor may use."""
    if step.tie is None and weight.tie is None and len(step.component.members) == 1:
        return [weight]
    owner, tied, made = step.held, step.tie, []
    weight = weight.map(Tensor.detach, weight.spec.replace(tie=tied))
    for member in step.component.members:
        if isinstance(member.tensor, Weight) and member.tensor is not owner:
            made.append(member_view(weight, member))
            continue
        view = None if tied is None else tied.views[tied.names.index(member.names[0])]
        order = None if view is None else order_of(view, owner)
        made.append(weight.detach() if order is None else weight.permute(order))
    return made


def _read_values(name: str, device: torch.device, given: RenamedCheckpoint, tick: Tick) -> Tensor:
    """Return the values of ``name`` on ``device``, for short use; see ``RenamedCheckpoint.read_briefly``."""
    place = given.rows_in(name)
    if place is None or device.type == "cpu":
        return given.read_briefly(name, tick).to(device)
    (key, first), spec, store = place, given.spec(name), given.checkpoint.store
    values, batch = allocate(spec.shape, spec.dtype, device), Batch(store.ring)
    store.read_later(key, values, batch, first)
    batch.run(tick)
    return values


# -- plain tensors ----------------------------------------------------------------------------------------------------


def _read_plain(
    step: Step, given: RenamedCheckpoint, tick: Tick, dtype: torch.dtype | None = None, batch: Batch | None = None
) -> list[Tensor]:
    """Return one tensor per member, all over one new memory, filled from the sources, or later by ``batch``.

    ``dtype`` overrides the dtype of the step.
    """
    made = _allocate(step, given, dtype or step.dtype)
    if batch is not None and len(step.sources) == 1:
        place = given.rows_in(step.sources[0].name)
        if place is not None:
            given.checkpoint.store.read_later(place[0], plain_values(made[step.sources[0].member]), batch, place[1])
            return made
    for source in reversed(step.sources):
        given.read_into(source.name, plain_values(made[source.member]), tick)
    return made


def _make_as_stored(step: Step, given: RenamedCheckpoint, batch: Batch) -> Tensor | None:
    """Return new memory, filled by ``batch``, for a plain tensor with the strides of the file; ``None`` for others.

    ``_read_plain`` returns the same, but takes 1.5 times as long, which matters for thousands of tensors.
    """
    entry, held = given.stored(step.sources[0].name), step.held
    if entry is None or type(held) not in STOCK or len(step.sources) > 1:
        return None
    if held.stride() != entry.stride or not held.is_contiguous():
        return None
    store, key = given.checkpoint.store, entry.keys["tensor"]
    made = allocate(entry.shape, step.dtype, step.device, entry.stride, at=store.stored(key).start)
    store.read_later(key, made, batch)
    return made


def _allocate(step: Step, given: RenamedCheckpoint, dtype: torch.dtype) -> list[Tensor]:
    """Return one tensor per member, all over one new memory."""
    component = step.component
    if len(component.members) == 1 or component.nbytes == 0:
        return [_empty(step, component.members[0], given, dtype)]
    is_mixed = component.dtype is None
    count = component.nbytes if is_mixed else component.nbytes // component.members[0].tensor.element_size()
    span = torch.zeros(count, dtype=torch.uint8 if is_mixed else dtype, device=step.device)
    return [member_view(span, member) for member in component.members]


def _empty(step: Step, member: Member, given: RenamedCheckpoint, dtype: torch.dtype) -> Tensor:
    """Return new memory with the strides that the file records, or else with the model's."""
    held, spec = member.tensor, given.spec(step.sources[0].name)
    stride = held.stride() if held.is_contiguous() else _dense(held.shape, held.stride())
    if given.find(step.sources[0].name)[1] is None:
        recorded = spec.replace(stride=_dense(spec.shape, spec.stride))
        stride = stride if recorded.is_contiguous else recorded.stride
    made = allocate(tuple(held.shape), dtype, step.device, stride)
    return held.around(made) if isinstance(held, Weight) else made


def _dense(shape: Shape, stride: Shape) -> Shape:
    """Return strides without gaps, in the order of ``stride``."""
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()


# -- encoded, some rows at a time, while they are read ----------------------------------------------------------------

_ROWS = 2**21
"""Elements that are read and then encoded at once. With fewer, threads would wait for each other more often."""

_COMPILED_ROWS = 2**23
"""Bytes of rows per call of the compiled loops, which need no scratch of that size."""

_READ = 2**19
"""Bytes that the compiled loops read at once: few enough to stay in the cache of one core."""

_LARGEST_ROWS = 2**22
"""Elements beyond which rows that share a block are encoded with the whole tensor."""


def encode_rows_into(
    step: Step, given: RenamedCheckpoint, batch: Batch, parts: Mapping[str, Tensor] | None = None
) -> Mapping[str, Tensor] | None:
    """Have ``batch`` read and encode rows of ``step`` into ``parts``, new ones by default, and return the parts.

    Returns ``None`` if the rows cannot be encoded separately. If ``batch`` meets values that cannot be encoded, the
    whole tensor is encoded, to raise the error with counts over all rows.
    """
    scheme, place, shape = step.scheme, given.rows_in(step.sources[0].name), tuple(step.held.shape)
    if place is None or step.kept is not None:
        return None
    assert scheme is not None
    key, first = place[0], place[1] or 0
    store, device = given.checkpoint.store, step.device if batch.passage(step.device) is not None else None
    stored, layout = store.stored(key).dtype, scheme.layout(shape)
    if device is None and step.device.type != "cpu":
        return None
    count = _rows_at_once(layout, shape, stored, is_staged=device is not None)
    if count is None:
        return None
    if parts is None:
        parts = {role: allocate(part.shape, part.dtype or stored, step.device) for role, part in layout.items()}
    encoder, file = _RowEncoder(step, given, parts), store.file_of(key)
    for rows, recipe, cuts in _jobs(scheme, layout, shape, stored, count, is_compiled=device is None):
        encode, encode_file = partial(encoder.encode, cuts=cuts), None
        start, stop = first + rows.start, first + rows.stop
        if device is not None:
            again = partial(Batch.rows, file=file, key=key, start=start, stop=stop, use=encode, device=device)
            encode = partial(encoder.encode, cuts=cuts, doubts=batch.doubts, again=again)
        if recipe is not None:
            units = len(rows) * math.prod(shape[1:]) * stored.itemsize // recipe.row
            encode_file = partial(encoder.encode_file, recipe=recipe, rows=units, cuts=cuts)
        batch.rows(file, key, start, stop, encode, encode_file, device)
    return parts


def encode_values_into(
    step: Step, given: RenamedCheckpoint, values: Tensor, batch: Batch, parts: Mapping[str, Tensor]
) -> bool:
    """Have ``batch`` encode ``values`` of ``step``, on the CPU, into ``parts``, as ``encode_rows_into`` does.

    Returns whether the rows can be encoded separately.
    """
    scheme, shape, dtype = step.scheme, tuple(values.shape), values.dtype
    assert scheme is not None
    layout = scheme.layout(shape)
    count = _rows_at_once(layout, shape, dtype, is_staged=False)
    if count is None:
        return False
    encoder = _RowEncoder(step, given, parts)

    def job(some: Tensor, cuts: Mapping[str, slice | None], space: Scratch) -> int:
        encoder.encode(some, cuts)
        return some.nbytes

    for start in range(0, shape[0], count):
        some = values[start : start + count]
        batch.do(partial(job, some, part_rows(layout, shape, start, start + len(some))), some.nbytes)
    return True


def _rows_at_once(layout: Mapping[str, Part], shape: Shape, stored: torch.dtype, *, is_staged: bool) -> int | None:
    """Return the number of rows per job, in whole blocks; ``None`` if the rows cannot be encoded separately.

    To a device all rows can go in one job: then some may share all numbers of a part.
    """
    if len(shape) < 2 or 0 in shape or not stored.is_floating_point:
        return None
    if any(part.dtype is None or (part.span == 0 and not is_staged) for part in layout.values()):
        return None
    row = math.prod(shape[1:])
    unit = row_unit(layout, row)
    if is_staged:
        is_whole = any(part.span == 0 for part in layout.values())
        return shape[0] if is_whole else max(STAGED // stored.itemsize // row // unit, 1) * unit
    count = max(_ROWS // row // unit, 1) * unit
    if count * row > _LARGEST_ROWS:
        return None
    if compiled.is_at_hand():
        count = max(count, _COMPILED_ROWS // (row * stored.itemsize) // unit * unit)
    return count


def _jobs(
    scheme: Scheme, layout: Mapping[str, Part], shape: Shape, stored: torch.dtype, count: int, *, is_compiled: bool
) -> Iterator[tuple[range, compiled.Recipe | None, Mapping[str, slice | None]]]:
    """Yield the rows of each job, the recipe of the compiled loops for them, and the slices of each part."""
    sizes = [n for n in (count, shape[0] % count) if n]
    recipes = {n: scheme.recipe((n, *shape[1:]), stored) if is_compiled else None for n in sizes}
    for start in range(0, shape[0], count):
        rows = range(start, min(start + count, shape[0]))
        yield rows, recipes[len(rows)], part_rows(layout, shape, rows.start, rows.stop)


@dataclass(frozen=True)
class _RowEncoder:
    """Encode rows of one stored tensor into slices of ``parts``."""

    step: Step
    given: RenamedCheckpoint
    parts: Mapping[str, Tensor]

    def encode(
        self,
        values: Tensor,
        cuts: Mapping[str, slice | None],
        doubts: list[Doubt] | None = None,
        again: Callable[[Batch], None] | None = None,
    ) -> None:
        """Encode the rows ``values`` into ``cuts`` of the parts, with torch ops, compiled loops or kernels.

        With ``doubts`` do not wait for the device to find rows that it cannot encode, but append them, with ``again``.
        """
        assert self.step.scheme is not None
        outs = {role: part if (cut := cuts[role]) is None else part[cut] for role, part in self.parts.items()}
        try:
            if doubts is None or again is None:
                self.step.scheme.encode_into(values, outs)
                return
            with unchecked() as flags:
                self.step.scheme.encode_into(values, outs)
            doubts += [(flag, again) for flag in flags]
        except SchemeError as error:
            encode_whole(self.step, self.given, no_tick)  # raises the error with counts over the whole tensor
            raise error.named(self.step.name) from None

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
    """Return ``LoadReport.encoder`` of a load that encodes: ``compiled``, or ``torch ops`` and the reason."""
    return "compiled" if compiled.native() is not None else f"torch ops ({compiled.state()})"
