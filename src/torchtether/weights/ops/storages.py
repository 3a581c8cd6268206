"""The storage that torch gives a Weight, which claims the bytes of the values and has no memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...torch_private.tensors import typed_storage
from ..dispatch import rule
from ..inner import empty_storage
from ..weight import Weight


@rule(Tensor.untyped_storage)
def untyped_storage(op: Any, weight: Weight) -> Any:
    """Return a storage whose size and identity tools may read; what needs its memory raises."""
    return empty_storage(weight)


@rule(Tensor.storage, typed_storage)
def storage(op: Any, weight: Weight) -> Any:
    """Return the same storage, typed, as deprecated code asks for it."""
    return empty_storage(weight, op)


@rule(Tensor.share_memory_, Tensor.is_shared)
def shared(op: Any, weight: Weight) -> Any:
    """Call the Weight's own method, also for a caller of ``Tensor``'s."""
    return getattr(weight, op.__name__)()
