"""Whole rows of numbers to codes, scales and zero points, in one compiled call: from memory, or straight from a file.

``Recipe`` is what ``encode.h`` calls so: how one scheme encodes the rows of one tensor, in the words of the loops.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from .loops import DTYPES, can_read, library_for, note_written


class Recipe(ctypes.Structure):
    """How the rows of a tensor are encoded; ``parts`` are the names of the codes, the scales and the zero points."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("columns", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("span", ctypes.c_float),
        ("unit", ctypes.c_float),
        ("lowest", ctypes.c_float),
        ("highest", ctypes.c_float),
        ("is_symmetric", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("zero_offset", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("mantissa", ctypes.c_int32),
        ("bias", ctypes.c_int32),
        ("edges", ctypes.c_float * 15),
        ("order", ctypes.c_uint8 * 16),
        ("is_ordered", ctypes.c_int32),
    )
    parts: tuple[str, ...]
    row: int
    """Bytes of one row, as it is read."""


AFFINE, FLOAT8, NEAREST = range(3)


def recipe(
    kind: int,
    dtype: torch.dtype,
    columns: int,
    width: int,
    *,
    parts: tuple[str, ...],
    bits: int,
    thresholds: tuple[float, ...] = (),
    order: tuple[int, ...] = tuple(range(16)),
    **more: float,
) -> Recipe | None:
    """Return a recipe for rows of ``columns`` numbers of ``dtype``, in runs of ``width``.

    ``None`` if the loops know no such.

    ``more`` are fields of ``Recipe``: for AFFINE ``span``, ``unit``, ``lowest``, ``highest``, ``offset`` and, where
    there are zero points, ``zero_offset``; for FLOAT8 ``span``, ``lowest``, ``highest``, ``mantissa`` and ``bias``; for
    NEAREST ``thresholds`` and ``order``, as ``encode_nearest`` has them.
    """
    if dtype not in DTYPES or columns < 1 or bits not in (4, 8) or (bits == 4 and width % 2 and width < columns):
        return None
    made = Recipe(kind=kind, dtype=DTYPES[dtype], columns=columns, width=width, bits=bits, unit=1.0)
    made.stride = -(-columns * bits // 8)
    made.is_symmetric = len(parts) == 2
    for name, value in more.items():
        setattr(made, name, value)
    made.edges[:] = (*thresholds, *[float("inf")] * (15 - len(thresholds)))
    made.order[:] = (*order, *[0] * (16 - len(order)))
    made.is_ordered = tuple(order) == tuple(range(len(order)))
    made.parts, made.row = parts, columns * dtype.itemsize
    return made


def encode_rows(recipe: Recipe | None, values: Tensor, parts: Mapping[str, Tensor]) -> bool:
    """Return whether ``parts`` hold the codes and scales of ``values``; if not, they hold anything.

    They do not where the loops are not at hand, or a number is not finite.
    """
    if recipe is None or not can_read(values):
        return False
    places = [parts[name] for name in recipe.parts]
    library = library_for(values, *places)
    if library is None or not all(map(Tensor.is_contiguous, places)):
        return False
    rows = values.nbytes // recipe.row
    made: int = library.tt_encode(ctypes.addressof(recipe), values.data_ptr(), rows, *_addresses(recipe, places))
    for place in places:
        note_written(place)
    return bool(made)


def encode_file(
    recipe: Recipe | None, descriptor: int, at: int, rows: int, space: Tensor, parts: Mapping[str, Tensor]
) -> bool:
    """Encode ``rows`` that the file holds from byte ``at`` on, read through ``space`` piece by piece.

    It is also not done where the file cannot be read.
    """
    if recipe is None:
        return False
    places = [parts[name] for name in recipe.parts]
    library = library_for(space, *places)
    if library is None or not all(map(Tensor.is_contiguous, places)):
        return False
    made: int = library.tt_encode_file(
        *(ctypes.addressof(recipe), descriptor, at, rows, space.data_ptr(), space.nbytes, *_addresses(recipe, places))
    )
    return bool(made)


def _addresses(recipe: Recipe, places: list[Tensor]) -> tuple[int, int | None, int]:
    """Return the addresses of scales, zero points and codes."""
    codes, scale, *zero = places
    return scale.data_ptr(), zero[0].data_ptr() if zero else None, codes.data_ptr()
