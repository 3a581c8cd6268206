"""Triton kernels that decode rows of a weight, or multiply by it without writing decoded values.

Products decode tiles to registers. Decoding must be launched with ``enable_fp_fusion=False``: see ``tile_kernels``.
"""
# Triton would take annotations of arguments as types to compile for.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from .tile_kernels import (
    WHOLE,
    levels_of_tile,
    scaled_levels_of_tile,
    scales_of_tile,
    times_global_scale,
    values_of_tile,
)


@triton.jit(do_not_specialize=["start", "count", "rows", "magic"])
def decode_rows(
    out, index, start, count, rows,
    codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Write ``count`` rows to ``out``: those from ``start`` on, or those in ``index``, NaN for one out of range."""
    tile = tl.program_id(0)
    across = tl.cdiv(columns, K)
    i = (tile // across).to(tl.int64) * N + tl.arange(0, N)
    k = tile % across * K
    is_row = i < count
    is_there = is_row
    if index is None:
        n = start + i
    else:
        n = tl.load(index + i, is_row, other=0).to(tl.int64)
        is_there = is_row & (n >= 0) & (n < rows)
    x = values_of_tile(
        codes, scale, zero, extra, offset, n, is_there, k, columns, row_bytes, groups, height, magic,
        FORMAT, N, K, S, IN_WORDS,
    )  # fmt: skip
    if index is not None:
        x = tl.where(is_there[:, None], x, float("nan"))
    column = k + tl.arange(0, K)
    mask = is_row[:, None] & (column < columns)[None, :]
    tl.store(out + i[:, None] * columns + column[None, :], x.to(out.dtype.element_ty), mask)


@triton.jit
def _products(
    x, n, is_row,
    codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Return the products of one row ``x`` with the rows ``n``, of the family "simple": (N,) float32.

    Each sum in a group is scaled once.
    """
    sums = tl.zeros((N, S), tl.float32)
    for k in range(0, columns, K):
        column, first = k + tl.arange(0, K), k + tl.arange(0, S) * (K // S)
        mask = is_row[:, None] & (first < columns)[None, :]
        at = (n // height * groups)[:, None] + (first // FORMAT.group)[None, :]
        w = levels_of_tile(codes, zero, n, is_row, at, mask, k, columns, row_bytes, magic, FORMAT, N, K, S, IN_WORDS)
        some = tl.load(x + column, column < columns, other=0).to(tl.float32)
        part = tl.sum(tl.reshape(w * some[None, :], (N, S, K // S)), 2)
        if FORMAT.group < WHOLE:
            part = part * scales_of_tile(scale, extra, offset, at, mask, FORMAT)
        sums += part
    made = tl.sum(sums, 1)
    if FORMAT.group == WHOLE:
        made = made * scales_of_tile(scale, extra, offset, n // height, is_row, FORMAT)
    if FORMAT.unit != 1.0:
        made = made * FORMAT.unit
    return made


@triton.jit(do_not_specialize=["magic"])
def multiply_row(
    out, x, bias, rows,
    codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Write the product of one row ``x`` with values of the family "simple"."""
    n = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_row = n < rows
    made = _products(
        x, n, is_row, codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
        FORMAT, N, K, S, IN_WORDS,
    )  # fmt: skip
    if bias is not None:
        made += tl.load(bias + n, is_row, other=0).to(tl.float32)
    tl.store(out + n, made.to(out.dtype.element_ty), is_row)


@triton.jit(do_not_specialize=["magic"])
def multiply_each(
    out, x, ends, stride, rows, matrices,
    codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
    MATRICES: tl.constexpr,
):  # fmt: skip
    """Write the product of each row of ``x`` with the matrix of its group; 0 for those after the last group.

    ``ends`` are the first rows after each of the groups, in order; a matrix has ``rows`` rows of the weight.
    """
    m, i = tl.program_id(1).to(tl.int64), tl.arange(0, MATRICES)
    group = tl.sum((tl.load(ends + i, i < matrices, other=2147483647) <= m).to(tl.int64))
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    n, is_row = group * rows + at, at < rows
    is_there = n < matrices * rows
    made = _products(
        x + m * stride, n, is_row & is_there,
        codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
        FORMAT, N, K, S, IN_WORDS,
    )  # fmt: skip
    made = tl.where(is_there, made, 0.0)
    tl.store(out + m * rows + at, made.to(out.dtype.element_ty), is_row)


@triton.jit(do_not_specialize=["count", "magic"])
def multiply_rows(
    out, x, bias, count, stride, rows,
    codes, scale, zero, extra, offset, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
    B: tl.constexpr, IS_EVEN: tl.constexpr, IS_AFTER: tl.constexpr, IS_EXACT: tl.constexpr,
):  # fmt: skip
    """Write ``x @ values.T + bias``; if ``M``, the most rows, is not 1, values are rounded to the dtype of ``x``.

    Of ``M`` rows ``B`` parts of the columns of a tile have sums of their own, and warps of their own to compute them.
    ``IS_AFTER``: levels minus zero points, which that dtype holds exactly, are multiplied, and the sums of parts, each
    in one group, scaled. ``IS_EXACT``: that dtype holds levels times scales exactly; the factor of all comes last.
    """
    n = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    is_row = n < rows
    m = tl.arange(0, M).to(tl.int64)
    sums = tl.zeros((N, K), tl.float32) if M == 1 else tl.zeros((B, N, M), tl.float32)
    for k in range(0, columns, K):
        if IS_AFTER:
            first = k + tl.arange(0, S) * (K // S)
            mask = is_row[:, None] & (first < columns)[None, :]
            at = (n // height * groups)[:, None] + (first // FORMAT.group)[None, :]
            w = levels_of_tile(
                codes, zero, n, is_row, at, mask, k, columns, row_bytes, magic,
                FORMAT, N, K, S, IN_WORDS, x.dtype.element_ty,
            )  # fmt: skip
        elif IS_EXACT:
            w = scaled_levels_of_tile(
                codes, scale, zero, extra, offset, n, is_row, k, columns, row_bytes, groups, height, magic,
                FORMAT, N, K, S, IN_WORDS, x.dtype.element_ty,
            )  # fmt: skip
        else:
            w = values_of_tile(
                codes, scale, zero, extra, offset, n, is_row, k, columns, row_bytes, groups, height, magic,
                FORMAT, N, K, S, IN_WORDS,
            )  # fmt: skip
        column = k + tl.arange(0, K)
        is_column = column < columns
        if not (IS_EVEN or IS_AFTER):  # a scale that is not finite would give NaN beyond the last column
            w = tl.where(is_column[None, :], w, 0.0)
        if M == 1:
            sums += w * tl.load(x + column, is_column, other=0).to(tl.float32)[None, :]
        else:
            at_x = k + tl.arange(0, B)[:, None, None] * (K // B) + tl.arange(0, K // B)[None, :, None]
            is_input = (at_x < columns) & (m < count)[None, None, :]
            some = tl.load(x + m[None, None, :] * stride + at_x, is_input, other=0)
            each = tl.permute(tl.reshape(w.to(some.dtype), (N, B, K // B)), (1, 0, 2))
            if IS_AFTER and FORMAT.group < WHOLE:
                part = k + tl.arange(0, B) * (K // B)
                at = (part // FORMAT.group)[:, None] + (n // height * groups)[None, :]
                by = scales_of_tile(scale, extra, offset, at, (part < columns)[:, None] & is_row[None, :], FORMAT)
                sums += tl.dot(each, some, input_precision="ieee") * by[:, :, None]
            else:
                sums = tl.dot(each, some, sums, input_precision="ieee")
    made = tl.sum(sums, 1)[:, None] if M == 1 else tl.sum(sums, 0)
    if IS_AFTER and FORMAT.group == WHOLE:
        made = made * scales_of_tile(scale, extra, offset, n // height, is_row, FORMAT)[:, None]
    if IS_EXACT:
        made = times_global_scale(made, extra, FORMAT)
    if (IS_AFTER or IS_EXACT) and FORMAT.unit != 1.0:
        made = made * FORMAT.unit
    if bias is not None:
        made += tl.load(bias + n, is_row, other=0).to(tl.float32)[:, None]
    mask = is_row[:, None] & (m < count)[None, :]
    tl.store(out + m[None, :] * rows + n[:, None], made.to(out.dtype.element_ty), mask)
