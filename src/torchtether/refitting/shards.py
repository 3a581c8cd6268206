"""Sharded tensors: a source of which each rank has a part, and a model of which this rank fills its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..checkpoint.held import HeldCheckpoint, Ranges
from ..distributed.loading import find_boxes
from ..distributed.ranks import Ranks
from ..distributed.shadows import box_of, local_of, local_shadow, reshard, stand_in, whole_shadow
from ..errors import LoadError
from ..loading.options import fault
from ..loading.restricting import Box, restrict
from ..loading.steps import Draft
from ..ties.components import find_components
from ..ties.names import named_tensors
from ..torch_private.fsdp2 import fsdp2_state, renew_shards
from ..weights.weight import Weight
from .target import Target


class ShardedTarget(Target):
    """A model with DTensors, of which every rank fills the rows that it holds."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        super().__init__(stand_in(model, whole_shadow, views=True))
        self._model, self._held = model, named_tensors(model)
        self._part = stand_in(model, local_shadow)
        self._components = find_components(self._part)

    def cut(self, draft: Draft) -> Draft:
        """Return the steps of ``draft`` for the rows of this rank; blocks that they cut are faults."""
        boxes, faults = find_boxes(self._held, draft)
        draft = restrict(draft, self._part, boxes, lambda name: torch.device("cpu"), faults, self._components)
        checkpoint = draft.given.checkpoint
        if isinstance(checkpoint, HeldCheckpoint):
            draft.faults += _not_here(draft, checkpoint)
        return super().cut(draft)

    def hold(self, tensors: Mapping[str, Tensor]) -> HeldCheckpoint:
        """Return the checkpoint of ``tensors``; of sharded ones a rank reads what it holds itself."""
        return HeldCheckpoint(tensors, local_box)

    def receive(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as it is: this rank reads what it holds of it."""
        return tensor

    def together(self) -> AbstractContextManager[None]:
        """Return a block that raises on all ranks, or on none."""
        return Ranks().all_or_none(LoadError)

    def finish(self) -> None:
        """Have FSDP2 gather what has been written."""
        for module in self._model.modules():
            state = fsdp2_state(module)
            if state is not None:
                renew_shards(state)


def _not_here(draft: Draft, checkpoint: HeldCheckpoint) -> list[str]:
    """Return the faults of steps that need other elements of a DTensor of the source than this rank has."""
    faults = []
    for step in draft.steps:
        for source in step.sources:
            for piece in draft.given[source.name].pieces:
                tensor = checkpoint.tensor(piece.key)
                if not isinstance(tensor, DTensor):
                    continue
                try:
                    held = box_of(tensor)
                except NotImplementedError as error:
                    faults.append(fault(step.name, f"the source's {piece.key}: {error}. Redistribute it first."))
                    continue
                if isinstance(local_of(tensor), Weight):
                    what = f"the source's {piece.key} is a sharded Weight. Give it whole: .full_tensor()."
                    faults.append(fault(step.name, what))
                elif piece.heads or not all(a <= c and d <= b for (a, b), (c, d) in zip(held, piece.box, strict=True)):
                    what = (
                        f"this rank needs {_format(piece.box)} of the source's {piece.key}, and holds {_format(held)}. "
                        "Shard both alike, or give whole tensors (.full_tensor(), one after the other), or a path."
                    )
                    faults.append(fault(step.name, what))
    return faults


def _format(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def local_box(tensor: Any, box: Ranges) -> Tensor:
    """Return the elements of ``box`` of a DTensor, of which this rank holds them; all that it holds for no box."""
    local = local_of(tensor)
    if not box:
        return local
    held = box_of(tensor)
    return local[tuple(slice(s.start - start, s.stop - start) for s, (start, _) in zip(box, held, strict=True))]


def gathered(tensor: Any, box: Ranges) -> Tensor:
    """Return the elements of ``box`` of a DTensor, all of them for no box; every rank of its mesh must ask for them.

    The shards come one after the other, and of each no more than lies in the box.
    """
    placement, mesh = tensor.placements[0], tensor.device_mesh
    ranges = [(one.start, one.stop) for one in box] or [(0, size) for size in tensor.shape]
    local = local_of(tensor)
    if len(tensor.placements) == 1 and isinstance(placement, Replicate):
        return local[tuple(slice(*one) for one in ranges)]
    if len(tensor.placements) > 1 or type(placement) is not Shard or type(local) is not Tensor:
        with torch.no_grad():
            whole: Tensor = tensor.full_tensor()
            return whole[tuple(slice(*one) for one in ranges)] if box else whole
    made = torch.empty([stop - start for start, stop in ranges], dtype=tensor.dtype, device=local.device)
    dim, group, size = placement.dim, mesh.get_group(), tensor.shape[placement.dim]
    first, last = ranges[dim]
    each = -(-size // mesh.size())  # the rule of torch.chunk
    for place, rank in enumerate(mesh.mesh.tolist()):
        begin, start, stop = place * each, max(first, place * each), min(last, (place + 1) * each, size)
        if start >= stop:
            continue
        out = made.narrow(dim, start - first, stop - start)
        if mesh.get_local_rank() == place:
            ranges[dim] = (start - begin, stop - begin)
            out.copy_(local[tuple(slice(*one) for one in ranges)])
        sent = out.contiguous()
        dist.broadcast(sent, src=rank, group=group)
        if sent.data_ptr() != out.data_ptr():
            out.copy_(sent)
    return made
