"""Calls of the Triton kernels, with the signatures of ``cpu.py``: products of few rows, and decoding, on a GPU.

Each returns ``None``, without computing, if the kernels do not fit; callers use torch ops then.
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
from ...schemes.tables import E2M1
from .layout import DTYPES, Layout, Rows

_SOURCES = {0: "signed", 1: "unsigned", 2: "e4m3", 3: "e5m2", 4: "table", 7: "table"}
_FAMILIES = ("simple", "biased", "biased_first", "super", "ordered")
_SCALES = {3: "e8m0", 4: "e4m3", 7: "nested"}
_GLOBALS = ("none", "multiplies", "divides")
_ROUNDED = ("float32", "bfloat16", "float16")
_E2M1 = bits_of(E2M1)
_TINY = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def linear(layout: Layout, parts: Sequence[Tensor], x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return ``x @ weight.T + bias`` by a kernel that reads the parts in place, outside of autograd.

        x (..., K) float32, bfloat16 or float16, up to 16 rows, any strides; bias (N,) of the same dtype
        result (..., N)

    Sums, with the bias, are float32 and rounded once to the dtype of ``x``. For two or more rows, decoded values are
    rounded to that dtype before the product, unless levels are integers or float8 and the sums of groups are scaled.
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


def linear_of_each(layout: Layout, parts: Sequence[Tensor], x: Tensor, ends: Tensor) -> Tensor | None:
    """Return the product of each row of ``x`` with the matrix of its group, of a weight that is a stack of matrices.

    x (M, K) float32, bfloat16 or float16    ends (G,) int32: the first row after each group
    result (M, N), zeros after the last group; the layout has G * N rows
    """
    if x.dtype not in DTYPES or ends.dtype is not torch.int32 or ends.dim() != 1 or ends.numel() == 0:
        return None
    if x.dim() != 2 or x.shape[1] != layout.columns or layout.rows % len(ends) or not serves(x, ends, *parts):
        return None
    codes = _codes(layout, parts)
    if codes is None:
        return None
    inputs = x.resolve_neg()
    inputs = inputs if inputs.stride(1) == 1 else inputs.contiguous()
    out = inputs.new_empty(x.shape[0], layout.rows // ends.shape[0])
    return out if decoding.multiply_each(codes, inputs, ends.contiguous(), out) else None


def decode(
    layout: Layout, parts: Sequence[Tensor], dtype: torch.dtype, rows: Rows = None, out: Tensor | None = None
) -> Tensor | None:
    """Return the ``rows``, with the bits of ``Scheme.decode``.

        (count of rows, K) of ``dtype``, which is float32, bfloat16 or float16

    The result is written to the beginning of ``out`` if that is given.
    """
    start, stop = rows or (0, layout.rows)
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
    """Return the decoded rows at ``index`` (int64 or int32, any shape and strides), with the bits of ``Scheme.decode``.

        (*index.shape, K) of ``dtype``, which is float32, bfloat16 or float16

    An index out of range gives a row of NaN.
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
"""One object per value, because Triton finds a kernel faster by the same object as at compilation."""


class _Known(NamedTuple):
    """The facts about a layout for calls: the code format, the sizes, the parts present, and their element counts."""

    form: CodeFormat
    sizes: tuple[int, int, int, int]
    is_there: tuple[bool, ...]
    counts: tuple[int, ...]


@lru_cache(maxsize=4096)
def _known(layout: Layout) -> _Known | None:
    """Return the facts about a layout; ``None`` if it has too many columns for 32 bits."""
    fields = layout.fields
    if layout.columns > WHOLE:
        return None
    table = bits_of(fields["levels"] or fields["table"]) if _SOURCES[fields["source"]] == "table" else ()
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
        table=table,
        is_e2m1=table == _E2M1 and scale in ("e8m0", "e4m3"),
        dynamic=bits_of(fields["dynamic"]),
    )
    is_there = tuple(kind >= 0 for kind in fields["types"])
    counts = tuple(count for count, there in zip(fields["counts"], is_there, strict=True) if there)
    columns, row_bytes, groups, height = (fields[name] for name in ("columns", "row_bytes", "groups", "height"))
    return _Known(_FORMS.setdefault(form, form), (columns, row_bytes, groups, height), is_there, counts)


def _codes(layout: Layout, parts: Sequence[Tensor]) -> decoding.Codes | None:
    """Return the parts as arguments of the kernels; ``None`` if they do not match the layout or have no memory."""
    known = _known(layout)
    if known is None:
        return None
    found = []
    for part, count in zip(parts, known.counts, strict=True):
        if part.numel() != count or not part.is_contiguous() or not part.data_ptr():
            return None
        # as bytes: Triton does not support e8m0, and old GPUs no float8
        found.append(part.view(torch.uint8) if part.dtype in _TINY else part)
    given = iter(found)
    slots = [next(given) if there else None for there in known.is_there]
    return decoding.Codes(known.form, (*slots, *known.sizes), known.sizes[0])
