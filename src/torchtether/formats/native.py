"""Our own format: part ``p`` of the Weight ``n`` is the plain tensor ``n.p``; the record says scheme and shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..files import part_key
from ..geometry.views import Shape
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .entry import Contents, Entry, Found
from .evidence import Evidence

name = "native"
evidence = Evidence(record=True)


def recognise(contents: Contents) -> Found | None:
    """Return the Weights in the record, by name; ``None`` if there are none."""
    weights = contents.record.weights
    if not weights:
        return None
    return Found(
        {
            name: Entry.of({part: part_key(name, part) for part in spec.scheme.layout(spec.base)}, spec)
            for name, spec in weights.items()
        }
    )


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts: they are stored as they are."""
    return dict(tensors)


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return what ``pack`` will store for a Weight of this spec: dtype and shape by key."""
    parts = spec.scheme.layout(spec.base)
    return {part_key(name, part): (what.dtype or spec.dtype, tuple(what.shape)) for part, what in parts.items()}


def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Return the tensors to store for ``weight``, by key: the inverse of ``recognise`` and ``unpack``.

    >>> import torch, torchtether as tt
    >>> sorted(pack("w", tt.Weight.encode(torch.eye(4), tt.int8())))
    ['w.qdata', 'w.scale']
    """
    assert isinstance(weight, Weight)
    return {part_key(name, part): tensor.detach() for part, tensor in weight.parts.items()}


def announce(specs: Mapping[str, WeightSpec], plain: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Return nothing: the record in the file itself says it."""
    return {}
