"""The memory blocks that tensors cover, and whether two of them share an element."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..torch_private.tensors import storage_id
from .views import extent

_HARDEST = 100_000
"""Steps of numpy's exact overlap test, a Diophantine problem. Pairs that need more steps count as overlapping."""

STOCK = (Tensor, nn.Parameter)
"""The types of nearly all tensors: no wrappers, never lazy."""


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """The bytes of one strided tensor, from ``start`` to ``stop`` in ``space``: a device, or one storage on ``meta``.

    Only blocks of the same space can be compared.
    """

    space: Hashable
    start: int
    stop: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def is_dense(self) -> bool:
        """Return whether the elements fill the bytes from ``start`` to ``stop`` without a gap or an overlap."""
        step = 1
        for stride, size in sorted((t, n) for n, t in zip(self.size, self.stride, strict=True) if n != 1):
            if stride != step:
                return False
            step *= size
        return True

    def overlaps(self, other: MemoryBlock) -> bool:
        """Return whether a byte belongs to an element of both."""
        if self.space != other.space or self.stop <= other.start or other.stop <= self.start:
            return False
        for outer, inner in ((self, other), (other, self)):
            if outer.start <= inner.start and inner.stop <= outer.stop and outer.is_dense:
                return True
        first = min(self.start, other.start)
        try:
            return bool(np.shares_memory(_ArrayInterface.of(self, first), _ArrayInterface.of(other, first), _HARDEST))  # type: ignore[arg-type]
        except np.exceptions.TooHardError:
            return True


class _ArrayInterface:
    """The geometry of a block at a made-up address, as an array that numpy compares but never reads."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface

    @staticmethod
    def of(block: MemoryBlock, first: int) -> Any:
        stride = tuple(step * block.itemsize for step in block.stride)
        address = (block.start - first + 4096, True)
        return np.asarray(
            _ArrayInterface(
                {
                    "version": 3,
                    "typestr": "|u1",
                    "data": address,
                    "shape": (*block.size, block.itemsize),
                    "strides": (*stride, 1),
                }
            )
        )


def is_strided(tensor: Tensor) -> bool:
    """Return whether ``tensor`` lies strided in one storage: it is not sparse, nested, lazy or a wrapper."""
    is_one = type(tensor) in STOCK or not (is_lazy(tensor) or hasattr(tensor, "__tensor_flatten__"))
    return is_one and tensor.layout == torch.strided and not tensor.is_nested


def blocks_of(tensor: Tensor) -> tuple[MemoryBlock, ...]:
    """Return the block of ``tensor``, or those of its inner tensors; none if it is empty or not strided."""
    is_stock = type(tensor) in STOCK
    if not is_stock and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = (getattr(tensor, name) for name in names)  # those of a DTensor include its device mesh
        return tuple(block for one in inner if isinstance(one, Tensor) for block in blocks_of(one))
    if not is_strided(tensor) or tensor.numel() == 0:
        return ()
    size, stride, itemsize = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    is_meta = tensor.is_meta if is_stock else tensor.untyped_storage().device.type == "meta"  # fake tensors too
    address: int = 0 if is_meta else tensor.data_ptr()
    space: Hashable = tensor.device
    if address == 0:  # on meta, or freed: the address is unknown, so only the storage objects can be compared
        space, address = storage_id(tensor), int(tensor.storage_offset()) * itemsize
    return (MemoryBlock(space, address, address + extent(size, stride) * itemsize, size, stride, itemsize),)


def unshared_spans(tensors: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """Return (start, nbytes) of each tensor that certainly shares no element with another, ``None`` for all others.

    Fast, because it compares addresses alone. The result is ``None`` for a tensor whose span overlaps another's, that
    is not a plain tensor, or that is empty: compare the blocks of those.
    """
    spans: list[tuple[int, int] | None] = [None] * len(tensors)
    places: list[tuple[int, int, int]] = []  # start, stop, and index of the tensor; -1 if it is not plain
    memories: dict[Hashable, tuple[int, int]] = {}  # of storages without address: index and bytes of their one tensor
    for i, tensor in enumerate(tensors):
        address = nbytes = 0
        if type(tensor) in STOCK and tensor.layout is torch.strided and not tensor.is_nested:
            address, nbytes = 0 if tensor.is_meta else tensor.data_ptr(), tensor.nbytes
        if address and nbytes:
            if not tensor.is_contiguous():
                nbytes = extent(tensor.shape, tensor.stride()) * tensor.element_size()
            places.append((address, address + nbytes, i))
        elif nbytes and tensor.is_contiguous():
            memory = storage_id(tensor)
            memories[memory] = (-1, 0) if memory in memories else (i, nbytes)
        else:
            for block in blocks_of(tensor):
                if isinstance(block.space, torch.device):
                    places.append((block.start, block.stop, -1))
                else:
                    memories[block.space] = -1, 0
    for i, nbytes in memories.values():
        if i >= 0:
            offset = int(tensors[i].storage_offset())
            spans[i] = offset * tensors[i].element_size() if offset else 0, nbytes
    places.sort()
    reached = 0
    for at, (start, stop, i) in enumerate(places):
        follows = places[at + 1][0] if at + 1 < len(places) else stop
        if i >= 0 and start >= reached and follows >= stop:
            spans[i] = start, stop - start
        if stop > reached:
            reached = stop
    return spans
