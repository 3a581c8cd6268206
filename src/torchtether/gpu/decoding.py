"""Calls of the decoding kernels: ranges of rows, indexed rows, and products of few rows of inputs."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .code_format import CodeFormat
from .serving import on

MOST_ROWS = 16
"""The most rows of inputs that one product takes."""

FEWER_ROWS = 8
"""The most rows for which products whose sums are scaled have a kernel of their own: on an H100 0.8 to 0.95 of the time
of that for ``MOST_ROWS``; others take 1.15 of it."""

DECODED = (16, 256, 4)
"""Rows and columns of codes that a program decodes at once, and its warps."""

MANY = 8192
"""The least rows of a weight for which programs take more rows each: there are enough of them for the whole GPU."""

ONE_ROW = {"words": (8, 4), "table": (2, 1), "many of a table": (4, 1), "bytes": (2, 4), "e4m3": (8, 4)}
"""Rows of codes and warps of a program in a product of one row of inputs, by what codes are; each thread reads 16 bytes
of a row at once. A table is in the memory that warps share: a single one need not wait for others."""

OTHER_ROW = (4, 1024, 4)
"""Rows, columns and warps of a program in a product of one row of inputs by a less simple format."""

FEW_ROWS = {"": (16, 512, 4), "many of 8 bits": (32, 512, 4), "many of a table": (32, 128, 2), "e2m1": (32, 512, 4)}
"""Rows and columns of codes and warps of a program in a product of up to ``MOST_ROWS`` rows of inputs.

