"""Lifted ops, which run on each part and change no value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedOpError
from ..dispatch import refuse, rule
from ..weight import Weight
from .padding import copy_padding, keep_padding, keep_shard, whole_of
from .rows import first_rows

aten = torch.ops.aten


@rule(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default, kind="lifted")
def lift(op: Any, weight: Weight) -> Weight:
    """Return the same parts under a new wrapper."""
    return keep_padding(weight.map(op), weight)


@rule(aten._pin_memory.default, kind="lifted")
def pin_memory(op: Any, weight: Weight, device: Any = None) -> Weight:
    return copy_padding(weight.map(lambda part: op(part, device), cut=()), weight)


@rule(aten.is_pinned.default, kind="lifted")
def is_pinned(op: Any, weight: Weight, device: Any = None) -> bool:
    return all(op(part, device) for part in weight.parts.values())


@rule(aten.record_stream.default, kind="lifted")
def record_stream(op: Any, weight: Weight, stream: Any) -> None:
    """Tell the allocator that ``stream`` uses the memory of each part."""
    for part in weight.parts.values():
        op(part, stream)


@rule(aten.clone.default, kind="lifted")
def clone(op: Any, weight: Weight, *, memory_format: torch.memory_format | None = None) -> Weight:
    """Copy every part."""
    if weight.scheme.transparent:
        return weight.around(op(weight.values_of(), memory_format=memory_format))
    _check_format(weight, memory_format)
    return keep_shard(weight.map(lambda part: op(part, memory_format=torch.contiguous_format), cut=()), weight)


@rule(aten._to_copy.default, kind="lifted")
def to_copy(op: Any, weight: Weight, **kwargs: Any) -> Weight | Tensor:
    """Move the parts; a float dtype becomes the compute dtype, and the parts keep theirs."""
    whole = whole_of(weight)
    if whole is not weight and "memory_format" not in kwargs:  # padded for a collective: so must the copy be
        return first_rows(to_copy(op, whole, **kwargs), weight.shape[0])
    dtype = kwargs.pop("dtype", None) or weight.dtype
    if weight.scheme.transparent:
        return copy_padding(weight.around(op(weight.values_of(), dtype=dtype, **kwargs)), weight)
    memory_format = kwargs.pop("memory_format", None)
    if not dtype.is_floating_point or dtype.itemsize < 2 or dtype.is_complex:  # no compute dtype: convert the values
        return op(weight.values_of(), dtype=dtype, memory_format=memory_format, **kwargs)  # type: ignore[no-any-return]
    _check_format(weight, memory_format)
    parts = weight.scheme.convert(weight.map(lambda part: op(part, **kwargs)).parts, dtype)
    return copy_padding(weight.with_parts(parts, weight.spec.replace(dtype=dtype)), weight)


def _check_format(weight: Weight, memory_format: torch.memory_format | None) -> None:
    """Raise UnsupportedOpError if the copy must have other strides than ``weight``: the parts have one order."""
    is_same = memory_format is torch.contiguous_format and weight.spec.is_contiguous
    if not is_same and memory_format not in (None, torch.preserve_format):
        what = (
            f"a Weight of shape {tuple(weight.shape)}, stride {weight.stride()} cannot be laid out as {memory_format}"
        )
        raise UnsupportedOpError(what, fix="Call .dequantize() first.")


refuse(aten.set_.source_Tensor, aten.set_.source_Storage_storage_offset, why="would detach a Weight from its parts")
refuse(aten.resize_.default, why="cannot change the size of a Weight: its parts are fixed")
