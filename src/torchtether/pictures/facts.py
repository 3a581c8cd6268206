"""The facts of a storage map: every tensor, every storage, and the place of each tensor in its storage."""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry.views import Shape
from ..weights.spec import Tie


@dataclass(frozen=True, slots=True)
class Lane:
    """Describe one plain tensor in a storage; ``start`` and ``stop`` are bytes from the storage's first.

    ``owner`` is the index, in its group, of the tensor that the lane is or is a part of; ``part`` names the part.
    ``is_dense`` says that it covers every byte from ``start`` to ``stop``.
    """

    owner: int
    part: str
    dtype: str
    shape: Shape
    stride: Shape
    layout: str
    start: int
    stop: int
    is_dense: bool = True


@dataclass(frozen=True, slots=True)
class Storage:
    """Describe one storage in memory, or in a file at the place ``where``. ``identity`` is 0 if it is not known."""

    nbytes: int
    device: str
    lanes: tuple[Lane, ...]
    where: str = ""
    identity: int = 0

    @property
    def reached(self) -> int:
        """Return the number of bytes that some tensor covers; the rest is allocated but unused."""
        total, end = 0, 0
        for lane in sorted(self.lanes, key=lambda lane: lane.start):
            total += max(0, lane.stop - max(lane.start, end))
            end = max(end, lane.stop)
        return total


@dataclass(frozen=True, slots=True)
class Held:
    """Describe one tensor object under all of its names; ``kind`` is "parameter", "buffer" or "tensor".

    ``scheme`` is that of a Weight, or the class of another wrapper; ``decoded`` are the bytes of its decoded values.
    ``nbytes`` counts the bytes of its elements, or of its parts. ``note`` is an additional remark.
    """

    names: tuple[str, ...]
    kind: str
    dtype: str
    shape: Shape
    stride: Shape
    layout: str
    device: str
    nbytes: int
    scheme: str = ""
    decoded: int = 0
    requires_grad: bool = False
    note: str = ""
    identity: int = 0


@dataclass(frozen=True, slots=True)
class StorageGroup:
    """Hold tensors that share storages, directly or through each other; most groups hold one of each.

    ``ties`` are those of tensors that share elements; tensors at different places of one storage are not tied.
    """

    tensors: tuple[Held, ...]
    storages: tuple[Storage, ...]
    ties: tuple[Tie, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes for storage in self.storages)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for held in self.tensors for name in held.names)


def layout_of(shape: Shape, stride: Shape) -> str:
    """Return the layout in a word: contiguous, transposed, permuted, strided, expanded or overlapping.

    >>> layout_of((2, 3), (3, 1)), layout_of((3, 2), (1, 3)), layout_of((2, 3), (6, 1)), layout_of((2, 3), (0, 1))
    ('contiguous', 'transposed', 'strided', 'expanded')
    """
    steps = [(jump, size) for size, jump in zip(shape, stride, strict=True) if size != 1]
    if 0 in shape:
        return "contiguous"
    if any(jump == 0 for jump, _ in steps):
        return "expanded"
    ordered, reach, is_dense = sorted(steps), 1, True
    for jump, size in ordered:
        if jump < reach:
            return "overlapping"
        is_dense = is_dense and jump == reach
        reach = jump * (size - 1) + reach
    if not is_dense:
        return "strided"
    if steps == ordered[::-1]:
        return "contiguous"
    return "transposed" if len(steps) == 2 else "permuted"
