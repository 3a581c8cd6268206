"""A model and its optimizer as named tensors, sharded ones as DTensors: what torch.distributed.checkpoint takes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ..checkpoint.saver import Aliases, HeldGroup, plan_groups
from ..errors import CheckpointError
from ..files import KEY, OPTIMIZER, Record, new_folder, part_key
from ..formats import native
from ..geometry.views import Shape, contiguous_stride
from ..schemes import Part, part_rows
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .optimizers import optimizer_tensors
from .ranks import Ranks
from .shadows import Shadowed, box_of, local_of, redone


def state_dict(
    model: nn.Module | Mapping[str, Tensor], optimizer: Any = None, *, aliases: Aliases = "drop"
) -> dict[str, Tensor]:
    """Return the tensors of ``model`` by name, over the memory that it uses, for ``torch.distributed.checkpoint``.

        dcp.async_save(tt.distributed.state_dict(model, optimizer), checkpoint_id=path)

    Sharded tensors are DTensors. Part ``p`` of a quantized weight ``n`` is the tensor ``n.p``; a part with several
    entries in a row has a dimension for those. Tied tensors are there once, under their owner's name, or with
    ``aliases="copy"`` under all. Under ``torchtether`` stands, in bytes, what ties them and what is quantized how, so
    that ``tt.distributed.load`` and ``tt.load`` read the folder; under ``torchtether.optimizer.`` the optimizer's
    state, hyperparameters in bytes. No value is anything but a tensor, so nothing is pickled.

    ``dcp.load`` into it loads the model, in place.

    Raises what ``tt.distributed.save`` does.

    >>> import torch
    >>> sorted(state_dict(torch.nn.Linear(2, 3)))
    ['bias', 'torchtether', 'weight']
    """
    found = Shadowed(model)
    groups = plan_groups(found.shadow, native, aliases)
    made: dict[str, Tensor] = {}
    for group in groups:
        for key, tensor in group.stored.items():
            made[key] = _plain(found.real(tensor))
        for name, weight in group.packed.items():
            made |= _parts(name, found.real(weight), weight)
    made[KEY] = as_bytes(_record(groups))
    for key, tensor in (optimizer_tensors(found.model, optimizer) if optimizer is not None else {}).items():
        made[OPTIMIZER + key] = _plain(tensor)
    return made


def save_dcp(
    ranks: Ranks, model: nn.Module | Mapping[str, Tensor], path: Path, optimizer: Any, aliases: Aliases
) -> None:
    """Write a folder by ``torch.distributed.checkpoint`` to ``path``, by one rename when all ranks are done."""
    with ranks.all_or_none(CheckpointError):
        if ranks.is_fake:
            raise CheckpointError("the process group is a fake one", name="format", fix="Save from real ranks.")
        state = state_dict(model, optimizer, aliases=aliases)
    folder, temporary = new_folder(path), None
    try:
        with ranks.all_or_none(CheckpointError):
            temporary = folder.__enter__() if ranks.rank == 0 else None
        temporary = ranks.gather(temporary, CheckpointError)[0]
        with ranks.all_or_none(CheckpointError), warnings.catch_warnings():
            if ranks.is_alone:  # torch warns of what is asked for
                warnings.simplefilter("ignore", UserWarning)
            save(state, checkpoint_id=temporary, process_group=ranks.group, no_dist=ranks.is_alone)
    except BaseException as error:
        if ranks.rank == 0 and temporary is not None:
            folder.__exit__(type(error), error, error.__traceback__)
        raise
    with ranks.all_or_none(CheckpointError):
        if ranks.rank == 0:
            folder.__exit__(None, None, None)


def as_bytes(text: str) -> Tensor:
    """Return ``text`` in UTF-8, as a tensor of bytes."""
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _plain(tensor: Tensor) -> Tensor:
    """Return ``tensor`` without a graph, contiguous, and without a transparent Weight that wraps it."""
    if isinstance(tensor, DTensor):
        local = local_of(tensor)
        return redone(tensor, (local.values_of() if isinstance(local, Weight) else local).detach().contiguous())
    values = tensor.values_of() if isinstance(tensor, Weight) else tensor
    return values.detach().resolve_conj().resolve_neg().contiguous()


def _parts(name: str, tensor: Tensor, shadow: Weight) -> dict[str, Tensor]:
    """Return the parts of a Weight; where its rows are sharded, so are parts that have something of each row."""
    if not isinstance(tensor, DTensor):
        assert isinstance(tensor, Weight)
        return {part_key(name, role): part.detach() for role, part in tensor.parts.items()}
    local, base = local_of(tensor), shadow.spec.base
    assert isinstance(local, Weight)
    layout, box = shadow.scheme.layout(base), box_of(tensor)
    cuts = part_rows(layout, base, *box[0])
    made = {}
    for role, part in local.parts.items():
        if cuts[role] is None:
            made[part_key(name, role)] = part.detach()
            continue
        shape, part = _by_rows(layout[role], base, part.detach())
        whole = DTensor.from_local(
            part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=contiguous_stride(shape)
        )
        _check_rows(name, role, whole, cuts[role], layout[role])
        made[part_key(name, role)] = whole
    return made


def _by_rows(layout: Part, base: Shape, part: Tensor) -> tuple[torch.Size, Tensor]:
    """Return the shape of the whole part, and this rank's share of it, with as many rows as the Weight has."""
    shape = tuple(layout.shape)
    row = base[0] and math.prod(base) // base[0]
    if shape[0] != base[0] and layout.span and row % layout.span == 0:
        each = row // layout.span
        return torch.Size((base[0], each, *shape[1:])), part.reshape(part.shape[0] // each, each, *shape[1:])
    return torch.Size(shape), part


def _check_rows(name: str, role: str, whole: DTensor, cut: slice | None, layout: Part) -> None:
    """Raise CheckpointError if a DTensor would have other rows here than the Weight has."""
    try:
        start, stop = box_of(whole)[0]
        scale = layout.shape[0] // max(whole.shape[0], 1)
        agrees = cut is not None and (start == stop or (start * scale, stop * scale) == (cut.start, cut.stop))
    except NotImplementedError:
        agrees = False
    if not agrees:
        raise CheckpointError(
            f"no DTensor has the rows of {role!r} that this rank holds",
            name=name,
            fix="Save with format='safetensors'.",
        )


def _record(groups: list[HeldGroup]) -> str:
    """Return the record of ties and weights of ``groups``, as a file by ``tt.save`` has it."""
    weights: dict[str, WeightSpec] = {name: spec for group in groups for name, spec in group.weights.items()}
    strides = {name: stride for group in groups for name, stride in group.strides.items()}
    copies = frozenset(name for group in groups for name in group.copies)
    ties = tuple(tie for group in groups for tie in group.ties)
    return Record(ties, weights, strides, copies).metadata()[KEY]
