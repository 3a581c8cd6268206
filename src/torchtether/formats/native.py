"""Our own format: part ``p`` of the Weight ``n`` is the plain tensor ``n.p``; the record holds scheme and shape.

In files by ``save_pretrained`` of transformers or diffusers, the record is in ``quantization_config`` of
``config.json``. Those of diffusers have it in their metadata, too (``WEIGHTS``): variants share one ``config.json``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..files import part_key
from ..files.record import parse_weight_entries, parse_weights, part_keys
from ..geometry.views import Shape
from ..weights.spec import WeightSpec
from ..weights.weight import Weight
from .entry import Contents, Entry, Evidence, Found

name = "native"
METHOD = "torchtether"
"""The ``quant_method`` in ``config.json``."""

WEIGHTS = "torchtether.weights"
"""The key in the metadata of files for the record of all Weights, in this file or others."""

evidence = Evidence(methods=(METHOD,), metadata=(WEIGHTS,), record=True)


def recognise(contents: Contents) -> Found | None:
    """Return the Weights in the record, by name; ``None`` if there are none.

    Raises CheckpointError for an invalid record in the metadata or in ``config.json``.
    """
    weights = contents.record.weights or _beside(contents)
    if not weights:
        return None
    return Found({name: Entry.of(part_keys(name, spec), spec) for name, spec in weights.items()})


def _beside(contents: Contents) -> Mapping[str, WeightSpec]:
    """Return the Weights that metadata or ``config.json`` describe, except those that are stored as plain tensors.

    Tools that dequantize a model leave the description in its config.
    """
    where, entries = "config.json", contents.quantization.get("weights") if contents.method == METHOD else None
    if WEIGHTS in contents.metadata:
        where, entries = WEIGHTS, parse_weight_entries(contents.metadata[WEIGHTS], contents.tensors, name=WEIGHTS)
    if not isinstance(entries, Mapping):
        return {}
    in_parts = {name: entry for name, entry in entries.items() if name not in contents.tensors}
    return parse_weights(in_parts, contents.tensors, name=where)


def unpack(entry: Entry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts, which are the stored tensors."""
    return dict(tensors)


def layout(name: str, spec: WeightSpec) -> dict[str, tuple[torch.dtype, Shape]]:
    """Return dtype and shape, by key, of each tensor that ``pack`` stores for a Weight of this spec."""
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
    """Return the ``quant_method``, by which transformers finds our quantizer. The record in the files has the specs."""
    return {"config.json": {"quantization_config": {"quant_method": METHOD}}} if specs else {}
