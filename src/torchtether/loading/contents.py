"""New contents for the tensors of one step, or new values in the memory that they have."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ..errors import SchemeError
from ..files import Batch, allocate
from ..geometry.blocks import STOCK
from ..progress import Tick, no_tick
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..ties.components import Member
from ..ties.spans import member_view, plain_values
from ..weights.module_load import encoded_as
from ..weights.spec import order_of
from ..weights.weight import Weight
from .encoding import encode_by_rows
from .steps import Step


def new_contents(step: Step, given: RenamedCheckpoint, tick: Tick, batch: Batch | None = None) -> Sequence[Tensor]:
    """Return new contents for every member of the component, over one memory; ``batch`` fills it where it can wait."""
    if batch is not None and step.scheme is None and len(step.component.members) == 1:
        made = _make_as_stored(step, given, batch)
        if made is not None:
            return [made]
    if step.is_given:
        weight = given.read_weight(step.sources[0].name, device=step.device, tick=tick)
        if isinstance(step.held, Weight) and step.held.scheme.decoder == weight.scheme:  # a master begins as its values
            weight = Weight.encode(weight, step.held.scheme)
        return _for_members(step, cast(Weight, weight.to(step.dtype)))
    if step.is_encoded:
        by_rows = (
            None if batch is None else encode_by_rows(step, given, batch, partial(encode_whole, step, given, no_tick))
        )
        return _for_members(step, encode_whole(step, given, tick)) if by_rows is None else [by_rows]
    return _wrap(_read_plain(step, given, tick, batch=None if step.scheme else batch), step)


def mapped_contents(step: Step, given: RenamedCheckpoint, tick: Tick) -> Sequence[Tensor]:
    """Return the contents of every member, over private pages of the file."""
    made, members = given.map(step.sources[0].name), step.component.members
    tick(step.nbytes)
    if isinstance(made, Weight):
        return _for_members(step, cast(Weight, made.to(step.dtype)))
    if len(members) > 1:
        flat = made.view(-1)
        span = flat if step.component.dtype else flat.view(torch.uint8)
        return _wrap([member_view(span, member) for member in members], step)
    held = step.held
    return _wrap([held.around(made) if isinstance(held, Weight) else made], step)


def is_mappable(step: Step, given: RenamedCheckpoint) -> bool:
    """Return whether the stored bytes can be the memory of the component, on ``meta`` so far, as they are."""
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
    """Write the values into the tensors as they are; the first source is written last, so that it wins."""
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
                held.copy_(given.read_briefly(source.name, tick))


def encode_whole(step: Step, given: RenamedCheckpoint, tick: Tick) -> Weight:
    """Return the owner's values, read in the dtype of the file so that no more memory is needed, encoded.

    Raises SchemeError, naming the step, if the scheme cannot hold the values.
    """
    assert step.scheme is not None
    held, name = step.held, step.sources[0].name
    if len(step.component.members) == 1 or step.component.nbytes == 0:
        values = given.read_briefly(name, tick).to(step.device)
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
    return cast(Weight, made.to(step.dtype))


def _wrap(made: Sequence[Tensor], step: Step) -> Sequence[Tensor]:
    """Return plain contents as Weights where the rules ask for a transparent scheme, with their tie."""
    if step.scheme is not None:
        made = [Weight.encode(plain_values(tensor), step.scheme) for tensor in made]
    return [new.map(Tensor.detach, new.spec.replace(tie=step.tie)) if isinstance(new, Weight) else new for new in made]


def _for_members(step: Step, weight: Weight) -> Sequence[Tensor]:
    """Return one Weight per member, all over the parts of ``weight``, which is in no other use."""
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


# -- plain tensors ----------------------------------------------------------------------------------------------------


def _read_plain(
    step: Step, given: RenamedCheckpoint, tick: Tick, dtype: torch.dtype | None = None, batch: Batch | None = None
) -> list[Tensor]:
    """Return one tensor per member, all over one new memory, filled from the sources; by ``batch`` where it can wait.

    ``dtype`` replaces that of the step.
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
    """Return new memory, filled by ``batch``, for a plain tensor with the strides that the file has; ``None`` else.

    ``_read_plain`` gives the same in half as much time again, which counts when there are thousands of tensors.
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
    """Return new memory with the strides that the file remembers, or else those of the model."""
    held, spec = member.tensor, given.spec(step.sources[0].name)
    stride = held.stride()
    if not held.is_contiguous():  # what is not dense becomes so, in the same order
        stride = torch.empty_like(torch.empty_strided(held.shape, stride, device="meta")).stride()
    if not spec.is_contiguous and given.find(step.sources[0].name)[1] is None:
        stride = spec.stride
    made = allocate(tuple(held.shape), dtype, step.device, stride)
    return held.around(made) if isinstance(held, Weight) else made
