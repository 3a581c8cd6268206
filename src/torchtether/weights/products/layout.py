"""The descriptions of Weights for the compiled kernels, derived from scheme and shape alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ... import compiled
from ...geometry.views import Shape
from ...schemes import Affine, Biased, Codebook, ScaledFloat, Scheme, SuperBlocks
from ...schemes.scaled_float import ELEMENTS
from ...schemes.tables import DYNAMIC

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes of inputs and outputs of the kernels, with their numbers in ``layout.h``."""

_NUMBERS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e8m0fnu: 44,
}
"""torch's own numbers of the dtypes of parts."""

PREFIX = "_part_"
"""The prefix of the attributes of a Weight that hold its parts, so that they cannot clash with those of Tensor."""

SCALES = {**DTYPES, torch.float8_e8m0fnu: 3, torch.float8_e4m3fn: 4}
_ZEROS = {torch.int8: 5, torch.uint8: 6}
_NESTED = 7
_CODES = {"INT8": 0, "UINT8": 1, "E4M3": 2, "E5M2": 3, "TABLE4": 4, "TABLE8": 7}
_FAMILY = {"BIASED": 1, "BIASED_FIRST": 2, "SUPER_BLOCKS": 3, "ORDERED": 4}
_TYPES = {"e4m3": "E4M3", "e5m2": "E5M2", "e2m1": "TABLE4"}

SLOTS = 5
"""The most parts that the kernels take: codes, scale, zero points, and two more."""


STREAM = "STREAM"
"""The general kind, for codes of 1 to 8 bits; the other kinds are limited to the group sizes of ``rows.h``."""

KINDS = ("INT8", "UINT8", "E4M3", "E5M2", "TABLE4", "INT4", STREAM)
"""Kinds of codes, in the order of ``Codes`` in ``layout.h``."""


Rows = tuple[int, int] | None
"""A range of rows to decode, (start, stop); ``None`` for all."""


