"""Encoding rows in one compiled call: to codes, scales and zero points, from memory or a file, or under given scales.

``Recipe`` mirrors ``recipe`` of ``encoders.h``: the settings with which a loop encodes the rows of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loops import DTYPES, can_read, library_for, note_written, one_per_run
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
_SCALES = ("", "floor", "even", "rceil", "times whole", "over whole")
"""The kinds of scales, in the order of ``encoders.h``: float32, three roundings of e8m0, e4m3 with a number for all."""


def recipe(kind: int, dtype: torch.dtype, columns: int, width: int, *, bits: int, **settings: Any) -> Recipe | None:
    """Return a recipe for rows of ``columns`` numbers of ``dtype``, in runs of ``width``; ``None`` if no loop fits.

    ``settings`` are those of ``_recipe``.
    """
    if dtype not in DTYPES or columns < 1 or bits not in (4, 8) or (bits == 4 and width % 2 and width < columns):
        return None
    return _recipe(kind, dtype, columns, width, bits=bits, **settings)


def _recipe(
    kind: int,
    dtype: torch.dtype,
    columns: int,
    width: int,
    *,
    bits: int,
    parts: tuple[str, ...] = ("qdata", "scale"),
    thresholds: tuple[float, ...] = (),
    order: tuple[int, ...] = tuple(range(16)),
    scales: str = "",
    top: int = 0,
    whole: float = 1.0,
    **more: float,
) -> Recipe:
    """Return a recipe.

    ``more`` are fields of ``Recipe``: for AFFINE ``span``, ``unit``, ``lowest``, ``highest``, ``offset`` and, where
    there are zero points, ``zero_offset``; for FLOAT8 ``span``, ``lowest``, ``highest``, ``mantissa`` and ``bias``; for
    NEAREST ``thresholds`` and ``order``, as in ``encode_nearest``; and those of ``Search.fields``.  ``scales`` is one
    of ``_SCALES``, of e8m0 for codes up to ``span``, whose exponent is ``top``, of e4m3 with ``whole``, the number for
    all rows; then ``thresholds`` are of magnitudes.
    """
    module = native()
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
        "edges": thresholds if scales else _edges(thresholds),
        "order": order,
        "is_ordered": tuple(order) == tuple(range(len(order))),
        **_NO_SEARCH,
    }
    fields |= more
    own: dict[str, Any] = {"scales": _SCALES.index(scales), "top": top, "whole": whole}
    if scales and kind == NEAREST:
        own |= {"kind": FLOAT8, "edges": _edges(())}  # codes of 4 bits are floats with one bit of mantissa
    made = None if module is None else module.Recipe(**(fields | own))
    return Recipe(made, fields | {"scales": scales, "top": top}, parts, columns * dtype.itemsize)


def _edges(thresholds: tuple[float, ...]) -> tuple[float, ...]:
    return (*thresholds, *[float("inf")] * (15 - len(thresholds)))


_SEARCHED = ("bits", "thresholds", "lowest", "highest", "unit", "is_searched", "kept", "smallest", "levels", "larger")
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
    kind, given = NEAREST if fields["thresholds"] else AFFINE, {name: fields[name] for name in _SEARCHED}
    made = _recipe(kind, x.dtype, x.shape[1], width, **given).native
    found, peaks = scale.to(torch.float32, copy=True).contiguous(), peaks.contiguous()
    zero = None if zero is None else zero.contiguous()
    library.fit_scales(
        *(made, x.data_ptr(), 0, *x.shape, peaks.data_ptr(), None if zero is None else zero.data_ptr()),
        found.data_ptr(),
    )
    return found


def encode_affine(
    x: Tensor,
    width: int,
    scale: Tensor,
    zero: Tensor | None,
    codes: Tensor,
    *,
    divides: bool,
    limits: tuple[int, int],
    offset: int,
    bits: int,
) -> bool:
    """Write round(x / scale + zero), clipped to ``limits``, plus ``offset``, to ``codes`` of 4 or 8 bits."""
    lowest, highest = limits
    return bits in (4, 8) and _encode_under(
        AFFINE, x, width, scale, zero, codes, divides, bits=bits, lowest=lowest, highest=highest, offset=offset
    )


def encode_float8(x: Tensor, width: int, scale: Tensor, codes: Tensor, *, divides: bool, largest: float) -> bool:
    """Write x / scale (or times), clipped to ``largest``, to ``codes`` (R, K), float8_e4m3fn or float8_e5m2."""
    if codes.dtype not in _FLOAT8:
        return False
    mantissa, bias = _FLOAT8[codes.dtype]
    reach = {"lowest": -largest, "highest": largest}
    return _encode_under(FLOAT8, x, width, scale, None, codes, divides, bits=8, mantissa=mantissa, bias=bias, **reach)


_FLOAT8 = {torch.float8_e4m3fn: (3, 7), torch.float8_e5m2: (2, 15)}  # bits of the mantissa, bias of the exponent


def encode_nearest(
    x: Tensor,
    width: int,
    scale: Tensor,
    codes: Tensor,
    *,
    divides: bool,
    thresholds: tuple[float, ...],
    order: tuple[int, ...] | None = None,
) -> bool:
    """Write to ``codes``, two to a byte, the number of ascending ``thresholds`` below x * scale.

    With ``order`` the code is ``order[number]``; without, the number is that of the magnitude of x / scale (or times),
    plus 8 for the sign, and the thresholds are those of ``E2M1``.
    """
    if order is None:
        e2m1 = {"mantissa": 1, "bias": 1, "lowest": -6.0, "highest": 6.0}
        return _encode_under(FLOAT8, x, width, scale, None, codes, divides, bits=4, **e2m1)
    if divides or len(thresholds) > 15:
        return False
    return _encode_under(NEAREST, x, width, scale, None, codes, False, bits=4, thresholds=thresholds, order=order)


def _encode_under(
    kind: int,
    x: Tensor,
    width: int,
    scale: Tensor,
    zero: Tensor | None,
    codes: Tensor,
    divides: bool,
    **settings: Any,
) -> bool:
    """Write the codes of ``x`` under given scales; return whether a loop could."""
    library = library_for(x, scale, codes)
    if library is None or not can_read(x) or codes.stride(-1) != 1:
        return False
    (scale, stride), zero = one_per_run(scale), None if zero is None else one_per_run(zero)[0]
    rows, columns, step = *x.shape, codes.stride(0)
    if rows == 1 and columns % width == 0 and width * settings["bits"] % 8 == 0:  # threads share rows
        rows, columns, stride, step = columns // width, width, 1, width * settings["bits"] // 8
    scales = "" if divides or kind == NEAREST else "times whole"
    made = _recipe(kind, x.dtype, columns, width, scales=scales, stride=step, is_symmetric=zero is None, **settings)
    library.encode_under(
        *(made.native, x.data_ptr(), 0, rows, columns),
        *(scale.data_ptr(), None if zero is None else zero.data_ptr(), stride, codes.data_ptr()),
    )
    return True


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
