"""A plan for the part of a model in one process: one box of each tensor, of which no other values are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..errors import TetherError
from ..renaming.pieces import Range
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..schemes import part_rows
from ..ties.components import Component, find_components
from .steps import Draft, Source, Step

Box = tuple[Range, ...]
"""The range of indices that a process holds of a tensor, by dimension: the first, and one past the last."""


def restrict(
    found: Draft,
    model: nn.Module,
    boxes: Mapping[str, Box],
    place: Callable[[str], torch.device],
    faults: Sequence[str] = (),
    components: tuple[Component, ...] | None = None,
) -> Draft:
    """Return the draft that loads ``model``, a part of the whole model that ``found`` loads.

    For each name in ``boxes`` the part has that box, and it has all of any other tensor; ``components`` are its
    components, if known. ``place`` returns the device of a tensor on ``meta`` for which the user asked none. Names that
    the part lacks are views of tensors that it has, and are not read.
    """
    components = find_components(model) if components is None else components
    home = {name: component for component in components for name in component.names}
    read = [_without_views(step, home) for step in found.steps]
    whole = {step.sources[0].name for step in read if _needs_all_rows(step)}
    names = {source.name for step in read for source in step.sources} & boxes.keys() & home.keys()
    given = found.given.cut({name: boxes[name] for name in names - whole})
    made = {name: _cut(value, boxes.get(name)) for name, value in found.computed.items() if name in home}
    devices = {name: place(name) for name in (*found.recorded, *made) if name in home} | found.targets.devices
    targets = dataclasses.replace(found.targets, components=components, devices=devices)
    faults = [*found.faults, *faults]
    draft = dataclasses.replace(found, given=given, targets=targets, steps=[], faults=faults, computed=made)
    for step in read:
        name, asked = step.sources[0].name, found.targets.devices
        if name not in home:
            draft.add_fault(
                step.name,
                f"the checkpoint has only {name}, a view of it. "
                "Load it in one process, or store the owner too: save with tt.save.",
            )
            continue
        is_free = step.held.is_meta and asked.keys().isdisjoint(step.component.names)
        local = step._replace(component=home[step.name], device=place(step.name) if is_free else step.device)
        if name not in boxes:
            draft.steps.append(local)
            continue
        what = _fault_of_cut(step, found.given, given, boxes[name])
        if what:
            draft.add_fault(step.name, what)
            continue
        local = local._replace(nbytes=given.nbytes(name), kept=boxes[name][0] if name in whole else None)
        draft.steps.append(local.with_form_of_model())
    return draft


def _cut(value: Tensor, box: Box | None) -> Tensor:
    """Return the part of ``value`` in ``box``; all of it if ``box`` is ``None``."""
    return value if box is None else value[tuple(slice(*range_) for range_ in box)]


def _without_views(step: Step, home: Mapping[str, Component]) -> Step:
    """Return ``step`` without the sources that are views, which the whole plan has compared with the owner."""
    sources = [
        Source(next(i for i, member in enumerate(home[name].members) if name in member.names), name)
        for _, name in step.sources
        if name in home
    ]
    return step._replace(sources=tuple(sources) or step.sources)


def _needs_all_rows(step: Step) -> bool:
    """Return whether the scheme of ``step`` can encode rows only together with all other rows."""
    if not step.is_encoded or step.scheme is None:
        return False
    return any(part.span == 0 for part in step.scheme.layout(tuple(step.held.shape)).values())


def _fault_of_cut(step: Step, whole: RenamedCheckpoint, cut: RenamedCheckpoint, box: Box) -> str:
    """Return the reason that ``box`` alone cannot be loaded; empty if it can."""
    name = step.sources[0].name
    if step.is_given and not whole.spec(name).is_contiguous:
        return (
            f"the checkpoint holds it with the strides {whole.spec(name).stride}, and FSDP2 shards only contiguous "
            "Weights. Dequantize the checkpoint first, and quantize it as it is loaded."
        )
    if _cuts_one_row(step, whole, box):
        shape, scheme = tuple(step.held.shape), whole.spec(name).scheme if step.is_given else step.scheme
        fix = (
            "Dequantize the checkpoint first, and quantize it as it is loaded."
            if step.is_given
            else f"Leave it unquantized: exclude it from quantize= with {{{name!r}: None, ...}}."
        )
        return f"{scheme} of shape {shape} is one row, which several ranks cannot share. {fix}"
    try:
        if step.is_given:
            cut.check(name)
        elif step.is_encoded and step.scheme is not None:
            shape = tuple(step.held.shape)
            if any(range_ != (0, size) for range_, size in zip(box[1:], shape[1:], strict=True)):
                # scales over parts of rows would be other values than one process has, and no save could join them
                return (
                    f"this rank holds {list(box)} of its shape {shape}, and Weights are split by rows only. "
                    f"Shard it along dimension 0, or exclude it from quantize= with {{{name!r}: None, ...}}."
                )
            part_rows(step.scheme.layout(shape), shape, *box[0])
    except TetherError as error:
        return f"{error.what}. Use another number of ranks, a scheme with other blocks, or no scheme."
    return ""


def _cuts_one_row(step: Step, whole: RenamedCheckpoint, box: Box) -> bool:
    """Return whether ``step`` would leave a part of a one-dimensional Weight here, which no load could join again."""
    scheme = whole.spec(step.sources[0].name).scheme if step.is_given else step.scheme
    is_one_row = len(box) == 1 and scheme is not None and not scheme.transparent
    return is_one_row and box[0] != (0, step.held.shape[0])
