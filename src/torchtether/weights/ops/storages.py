"""What torch asks a Weight of the memory behind it: the storage, which claims its bytes and has none; its parts."""

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
    """Return a storage whose size and identity tools may read; what needs its memory raises."""
    return empty_storage(weight)


@rule(Tensor.storage, typed_storage)
def storage(op: Any, weight: Weight) -> Any:
    """Return the same storage, typed, as deprecated code asks for it."""
    return empty_storage(weight, op)


_NOWHERE = 1 << 55
"""No address of a process has this bit, on x86-64 or ARM: what reads there by mistake ends, and finds no codes."""


@rule(Tensor.data_ptr)
def data_ptr(op: Any, weight: Weight) -> int:
    """Return a number that tells memory apart: equal for what begins with one part, 0 on ``meta``.

    It is the address of the memory only for a transparent scheme.  Tools such as accelerate know tied tensors by this
    number; torch gives every wrapper 0, which they take for one tensor, or refuses.
    """
    first = next(iter(weight.parts.values()))
    address = first.data_ptr()
    return address if weight.scheme.transparent or not address else address | _NOWHERE


@rule(Tensor.share_memory_, Tensor.is_shared)
def shared(op: Any, weight: Weight) -> Any:
    """Call the Weight's own method, also for a caller of ``Tensor``'s."""
    return getattr(weight, op.__name__)()


@rule(REQUIRES_GRAD)
def requires_grad(op: Any, weight: Weight) -> bool:
    """Return whether the Weight requires grad; no to ``torch.export`` where it asks for its codes."""
    return weight._asked_requires_grad(3)


FOLDS[REQUIRES_GRAD] = requires_grad  # AOTInductor asks while it compiles
