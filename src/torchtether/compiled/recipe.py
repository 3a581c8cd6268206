"""Encoding whole rows to codes, scales and zero points in one compiled call, from memory or straight from a file.

``Recipe`` mirrors ``recipe`` of ``encoders.h``: the settings with which a loop encodes the rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loops import DTYPES, can_read, library_for, note_written
from .room import native


class Recipe(NamedTuple):
    """The settings of a loop; ``parts`` are the names of the codes, the scales and the zero points."""

    native: Any  # ``recipe`` of encoders.h; None without the compiled module
    fields: Mapping[str, Any]
    """The same settings by name, for encoders of other devices."""
    parts: tuple[str, ...]
    row: int
    """Bytes of one row of values."""


AFFINE, FLOAT8, NEAREST = range(3)
_POWERS = ("", "floor", "even", "rceil")
"""The roundings of e8m0 scales, in the order of ``encoders.h``."""


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
    power: str = "",
    top: int = 0,
    **more: float,
) -> Recipe | None:
    """Return a recipe for rows of ``columns`` numbers of ``dtype``, in runs of ``width``; ``None`` if no loop fits.

    ``more`` are fields of ``Recipe``: for AFFINE ``span``, ``unit``, ``lowest``, ``highest``, ``offset`` and, where
    there are zero points, ``zero_offset``; for FLOAT8 ``span``, ``lowest``, ``highest``, ``mantissa`` and ``bias``; for
    NEAREST ``thresholds`` and ``order``, as in ``encode_nearest``; and those of ``Search.fields``.  With ``power``, the
    rounding of e8m0 scales for codes up to ``span``, whose exponent is ``top``, ``thresholds`` are of magnitudes.
    """
    module = native()
    if dtype not in DTYPES or columns < 1 or bits not in (4, 8):
        return None
    if bits == 4 and width % 2 and width < columns:
        return None
    fields = {
        **dict.fromkeys(("span", "lowest", "highest", "offset", "zero_offset", "mantissa", "bias"), 0),
        "kind": kind,
        "dtype": DTYPES[dtype],
        "columns": columns,
        "width": width,
        "stride": -(-columns * bits // 8),
        "unit": 1.0,
        "is_symmetric": len(parts) == 2,
        "bits": bits,
        "edges": thresholds if power else _edges(thresholds),
        "order": order,
        "is_ordered": tuple(order) == tuple(range(len(order))),
        **_NO_SEARCH,
    }
    fields |= more
    own: dict[str, Any] = {"power": _POWERS.index(power), "top": top}
    if power:
        own |= {"kind": FLOAT8, "edges": _edges(())}  # codes of 4 bits are floats with one bit of mantissa
    made = None if module is None else module.Recipe(**(fields | own))
    return Recipe(made, fields | {"power": power, "top": top}, parts, columns * dtype.itemsize)


def _edges(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    return (*thresholds, *[float("inf")] * (15 - len(thresholds)))


_SEARCHED = ("bits", "lowest", "highest", "unit", "is_searched", "kept", "smallest", "levels", "larger")
_NO_SEARCH = {"is_searched": 0, "kept": 0, "smallest": 0.0, "levels": (), "larger": ()}


def fit_scales(
    x: Tensor, width: int, peaks: Tensor, scale: Tensor, zero: Tensor | None, fields: Mapping[str, Any]
) -> Tensor | None:
    """Return the scales, (R, groups) float32, found by a search for the runs of ``x`` (R, K).

    ``peaks`` are the largest magnitudes of the runs, ``scale`` the scales of their ranges, ``zero`` their zero points,
    all float32 and (R, groups); ``fields`` are the fields of a ``Search``, with those of ``Search.fields``.
    """
    library = library_for(x, peaks, scale)
    if library is None or not can_read(x) or len(fields["levels"]) > 16:
        return None
    unused = ("columns", "stride", "is_symmetric", "offset", "zero_offset", "mantissa", "bias", "power", "top")
    given: dict[str, Any] = dict.fromkeys(unused, 0)
    given |= {"span": 0.0, "order": (), "is_ordered": 1, "dtype": DTYPES[x.dtype], "width": width}
    given |= {"kind": NEAREST if fields["thresholds"] else AFFINE, "edges": _edges(fields["thresholds"])}
    made = library.Recipe(**given, **{name: fields[name] for name in _SEARCHED})
    found, peaks = scale.to(torch.float32, copy=True).contiguous(), peaks.contiguous()
    zero = None if zero is None else zero.contiguous()
    library.fit_scales(
        *(made, x.data_ptr(), 0, *x.shape, peaks.data_ptr(), None if zero is None else zero.data_ptr()),
        found.data_ptr(),
    )
    return found


def encode_rows(recipe: Recipe | None, values: Tensor, parts: Mapping[str, Tensor]) -> bool:
    """Write the codes and scales of ``values`` to ``parts``; return whether that was done, else they are undefined.

    It fails where no loop can run, or a number is not finite.
    """
    if recipe is None or recipe.native is None or not can_read(values):
        return False
    places = [parts[name] for name in recipe.parts]
    library = library_for(values, *places)
    if library is None or not all(map(Tensor.is_contiguous, places)):
        return False
    rows = values.nbytes // recipe.row
    made: int = library.encode(recipe.native, values.data_ptr(), rows, *_addresses(recipe, places))
    for place in places:
        note_written(place)
    return bool(made)


def encode_file(
    recipe: Recipe | None, descriptor: int, at: int, rows: int, space: Tensor, parts: Mapping[str, Tensor]
) -> bool:
    """Encode ``rows`` of a file from byte ``at`` on, read through the buffer ``space`` piece by piece.

    Returns as ``encode_rows`` does; it fails also where the file cannot be read.
    """
    if recipe is None or recipe.native is None:
        return False
    places = [parts[name] for name in recipe.parts]
    library = library_for(space, *places)
    if library is None or not all(map(Tensor.is_contiguous, places)):
        return False
    made: int = library.encode_file(
        *(recipe.native, descriptor, at, rows, space.data_ptr(), space.nbytes, *_addresses(recipe, places))
    )
    return bool(made)


def _addresses(recipe: Recipe, places: list[Tensor]) -> tuple[int, int | None, int]:
    """Return the addresses of scales, zero points and codes."""
    codes, scale, *zero = places
    return scale.data_ptr(), zero[0].data_ptr() if zero else None, codes.data_ptr()
