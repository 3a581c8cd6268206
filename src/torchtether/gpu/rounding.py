"""Calls of the rounding kernels: inputs of products, rounded to 8 or 4 bits, and scaled products.

All give the bits of the torch ops in ``weights/products``, without a graph of autograd. They return ``None``, without
computing, where torch ops must be used.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from ..torch_private.observers import is_observed
from .encoding import FLOATS
from .serving import on, serves

CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
"""Kinds with one scale per row, and the dtype of their codes."""

_WIDE = 8192
"""The most columns of a row that a program holds in registers; it reads longer rows twice."""

_TILE = 4096
"""The columns that it processes at once in longer rows."""

_SUMS = (8, 512)
"""Rows and columns of sums that a program scales."""


def codes(x: Tensor, kind: str) -> tuple[Tensor, Tensor] | None:
    """Return the codes of ``x`` (..., K), of the dtype in ``CODES``, and their (..., 1) float32 scales.

    If a row is not finite, its scale is NaN, and its codes of int8 are 0.
    """
    rows = _rows_of(x)
    if rows is None:
        return None
    made = torch.empty(x.shape, dtype=CODES[kind], device=x.device)
    return made, _round(rows, made if kind == "int8" else made.view(torch.uint8), kind, units=False)


def units(x: Tensor, kind: str, block: int | None = None) -> tuple[Tensor, Tensor] | None:
    """Return ``x`` (..., K) rounded, in blocks of so many columns if ``block`` is given: units, and (..., 1) scales.

    units (..., K) of the dtype of ``x``    scales float32, by which to multiply the units
    """
    rows = _rows_of(x)
    if rows is None:
        return None
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return made, _round(rows, made, kind, units=True, block=block)


def scaled(
    sums: Tensor,
    steps: Tensor,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    unit: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor | None:
    """Return ``sums * steps * (scale * unit) + bias``, computed in float32 and rounded once to ``dtype``.

    sums (..., N) int32 or float    steps (..., 1) float32    scale (N or 1 elements)    bias (N,)    result (..., N)
    """
    others = [one for one in (scale, bias) if one is not None]
    if not _is_direct() or not serves(sums, steps, *others) or not sums.is_contiguous() or sums.numel() == 0:
        return None
    if sums.dtype not in (torch.int32, *FLOATS) or not {dtype, *(one.dtype for one in others)} <= {*FLOATS}:
        return None
    columns = sums.shape[-1]
    rows = sums.numel() // columns
    if steps.dtype is not torch.float32 or steps.numel() != rows:
        return None
    if (bias is not None and bias.numel() != columns) or (scale is not None and scale.numel() not in (1, columns)):
        return None
    out = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    high, wide = _SUMS
    with on(out):
        _kernels().scale_sums[(-(-rows // high) * -(-columns // wide),)](
            sums,
            _in_memory(steps),
            None if scale is None else _in_memory(scale),
            None if bias is None else _in_memory(bias),
            out,
            unit,
            rows,
            columns,
            SHARED=scale is not None and scale.numel() == 1,
            ROWS=high,
            TILE=wide,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


def _is_direct() -> bool:
    """Return whether nothing must see torch ops: forward AD, too, has no formula for a kernel."""
    return not torch.compiler.is_compiling() and not is_observed()


def _rows_of(x: Tensor) -> Tensor | None:
    """Return ``x`` as rows, each contiguous; ``None`` if the kernels cannot read it."""
    if not _is_direct() or not serves(x) or x.dtype not in FLOATS or x.dim() == 0 or x.numel() == 0:
        return None
    rows = x.resolve_neg().reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _in_memory(x: Tensor) -> Tensor:
    """Return the numbers of ``x`` one after another, not only marked as negated."""
    return x.resolve_neg().contiguous()


def _round(rows: Tensor, out: Tensor, kind: str, *, units: bool, block: int | None = None) -> Tensor:
    """Write ``rows``, rounded, to ``out``; return a scale for each."""
    count, columns = rows.shape
    scale = torch.empty((*out.shape[:-1], 1), dtype=torch.float32, device=out.device)
    tile, warps = _tile(columns, block or 1)
    constants = {"UNITS": units} if block is None else {"SIZE": block}
    kernel = _kernels().round_rows if block is None else _kernels().round_blocks
    with on(out):
        kernel[(count,)](
            rows,
            out,
            scale,
            columns,
            rows.stride(0),
            KIND=kind,
            **constants,
            LOOPS=tile < columns,
            TILE=tile,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return scale


@cache
def _tile(columns: int, block: int) -> tuple[int, int]:
    """Return the columns that a program processes at once, a multiple of ``block``, and its warps."""
    whole = max(1 << (columns - 1).bit_length(), block)
    tile = whole if whole <= _WIDE else _TILE
    return tile, max(1, min(8, tile // 512))


@cache
def _kernels() -> ModuleType:
    return import_module(".rounding_kernels", __package__)  # which imports Triton
