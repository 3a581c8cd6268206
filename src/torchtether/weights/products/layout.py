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
from ...schemes import Affine, Codebook, ScaledFloat, Scheme
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
    can_multiply: bool
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
    >>> found = layout_of(int4(), (8, 256)); found.kind, found.can_multiply
    ('INT4', True)
    >>> layout_of(int4(), (8, 3, 256)) is None
    True
    """
    return _found(scheme, shape, activations)


@lru_cache(maxsize=4096)
def _found(scheme: Scheme, shape: Shape, activations: str | None) -> Layout | None:
    if len(shape) != 2 or 0 in shape:
        return None
    describe = {Affine: _affine, ScaledFloat: _scaled_float, Codebook: _codebook}.get(type(scheme))
    made: Layout | None = describe(scheme, shape) if describe is not None else None  # type: ignore[operator]
    if made is not None and activations is not None:
        made.struct.activations = 1 if activations == "int8" else 2
    return made


def _affine(scheme: Affine, shape: Shape) -> Layout | None:
    if scheme.act_order or scheme.bits not in (4, 8):
        return None
    above = 0 if scheme.signed and scheme.bits == 8 else 1 << (scheme.bits - 1)  # stored codes over signed ones
    kind = "INT4" if scheme.bits == 4 else "INT8" if scheme.signed else "UINT8"
    fields: dict[str, float] = {
        "scale": _SCALES[scheme.scale_dtype],
        "unit": scheme.unit,
        "offset": float(above),
        "zero": -1,
    }
    if not scheme.symmetric:
        held = torch.int8 if scheme.signed else torch.uint8
        fields |= {"zero": _ZEROS[held], "offset": float(above - (0 if scheme.signed else above))}
    return _made(kind, scheme, shape, scheme.block, ("qdata", "scale", "zero_point"), fields)


def _scaled_float(scheme: ScaledFloat, shape: Shape) -> Layout | None:
    if scheme.element not in _TYPES:
        return None
    fields: dict[str, float] = {"scale": _SCALES[scheme.scale_dtype], "zero": -1}
    if scheme.global_scale:
        fields["global_"] = 2 if scheme.global_divides else 1
    names = ("qdata", "scale", None, "global_scale")
    return _made(_TYPES[scheme.element], scheme, shape, scheme.block, names, fields, ELEMENTS[scheme.element].table)


def _codebook(scheme: Codebook, shape: Shape) -> Layout | None:
    if scheme.bits != 4 or (scheme.flat and (shape[1] % scheme.block_size or shape[1] % 2)):
        return None  # blocks, or bytes, that lie across rows
    fields: dict[str, float] = {"scale": 0, "zero": -1}
    if scheme.nested:
        fields |= {"scale": _NESTED, "nested": scheme.nested_block_size}
    names = ("qdata", "absmax", None, "nested_absmax", "nested_offset")
    return _made("TABLE4", scheme, shape, (1, scheme.block_size), names, fields, scheme.table)


def _made(
    kind: str,
    scheme: Scheme,
    shape: Shape,
    block: tuple[int | None, int | None],
    names: tuple[str | None, ...],
    fields: dict[str, float],
    table: tuple[float, ...] = (),
) -> Layout | None:
    rows, columns = shape
    height, group = block[0] or rows, min(block[1] or columns, columns)
    nibbled = kind in ("INT4", "TABLE4")
    if nibbled and group % 2 and group < columns:
        return None  # a group that begins within a byte
    struct = Struct(rows=rows, columns=columns, row_bytes=-(-columns // 2) if nibbled else columns, group=group)
    struct.groups, struct.height, struct.unit = -(-columns // group), height, 1.0
    for field, value in fields.items():
        setattr(struct, field, value)
    struct.table[: len(table)] = table
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
    return Layout(
        ctypes.addressof(struct),
        attributes,
        kind,
        rows,
        columns,
        tuple(parts),
        group >= columns or group % 128 == 0 or group in ((8, 16, 32, 64) if nibbled else (32, 64)),
        itemgetter(*attributes),
        {},
        struct,
    )
