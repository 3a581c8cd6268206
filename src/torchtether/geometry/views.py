"""Sizes and strides: the extent of a view, contiguous strides, and whether a view overlaps itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._dtypes import dtype_from_name, dtype_name
from ..errors import TieError
from ..torch_private.observers import cached

Shape = tuple[int, ...]


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first to the last in memory, both included; 0 if there are none.

    >>> extent((2, 3), (4, 1)), extent((), ()), extent((0, 3), (3, 1))
    (7, 1, 0)
    """
    if 0 in size:
        return 0
    return sum((count - 1) * step for count, step in zip(size, stride, strict=True)) + 1


def overlaps_itself(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two elements may share memory: some stride is less than the extent of the smaller strides.

    With such a view a small file could make a large tensor, and writing to one element would change another.
    """
    reach = 1
    for step, count in sorted((s, n) for n, s in zip(size, stride, strict=True) if n > 1):
        if step < reach:
            return True
        reach += step * (count - 1)
    return False


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill their extent without a gap or an overlap; True if there are none."""
    if 0 in size:
        return True
    step = 1
    for jump, count in sorted((t, n) for n, t in zip(size, stride, strict=True) if n > 1):
        if jump != step:
            return False
        step *= count
    return True


@cached
def contiguous_stride(shape: Shape) -> Shape:
    """Return the strides, in elements, of a contiguous tensor of ``shape``.

    >>> contiguous_stride((2, 0, 3))
    (3, 3, 1)
    """
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True)
class View:
    """Describe the geometry of an alias over its owner's memory.

    ``stride`` and ``offset`` count elements of ``dtype``; ``offset`` starts at the owner's first byte.

    >>> import torch
    >>> View(torch.float32, (3, 2), (1, 3)).to_json()
    {'dtype': 'float32', 'size': [3, 2], 'stride': [1, 3], 'offset': 0}
    """

    dtype: torch.dtype
    size: Shape
    stride: Shape
    offset: int = 0

    @property
    def overlaps_itself(self) -> bool:
        """Return whether two of its elements may share memory; see the function of the same name."""
        return overlaps_itself(self.size, self.stride)

    def to_json(self) -> dict[str, Any]:
        """Return the view as JSON values, which ``from_json`` reads."""
        return {
            "dtype": dtype_name(self.dtype),
            "size": list(self.size),
            "stride": list(self.stride),
            "offset": self.offset,
        }

    @staticmethod
    def from_json(record: Any) -> View:
        """Return the view that ``to_json`` wrote. Raise TieError for anything else."""
        if not isinstance(record, dict) or record.keys() != {"dtype", "size", "stride", "offset"}:
            raise TieError("a view record needs exactly dtype, size, stride and offset")
        size, stride, offset = record["size"], record["stride"], record["offset"]
        numbers = [*size, *stride, offset] if isinstance(size, list) and isinstance(stride, list) else [None]
        if any(type(number) is not int or not 0 <= number < 2**48 for number in numbers) or len(size) != len(stride):
            raise TieError(f"a view record holds a bad size {size!r}, stride {stride!r} or offset {offset!r}")
        return View(dtype_from_name(record["dtype"]), tuple(size), tuple(stride), offset)


def lies_in(view: View, owner: View) -> bool:
    """Return whether every byte of ``view`` is one of ``owner``, which is dense; its ``offset`` starts at its first.

    >>> import torch
    >>> owner = View(torch.float32, (2, 3), (3, 1))
    >>> lies_in(View(torch.float32, (3,), (1,), 3), owner), lies_in(View(torch.float32, (3,), (1,), 4), owner)
    (True, False)
    """
    count = math.prod(owner.size)
    reach = (view.offset + extent(view.size, view.stride)) * view.dtype.itemsize
    return extent(owner.size, owner.stride) == count and reach <= count * owner.dtype.itemsize
