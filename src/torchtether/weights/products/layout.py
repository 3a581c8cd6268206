"""What the compiled kernels need to know of a Weight, found from its scheme and shape alone."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry.views import Shape
from ...schemes import Affine, Biased, Codebook, ScaledFloat, Scheme, SuperBlocks
from ...schemes.scaled_float import ELEMENTS
from ...schemes.tables import DYNAMIC

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels take as inputs and give as outputs, by their number in ``cpu.cpp``."""

_NUMBERS = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
    torch.float8_e5m2: 23,
    torch.float8_e4m3fn: 24,
    torch.float8_e8m0fnu: 44,
}
"""torch's own numbers of the dtypes of parts."""

PREFIX = "_part_"
"""Parts are attributes of a Weight under their names with this in front, which keeps them clear of Tensor's own."""

_SCALES = {**DTYPES, torch.float8_e8m0fnu: 3, torch.float8_e4m3fn: 4}
_ZEROS = {torch.int8: 5, torch.uint8: 6}
_NESTED = 7
_TYPES = {"e4m3": "E4M3", "e5m2": "E5M2", "e2m1": "TABLE4"}
_CODES = {"INT8": 0, "UINT8": 1, "E4M3": 2, "E5M2": 3, "TABLE4": 4, "TABLE8": 7}
_FAMILY = {"BIASED": 1, "BIASED_FIRST": 2, "SUPER_BLOCKS": 3}
STREAM = "STREAM"
"""The kind of all codes of 1 to 8 bits that no other kind suits; the others take the groups of ``avx2.h``."""

_DYNAMIC = (ctypes.c_float * 256)(*DYNAMIC)


SLOTS = 5
"""How many parts the kernels take at most: codes, scale, zero points, and two more."""


