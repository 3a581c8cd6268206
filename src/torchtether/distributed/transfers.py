"""Tensors that come together on one rank, from the rows that each rank holds."""

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
from ..renaming.pieces import Range
from ..schemes import part_rows
from ..weights.weight import Weight
from .ranks import Ranks
from .shadows import local_of

Region = tuple[slice, ...]
Boxes = Mapping[str, tuple[Range, ...]]


@dataclass(frozen=True)
class Item:
    """Hold what is stored under ``key``: a tensor, or a Weight for ``format`` to pack.

    ``shadow`` says what it is; it is also where the values are, unless ``name`` is that of a sharded tensor.
    """

    key: str
    shadow: Tensor
    name: str | None = None
    format: Writable | None = None


class Transfers:
    """Bring items to the ranks that write them; ``boxes`` has what each rank holds of the sharded tensors."""

    def __init__(self, ranks: Ranks, sharded: Mapping[str, DTensor], boxes: Sequence[Boxes]) -> None:
        self._ranks, self._sharded, self._boxes = ranks, sharded, boxes
        self._device = _device(ranks)

    def run(self, wanted: Sequence[Sequence[Item]]) -> Iterator[tuple[Item, Tensor] | None]:
        """Yield the items that ``wanted`` lists for this rank, one after the other, each with its tensor on the CPU.

        All ranks run through it to its end, however many items are theirs: in each turn one item goes to each rank.
        ``None`` is a turn without one for this rank.
        """
        for turn in range(max(map(len, wanted), default=0)):
            jobs = [(rank, items[turn]) for rank, items in enumerate(wanted) if turn < len(items)]
            yield self._turn(jobs)

    def _turn(self, jobs: Sequence[tuple[int, Item]]) -> tuple[Item, Tensor] | None:
        """Bring one item to each of some writers; return the item of this rank with its tensor, if it is one."""
        me, mine, made = self._ranks.rank, None, {}
        flights: list[Any] = []
        landed: list[tuple[Tensor, Tensor]] = []
        kept: list[Tensor] = []
        try:
            for writer, item in jobs:
                if writer == me:
                    mine = item
                for role, whole in _parts(item.shadow).items():
                    out = torch.empty(whole.shape, dtype=whole.dtype) if writer == me else None
                    if out is not None:
                        made[role] = out
                    for rank, region in self._sources(item, role):
                        if rank == me:
                            held = self._held(item, role).detach()
                            if out is not None:
                                copyable(out[region]).copy_(copyable(held))
                            else:
                                kept.append(_bytes(held).to(self._device))
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
            raise CheckpointError(f"another rank is gone, or its network: {error}") from error
        for place, memory in landed:
            copyable(place).copy_(copyable(memory.cpu().view(place.dtype).view(place.shape)))
        if mine is None:
            return None
        if isinstance(mine.shadow, Weight):
            return mine, Weight(made, mine.shadow.spec)
        return mine, made[""]

    def _held(self, item: Item, role: str) -> Tensor:
        """Return this rank's part of ``item``, or of its part ``role``."""
        tensor = item.shadow if item.name is None else local_of(self._sharded[item.name])
        if isinstance(tensor, Weight) and not isinstance(item.shadow, Weight):
            return tensor.values_of()
        return _parts(tensor)[role]

    def _sources(self, item: Item, role: str) -> list[tuple[int, Region]]:
        """Return the ranks that hold something of this part of the item, and the region of each; each place once."""
        shadow = item.shadow
        if shadow.numel() == 0:
            return []
        if item.name is None:
            return [(0, ())]
        found: dict[tuple[Range, ...], int] = {}  # slices are no keys
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
    """Return the parts of a Weight, or a plain tensor as its one part."""
    return tensor.parts if isinstance(tensor, Weight) else {"": tensor}


def _device(ranks: Ranks) -> torch.device:
    """Return the device whose memory the group can send: the CPU, unless it knows only others."""
    if ranks.is_alone or "gloo" in dist.get_backend_config(ranks.group) or "mpi" in dist.get_backend(ranks.group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor, made contiguous, as bytes."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
