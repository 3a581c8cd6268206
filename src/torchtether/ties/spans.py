"""The memory of a component as one tensor (its span), and members as views over the span or a conversion of it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ..errors import TieError
from ..geometry.blocks import blocks_of
from ..weights.weight import Weight
from .components import Component, Member, has_own_memory, same_parts


def span_tensor(component: Component) -> Tensor:
    """Return all memory of ``component`` as one 1-D tensor, in the common dtype, or bytes where dtypes differ.

    For a component without memory of its own (a sparse tensor, Weights over the same parts) return its first tensor,
    detached; ``member_view`` takes either.  Raises TieError for Weights that share only some of their parts.
    """
    first = component.members[0].tensor
    if component.nbytes == 0:
        check_same_parts(component)
        return first if is_lazy(first) else first.detach()
    dtype = component.dtype or torch.uint8
    for member in component.members:
        tensor = plain_values(member.tensor)
        offset = component.start - (blocks_of(tensor)[0].start - tensor.storage_offset() * tensor.element_size())
        storage = tensor.untyped_storage()
        if offset >= 0 and offset + component.nbytes <= storage.nbytes() and offset % dtype.itemsize == 0:
            count = component.nbytes // dtype.itemsize
            made = torch.empty(0, dtype=dtype, device=tensor.device)
            return made.set_(storage, offset // dtype.itemsize, (count,), (1,))
    raise TieError(
        "no storage holds all of these overlapping tensors", name=", ".join(component.names), fix="Clone one of them."
    )


def member_view(span: Tensor, member: Member) -> Tensor:
    """Return the tensor of ``member`` over ``span``, the ``span_tensor`` of its component or a conversion of that."""
    tensor, view = member.tensor, member.view
    if isinstance(tensor, Weight) and not tensor.scheme.transparent and isinstance(span, Weight):
        return span.map(Tensor.detach, span.spec.replace(shape=view.size, stride=view.stride, tie=tensor.tie))
    if not has_own_memory(tensor) or tensor.numel() == 0:
        return span if is_lazy(span) else span.detach()
    if member.as_bytes and span.dtype == torch.uint8 != view.dtype:
        start = span.storage_offset() + view.offset * view.dtype.itemsize
        made = torch.empty(0, dtype=view.dtype, device=span.device)
        made.set_(span.untyped_storage(), start // view.dtype.itemsize, view.size, view.stride)
    else:
        made = span.detach().as_strided(view.size, view.stride, span.storage_offset() + view.offset)
    if tensor.is_conj():
        made = made.conj()
    return tensor.around(made) if isinstance(tensor, Weight) else made


def plain_values(tensor: Tensor) -> Tensor:
    """Return the values of a Weight, without a copy where it is transparent; any other tensor as it is."""
    return tensor.values_of() if isinstance(tensor, Weight) else tensor


def check_same_parts(component: Component) -> None:
    """Raise TieError, for a component without memory of its own, unless all its members consist of the same tensors."""
    first, *others = component.members
    for other in others:
        if not same_parts(first.tensor, other.tensor):
            raise TieError(
                f"shares only a part of its memory with {first.names[0]}, so they cannot be converted together",
                name=other.names[0],
                fix="Call tt.untie on it first.",
            )
