"""Published checkpoint formats: each is a module of pure functions, and they are tried in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._checks import describe
from ..errors import ArgumentError, CheckpointError
from ..geometry.views import Shape, contiguous_stride
from . import native
from .entry import (
    GUESSED,
    NOTHING,
    Contained,
    Contents,
    Entry,
    Fitting,
    ForLinear,
    Format,
    Found,
    Indexed,
    Variant,
    Writable,
    is_in_parts,
    may_recognise,
)
from .rows import ByRows, Cut, cut_rows

if TYPE_CHECKING:
    from .catalog import FORMATS, WRITABLE

PLAIN = "safetensors"
"""The name of the format that stores every tensor as it is."""


def __getattr__(name: str) -> Any:
    if name in ("FORMATS", "WRITABLE"):
        from . import catalog

        return getattr(catalog, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(format: Format) -> None:
    """Register ``format`` for reading, and for writing if it has the functions for it.

    A format is a module or object with ``name``, ``recognise`` and ``unpack``. One that can be written also has
    ``layout``, ``pack`` and ``announce``. It is tried right after our native format. ``tt.testing.check_format`` checks
    that it behaves as the other formats do.

    Raises CheckpointError, with nothing changed, if one of these is absent or the name is taken, and ArgumentError for
    a class.

    >>> from torchtether import formats
    >>> formats.register(formats.native)
    Traceback (most recent call last):
    torchtether.errors.CheckpointError: native: a format of this name exists already. Choose another name.
    """
    from .catalog import FORMATS, WRITABLE

    if isinstance(format, type):
        raise ArgumentError(f"is {describe(format)}, not a format", name="format", fix="Give an instance of it.")
    name = getattr(format, "name", None)
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"the {type(format).__name__} has no name", name="format", fix="Set its attribute name.")
    absent = [one for one in ("recognise", "unpack") if not callable(getattr(format, one, None))]
    writes = [one for one in ("layout", "pack", "announce") if callable(getattr(format, one, None))]
    if writes:
        absent += [one for one in ("layout", "pack", "announce") if one not in writes]
    if absent:
        raise CheckpointError(f"the format has no {absent[0]}()", name=name, fix="See torchtether.formats.Format.")
    if name == PLAIN or any(name == one.name for one in FORMATS):
        raise CheckpointError("a format of this name exists already", name=name, fix="Choose another name.")
    FORMATS.insert(1, format)
    if writes:
        WRITABLE.append(format)  # type: ignore[arg-type]


def recognise(contents: Contents) -> tuple[Format | None, Found, dict[str, Entry]]:
    """Return the format of a checkpoint, what the format found, and an entry for every tensor, by name.

    The format is ``None`` if all tensors are plain. Weights with a fault have no entry. Nor have keys that belong to
    the format alone, such as scales. Of a Weight that we wrote, the record has the compute dtype; otherwise the format
    infers it.

    Raises CheckpointError for a format that is known and not read.
    """
    from . import refused
    from .catalog import FORMATS

    for format in FORMATS:
        found = format.recognise(contents) if may_recognise(format, contents) else None
        if found is not None:
            break
    else:
        if contents.method or refused.evidence.is_in(contents):
            refused.check_refused(contents)
        format, found = None, Found()
    taken = {key for entry in found.weights.values() for key in entry.keys.values()} | found.spare
    entries = {name: entry for name, entry in found.weights.items() if name not in found.faults}
    strides: dict[Shape, Shape] = {}  # many tensors have few shapes
    recorded, new = contents.record.strides, tuple.__new__  # a third of the time of Entry(...)
    for key, (dtype, shape, _, _) in contents.tensors.items():
        if key not in taken and key not in found.faults:
            stride = strides.get(shape)
            if stride is None:
                stride = strides[shape] = contiguous_stride(shape)
            stride = recorded.get(key) or stride
            entries[key] = new(Entry, ({"tensor": key}, shape, stride, dtype, None, NOTHING))
    for name, dtype in contents.record.dtypes.items():
        if name in entries:
            entries[name] = _computing_in(dtype, entries[name])
    return format, found, {name: entries[name] for name in sorted(entries)}


def _computing_in(dtype: torch.dtype, entry: Entry) -> Entry:
    """Return the ``entry`` of a Weight with the compute dtype ``dtype``, unless its parts have that dtype, too."""
    spec = entry.spec
    if spec is None or None in {part.dtype for part in spec.scheme.layout(spec.base).values()}:
        return entry
    return entry._replace(dtype=dtype, spec=spec.replace(dtype=dtype))


def writable(name: str) -> Writable:
    """Return the format called ``name``, for writing. Raise CheckpointError if it cannot be written."""
    from .catalog import FORMATS, WRITABLE

    for format in WRITABLE:
        if format.name == name:
            return format
    known = ", ".join(repr(format.name) for format in WRITABLE)
    read_only = any(format.name == name for format in FORMATS)
    what = f"{name!r} can be read but not written" if read_only else f"unknown format {name!r}"
    raise CheckpointError(what, name="format", fix=f"Choose one of {known}.")


def with_quantization(config: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the quantization settings ``written`` of a new format, without those of the old one.

    >>> with_quantization({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, {})
    {'model_type': 'llama'}
    """
    kept: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("quantization_config", "compression_config", "quantization", "_quanto_qmap"):
            continue
        kept[key] = (
            with_quantization(value, {}) if key in ("text_config", "llm_config") and isinstance(value, dict) else value
        )
    return kept | dict(written)


__all__ = [
    "FORMATS",
    "GUESSED",
    "PLAIN",
    "WRITABLE",
    "ForLinear",
    "ByRows",
    "Contained",
    "Contents",
    "Cut",
    "Entry",
    "Fitting",
    "Format",
    "Found",
    "Indexed",
    "Variant",
    "Writable",
    "cut_rows",
    "is_in_parts",
    "native",
    "recognise",
    "register",
    "with_quantization",
    "writable",
]