@dataclass(eq=False, slots=True)
class Layout:
    """The description of a two-dimensional Weight for the kernels.

    ``parts`` has the names of the parts in the order of the kernels' arguments; ``fields`` are those of ``Layout`` in
    ``layout.h``, with the dtype and the number of elements of each part. ``native`` is the same object in the compiled
    module, made at the first call of ``bound``.
    """

    kind: str
    parts: tuple[str, ...]
    fields: dict[str, Any]
    activations: str | None = None
    """The format to which products round their inputs; ``fields`` say whether the compiled module supports it."""
    native: Any = None
    choices: dict[Any, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    """The cached choices of ``table.py``: by dtype for the CPU, by dtype and device type for other devices."""
    values_of: Callable[[Any], tuple[Tensor, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.values_of = itemgetter(*self.attributes)

    @property
    def rows(self) -> int:
        return self.fields["rows"]  # type: ignore[no-any-return]

    @property
    def columns(self) -> int:
        return self.fields["columns"]  # type: ignore[no-any-return]

    @property
    def attributes(self) -> tuple[str, ...]:
        """Return the names of the attributes of a Weight that hold the parts."""
        return tuple(sys.intern(PREFIX + name) for name in self.parts)

    def pick_from(self, weight: Any) -> tuple[Tensor, ...]:
        """Return the parts of a Weight in the order of the kernels' arguments."""
        return self.values_of(weight.__dict__)

    def bound(self) -> Any:
        """Return ``native``; ``None`` without the compiled module."""
        if self.native is None and (module := compiled.native()) is not None:
            made = module.Layout(self.attributes, **self.fields)
            self.native = self.native or made  # another thread may have made one meanwhile, and set its rows
        return self.native


def layout_of(scheme: Scheme, shape: Shape, activations: str | None = None) -> Layout | None:
    """Return the layout of a Weight of ``scheme`` and ``shape``; ``None`` if the kernels do not support them.

    ``activations`` is the format to which products round their inputs; if a kernel does not support it, it refuses.

    >>> from torchtether.schemes import int4
    >>> layout_of(int4(), (8, 256)).kind, layout_of(int4(16), (8, 256)).kind
    ('INT4', 'STREAM')
    >>> layout_of(int4(), (8, 3, 256)) is None
    True
    """
    return _found(scheme.decoder, shape, activations)


@lru_cache(maxsize=4096)
def _found(scheme: Scheme, shape: Shape, activations: str | None) -> Layout | None:
    if len(shape) != 2 or 0 in shape:
        return None
    describe = _FAMILIES.get(type(scheme))
    made: Layout | None = describe(scheme, shape) if describe is not None else None
    if made is not None and activations is not None:
        is_known = activations == "int8" and made.fields["family"] != _FAMILY["ORDERED"]
        made.fields["activations"] = 1 if is_known else 2
        made.activations = activations
    return made


def _affine(scheme: Affine, shape: Shape) -> Layout | None:
    is_signed = scheme.signed and scheme.bits == 8
    above = 0 if is_signed else 1 << (scheme.bits - 1)  # the offset of stored codes from signed ones
    source = "INT8" if is_signed else "UINT8"
    fields: dict[str, Any] = {
        "scale": SCALES[scheme.scale_dtype],
        "unit": scheme.unit,
        "offset": float(above),
    }
    if not scheme.symmetric:
        zero_above = 0 if scheme.signed else 1 << (scheme.bits - 1)
        fields |= {"zero": _ZEROS[torch.int8 if scheme.signed else torch.uint8], "offset": float(above - zero_above)}
    kind = {4: "INT4", 8: source}.get(scheme.bits, STREAM)
    if scheme.act_order:
        kind, fields["family"] = STREAM, _FAMILY["ORDERED"]
    names = ("qdata", "scale", "zero_point", "g_idx")
    return _made(kind, scheme, shape, scheme.block, names, fields, scheme.bits, source)


def _biased(scheme: Biased, shape: Shape) -> Layout | None:
    fields = {
        "scale": SCALES[scheme.scale_dtype],
        "family": _FAMILY["BIASED_FIRST" if scheme.bias_first else "BIASED"],
        "arithmetic": DTYPES[scheme.arithmetic],
    }
    return _made(STREAM, scheme, shape, scheme.block, ("qdata", "scale", "bias"), fields, scheme.bits, "UINT8")


def _super_blocks(scheme: SuperBlocks, shape: Shape) -> Layout | None:
    fields = {
        "family": _FAMILY["SUPER_BLOCKS"],
        "offset": float(scheme.offset),
        "nested": scheme.super_block_size // scheme.block_size,
    }
    names = ("qdata", "scale", "min", "super_scale", "super_min")
    block, source = (1, scheme.block_size), "UINT8" if scheme.table is None else "TABLE"
    return _made(STREAM, scheme, shape, block, names, fields, scheme.bits, source, scheme.table or ())


def _scaled_float(scheme: ScaledFloat, shape: Shape) -> Layout | None:
    fields = {
        "scale": SCALES[scheme.scale_dtype],
        "global_scale": int(scheme.global_scale) + int(scheme.global_divides),
    }
    names, element = ("qdata", "scale", None, "global_scale"), ELEMENTS[scheme.element]
    kind = _TYPES.get(scheme.element, STREAM)
    source = "TABLE" if element.table else kind
    return _made(kind, scheme, shape, scheme.block, names, fields, element.bits, source, element.table)


def _codebook(scheme: Codebook, shape: Shape) -> Layout | None:
    fields: dict[str, Any] = {"scale": 0}
    if scheme.nested:
        fields |= {"scale": _NESTED, "nested": scheme.nested_block_size}
    names = ("qdata", "absmax", None, "nested_absmax", "nested_offset")
    columns, size = shape[1], scheme.block_size
    kind = "TABLE4" if scheme.bits == 4 else STREAM
    if scheme.flat and (columns % size or columns * scheme.bits % 8):  # blocks or bytes cross the ends of rows
        kind = STREAM
        fields |= {"is_flat": 1, "row_bytes": 0, "group": size, "groups": (columns - 1) // size + 2}
    return _made(kind, scheme, shape, (1, size), names, fields, scheme.bits, "TABLE", scheme.table)


_FAMILIES: dict[type, Callable[[Any, Shape], Layout | None]] = {
    Affine: _affine,
    Biased: _biased,
    SuperBlocks: _super_blocks,
    ScaledFloat: _scaled_float,
    Codebook: _codebook,
}


def _made(
    kind: str,
    scheme: Scheme,
    shape: Shape,
    block: tuple[int | None, int | None],
    names: tuple[str | None, ...],
    fields: dict[str, Any],
    bits: int,
    source: str,
    table: tuple[float, ...] = (),
) -> Layout:
    """Return the layout for codes of ``bits`` bits, which are integers (``UINT8``, say) or indices of ``table``."""
    rows, columns = shape
    height, group = block[0] or rows, min(block[1] or columns, columns)
    if not (group >= columns or group % 128 == 0 or group in (32, 64)):
        kind = STREAM
    counts, types, parts = [0] * SLOTS, [-1] * SLOTS, []
    layout = scheme.layout(shape)
    for i, name in enumerate(names):
        part = layout.get(name or "")
        if name is not None and part is not None and part.dtype is not None:
            types[i], counts[i] = _NUMBERS[part.dtype], math.prod(part.shape)
            parts.append(name)
    if source == "TABLE":
        source = "TABLE4" if len(table) <= 16 else "TABLE8"
    described: dict[str, Any] = {
        "kind": KINDS.index(kind),
        "rows": rows,
        "columns": columns,
        "row_bytes": -(-columns * bits // 8),
        "group": group,
        "groups": -(-columns // group),
        "height": height,
        "nested": 0,
        "zero": -1,
        "scale": 0,
        "global_scale": 0,
        "activations": 0,
        "offset": 0.0,
        "unit": 1.0,
        "dynamic": DYNAMIC if fields.get("scale") == _NESTED else (),
        "counts": counts,
        "types": types,
        "most": (),
        "least": (),
        "bits": bits,
        "source": _CODES[source],
        **dict.fromkeys(("family", "arithmetic", "is_flat"), 0),
        **_levels(table),
        **fields,
    }
    return Layout(kind, tuple(parts), described)


def _levels(table: tuple[float, ...]) -> dict[str, Any]:
    """Return the values of codes as floats and, if all are small multiples of a power of two, as integers."""
    is_short = len(table) <= 16
    parts = max((value.as_integer_ratio()[1] for value in table), default=1)
    is_whole = 0 < len(table) <= 64 and parts <= 1 << 30 and max(map(abs, table)) * parts <= 127
    return {
        "table": (table or tuple(range(16))) if is_short else (),
        "levels": () if is_short else table,
        "is_whole": is_whole,
        "step": 1 / parts if is_whole else 1.0,
        "whole": [int(value * parts) & 255 for value in table] if is_whole else (),
    }
