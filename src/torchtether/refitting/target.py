"""The model as a refit sees it: its tensors, and what fills them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from ..checkpoint.held import HeldCheckpoint
from ..loading.matching import match_renamed
from ..loading.options import LoadOptions
from ..loading.steps import Draft
from ..renaming.renamed_checkpoint import RenamedCheckpoint
from ..ties.names import is_sharded
from .writing import unwritable


class Target:
    """A model of which this process holds all."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = model
        """The model, or a shadow of all of it that has its names, shapes and ties."""

    def match(self, given: RenamedCheckpoint, options: LoadOptions) -> Draft:
        """Return the steps that fill what this process holds from ``given``, and all faults."""
        return self.cut(match_renamed(self.whole, given, options))

    def cut(self, draft: Draft) -> Draft:
        """Return the steps of ``draft``, which fill all of the model, for what this process holds of it.

        Faults are added for what cannot be written.
        """
        draft.faults += [what for what in map(unwritable, draft.steps) if what]
        return draft

    def hold(self, tensors: Mapping[str, Tensor]) -> HeldCheckpoint:
        """Return the checkpoint of ``tensors``; of sharded ones every rank reads all, shard by shard."""
        if not any(map(is_sharded, tensors.values())):
            return HeldCheckpoint(tensors)
        from .shards import AllShards

        return HeldCheckpoint(tensors, AllShards())

    def receive(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which has arrived alone, as ``hold`` takes it: read from all ranks if it is sharded."""
        return self.hold({"": tensor}).read("") if is_sharded(tensor) else tensor

    def together(self) -> AbstractContextManager[None]:
        """Return a block that raises on all ranks, or on none."""
        return nullcontext()
