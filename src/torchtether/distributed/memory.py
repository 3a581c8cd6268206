"""The memory of sharded units: bytes held by each rank, bytes gathered, and the peaks of a forward and a backward.

The peaks follow what FSDP2 does in torch 2.13 to 2.15, and agree with the allocations that the profiler records:

- an all-gather fills one flat buffer, which is copied out; in forward the buffer lives until the next unit is gathered
  (torch 2.15 frees it before the next unit is copied out, torch 2.13 after);
- a unit that is gathered in another dtype is cast before, shard by shard;
- in backward the preceding unit is prefetched, and the flat input of the last reduce-scatter still lives;
- autograd adds the gradients of a tied parameter at the end of backward, where two of them and their sum exist at once;
- the root, and units of several modules, stay gathered while other units run;
- a product with a Weight decodes it while its unit is gathered: all of it, or the rows that are decoded at once.

Less is needed where a kernel multiplies with the codes.  Decoding takes some hundred KiB of its own.
Activations and optimizer states are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..geometry.views import Shape
from ..schemes import Plain, Scheme
from ..torch_private.fsdp2 import frees_before_copy
from ..weights.ops.product import rows_of_piece
from ..weights.ops.sharding import rows_per_rank


@dataclass(frozen=True)
class UnitParameter:
    """Describe one parameter of a unit: its names, and the facts that determine its bytes."""

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    scheme: Scheme
    requires_grad: bool
    uses: int = 1
    """The number of gradients that autograd adds for it: one for each module that uses it."""
    views: tuple[str, ...] = ()
    """Names that are views of it (slices, transposes); they are not parameters any more once it is sharded."""

    @property
    def name(self) -> str:
        """Return its first name."""
        return self.names[0]

    @property
    def count(self) -> int:
        """Return its number of rows; a scalar, which cannot be sharded, counts as one."""
        return self.shape[0] if self.shape else 1

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """Return (start, stop) of the rows that ``rank`` holds, by the rule of ``torch.chunk``."""
        each = rows_per_rank(self.count, ranks)
        return min(rank * each, self.count), min((rank + 1) * each, self.count)

    def _size(self, rows: int, dtype: torch.dtype) -> int:
        """Return the bytes of ``rows`` rows in the scheme, with ``dtype`` as the dtype of their values."""
        return self.scheme.nbytes((rows, *self.shape[1:]) if self.shape else (), dtype)

    def shared_bytes(self) -> int:
        """Return the bytes of the parts that all rows share, and every rank holds whole."""
        parts = self.scheme.layout(self.shape).values()
        return sum(math.prod(p.shape) * (p.dtype or self.dtype).itemsize for p in parts if p.span == 0)

    def shard_bytes(self, ranks: int) -> int:
        """Return the bytes that each rank allocates: those of the largest shard, because FSDP2 pads the others."""
        return self._size(rows_per_rank(self.count, ranks), self.dtype)

    def held_bytes(self, rank: int, ranks: int) -> int:
        """Return the bytes of the rows that ``rank`` holds, without padding."""
        start, stop = self.rows(rank, ranks)
        return self._size(stop - start, self.dtype) if stop > start else 0

    def gathered_bytes(self, ranks: int, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of an all-gather's result: the padded rows of all ranks, floats in ``dtype``."""
        rows = rows_per_rank(self.count, ranks)
        return ranks * (self._size(rows, self._gathered_in(dtype)) - self.shared_bytes())

    def cast_bytes(self, ranks: int, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of the copy that a rank gives to an all-gather in ``dtype``; 0 if it gives its shard."""
        return self.gathered_bytes(ranks, dtype) // ranks if self._gathered_in(dtype) != self.dtype else 0

    def _gathered_in(self, dtype: torch.dtype | None) -> torch.dtype:
        is_plain = isinstance(self.scheme, Plain) and self.dtype.is_floating_point
        return dtype if dtype is not None and is_plain else self.dtype

    def decoded_bytes(self, dtype: torch.dtype | None = None, device: str = "cpu") -> int:
        """Return the bytes that a product on a type of device decodes of a Weight at once.

        A product decodes some rows of a matrix at a time, and tensors of other shapes whole.
        """
        if self.scheme.transparent or not self.shape:
            return 0
        dtype = dtype or self.dtype
        step = rows_of_piece(self.shape, dtype, device) if len(self.shape) == 2 else None
        return min(self.shape[0], step or self.shape[0]) * math.prod(self.shape[1:]) * dtype.itemsize

    def grad_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of one whole gradient; 0 if frozen."""
        return math.prod(self.shape) * (dtype or self.dtype).itemsize if self.requires_grad else 0

    def grad_shard_bytes(self, ranks: int, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of a rank's shard of the gradient, with padding."""
        return self.grad_bytes(dtype) // max(self.count, 1) * rows_per_rank(self.count, ranks)


@dataclass(frozen=True)
class Peaks:
    """Hold the peak bytes of whole parameters, decoded values and gradients beside the shards of a rank.

    ``forward_at`` and ``backward_at`` are the labels of the units in which the peaks occur.
    """

    forward: int
    forward_at: str
    backward: int
    backward_at: str


@dataclass(frozen=True)
class Cost:
    """Hold the bytes of one unit."""

    label: str
    gathered: int
    cast: int
    """Bytes of the copies in another dtype that each rank gives to the all-gather."""
    grads: int
    meeting: int
    """Extra bytes while autograd adds gradients of the largest tied parameter: a second gradient, and the sum."""
    scattered: int
    """Bytes of the flat input of the reduce-scatter."""
    shards: int
    """Bytes of the gradient shards that the reduce-scatter leaves on each rank."""
    decoded: int
    """Bytes of the values that the largest product with a Weight decodes at once."""
    stays: bool
    """Whether the unit stays gathered while other units run."""


def peaks(units: Sequence[Cost], *, keeps: bool = False) -> Peaks:
    """Return the peaks of a training step over ``units``, in the order in which they run, the root last.

    ``keeps`` means that units stay gathered after forward (``reshard_after_forward=False``); the root always does.
    """
    outer = [unit for unit in reversed(units) if unit.stays]
    inner = [unit for unit in units if not unit.stays]
    return Peaks(*_forward(outer, inner, keeps), *_backward(outer, inner, keeps))


def _forward(outer: Sequence[Cost], inner: Sequence[Cost], keeps: bool) -> tuple[int, str]:
    """Return the peak of a forward pass in bytes, and the label of the unit in which it occurs."""
    most, label, held, flat = 0, "", 0, 0
    for unit in (*outer, *inner):
        both = flat + 2 * unit.gathered
        if frees_before_copy():
            both = max(flat + unit.gathered + unit.cast, 2 * unit.gathered)
        if held + both > most:
            most, label = held + both, unit.label
        if not unit.stays and held + 2 * unit.gathered + unit.decoded > most:
            most, label = held + 2 * unit.gathered + unit.decoded, unit.label
        held += unit.gathered if unit.stays or keeps else 0
        flat = unit.gathered
    for unit in outer:  # after the other units have run: a tied head, for example
        if held + flat + unit.decoded > most:
            most, label = held + flat + unit.decoded, unit.label
    return most, label


def _backward(outer: Sequence[Cost], inner: Sequence[Cost], keeps: bool) -> tuple[int, str]:
    """Return the peak of a backward pass in bytes, and the label of the unit in which it occurs."""
    base = sum(unit.gathered for unit in outer)
    most, label = base + max((unit.gathered for unit in outer[1:]), default=0), outer[0].label if outer else ""
    most = max(most, base + max((unit.decoded for unit in outer), default=0))
    waiting = sum(unit.meeting // 2 for unit in outer)  # the head's gradient, until that of the embedding is added
    flat = done = 0
    for place, unit in reversed(list(enumerate(inner))):
        held = sum(other.gathered for other in inner[:place]) if keeps else 0
        before = inner[place - 1].gathered if place and not keeps else 0
        at = base + waiting + held + done + before + unit.grads
        at += max(flat + unit.gathered + max(unit.meeting, unit.decoded), unit.scattered)
        if at > most:
            most, label = at, unit.label
        flat, done = unit.scattered, done + unit.shards
    grads = sum(unit.grads for unit in outer)
    meeting, scattered = (max((getattr(unit, key) for unit in outer), default=0) for key in ("meeting", "scattered"))
    at = done + grads + max(flat + base + meeting, scattered)
    return (at, max(outer, key=lambda unit: unit.grads).label) if outer and at > most else (most, label)