All were the fastest, or within 0.15 of it, on an H100, for 4096 x 4096 and 28672 x 8192 numbers;
``python -m tests.gpu --only tiles`` tries others.
"""

MOST_SUMS = 64
"""The most parts times rows of a tile, for each warp, with sums of their own: a part takes half a register a row."""

MAGIC = 0x4B000000
"""The bits of 2.0**23, an argument of the kernels: of a constant, the compiler would make one more instruction."""


class Codes(NamedTuple):
    """The arguments of the kernels for one weight.

    ``arguments`` are the parts, ``None`` for absent ones (codes, scale, zero points, ``extra`` and ``offset``, whose
    meaning depends on the scale and the family: see ``CodeFormat``), then the sizes: columns, bytes of a row of codes,
    groups of columns in a row, and the number of rows that share a scale.
    """

    form: CodeFormat
    arguments: tuple[Tensor | int | None, ...]
    columns: int


def decode(codes: Codes, out: Tensor, *, rows: int, start: int = 0, index: Tensor | None = None) -> None:
    """Write the rows from ``start`` on, or the rows at ``index``, to ``out``.

        out (count, K) float32, bfloat16 or float16, contiguous    index (count,) int64 or int32, contiguous

    An index outside of ``rows`` gives a row of NaN: an error would have to wait for the GPU.
    """
    if not out.numel():
        return
    high, wide, warps = DECODED
    grid = (-(-out.shape[0] // high) * -(-codes.columns // wide),)
    with on(out):
        _kernels().decode_rows[grid](
            out,
            index,
            start,
            out.shape[0],
            rows,
            *codes.arguments,
            MAGIC,
            codes.form,
            high,
            wide,
            _groups_in(codes.form, wide),
            False,
            num_warps=warps,
            enable_fp_fusion=False,
        )


def multiply(codes: Codes, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ values.T + bias`` to ``out``.

        x (M, K) float32, bfloat16 or float16, M at most MOST_ROWS, columns contiguous
        bias (N,) of the same dtype, contiguous    out (M, N) of it, contiguous

    Sums are float32, in an order that depends on sizes alone.
    """
    count, rows = out.shape
    if not out.numel():
        return
    form, columns = codes.form, codes.columns
    in_words = _is_in_words(codes)
    with on(out):
        if count == 1 and (one := tile_of_one(form, rows, columns)):
            high, wide, parts, warps = one
            _kernels().multiply_row[(-(-rows // high),)](
                out, x, bias, rows, *codes.arguments, MAGIC, form, high, wide, parts, in_words, num_warps=warps
            )
            return
        high, wide, parts, warps, is_after = tile_of_few(form, rows, columns, count)
        across = _groups_in(form, wide)
        _kernels().multiply_rows[(-(-rows // high),)](
            out,
            x,
            bias,
            count,
            x.stride(0),
            rows,
            *codes.arguments,
            MAGIC,
            form,
            1 if count == 1 else FEWER_ROWS if is_after and count <= FEWER_ROWS else MOST_ROWS,
            high,
            wide,
            across,
            in_words and across * 8 <= wide >= 128,
            parts,
            columns % wide == 0,
            is_after,
            _is_exact(form, x.dtype),
            num_warps=warps,
        )


def multiply_each(codes: Codes, x: Tensor, ends: Tensor, out: Tensor) -> bool:
    """Write the product of each row of ``x`` with the matrix of its group; return whether the format allows it.

        x (M, K) float32, bfloat16 or float16, columns contiguous    ends (G,) int32: the first row after each group
        out (M, N) of the dtype of ``x``, contiguous, 0 after the last group    codes of G * N rows

    Each row of inputs reads its matrix. None of the sizes depends on the groups.
    """
    count, rows = out.shape
    tile = tile_of_one(codes.form, rows, codes.columns)
    if tile is None or not 0 < count < 1 << 16 or not rows:  # CUDA starts no more programs along a second axis
        return False
    high, wide, parts, warps = tile
    with on(out):
        _kernels().multiply_each[(-(-rows // high), count)](
            out,
            x,
            ends,
            x.stride(0),
            rows,
            ends.shape[0],
            *codes.arguments,
            MAGIC,
            codes.form,
            high,
            wide,
            parts,
            _is_in_words(codes),
            1 << (ends.shape[0] - 1).bit_length(),
            num_warps=warps,
        )
    return True


def _is_simple(form: CodeFormat) -> bool:
    return form.family == "simple" and not form.is_flat


def _is_exact(form: CodeFormat, dtype: torch.dtype) -> bool:
    """Return whether ``dtype``, of 16 bits, holds levels times scales: float16 has not the exponents of e8m0."""
    halves = (torch.bfloat16, torch.float16) if form.scale == "e4m3" else (torch.bfloat16,)
    return form.is_e2m1 and _is_simple(form) and dtype in halves


def _is_in_words(codes: Codes) -> bool:
    """Return whether rows of codes consist of aligned words of 8 codes, each in one group."""
    form, first, row_bytes = codes.form, codes.arguments[0], codes.arguments[6]
    assert isinstance(first, Tensor)
    assert isinstance(row_bytes, int)
    is_fit = form.bits == 4 and form.group % 8 == 0 and _is_simple(form)
    return is_fit and row_bytes % 4 == 0 and first.data_ptr() % 4 == 0


@lru_cache(maxsize=4096)
def tile_of_one(form: CodeFormat, rows: int, columns: int) -> tuple[int, int, int, int] | None:
    """Return the tile of ``multiply_row``: rows, columns, parts of a row with a sum each, and warps.

    ``None`` if the format does not suit it.
    """
    if not _is_simple(form) or 8 % form.bits or form.group % 8 or form.group & (form.group - 1):
        return None
    kind = form.source if form.source in ("table", "e4m3") else "words" if form.bits == 4 else "bytes"
    high, warps = ONE_ROW["many of a table" if kind == "table" and rows >= MANY else kind]
    each = 16 * 8 // form.bits
    while warps > 1 and each * 32 * warps > columns:
        warps //= 2
    wide = each * 32 * warps
    return high, wide, wide // min(each, form.group), warps


@lru_cache(maxsize=4096)
def tile_of_few(form: CodeFormat, rows: int, columns: int, count: int) -> tuple[int, int, int, int, bool]:
    """Return the tile of ``multiply_rows``: rows, columns, parts of the columns with sums of their own, and warps.

    The last item tells whether sums are scaled, not values: each part is in one group then, and has a row of its own
    of the product. A part has at least 128 bits of each row: Triton's product lets each of four threads read 32 bits
    of it, as it sees through what unpacks the codes, and of fewer counts some twice.
    """
    if count == 1:
        high, most, warps = OTHER_ROW
        return high, max(16, min(most, 1 << (columns - 1).bit_length())), 1, warps, False
    kind = "many of a table" if form.source == "table" else "many of 8 bits" if form.bits == 8 else ""
    high, most, warps = FEW_ROWS["e2m1" if form.is_e2m1 else kind if rows >= MANY else ""]
    least = 128 // form.bits if 8 % form.bits == 0 else 16
    wide = max(least, min(most, 1 << (columns - 1).bit_length()))
    warps = parts = min(warps, wide // least)
    if not _is_simple(form) or form.source == "table":
        return high, wide, parts, warps, False
    if form.group % (wide // parts) == 0:
        return high, wide, parts, warps, True
    each = wide // form.group
    is_after = form.group >= least and wide % form.group == 0 and each % parts == 0 and each * high <= MOST_SUMS * warps
    return high, wide, each if is_after else parts, warps, is_after


@cache
def _kernels() -> ModuleType:
    return import_module(".decoding_kernels", __package__)  # which imports Triton


def _groups_in(form: CodeFormat, columns: int) -> int:
    """Return the number of groups in a tile of ``columns``, if all are equally wide; else ``columns``."""
    if form.is_flat or form.family == "ordered":
        return columns
    if form.group % columns == 0:
        return 1
    return columns // form.group if columns % form.group == 0 else columns
