"""A state dict in memory as a checkpoint: tensors are read by name, as from files, without copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ..formats import Entry
from ..geometry.views import Shape
from ..progress import Tick, no_tick
from ..schemes import part_rows, same_bits, view_parts
from ..ties.names import is_sharded
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .aliases import is_equal
from .reader import Checkpoint

Ranges = tuple[slice, ...]


class Shards(Protocol):
    """A reader of sharded tensors, of which this process has a part."""

    def read(self, tensor: Any, box: Ranges) -> Tensor:
        """Return the values of ``tensor`` in ``box``; all of them if ``box`` is empty."""

    def holds(self, tensor: Any, test: Callable[[Tensor], bool]) -> bool:
        """Return whether ``test`` is true of every shard from which ``read`` would read."""


class HeldCheckpoint(Checkpoint):
    """Read the tensors of a mapping as ``Checkpoint`` reads those of files, without copies of whole tensors.

    ``shards`` reads sharded tensors. The checkpoint has no ties: the values of two names are compared instead.
    """

    def __init__(self, tensors: Mapping[str, Tensor], shards: Shards | None = None) -> None:
        self._tensors, self._shards = tensors, shards
        self.format = "the state dict"
        self.path = Path(self.format)
        self.ties, self.faults, self.copies, self.flat = (), {}, {}, {}
        self._format = self._fitting = None
        self._padding, self._alias, self._tied, self._kept = set(), {}, {}, {}
        self.entries = {name: _entry(name, tensor) for name, tensor in tensors.items()}

    def nbytes(self, name: str) -> int:
        """Return the number of bytes of ``name`` in all its shards."""
        tensor = self._tensors[name]
        return tensor.numel() * tensor.element_size() if is_sharded(tensor) else tensor.nbytes

    def tensor(self, name: str) -> Tensor:
        """Return the tensor object ``name`` of the mapping."""
        return self._tensors[name]

    def read(self, owner: str, *, device: torch.device | str = "cpu", tick: Tick = no_tick) -> Tensor:
        """Return ``owner`` on its present device; the caller must not change it, because it may share memory."""
        return self._values(owner, ())

    def read_briefly(self, name: str, tick: Tick = no_tick) -> Tensor:
        """Return ``name`` on its present device, with its strides; the caller must not change it."""
        return self._values(name, ())

    def read_into(self, name: str, out: Tensor, tick: Tick = no_tick) -> None:
        """Fill the plain tensor ``out``, of any strides, dtype and device, with the values of ``name``."""
        values = self._values(name, ())
        out.detach().copy_(values.dequantize() if isinstance(values, Weight) else values)

    def get_slice(self, name: str) -> Any:
        """Return an object whose ``[...]`` returns a part of ``name``."""
        return _Slice(self, name)

    def _values(self, name: str, box: Ranges) -> Tensor:
        tensor = self._tensors[name]
        if is_sharded(tensor):
            assert self._shards is not None
            return self._shards.read(tensor, box)
        values = tensor.values_of() if isinstance(tensor, Weight) and tensor.scheme.transparent else tensor
        return values.detach()[box] if box else values.detach()

    def holds(self, name: str, test: Callable[[Tensor], bool]) -> bool:
        """Return whether ``test`` is true of all values of ``name``, shard by shard if it is sharded."""
        tensor = self._tensors[name]
        if not is_sharded(tensor):
            return test(self._values(name, ()))
        assert self._shards is not None
        return self._shards.holds(tensor, test)

    def read_rows(self, name: str, shape: Shape, start: int, stop: int) -> dict[str, Tensor]:
        """Return the parts of rows ``start:stop`` of the Weight ``name``, whose base is viewed in ``shape``."""
        weight = self._values(name, ())
        assert isinstance(weight, Weight)
        parts = view_parts(weight.scheme, dict(weight.parts), shape)
        cuts = part_rows(weight.scheme.layout(shape), shape, start, stop)
        return {role: parts[role] if cut is None else parts[role][cut] for role, cut in cuts.items()}

    def rows_nbytes(self, name: str, shape: Shape, start: int, stop: int) -> int | None:
        """Return ``None``: ``read_rows`` reads no more than the parts of those rows."""
        return None

    def is_part_equal(self, one: str, other: str, part: str) -> bool:
        """Return whether two Weights have the same bits in ``part``."""
        found = [self._values(name, ()) for name in (one, other)]
        return all(isinstance(w, Weight) for w in found) and same_bits(*(w.parts[part] for w in found))  # type: ignore[attr-defined]

    def is_mappable(self, name: str) -> bool:
        """Return False: there is no file."""
        return False

    def whole_key(self, name: str) -> str | None:
        """Return ``None``: there is no file."""
        return None

    def is_same(self, one: str, other: str) -> bool:
        """Return whether two names hold the same bits in the same shape and dtype."""
        first, second = self._tensors[one], self._tensors[other]
        if first is second:
            return True
        kind, other_kind = self.entries[one].kind, self.entries[other].kind
        if kind == other_kind and type(first) is type(second) is Tensor and first.data_ptr() == second.data_ptr() != 0:
            return True
        if (kind.shape, kind.dtype, kind.scheme) != (other_kind.shape, other_kind.dtype, other_kind.scheme):
            return False
        return is_equal(self._values(one, ()), self._values(other, ()))

    def close(self) -> None:
        """Do nothing: there is no file."""

    def __repr__(self) -> str:
        return f"{self.path}, {len(self)} tensors"


class _Slice:
    """A tensor whose ``[...]`` returns a part."""

    def __init__(self, checkpoint: HeldCheckpoint, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name

    def __getitem__(self, box: Ranges) -> Tensor:
        return self._checkpoint._values(self._name, box)


def _entry(name: str, tensor: Tensor) -> Entry:
    """Return the entry of the whole ``tensor``, also if this process has only a shard of it."""
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    shape = tuple(tensor.shape)
    if isinstance(local, Weight) and not local.scheme.transparent:
        spec = WeightSpec.of(shape, local.dtype, local.scheme) if is_sharded(tensor) else local.spec.replace(tie=None)
        return Entry.of({role: f"{name}.{role}" for role in local.parts}, spec)
    return Entry({"tensor": name}, shape, tuple(tensor.stride()), tensor.dtype)
