"""Calls of the Triton kernels, with the signatures of ``cpu.py``: products of few rows, and decoding, on a GPU.

Each answers ``None``, with nothing computed, where the kernels do not suit: torch ops are right.
None of them waits for the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...gpu import decoding, serves
from ...gpu.code_format import WHOLE, CodeFormat, bits_of
from .layout import DTYPES, Layout

_SOURCES = {0: "signed", 1: "unsigned", 2: "e4m3", 3: "e5m2", 4: "table", 7: "table"}
_FAMILIES = ("simple", "biased", "biased_first", "super", "ordered")
_SCALES = {3: "e8m0", 4: "e4m3", 7: "nested"}
_GLOBALS = ("none", "multiplies", "divides")
_ROUNDED = ("float32", "bfloat16", "float16")
_TINY = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by the kernel that reads the parts as they lie, without a graph.

        x (..., K) float32, bfloat16 or float16, up to 16 rows, any strides; bias (N,) of the same dtype
        result (..., N)

    Sums, with the bias, are float32 and rounded once to the dtype of ``x``. From two rows on, values are rounded to it
    before they are multiplied.
    """
    rows, columns = layout.rows, layout.columns
    if x.dtype not in DTYPES or x.shape[-1:] != (columns,) or x.numel() > decoding.MOST_ROWS * columns:
        return None
    if bias is not None and (bias.dtype is not x.dtype or bias.shape != (rows,)):
        return None
    if layout.fields["activations"] or not serves(x, *parts, *(() if bias is None else (bias,))):
        return None
    codes = _codes(layout, parts)
    if codes is None:
        return None
    inputs = x.resolve_neg() if x.is_neg() else x
    inputs = inputs if x.dim() == 2 else inputs.reshape(-1, columns)
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    out = inputs.new_empty(inputs.shape[0], rows)
    added = None if bias is None else bias.resolve_neg().contiguous()
    decoding.multiply(codes, inputs, added, out)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], rows)


def decode(
    layout: Layout,
    parts: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    start: int = 0,
    stop: int | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """Return the rows ``start`` to ``stop``, with the bits of ``Scheme.decode``.

        (stop - start, K) of ``dtype``, which is float32, bfloat16 or float16

    Written into the beginning of ``out`` where that is given.
    """
    stop = layout.rows if stop is None else stop
    if dtype not in DTYPES or not 0 <= start <= stop <= layout.rows:
        return None
    if not serves(*parts, *(() if out is None else (out,))) or (codes := _codes(layout, parts)) is None:
        return None
    shape = (stop - start, layout.columns)
    made = parts[0].new_empty(shape, dtype=dtype) if out is None else out[: stop - start]
    if made.shape != shape or made.dtype is not dtype or not made.is_contiguous():
        return None
    decoding.decode(codes, made, rows=layout.rows, start=start)
    return made


def gather(layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, index: Tensor) -> Tensor | None:
    """Return the rows that ``index`` (int64 or int32, any shape and strides) names, as ``Scheme.decode`` does.

        (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    An index that names no row gives a row of nan.
    """
    if dtype not in DTYPES or index.dtype not in (torch.int64, torch.int32):
        return None
    if not serves(index, *parts) or (codes := _codes(layout, parts)) is None:
        return None
    names = index.reshape(-1).contiguous()
    made = parts[0].new_empty((names.shape[0], layout.columns), dtype=dtype)
    decoding.decode(codes, made, rows=layout.rows, index=names)
    return made.view(*index.shape, layout.columns)


_FORMS: dict[CodeFormat, CodeFormat] = {}
"""One of those that are equal, for Triton finds a kernel sooner by the very object that it was compiled for."""


class _Known(NamedTuple):
    """What calls need of a layout: what kernels are compiled for, sizes, and how many elements which parts have."""

    form: CodeFormat
    sizes: tuple[int, int, int, int]
    is_there: tuple[bool, ...]
    counts: tuple[int, ...]


@lru_cache(maxsize=4096)
def _known(layout: Layout) -> _Known | None:
    """Return what follows from a layout, ``None`` where columns are too many for 32 bits."""
    fields = layout.fields
    if layout.columns > WHOLE:
        return None
    source, scale = _SOURCES[fields["source"]], _SCALES.get(fields["scale"], "float")
    form = CodeFormat(
        bits=fields["bits"],
        source=source,
        scale=scale,
        family=_FAMILIES[fields["family"]],
        rounds=_ROUNDED[fields["arithmetic"]],
        offset=fields["offset"],
        unit=fields["unit"],
        group=fields["group"] if fields["groups"] > 1 else WHOLE,
        nested=max(fields["nested"], 1),
        global_scale=_GLOBALS[fields["global_scale"]],
        is_flat=bool(fields["is_flat"]),
        table=bits_of(fields["levels"] or fields["table"]) if source == "table" else (),
        dynamic=bits_of(fields["dynamic"]),
    )
    is_there = tuple(kind >= 0 for kind in fields["types"])
    counts = tuple(count for count, there in zip(fields["counts"], is_there, strict=True) if there)
    columns, row_bytes, groups, height = (fields[name] for name in ("columns", "row_bytes", "groups", "height"))
    return _Known(_FORMS.setdefault(form, form), (columns, row_bytes, groups, height), is_there, counts)


def _codes(layout: Layout, parts: Sequence[Tensor]) -> decoding.Codes | None:
    """Return the parts as the kernels take them, ``None`` if they are not where the layout says."""
    known = _known(layout)
    if known is None:
        return None
    found = []
    for part, count in zip(parts, known.counts, strict=True):
        if part.numel() != count or not part.is_contiguous() or not part.data_ptr():
            return None
        # Triton knows no e8m0, and old GPUs no float8: all are bytes
        found.append(part.view(torch.uint8) if part.dtype in _TINY else part)
    given = iter(found)
    slots = [next(given) if there else None for there in known.is_there]
    return decoding.Codes(known.form, (*slots, *known.sizes), known.sizes[0])
