"""Calls of the kernels that decode: whole rows, rows that are named, and products of few rows of inputs."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .code_format import CodeFormat

MOST_ROWS = 16
"""Rows of inputs that one product takes."""

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


@cache
def kernels(device: torch.device) -> ModuleType | None:
    """Return the kernels, once one has run on ``device``; ``None``, with a warning, where Triton cannot build them.

    It needs a GPU of compute capability 8.0, a driver that it knows and, in some versions, a C compiler.
    """
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from . import decoding_kernels as found  # which imports Triton

        code, scale = (torch.ones(1, 1, dtype=dtype, device=device) for dtype in (torch.int8, torch.float32))
        trial = Codes(code, scale, None, None, None, 1, 1, 1, 1)
        _decode(found, CodeFormat(8, "signed", "float"), trial, torch.empty_like(scale), 1, 0, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of many types: of the compiler, the linker, the driver
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        fix = "Install a C compiler, or a driver that this Triton knows; until then torch ops decode weights."
        warnings.warn(f"gpu: Triton cannot build kernels for {device}: {reason}. {fix}", stacklevel=2)
        return None
    return found


def decode(
    form: CodeFormat, codes: Codes, out: Tensor, *, rows: int, start: int = 0, index: Tensor | None = None
) -> bool:
    """Write the rows from ``start``, or those that ``index`` names, to ``out``; return whether that was done.

        out (count, K) float32, bfloat16 or float16, contiguous    index (count,) int64 or int32, contiguous

    An index that names none of the ``rows`` gives a row of nan: to raise, one would have to wait for the GPU.
    """
    found = kernels(out.device)
    if found is None:
        return False
    if out.numel():
        _decode(found, form, codes, out, rows, start, index)
    return True


def multiply(form: CodeFormat, codes: Codes, x: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Write ``x @ values.T + bias`` to ``out``; return whether that was done.

        x (M, K) float32, bfloat16 or float16, M at most MOST_ROWS, columns contiguous
        bias (N,) of the same dtype, contiguous    out (M, N) of it, contiguous

    Sums are float32, in an order that sizes alone decide.
    """
    found, (count, rows) = kernels(out.device), out.shape
    if found is None:
        return False
    if not out.numel():
        return True
    is_one = count == 1
    high, wide = ONE_ROW if is_one else FEW_ROWS
    wide = max(16, min(wide, 1 << (codes.columns - 1).bit_length()))
    with _on(out):
        found.multiply_rows[(-(-rows // high),)](
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
    return True


def _decode(
    found: ModuleType, form: CodeFormat, codes: Codes, out: Tensor, rows: int, start: int, index: Tensor | None
) -> None:
    high, wide = DECODED
    grid = (-(-out.shape[0] // high) * -(-codes.columns // wide),)
    with _on(out):
        found.decode_rows[grid](
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


def _groups_in(form: CodeFormat, columns: int) -> int:
    """Return how many groups a tile of so many columns has: all as wide, or one for each column."""
    if form.is_flat or form.family == "ordered":
        return columns
    if form.group % columns == 0:
        return 1
    return columns // form.group if columns % form.group == 0 else columns


def _on(tensor: Tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