class Struct(ctypes.Structure):
    """``Layout`` of ``cpu.cpp``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "columns", "row_bytes", "group", "groups", "height", "nested")),
        *((name, ctypes.c_int32) for name in ("scale", "zero", "global_", "activations")),
        ("offset", ctypes.c_float),
        ("unit", ctypes.c_float),
        ("table", ctypes.c_float * 16),
        ("dynamic", ctypes.POINTER(ctypes.c_float)),
        ("counts", ctypes.c_int64 * SLOTS),
        ("types", ctypes.c_int32 * SLOTS),
        ("most", ctypes.c_int64 * len(DTYPES)),
        ("entries", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("bits", "source", "family", "arithmetic", "is_flat")),
        ("step", ctypes.c_float),
        ("levels", ctypes.POINTER(ctypes.c_float)),
        ("whole", ctypes.POINTER(ctypes.c_int8)),
    )


class Layout(NamedTuple):
    """How the kernels see the parts of a two-dimensional Weight.

    ``parts`` names the parts in the order in which the kernels take them; which dtype and how many elements each must
    have stands in ``struct``. ``can_multiply`` is false where only decoding is possible. ``choices`` is what
    ``table.py`` has answered about it, by dtype.
    """

    address: int  # of ``struct``; the kernels know that this comes first, and the attributes of the parts second
    attributes: tuple[str, ...]
    kind: str
    rows: int
    columns: int
    parts: tuple[str, ...]
    values_of: Callable[[Any], tuple[Tensor, ...]]
    choices: dict[torch.dtype, tuple[tuple[str, int], ...]]
    struct: Struct

    def pick_from(self, weight: Any) -> tuple[Tensor, ...]:
        """Return the parts of a Weight, in the order in which the kernels take them."""
        return self.values_of(weight.__dict__)


def layout_of(scheme: Scheme, shape: Shape, activations: str | None = None) -> Layout | None:
    """Return the layout of a Weight of ``scheme`` and ``shape``; ``None`` for what the kernels do not know.

    ``activations`` are what products round their inputs to; of those that no kernel knows, all refuse to multiply.

    >>> from torchtether.schemes import int4
    >>> layout_of(int4(), (8, 256)).kind, layout_of(int4(16), (8, 256)).kind
    ('INT4', 'STREAM')
    >>> layout_of(int4(), (8, 3, 256)) is None
    True
    """
    return _found(scheme, shape, activations)


@lru_cache(maxsize=4096)
def _found(scheme: Scheme, shape: Shape, activations: str | None) -> Layout | None:
    if len(shape) != 2 or 0 in shape:
        return None
    describe = _FAMILIES.get(type(scheme))
    made: Layout | None = describe(scheme, shape) if describe is not None else None
    if made is not None and activations is not None:
        made.struct.activations = 1 if activations == "int8" else 2
    return made


def _affine(scheme: Affine, shape: Shape) -> Layout | None:
    if scheme.act_order:
        return None
    is_signed = scheme.signed and scheme.bits == 8
    above = 0 if is_signed else 1 << (scheme.bits - 1)  # stored codes over signed ones
    source = "INT8" if is_signed else "UINT8"
    fields: dict[str, Any] = {
        "scale": _SCALES[scheme.scale_dtype],
        "unit": scheme.unit,
        "offset": float(above),
    }
    if not scheme.symmetric:
        zero_above = 0 if scheme.signed else 1 << (scheme.bits - 1)
        fields |= {"zero": _ZEROS[torch.int8 if scheme.signed else torch.uint8], "offset": float(above - zero_above)}
    kind = {4: "INT4", 8: source}.get(scheme.bits, STREAM)
    return _made(kind, scheme, shape, scheme.block, ("qdata", "scale", "zero_point"), fields, scheme.bits, source)


def _biased(scheme: Biased, shape: Shape) -> Layout | None:
    fields = {
        "scale": _SCALES[scheme.scale_dtype],
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
    fields = {"scale": _SCALES[scheme.scale_dtype], "global_": int(scheme.global_scale) + int(scheme.global_divides)}
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
    if scheme.flat and (columns % size or columns * scheme.bits % 8):  # blocks, or bytes, that lie across rows
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
    """Describe codes of ``bits`` bits, each of which means itself (``UINT8``, say) or what ``table`` has for it."""
    rows, columns = shape
    height, group = block[0] or rows, min(block[1] or columns, columns)
    if not (group >= columns or group % 128 == 0 or group in (32, 64)):
        kind = STREAM
    struct = Struct(rows=rows, columns=columns, row_bytes=-(-columns * bits // 8), group=group, zero=-1, unit=1.0)
    struct.groups, struct.height, struct.bits, struct.step = -(-columns // group), height, bits, 1.0
    if source == "TABLE":
        source = "TABLE4" if len(table) <= 16 else "TABLE8"
        _describe_levels(struct, table)
    else:
        struct.table[:] = range(16)
    struct.source = _CODES[source]
    for field, value in fields.items():
        setattr(struct, field, value)
    struct.dynamic = _DYNAMIC
    layout = scheme.layout(shape)
    parts: list[str] = []
    for i, name in enumerate((*names, *(None,) * (SLOTS - len(names)))):
        part = layout.get(name or "")
        if name is None or part is None or part.dtype is None:
            struct.types[i] = -1
        else:
            struct.types[i], struct.counts[i] = _NUMBERS[part.dtype], math.prod(part.shape)
            parts.append(name)
    attributes = tuple(sys.intern(PREFIX + name) for name in parts)
    address = ctypes.addressof(struct)
    return Layout(address, attributes, kind, rows, columns, tuple(parts), itemgetter(*attributes), {}, struct)


def _describe_levels(struct: Struct, table: tuple[float, ...]) -> None:
    """Write what codes stand for: as floats, and where all are small multiples of a power of two as those."""
    if len(table) <= 16:
        struct.table[: len(table)] = table
    else:
        struct.levels = (ctypes.c_float * 256)(*table)
    parts = max(value.as_integer_ratio()[1] for value in table)
    if len(table) <= 64 and max(map(abs, table)) * parts <= 127:
        struct.step = 1 / parts
        struct.whole = (ctypes.c_int8 * 64)(*(int(value * parts) for value in table))
