"""The memory blocks that tensors cover, and whether two of them share an element."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..torch_private.tensors import storage_id
from .views import extent, is_dense

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
        return is_dense(self.size, self.stride)

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


def has_values(tensor: Tensor) -> bool:
    """Return whether the strided ``tensor`` has memory: it is not on meta, fake or freed."""
    if tensor.numel() == 0:
        return True
    is_meta = tensor.is_meta if type(tensor) in STOCK else tensor.untyped_storage().device.type == "meta"
    return not is_meta and tensor.data_ptr() != 0


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
