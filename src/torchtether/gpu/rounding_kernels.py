"""The Triton kernels that round inputs of products, and scale the products; ``rounding`` calls them.

A program rounds one row. It keeps a row of up to ``TILE`` columns in registers, and reads a longer one twice: once for
its largest magnitude, and then again, from the cache, to round it.

Bits are those of torch ops, as in ``encoding_kernels``: divisions are IEEE's (``div_rn``, or ``quotients`` where one
divisor has many dividends), products and sums stay two steps (the calls pass ``enable_fp_fusion=False``), and a
quotient by a power of two is a product with its inverse.
"""
# Triton would take annotations of arguments as types to compile for.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

from .encoding_kernels import MAGIC, MOST_INVERSE, TINY, bits_of, float8_codes, float_of, quotients, widened

LIFT = tl.constexpr(2.0**64)
"""What rows of small numbers are multiplied by, without rounding, before they are divided."""

INFINITY = tl.constexpr(0x7F800000)
"""The bits of infinity, which are those of all exponents; the bits of magnitudes have the order of the magnitudes."""

SMALLEST = tl.constexpr(0x00800000)
"""The bits of the smallest normal number."""


@triton.jit
def _read(x, column, columns):
    return widened(tl.load(x + column, column < columns, other=0.0))


@triton.jit
def _magnitudes(x):
    return bits_of(x) & 0x7FFFFFFF


@triton.jit
def _with_sign_of(magnitudes, x):
    return float_of(bits_of(magnitudes) | (bits_of(x) & -0x80000000))


