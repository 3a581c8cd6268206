"""Published checkpoint formats: each a module of pure functions, tried in order."""

from __future__ import annotations

from ..spec import contiguous_stride
from . import bitsandbytes, fp8, mxfp4, native
from .entry import Contents, Entry, Format, Found

FORMATS: tuple[Format, ...] = (native, bitsandbytes, fp8, mxfp4)
"""In the order in which they are tried; the first that recognises a checkpoint has it."""

PLAIN = "safetensors"
"""The name of the format that stores every tensor as it is."""


def recognise(contents: Contents) -> tuple[Format | None, Found, dict[str, Entry]]:
    """The format of a checkpoint (``None``: plain tensors), what it found, and every tensor by name, quantized or not.

    Weights with a fault, and keys that only belong to the format, are not among the tensors.
    """
    for format in FORMATS:
        found = format.recognise(contents)
        if found is not None:
            break
    else:
        format, found = None, Found()
    taken = {key for entry in found.weights.values() for key in entry.keys.values()} | found.spare
    entries = dict(found.weights)
    for key, stored in contents.tensors.items():
        if key not in taken:
            stride = contents.record.strides.get(key) or contiguous_stride(stored.shape)
            entries[key] = Entry({"tensor": key}, stored.shape, stride, stored.dtype)
    return format, found, dict(sorted(entries.items()))


__all__ = ["FORMATS", "PLAIN", "Contents", "Entry", "Format", "Found", "native", "recognise"]
