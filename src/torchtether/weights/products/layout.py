"""What the compiled kernels need to know of a Weight, found from its scheme and shape alone."""

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
from ...schemes import Affine, Codebook, ScaledFloat, Scheme
from ...schemes.scaled_float import ELEMENTS
from ...schemes.tables import DYNAMIC

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels take as inputs and give as outputs, by their number in ``layout.h``."""

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

SLOTS = 5
"""How many parts the kernels take at most: codes, scale, zero points, and two more."""


KINDS = ("INT8", "UINT8", "E4M3", "E5M2", "TABLE4", "INT4")
"""Kinds of codes, in the order of ``Codes`` in ``layout.h``."""


@dataclass(eq=False, slots=True)
class Layout:
    """How the kernels see the parts of a two-dimensional Weight.

    ``parts`` names the parts in the order in which the kernels take them; which dtype and how many elements each must
    have stands in ``fields``, which are those of ``Layout`` in ``layout.h``. ``can_multiply`` is false where only
    decoding is possible. ``native`` is the same for the compiled room, made when it is first asked for (``bound``).
    """

    kind: str
    parts: tuple[str, ...]
    can_multiply: bool
    fields: dict[str, Any]
    native: Any = None
    choices: dict[torch.dtype, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    """What ``table.py`` has answered about it."""
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
        """Return the names under which a Weight holds the parts."""
        return tuple(sys.intern(PREFIX + name) for name in self.parts)

    def pick_from(self, weight: Any) -> tuple[Tensor, ...]:
        """Return the parts of a Weight, in the order in which the kernels take them."""
        return self.values_of(weight.__dict__)

    def bound(self) -> Any:
        """Return ``native``, or ``None`` where nothing compiled is there."""
        if self.native is None and (module := compiled.native()) is not None:
            self.native = module.Layout(self.attributes, **self.fields)
        return self.native


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
        made.fields["activations"] = 1 if activations == "int8" else 2
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
        fields["global_scale"] = 2 if scheme.global_divides else 1
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
    counts, types, parts = [0] * SLOTS, [-1] * SLOTS, []
    layout = scheme.layout(shape)
    for i, name in enumerate(names):
        part = layout.get(name or "")
        if name is not None and part is not None and part.dtype is not None:
            types[i], counts[i] = _NUMBERS[part.dtype], math.prod(part.shape)
            parts.append(name)
    described = {
        "kind": KINDS.index(kind),
        "rows": rows,
        "columns": columns,
        "row_bytes": -(-columns // 2) if nibbled else columns,
        "group": group,
        "groups": -(-columns // group),
        "height": height,
        "nested": 0,
        "global_scale": 0,
        "activations": 0,
        "offset": 0.0,
        "unit": 1.0,
        "table": table,
        "dynamic": DYNAMIC if fields["scale"] == _NESTED else (),
        "counts": counts,
        "types": types,
        "most": (),
        **fields,
    }
    can_multiply = group >= columns or group % 128 == 0 or group in ((8, 16, 32, 64) if nibbled else (32, 64))
    return Layout(kind, tuple(parts), can_multiply, described)