@triton.jit
def _nearest(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Return the nearest numbers of ``MANTISSA`` bits after the first, with exponents of ``LEAST`` or more.

    Halfway cases become even. A sum with ``large`` has the last bit that the result may have.
    """
    exponent = tl.maximum(bits_of(x) & INFINITY, (127 + LEAST) << 23)
    large = float_of(exponent + ((23 - MANTISSA) << 23 | 0x400000))
    return _with_sign_of((float_of(_magnitudes(x)) + large) - large, x)


@triton.jit
def _power_above(x):
    """Return the smallest normal power of two that is not less than ``x``, which is not negative."""
    return float_of(tl.maximum((bits_of(x) + 0x7FFFFF) & INFINITY, SMALLEST))


@triton.jit
def _from_float8(x):
    """Return ``x``, of magnitudes that round to 448 or less, rounded to e4m3, in float32; of infinity, anything."""
    if target_info.cuda_capability_geq(8, 9):
        return x.to(tl.float8e4nv).to(tl.float16).to(tl.float32)
    else:
        return _nearest(x, 3, -6)


@triton.jit
def _rounded_row(x, by, inverse, is_finite, KIND: tl.constexpr, UNITS: tl.constexpr):
    """Return the codes of ``x``, as integers, or what they stand for, between -1 and 1."""
    y = quotients(x * LIFT, by * LIFT, inverse * (1 / LIFT)) if inverse > MOST_INVERSE else quotients(x, by, inverse)
    if KIND == "int8":
        if UNITS:
            return _with_sign_of((float_of(_magnitudes(y)) + MAGIC) - MAGIC, y) * 0.0078125
        else:
            return tl.where(is_finite, bits_of(y + MAGIC), 0)
    elif UNITS:
        return _from_float8(y) * 0.001953125
    else:
        return float8_codes(y, 3, 7)


@triton.jit
def round_rows(
    x, out, scale, columns, stride,
    KIND: tl.constexpr, UNITS: tl.constexpr, LOOPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a row's scale, its largest magnitude / 127 or 448, and its codes; or ``UNITS`` and the scale of those.

    Of a row that is not finite the scale is NaN, and codes of int8 are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * columns
    column = tl.arange(0, TILE)
    values = _read(x, column, columns)
    found = _magnitudes(values)
    if LOOPS:
        for start in range(TILE, columns, TILE):
            found = tl.maximum(found, _magnitudes(_read(x, start + column, columns)))
    most = tl.max(found, 0)
    is_finite = most < INFINITY
    by = tl.div_rn(float_of(most), 127.0 if KIND == "int8" else 448.0)
    by = tl.where(by < TINY, TINY, by)
    ONE: tl.constexpr = (128.0 if KIND == "int8" else 512.0) if UNITS else 1.0
    tl.store(scale + row, tl.where(is_finite, by * ONE, float("nan")))
    inverse = tl.div_rn(1.0, by)
    by = tl.where(is_finite, by, 0.0)  # then ``quotients`` are products with the inverse, 0 or NaN: x / infinity, NaN
    made = _rounded_row(values, by, inverse, is_finite, KIND, UNITS)
    tl.store(out + column, made.to(out.dtype.element_ty), column < columns)
    if LOOPS:
        for start in range(TILE, columns, TILE):
            made = _rounded_row(_read(x, start + column, columns), by, inverse, is_finite, KIND, UNITS)
            tl.store(out + start + column, made.to(out.dtype.element_ty), start + column < columns)


@triton.jit
def _rounded_blocks(x, most, power, KIND: tl.constexpr):
    """Return the blocks ``x`` (blocks, size), rounded and divided by ``power``; ``most`` is the bits of the largest.

    Quotients need no clipping: the largest rounds to the largest number of its kind. What is not finite makes its
    block NaN, and in nvfp4 its row.
    """
    bits = tl.max(_magnitudes(x), 1)
    largest, is_finite = float_of(bits), bits < INFINITY
    if KIND == "nvfp4":
        above = _power_above(tl.div_rn(float_of(most), 2688.0))
        inverse = tl.div_rn(1.0, above)
        scale = tl.div_rn(largest * inverse, 6.0)
        scale = _nearest(tl.minimum(tl.maximum(scale, 0.015625), 448.0), 3, -6)
        values = quotients(x * inverse, scale[:, None], tl.div_rn(1.0, scale)[:, None])
        values = _nearest(values, 1, 0)
        by = scale * tl.div_rn(above, power)
        is_finite = is_finite & (most < INFINITY)
    else:
        if KIND == "mxfp8":
            scale = _power_above(tl.div_rn(largest, 448.0))
        else:  # rounding to the significand of e2m1 may raise the exponent
            scale = float_of((bits + (1 << 21)) & INFINITY) * 0.25
            scale = float_of(tl.maximum(bits_of(scale), 0x00400000))  # 2**-127, which Triton would take for a float64
        scale = tl.where(bits > 0, scale, 1.0)
        values = x * tl.div_rn(1.0, scale)[:, None]
        values = _from_float8(values) if KIND == "mxfp8" else _nearest(values, 1, 0)
        by = tl.div_rn(scale, power)
    return values * tl.where(is_finite, by, float("nan"))[:, None]


@triton.jit
def round_blocks(
    x, out, scale, columns, stride,
    KIND: tl.constexpr, SIZE: tl.constexpr, LOOPS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write a row rounded in blocks of ``SIZE``, divided by the power of two in its largest magnitude; and the power.

    The power is 1 for a row that is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    out += row * columns
    column = (tl.arange(0, TILE // SIZE) * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    values = _read(x, column, columns)
    found = _magnitudes(values)
    if LOOPS:
        for start in range(TILE, columns, TILE):
            found = tl.maximum(found, _magnitudes(_read(x, start + column, columns)))
    most = tl.max(tl.max(found, 1), 0)
    power = float_of(tl.where(most < INFINITY, tl.maximum(most & INFINITY, SMALLEST), 0x3F800000))
    tl.store(scale + row, power)
    made = _rounded_blocks(values, most, power, KIND)
    tl.store(out + column, made.to(out.dtype.element_ty), column < columns)
    if LOOPS:
        for start in range(TILE, columns, TILE):
            made = _rounded_blocks(_read(x, start + column, columns), most, power, KIND)
            tl.store(out + start + column, made.to(out.dtype.element_ty), start + column < columns)


@triton.jit(do_not_specialize=["rows"])
def scale_sums(
    sums, steps, scale, bias, out, unit, rows, columns, SHARED: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Write ``sums * steps * (scale * unit) + bias``, rounded once from float32: steps of rows, scales of columns.

    With ``SHARED`` there is one scale for all columns; absent scales and biases are ``None``.
    """
    tile, across = tl.program_id(0), tl.cdiv(columns, TILE)
    row = (tile // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tile % across * TILE + tl.arange(0, TILE)
    is_row, is_column = row < rows, column < columns
    at, inside = row[:, None] * columns + column[None, :], is_row[:, None] & is_column[None, :]
    x = widened(tl.load(sums + at, inside, other=0)) * tl.load(steps + row, is_row, other=0.0)[:, None]
    if scale is not None:
        if SHARED:
            x = x * (widened(tl.load(scale)) * unit)
        else:
            x = x * (widened(tl.load(scale + column, is_column, other=0.0)) * unit)[None, :]
    if bias is not None:
        x = x + widened(tl.load(bias + column, is_column, other=0.0))[None, :]
    tl.store(out + at, x.to(out.dtype.element_ty), inside)
