"""Assembling whole tensors on the ranks that write them, from the shards of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._dtypes import copyable
from ..errors import CheckpointError
from ..formats import Writable
from ..geometry.shards import local_of
from ..renaming.pieces import Range
from ..schemes import part_rows
from ..weights.weight import Weight
from .ranks import Ranks

Region = tuple[slice, ...]
Boxes = Mapping[str, tuple[Range, ...]]


@dataclass(frozen=True)
class Item:
    """Describe the entry ``key`` of a file: a tensor, or a Weight that ``format`` packs.

    ``shadow`` has the shape, dtype and scheme of the whole. It also has the values, unless ``name`` names a sharded
    tensor, whose shards have them.
    """

    key: str
    shadow: Tensor
    name: str | None = None
    format: Writable | None = None


class Transfers:
    """Send items to the ranks that write them; ``boxes`` maps each sharded tensor to the indices held, by rank."""

    def __init__(self, ranks: Ranks, sharded: Mapping[str, DTensor], boxes: Sequence[Boxes]) -> None:
        self._ranks, self._sharded, self._boxes = ranks, sharded, boxes
        self._device = _device(ranks)
        self.error: Exception | None = None
        """The first error of reading a shard of this rank. Zeros took its place, so that no rank waits."""

    def run(self, wanted: Sequence[Sequence[Item]]) -> Iterator[tuple[Item, Tensor] | None]:
        """Yield the items that ``wanted`` lists for this rank, one after the other, each with its tensor on the CPU.

        ``wanted`` lists the items by rank. In each turn every rank receives at most one item, so every rank must
        exhaust the iterator, whatever it receives. ``None`` is a turn without an item for this rank.
        """
        for turn in range(max(map(len, wanted), default=0)):
            jobs = [(rank, items[turn]) for rank, items in enumerate(wanted) if turn < len(items)]
            yield self._turn(jobs)

    def _turn(self, jobs: Sequence[tuple[int, Item]]) -> tuple[Item, Tensor] | None:
        """Send each item of ``jobs`` to its rank; return this rank's item with its tensor, or ``None``."""
        me, mine, made = self._ranks.rank, None, {}
        flights: list[Any] = []
        landed: list[tuple[Tensor, Tensor]] = []
        kept: list[Tensor] = []
        try:
            for writer, item in jobs:
                if writer == me:
                    mine = item
                for role, whole in _parts(item.shadow).items():
                    out = torch.empty(whole.shape, dtype=whole.dtype, device="cpu") if writer == me else None
                    if out is not None:
                        made[role] = out
                    for rank, region in self._sources(item, role):
                        if rank == me:
                            kept.append(self._shard(item, role, whole[region]))
                            if out is not None:
                                landed.append((out[region], kept[-1]))
                            else:
                                flights.append(dist.isend(kept[-1], group=self._ranks.group, group_dst=writer))
                        elif out is not None:
                            place = out[region]
                            is_direct = place.is_contiguous() and self._device.type == "cpu"
                            memory = (
                                _bytes(place)
                                if is_direct
                                else torch.empty(place.nbytes, dtype=torch.uint8, device=self._device)
                            )
                            flights.append(dist.irecv(memory, group=self._ranks.group, group_src=rank))
                            if not is_direct:
                                landed.append((place, memory))
            for flight in flights:
                flight.wait()
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"another rank has stopped or cannot be reached: {error}") from error
        for place, memory in landed:
            copyable(place).copy_(copyable(memory.cpu().view(place.dtype).view(place.shape)))
        if mine is None:
            return None
        if isinstance(mine.shadow, Weight):
            return mine, Weight(made, mine.shadow.spec)
        return mine, made[""]

    def _shard(self, item: Item, role: str, shadow: Tensor) -> Tensor:
        """Return the bytes of this rank's shard of the part ``role`` of ``item``; if that fails, as many zeros."""
        try:
            return _bytes(self._held(item, role).detach()).to(self._device)
        except Exception as error:
            self.error = self.error or error
            return torch.zeros(shadow.nbytes, dtype=torch.uint8, device=self._device)

    def _held(self, item: Item, role: str) -> Tensor:
        """Return this rank's shard of the part ``role`` of ``item``; a plain tensor has the one part ``""``."""
        tensor = item.shadow if item.name is None else local_of(self._sharded[item.name])
        if isinstance(tensor, Weight) and not isinstance(item.shadow, Weight):
            return tensor.values_of()
        return _parts(tensor)[role]

    def _sources(self, item: Item, role: str) -> list[tuple[int, Region]]:
        """Return the ranks that hold rows of the part ``role``, each with its region; of replicas the first rank."""
        shadow = item.shadow
        if shadow.numel() == 0:
            return []
        if item.name is None:
            return [(0, ())]
        found: dict[tuple[Range, ...], int] = {}  # slices are not hashable before Python 3.12
        for rank, boxes in enumerate(self._boxes):
            box = boxes[item.name]
            if any(start == stop for start, stop in box):
                continue
            if isinstance(shadow, Weight):
                cut = part_rows(shadow.scheme.layout(shadow.spec.base), shadow.spec.base, *box[0])[role]
                box = () if cut is None else ((cut.start, cut.stop),)
            found.setdefault(box, rank)
        return [(rank, tuple(slice(*range_) for range_ in box)) for box, rank in found.items()]


def _parts(tensor: Tensor) -> Mapping[str, Tensor]:
    """Return the parts of a Weight, or a plain tensor as its one part ``""``."""
    return tensor.parts if isinstance(tensor, Weight) else {"": tensor}


def _device(ranks: Ranks) -> torch.device:
    """Return the device whose memory the group's backend can send: the CPU if it can, else the current CUDA device."""
    if ranks.is_alone or "gloo" in dist.get_backend_config(ranks.group) or "mpi" in dist.get_backend(ranks.group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, made contiguous, as bytes."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
