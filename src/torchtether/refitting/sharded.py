"""The target of a refit for a model with DTensors: each rank fills the rows that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..checkpoint.held import HeldCheckpoint
from ..distributed.guards import check_shards
from ..distributed.loading import find_boxes
from ..distributed.ranks import Ranks
from ..distributed.shadows import local_shadow, reshard, stand_in, whole_shadow
from ..errors import LoadError
from ..geometry.shards import box_of, local_of
from ..loading.options import fault
from ..loading.restricting import Box, restrict
from ..loading.steps import Draft
from ..renaming.pieces import Piece
from ..ties.components import find_components
from ..ties.names import named_tensors
from ..weights.weight import Weight
from .shards import OwnShard
from .target import Target


class ShardedTarget(Target):
    """A model with DTensors, of which each rank fills its own rows."""

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        check_shards(model)  # FSDP2 must gather from the memory that is about to be written
        super().__init__(stand_in(model, whole_shadow, views=True))
        self._held = named_tensors(model)
        self._part = stand_in(model, local_shadow)
        self._components = find_components(self._part)

    def cut(self, draft: Draft) -> Draft:
        """Restrict the steps of ``draft`` to the rows of this rank; add faults for blocks that the rows cut."""
        boxes, faults = find_boxes(self._held, draft)
        draft = restrict(draft, self._part, boxes, lambda name: torch.device("cpu"), faults, self._components)
        checkpoint = draft.given.checkpoint
        if isinstance(checkpoint, HeldCheckpoint):
            wrong = _not_here(draft, checkpoint)
            draft.faults += wrong.values()
            draft.steps = [step for step in draft.steps if step.name not in wrong]
        return super().cut(draft)

    def hold(self, tensors: Mapping[str, Tensor]) -> HeldCheckpoint:
        """Return the checkpoint of ``tensors``; of a sharded one this rank reads its own shard."""
        return HeldCheckpoint(tensors, OwnShard())

    def receive(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` as it is: this rank reads its own shard."""
        return tensor

    def together(self, *, is_undone: bool = True) -> AbstractContextManager[None]:
        """Return a context manager that raises on all ranks, or on none; ``is_undone`` if nothing is then done."""
        ranks = Ranks()
        return ranks.all_or_none(LoadError) if is_undone else ranks.all_or_none(LoadError, "")


def _not_here(draft: Draft, checkpoint: HeldCheckpoint) -> dict[str, str]:
    """Return faults, by name, of steps that need elements of a source DTensor which this rank does not have."""
    wrong: dict[str, str] = {}
    for step in draft.steps:
        for piece in (piece for source in step.sources for piece in draft.given[source.name].pieces):
            tensor = checkpoint.tensor(piece.key)
            if isinstance(tensor, DTensor):
                what = _fault_of_piece(tensor, piece)
                if what:
                    wrong[step.name] = fault(step.name, f"the source's {piece.key} {what}")
    return wrong


def _fault_of_piece(tensor: DTensor, piece: Piece) -> str:
    """Return why this rank cannot read ``piece`` of ``tensor`` by itself; empty if it can."""
    try:
        held = box_of(tensor)
    except NotImplementedError as error:
        return f"is a DTensor that cannot be read: {error}. Redistribute it first."
    if isinstance(local_of(tensor), Weight):
        return "is a sharded Weight, which cannot be read shard by shard. Give it whole: .full_tensor()."
    is_here = all(a <= c and d <= b for (a, b), (c, d) in zip(held, piece.box, strict=True))
    if is_here and not piece.heads:
        return ""
    return (
        f"has the elements {_format(held)} on this rank, which needs {_format(piece.box)}. "
        "Shard both alike, or give whole tensors (.full_tensor(), one after the other), or a path."
    )


def _format(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
