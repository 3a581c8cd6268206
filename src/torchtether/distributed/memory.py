"""What sharded units cost: bytes held by each rank, bytes gathered, and the peaks of a forward and a backward.

The model of the peaks is FSDP2's on torch 2.13, measured with the allocations of the profiler:
an all-gather fills one flat buffer and is copied out, so that a unit is there twice for a moment; the gradients of a
tied parameter meet in autograd, where two of them and their sum exist at once; gradients are copied into the flat
input of the reduce-scatter.  Activations and optimizer states are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..ops.sharding import rows_per_rank
from ..schemes import Plain, Scheme, Shape


@dataclass(frozen=True)
class UnitParameter:
    """One parameter of a unit: its names, and what is needed to count its bytes."""

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    scheme: Scheme
    requires_grad: bool
    uses: int = 1
    """How many gradients of it autograd adds up: one for each module that uses it."""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """The first of the rows that ``rank`` holds, and the one after the last: the rule of ``torch.chunk``."""
        each = rows_per_rank(self.shape[0], ranks)
        return min(rank * each, self.shape[0]), min((rank + 1) * each, self.shape[0])

    def _size(self, rows: int, dtype: torch.dtype) -> int:
        return self.scheme.nbytes((rows, *self.shape[1:]), dtype)

    def shared_bytes(self) -> int:
        """The bytes of the parts that every row needs, which are whole on each rank."""
        parts = self.scheme.layout(self.shape).values()
        return sum(math.prod(p.shape) * (p.dtype or self.dtype).itemsize for p in parts if p.span == 0)

    def shard_bytes(self, ranks: int) -> int:
        """What each rank allocates: the rows of the fullest one, because FSDP2 pads the others."""
        return self._size(rows_per_rank(self.shape[0], ranks), self.dtype)

    def held_bytes(self, rank: int, ranks: int) -> int:
        """The bytes of the rows that ``rank`` holds, without padding."""
        start, stop = self.rows(rank, ranks)
        return self._size(stop - start, self.dtype) if stop > start else 0

    def gathered_bytes(self, ranks: int, dtype: torch.dtype | None = None) -> int:
        """What an all-gather gives: the padded rows of all ranks, floats in ``dtype``."""
        own = dtype if dtype is not None and isinstance(self.scheme, Plain) and self.dtype.is_floating_point else None
        rows = rows_per_rank(self.shape[0], ranks)
        return ranks * (self._size(rows, own or self.dtype) - self.shared_bytes())

    def grad_bytes(self, dtype: torch.dtype | None = None) -> int:
        """The bytes of one whole gradient; 0 if frozen."""
        return math.prod(self.shape) * (dtype or self.dtype).itemsize if self.requires_grad else 0


@dataclass(frozen=True)
class Peaks:
    """The most bytes of whole parameters and gradients that a rank holds beside its shards, and when."""

    forward: int
    forward_at: str
    backward: int
    backward_at: str


@dataclass(frozen=True)
class Cost:
    """What one unit adds up to, in bytes."""

    label: str
    gathered: int
    grads: int
    meeting: int
    """What autograd holds more while the gradients of the largest tied parameter meet: another one, and their sum."""
    scattered: int
    """The flat input of the reduce-scatter."""


def cost(
    label: str,
    parameters: Sequence[UnitParameter],
    ranks: int,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Cost:
    """The bytes that gathering and reducing ``parameters`` together takes."""
    gathered = sum(one.gathered_bytes(ranks, param_dtype) for one in parameters)
    grads = sum(one.grad_bytes(param_dtype) for one in parameters)
    meeting = max((2 * one.grad_bytes(param_dtype) for one in parameters if one.uses > 1), default=0)
    reduce_dtype = reduce_dtype or param_dtype
    scattered = sum(
        one.grad_bytes(reduce_dtype) // max(one.shape[0], 1) * rows_per_rank(one.shape[0], ranks) * ranks
        for one in parameters
    )
    return Cost(label, gathered, grads, meeting, scattered)


def peaks(units: Sequence[Cost], root: Cost | None, *, keeps: bool = False) -> Peaks:
    """The peaks of a step over ``units``, in the order in which they run, and the root, which is gathered first.

    ``keeps`` says that units stay gathered after forward (``reshard_after_forward=False``); the root always does.
    """
    held = root.gathered if root else 0
    forward, forward_at = 2 * held, root.label if root else ""
    for unit in units:
        if held + 2 * unit.gathered > forward:
            forward, forward_at = held + 2 * unit.gathered, unit.label
        held += unit.gathered if keeps else 0
    base = root.gathered if root else 0
    pending = root.meeting // 2 if root else 0  # the head's gradient waits for that of the embedding
    backward, backward_at = (held, "") if keeps else (base, "")
    for place, unit in reversed(list(enumerate(units))):
        before = 0 if place == 0 or keeps else units[place - 1].gathered  # which FSDP2 gathers meanwhile
        later = sum(other.gathered for other in units[:place]) if keeps else 0
        at = max(
            2 * unit.gathered if not keeps else unit.gathered,
            unit.gathered + unit.grads + unit.meeting + before,
            unit.grads + unit.scattered + before,
        )
        if base + later + pending + at > backward:
            backward, backward_at = base + later + pending + at, unit.label
    if root:
        at = max(root.gathered + root.grads + root.meeting, root.grads + root.scattered)
        if at > backward:
            backward, backward_at = at, root.label
    return Peaks(forward, forward_at, backward, backward_at)
