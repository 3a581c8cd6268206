"""Calls of the decoding kernels: ranges of rows, indexed rows, and products of few rows of inputs."""

from __future__ import annotations

from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from .code_format import CodeFormat
from .serving import on

MOST_ROWS = 16
"""The most rows of inputs that one product takes."""

DECODED = (16, 256, 4)
ONE_ROW = (4, 1024, 4)
FEW_ROWS = (32, 128, 4)
"""Rows and columns of codes that a program processes at once, and its warps: to decode them, and in products.

Not measured: ``python -m tests.gpu --only tiles`` tries others.
"""


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
            codes.form,
            high,
            wide,
            _groups_in(codes.form, wide),
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
    is_one = count == 1
    high, most, warps = ONE_ROW if is_one else FEW_ROWS
    wide, across = _tile(codes.form, codes.columns, most)
    with on(out):
        _kernels().multiply_rows[(-(-rows // high),)](
            out,
            x,
            bias,
            count,
            x.stride(0),
            rows,
            *codes.arguments,
            codes.form,
            1 if is_one else MOST_ROWS,
            high,
            wide,
            across,
            codes.columns % wide == 0,
            num_warps=warps,
            enable_fp_fusion=True,
        )


@lru_cache(maxsize=4096)
def _tile(form: CodeFormat, columns: int, most: int) -> tuple[int, int]:
    """Return the columns of a tile of a product, at most ``most``, and its groups of columns."""
    wide = max(16, min(most, 1 << (columns - 1).bit_length()))
    return wide, _groups_in(form, wide)


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
