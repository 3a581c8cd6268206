"""Rules for queries about memory and ``requires_grad``; the storage of a Weight reports a size but has no memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...torch_private.tensors import typed_storage
from ..dispatch import FOLDS, rule
from ..inner import empty_storage
from ..weight import Weight
from ..wrapping import REQUIRES_GRAD


@rule(Tensor.untyped_storage)
def untyped_storage(op: Any, weight: Weight) -> Any:
    """Return a storage whose size and identity tools may read; ops that need its memory raise UnsupportedOpError."""
    return empty_storage(weight)


@rule(Tensor.storage, typed_storage)
def storage(op: Any, weight: Weight) -> Any:
    """Return the same storage, typed, for deprecated code."""
    return empty_storage(weight, op)


_NOWHERE = 1 << 55
"""A bit that no address of a process has on x86-64 or ARM: a mistaken read there faults instead of reading codes."""


@rule(Tensor.data_ptr)
def data_ptr(op: Any, weight: Weight) -> int:
    """Return a number that identifies the memory: equal for Weights with the same first part, 0 on ``meta``.

    It is the address of the memory only for a transparent scheme.  Tools such as accelerate find tied tensors by this
    number.  Torch itself raises for a wrapper, or returns 0 for each, which tools take for one tensor.
    """
    first = next(iter(weight.parts.values()))
    address = first.data_ptr()
    return address if weight.scheme.transparent or not address else address | _NOWHERE


@rule(Tensor.share_memory_, Tensor.is_shared)
def shared(op: Any, weight: Weight) -> Any:
    """Call the Weight's own method where the method of ``Tensor`` was called."""
    return getattr(weight, op.__name__)()


@rule(REQUIRES_GRAD)
def requires_grad(op: Any, weight: Weight) -> bool:
    """Return whether the Weight requires grad; False where ``torch.export`` would set the answer on codes."""
    return weight._requires_grad_for(3)


FOLDS[REQUIRES_GRAD] = requires_grad  # AOTInductor reads it while it compiles
