"""The target of a refit: the model's tensors, and the steps that fill them."""

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
    """A model that this process holds whole."""

    def __init__(self, model: nn.Module) -> None:
        self.whole = model
        """The model, or a shadow of the whole model with its names, shapes and ties."""

    def match(self, given: RenamedCheckpoint, options: LoadOptions) -> Draft:
        """Return the steps that fill this process's part of the model from ``given``, and all faults."""
        return self.cut(match_renamed(self.whole, given, options))

    def cut(self, draft: Draft) -> Draft:
        """Restrict the steps of ``draft`` to this process's part of the model; add faults for unwritable memory."""
        draft.faults += [what for what in map(unwritable, draft.steps) if what]
        return draft

    def hold(self, tensors: Mapping[str, Tensor]) -> HeldCheckpoint:
        """Return the checkpoint of ``tensors``; every rank reads sharded ones whole, shard by shard."""
        if not any(map(is_sharded, tensors.values())):
            return HeldCheckpoint(tensors)
        from .shards import AllShards

        return HeldCheckpoint(tensors, AllShards())

    def receive(self, tensor: Tensor) -> Tensor:
        """Return ``tensor``, which has arrived by itself, for ``hold``: gathered from all ranks if it is sharded."""
        return self.hold({"": tensor}).read("") if is_sharded(tensor) else tensor

    def together(self, *, is_undone: bool = True) -> AbstractContextManager[None]:
        """Return a context manager that raises on all ranks, or on none; ``is_undone`` if nothing is then done."""
        return nullcontext()
