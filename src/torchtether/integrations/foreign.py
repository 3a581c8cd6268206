"""Describe a parameter of another library as the Weight that it will become, without changing it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..errors import CheckpointError, ConversionError
from ..files import Record, Stored
from ..formats import Contents, Entry, Fitting, Format
from ..geometry.views import Shape
from ..weights.spec import WeightSpec

KEY = "m.weight"
"""The name that a described tensor has for a format."""

Parts = Callable[[], Mapping[str, Tensor]]


class Foreign(NamedTuple):
    """Describe one tensor of another library.

    spec        the spec of the Weight that holds its codes, without a tie
    parts       returns the parts, which may be copies
    attributes  names of the attributes that the library sets on the tensor
    inputs      describes how the library rounds inputs of products if the Weight does not; else empty
    """

    spec: WeightSpec
    parts: Parts
    attributes: Collection[str]
    inputs: str = ""


def described(
    format: Format,
    stored: Mapping[str, Tensor],
    *,
    shape: Shape,
    metadata: Mapping[str, str] | None = None,
    beside: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[WeightSpec, Parts]:
    """Return the spec of the weight ``KEY`` of ``shape`` that ``format`` reads in ``stored``, and its parts.

    Raises ConversionError if the format cannot read it.
    """
    tensors = {key: Stored(tensor.dtype, tuple(tensor.shape), 0) for key, tensor in stored.items()}
    contents = Contents(tensors, metadata or {}, Record(), beside or {}, stored.__getitem__)
    try:
        found = format.recognise(contents)
    except CheckpointError as error:
        raise ConversionError(error.what, fix=error.fix) from None
    entry: Entry | None = found.weights.get(KEY) if found is not None else None
    what = ""
    if found is None or entry is None or found.faults:
        what = "; ".join(found.faults.values()) if found else f"does not match the format {format.name!r}"
    elif entry.shape != shape and isinstance(format, Fitting):
        entry = format.fit(entry, shape)
    if what or entry is None or entry.shape != shape or entry.spec is None:
        what = what or f"has shape {shape}, and its rows do not consist of whole groups of codes"
        raise ConversionError(what, fix=f"Dequantize it with {format.name} first.")
    known, spec = entry, entry.spec

    def parts() -> Mapping[str, Tensor]:
        made = format.unpack(known, {role: stored[key] for role, key in known.keys.items()})
        return {role: made[role].contiguous() for role in spec.scheme.layout(spec.base)}

    return spec, parts
