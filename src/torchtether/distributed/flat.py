"""A model and its optimizer as a flat state dict of tensors and DTensors, for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from ..checkpoint.saver import Aliases, Masters, check_values, plan_groups
from ..checkpoint.writer import record_of
from ..errors import CheckpointError
from ..exchange.optimizer_state import Optimizers
from ..files import KEY, OPTIMIZER, new_folder, part_key
from ..formats import native
from ..geometry.shards import box_of, local_of
from ..geometry.views import Shape, contiguous_stride
from ..schemes import Part, part_rows
from ..weights.weight import Weight
from .optimizers import as_bytes, optimizer_tensors
from .ranks import Ranks
from .shadows import Shadowed, with_local


def state_dict(
    model: nn.Module | Mapping[str, Tensor],
    optimizer: Optimizers = None,
    *,
    aliases: Aliases = "drop",
    masters: Masters = "keep",
) -> dict[str, Tensor]:
    """Return the tensors of ``model`` by name, sharing its memory, for ``torch.distributed.checkpoint``.

        dcp.async_save(tt.distributed.state_dict(model, optimizer), checkpoint_id=path)

    Sharded tensors are DTensors. Part ``p`` of a quantized weight ``n`` is the tensor ``n.p``; a part with several
    entries in a row has a dimension for those. A tied tensor has one entry, under its owner's name, or with
    ``aliases="copy"`` one under each name; ``masters="drop"`` leaves out the masters of ``Mastered`` Weights. The entry
    ``torchtether`` holds the record of ties and schemes in bytes, so that ``tt.distributed.load`` and ``tt.load`` can
    read the folder. Entries under ``torchtether.optimizer.`` hold the
    optimizer's state, hyperparameters in bytes. Every value is a tensor, so nothing is pickled.

    ``dcp.load`` into this dictionary loads the model in place.

    Raises what ``tt.distributed.save`` does.

    >>> import torch
    >>> sorted(state_dict(torch.nn.Linear(2, 3)))
    ['bias', 'torchtether', 'weight']
    """
    found = Shadowed(model)
    groups = plan_groups(found.shadow, native, aliases, masters)
    made: dict[str, Tensor] = {}
    for group in groups:
        for key, tensor in group.stored.items():
            made[key] = _plain(key, found.real(tensor))
        for name, weight in group.packed.items():
            made |= _parts(name, found.real(weight), weight)
    made[KEY] = as_bytes(record_of(groups).metadata()[KEY])
    for key, tensor in (optimizer_tensors(found.model, optimizer) if optimizer is not None else {}).items():
        made[OPTIMIZER + key] = _plain(key, tensor)
    return made


def save_dcp(
    ranks: Ranks,
    model: nn.Module | Mapping[str, Tensor],
    path: Path,
    optimizer: Optimizers,
    aliases: Aliases,
    masters: Masters,
) -> None:
    """Write ``path`` by ``torch.distributed.checkpoint``: to a temporary folder, renamed when all ranks are done."""
    with ranks.all_or_none(CheckpointError):
        if ranks.is_fake:
            what = "'dcp' needs all ranks, and the backend of the process group is 'fake'"
            raise CheckpointError(what, name="format", fix="Save with a real process group.")
        state = state_dict(model, optimizer, aliases=aliases, masters=masters)
    folder, temporary = new_folder(path), None
    try:
        with ranks.all_or_none(CheckpointError):
            temporary = folder.__enter__() if ranks.rank == 0 else None
        temporary = ranks.gather(temporary, CheckpointError)[0]
        with ranks.all_or_none(CheckpointError), warnings.catch_warnings():
            if ranks.is_alone:  # torch warns that no_dist=True saves on one process
                warnings.simplefilter("ignore", UserWarning)
            try:
                save(state, checkpoint_id=temporary, process_group=ranks.group, no_dist=ranks.is_alone)
            except CheckpointException as error:
                raise _first_failure(error, path) from error
            except RuntimeError as error:  # of a collective: torch wraps all others in a CheckpointException
                what = f"another rank has stopped or cannot be reached: {str(error).splitlines()[0]}"
                raise CheckpointError(what, name=str(path)) from error
    except BaseException as error:
        if ranks.rank == 0 and temporary is not None:
            folder.__exit__(type(error), error, error.__traceback__)
        raise
    with ranks.all_or_none(CheckpointError):
        if ranks.rank == 0:
            folder.__exit__(None, None, None)


def _first_failure(error: CheckpointException, path: Path) -> BaseException:
    """Return an error of one line for ``error``, which has many and is no Exception, or the interrupt that it wraps."""
    rank, (failure, _) = next(iter(error.failures.items()))
    if not isinstance(failure, Exception):
        return failure
    while isinstance(failure.__context__, Exception):  # closing a zip file after a failed write fails again
        failure = failure.__context__
    text = getattr(failure, "strerror", None) or str(failure).strip() or type(failure).__name__
    return CheckpointError(f"rank {rank} cannot write it: {text.splitlines()[0]}", name=str(path))


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Return ``tensor`` detached and contiguous; of a transparent Weight the tensor that it wraps.

    Raise CheckpointError, naming ``name``, for a tensor of another class, which torch would pickle.
    """
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    check_values(name, local)
    if isinstance(tensor, DTensor):
        return with_local(tensor, (local.values_of() if isinstance(local, Weight) else local).detach().contiguous())
    values = tensor.values_of() if isinstance(tensor, Weight) else tensor
    return values.detach().resolve_conj().resolve_neg().contiguous()


def _parts(name: str, tensor: Tensor, shadow: Weight) -> dict[str, Tensor]:
    """Return the parts of a Weight by key; of a sharded Weight, parts with entries per row are DTensors."""
    if not isinstance(tensor, DTensor):
        assert isinstance(tensor, Weight)
        return {part_key(name, role): part.detach() for role, part in tensor.parts.items()}
    local, base = local_of(tensor), shadow.spec.base
    check_values(name, local)
    assert isinstance(local, Weight)
    layout, box = shadow.scheme.layout(base), box_of(tensor)
    cuts = part_rows(layout, base, *box[0])
    made = {}
    for role in layout:  # without a master that is left out
        part = local.parts[role]
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
    """Return the shape of the whole part, and this rank's shard, both with the Weight's rows as first dimension."""
    shape = tuple(layout.shape)
    row = base[0] and math.prod(base) // base[0]
    if shape[0] != base[0] and layout.span and row % layout.span == 0:
        each = row // layout.span
        return torch.Size((base[0], each, *shape[1:])), part.reshape(part.shape[0] // each, each, *shape[1:])
    return torch.Size(shape), part


def _check_rows(name: str, role: str, whole: DTensor, cut: slice | None, layout: Part) -> None:
    """Raise CheckpointError if the DTensor ``whole`` has other rows on this rank than the Weight."""
    try:
        start, stop = box_of(whole)[0]
        scale = layout.shape[0] // max(whole.shape[0], 1)
        agrees = cut is not None and (start == stop or (start * scale, stop * scale) == (cut.start, cut.stop))
    except NotImplementedError:
        agrees = False
    if not agrees:
        raise CheckpointError(
            f"no DTensor can describe the rows of the part {role!r} that this rank holds",
            name=name,
            fix="Save with format='safetensors'.",
        )
