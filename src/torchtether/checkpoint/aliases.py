"""Aliases of stored tensors: the views that ties record, and the comparison of two tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..geometry.views import View, contiguous_stride
from ..schemes import same_bits
from ..weights.weight import Weight


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, shape and dtype; Weights, the same parts and spec but the tie."""
    if isinstance(one, Weight) or isinstance(other, Weight):
        return (
            isinstance(one, Weight)
            and isinstance(other, Weight)
            and one.spec.replace(tie=None) == other.spec.replace(tie=None)
            and all(same_bits(part, other.parts[name]) for name, part in one.parts.items())
        )
    return same_bits(one, other)


def view_of(whole: Tensor, view: View | None) -> Tensor:
    """Return the alias of geometry ``view`` over the memory of ``whole``, its owner; ``whole`` itself for ``None``."""
    if view is None:
        return whole
    if isinstance(whole, Weight) and not whole.scheme.transparent:
        return _view_of_weight(whole, view)
    storage = whole.untyped_storage()
    start = whole.storage_offset() * whole.element_size() + view.offset * view.dtype.itemsize
    if start % view.dtype.itemsize:
        raise CheckpointError(f"a view of {view.dtype} cannot begin at byte {start}")
    made = torch.empty(0, dtype=view.dtype, device=whole.device)
    return made.set_(storage, start // view.dtype.itemsize, view.size, view.stride)


def _view_of_weight(whole: Weight, view: View) -> Weight:
    spec = whole.spec
    if len(view.size) == len(spec.shape) and sorted(view.size) == sorted(spec.shape) and view.offset == 0:
        return whole.map(Tensor.detach, spec.replace(shape=view.size, stride=view.stride))
    row = contiguous_stride(spec.shape)[0]
    rows: Weight = whole.detach().narrow(0, view.offset // row, view.size[0])  # type: ignore[assignment]
    return rows
