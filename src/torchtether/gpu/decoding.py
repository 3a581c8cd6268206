"""Calls of the decoding kernels: ranges of rows, indexed rows, and products of few rows of inputs."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from .code_format import CodeFormat
from .serving import on

MOST_ROWS = 16
"""The most rows of inputs that one product takes."""

DECODED = (16, 256)
ONE_ROW = (4, 1024)
FEW_ROWS = (32, 128)
"""Rows and columns of codes that a program takes at once: to decode them, and in products. Not measured."""


class Codes(NamedTuple):
    """A weight as the kernels take it: its parts, ``None`` where there is none, and its sizes.

    ``row_bytes`` are those of a row of codes, ``groups`` those of columns in a row, ``height`` rows have one scale. Of
    two more parts, ``extra`` and ``offset``, ``decoding_kernels.py`` says what they are.
    """

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    extra: Tensor | None
    offset: Tensor | None
    columns: int
    row_bytes: int
    groups: int
    height: int


def decode(
    form: CodeFormat, codes: Codes, out: Tensor, *, rows: int, start: int = 0, index: Tensor | None = None
) -> None:
    """Write the rows from ``start``, or those that ``index`` names, to ``out``.

        out (count, K) float32, bfloat16 or float16, contiguous    index (count,) int64 or int32, contiguous

    An index outside of ``rows`` gives a row of NaN: an error would have to wait for the GPU.
    """
    if not out.numel():
        return
    high, wide = DECODED
    grid = (-(-out.shape[0] // high) * -(-codes.columns // wide),)
    with on(out):
        _kernels().decode_rows[grid](
            out,
            index,
            start,
            out.shape[0],
            rows,
            *codes,
            form,
            high,
            wide,
            _groups_in(form, wide),
            enable_fp_fusion=False,
        )


def multiply(form: CodeFormat, codes: Codes, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write ``x @ values.T + bias`` to ``out``.

        x (M, K) float32, bfloat16 or float16, M at most MOST_ROWS, columns contiguous
        bias (N,) of the same dtype, contiguous    out (M, N) of it, contiguous

    Sums are float32, in an order that depends on sizes alone.
    """
    count, rows = out.shape
    if not out.numel():
        return
    is_one = count == 1
    high, wide = ONE_ROW if is_one else FEW_ROWS
    wide = max(16, min(wide, 1 << (codes.columns - 1).bit_length()))
    with on(out):
        _kernels().multiply_rows[(-(-rows // high),)](
            out,
            x,
            bias,
            count,
            x.stride(0),
            rows,
            *codes,
            form,
            1 if is_one else MOST_ROWS,
            high,
            wide,
            _groups_in(form, wide),
            codes.columns % wide == 0,
            enable_fp_fusion=True,
        )


def _kernels() -> ModuleType:
    return import_module(".decoding_kernels", __package__)  # which imports Triton


def _groups_in(form: CodeFormat, columns: int) -> int:
    """Return the number of groups in a tile of ``columns``, if all are equally wide; else ``columns``."""
    if form.is_flat or form.family == "ordered":
        return columns
    if form.group % columns == 0:
        return 1
    return columns // form.group if columns % form.group == 0 else columns
