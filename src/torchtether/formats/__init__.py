"""Published checkpoint formats: each a module of pure functions, tried in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..files import Header, Record
from ..spec import contiguous_stride
from . import native
from .entry import Entry, Format

FORMATS: tuple[Format, ...] = (native,)
"""In the order in which they are tried; the first that recognises a checkpoint has it."""

PLAIN = "safetensors"
"""The name of the format that stores every tensor as it is."""


def recognise(header: Header, record: Record, config: Mapping[str, Any]) -> tuple[Format | None, dict[str, Entry]]:
    """The format of a checkpoint (``None``: plain tensors), and every tensor in it by name, quantized or not."""
    for format in FORMATS:
        weights = format.recognise(header, record, config)
        if weights is not None:
            break
    else:
        format, weights = None, {}
    taken = {key for entry in weights.values() for key in entry.keys.values()}
    entries = dict(weights)
    for key, stored in header.tensors.items():
        if key not in taken:
            stride = record.strides.get(key) or contiguous_stride(stored.shape)
            entries[key] = Entry({"tensor": key}, stored.shape, stride, stored.dtype)
    return format, dict(sorted(entries.items()))


__all__ = ["FORMATS", "PLAIN", "Entry", "Format", "native", "recognise"]
