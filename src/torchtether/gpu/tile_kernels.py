"""Parts of Triton kernels that decode a tile of a weight; ``CodeFormat`` specializes them for each scheme.

Decoding takes the steps of ``schemes`` in their order, in float32, so kernels must be launched with
``enable_fp_fusion=False``: a fused multiply and add rounds once where ``schemes`` rounds twice.
"""
# Triton would take annotations of arguments as types to compile for.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

from .code_format import WHOLE as _WHOLE

WHOLE = tl.constexpr(_WHOLE)


@triton.jit
def _table(VALUES: tl.constexpr, SIZE: tl.constexpr):
    """Return the numbers whose bits are ``VALUES``: (SIZE,), a power of two; missing ones are 0."""
    place = tl.arange(0, SIZE)
    made = tl.zeros((SIZE,), tl.int32)
    for i in tl.static_range(len(VALUES)):
        made = tl.where(place == i, VALUES[i], made)
    return made.to(tl.float32, bitcast=True)


@triton.jit
def _look_up(table, codes):
    """Return ``table[codes]`` of a tile of codes."""
    found = tl.gather(table, tl.reshape(codes.to(tl.int32), (codes.numel,)), 0)
    return tl.reshape(found, codes.shape)


@triton.jit
def _from_e4m3(codes):
    """Return the numbers of e4m3 bytes; where no instruction does, as small float32 times a power of two."""
    if target_info.cuda_capability_geq(8, 9):
        made = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        byte = codes.to(tl.int32)
        bits = (byte << 24) >> 4 & -0x78100000  # the sign, 4 bits of exponent, 3 of mantissa
        small = bits.to(tl.float32, bitcast=True)
        made = tl.where((byte & 0x7F) == 0x7F, float("nan"), small * 1.329227995784916e36)  # 2**120
    return made


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Return ``x`` rounded to ``DTYPE``, as float32."""
    if DTYPE == "bfloat16":
        x = x.to(tl.bfloat16).to(tl.float32)
    if DTYPE == "float16":
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _codes(codes, n, is_row, k, columns, row_bytes, FORMAT: tl.constexpr, K: tl.constexpr):
    """Return the codes of the rows ``n`` (N,) at the columns ``k`` to ``k + K``: (N, K)."""
    BITS: tl.constexpr = FORMAT.bits
    if 8 % BITS == 0 and not FORMAT.is_flat:
        EACH: tl.constexpr = 8 // BITS
        at = k // EACH + tl.arange(0, K // EACH)
        mask = is_row[:, None] & (at < row_bytes)[None, :]
        made = tl.load(codes + n[:, None] * row_bytes + at[None, :], mask, other=0)
        if BITS <= 4:  # halves of bytes, then halves of these, the lower one first
            made = tl.interleave(made & 15, made >> 4)
        if BITS <= 2:
            made = tl.interleave(made & 3, made >> 2)
        if BITS == 1:
            made = tl.interleave(made & 1, made >> 1)
    else:
        column = k + tl.arange(0, K)
        mask = is_row[:, None] & (column < columns)[None, :]
        if FORMAT.is_flat:
            bit = (n[:, None] * columns + column[None, :]) * BITS
        else:
            bit = n[:, None] * row_bytes * 8 + (column * BITS)[None, :]
        shift, at = (bit & 7).to(tl.int32), codes + (bit >> 3)
        made = tl.load(at, mask, other=0).to(tl.int32)
        if 8 % BITS != 0:  # some codes end in the next byte
            made = made | tl.load(at + 1, mask & (shift + BITS > 8), other=0).to(tl.int32) << 8
        made = made >> shift & ((1 << BITS) - 1)
    return made


@triton.jit
def _levels(codes, FORMAT: tl.constexpr):
    if FORMAT.source == "table":
        made = _look_up(_table(FORMAT.table, 1 << FORMAT.bits), codes)
    elif FORMAT.source == "e4m3":
        made = _from_e4m3(codes)
    elif FORMAT.source == "e5m2":  # the upper byte of a float16
        made = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        made = codes.to(tl.float32)
    return made


@triton.jit
def _nibble(words, less, magic, AT: tl.constexpr, FORMAT: tl.constexpr):
    """Return the 4 bits of each word from bit ``AT`` on; if they are integers, as floats, minus ``less``.

    An integer becomes a float as the lowest bits of 2**23 + 2**AT * it: a conversion takes twice as long.
    """
    if FORMAT.source == "table":
        made = words >> AT & 15
    else:
        made = (words & (15 << AT) | magic).to(tl.float32, bitcast=True)
        made = made * (1.0 / (1 << AT)) - (8388608.0 / (1 << AT) + less)  # every step is exact
    return made


@triton.jit
def _nibbles(words, less, magic, FORMAT: tl.constexpr):
    """Return the levels of the 8 codes of each word, minus ``less``: (N, 8 W) from (N, W)."""
    high = words >> 16
    even = tl.interleave(
        tl.interleave(_nibble(words, less, magic, 0, FORMAT), _nibble(high, less, magic, 0, FORMAT)),
        tl.interleave(_nibble(words, less, magic, 8, FORMAT), _nibble(high, less, magic, 8, FORMAT)),
    )
    odd = tl.interleave(
        tl.interleave(_nibble(words, less, magic, 4, FORMAT), _nibble(high, less, magic, 4, FORMAT)),
        tl.interleave(_nibble(words, less, magic, 12, FORMAT), _nibble(high, less, magic, 12, FORMAT)),
    )
    made = tl.interleave(even, odd)
    if FORMAT.source == "table":
        made = _look_up(_table(FORMAT.table, 16), made)
    return made


@triton.jit
def _half_nibble(words, AT: tl.constexpr, ONE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the 4 bits of each word from bit ``AT`` on, as the lowest bits of a number of 16 bits: plus ``ONE``."""
    return (words >> AT & 15 | (0x4300 if ONE == 128 else 0x6400)).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def _half(words, AT: tl.constexpr, ONE: tl.constexpr, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    if FORMAT.is_e2m1:  # its bits, moved, are the number times 2**-126, in float16 times 2**-14
        PLACE: tl.constexpr = (6 if tl.bfloat16 == DTYPE else 9) - AT  # of the lowest bit
        low = (words << PLACE if PLACE >= 0 else words >> -PLACE) & (0x1C0 if tl.bfloat16 == DTYPE else 0xE00)
        sign = (words << 12 - AT if AT <= 12 else words >> AT - 12) & 0x8000
        made = (sign | low).to(tl.int16).to(DTYPE, bitcast=True)
    else:
        made = _half_nibble(words, AT, ONE, DTYPE)
    return made


@triton.jit
def _half_nibbles(words, DTYPE: tl.constexpr, FORMAT: tl.constexpr):
    """Return the 8 codes of each word, integers or of e2m1, in bfloat16 or float16: (N, 8 W) from (N, W)."""
    ONE: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0  # the power of two whose lowest bits count in ones
    even = tl.interleave(
        tl.interleave(_half(words, 0, ONE, DTYPE, FORMAT), _half(words, 16, ONE, DTYPE, FORMAT)),
        tl.interleave(_half(words, 8, ONE, DTYPE, FORMAT), _half(words, 24, ONE, DTYPE, FORMAT)),
    )
    odd = tl.interleave(
        tl.interleave(_half(words, 4, ONE, DTYPE, FORMAT), _half(words, 20, ONE, DTYPE, FORMAT)),
        tl.interleave(_half(words, 12, ONE, DTYPE, FORMAT), _half(words, 28, ONE, DTYPE, FORMAT)),
    )
    made = tl.interleave(even, odd)
    if FORMAT.is_e2m1:
        return made * (8.507059173023462e37 if tl.bfloat16 == DTYPE else 16384.0)
    else:
        return made - ONE


@triton.jit
def levels_of_tile(
    codes, zero, n, is_row, at, mask, k, columns, row_bytes, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
    DTYPE: tl.constexpr = tl.float32,
):  # fmt: skip
    """Return the levels of the rows ``n`` at the columns ``k`` to ``k + K``, minus zero points and offset: (N, K).

    ``at`` (N, S) are the indices of the zero points. Integers and numbers of e2m1 in words are of the dtype ``DTYPE``,
    all others float32.
    """
    less = FORMAT.offset
    if zero is not None:
        less = tl.load(zero + at, mask, other=0).to(tl.float32) + FORMAT.offset
    if IN_WORDS:
        word = k // 8 + tl.arange(0, K // 8)
        is_word = is_row[:, None] & (word < row_bytes // 4)[None, :]
        words = codes.to(tl.pointer_type(tl.int32)) + n[:, None] * (row_bytes // 4) + word[None, :]
        found = tl.load(words, is_word, other=0)
        if tl.float32 == DTYPE:
            if zero is not None:
                less = _spread(less, N, K // 8, S)
            made = _nibbles(found, less, magic, FORMAT)
        elif FORMAT.is_e2m1:
            made = _half_nibbles(found, DTYPE, FORMAT)
        else:
            if zero is not None:
                less = _spread(less.to(DTYPE), N, K, S)
            made = _half_nibbles(found, DTYPE, FORMAT) - less
    else:
        made = _levels(_codes(codes, n, is_row, k, columns, row_bytes, FORMAT, K), FORMAT)
        if zero is not None:
            made = made - _spread(less, N, K, S)
        elif FORMAT.offset != 0.0:
            made = made - FORMAT.offset
    return made


@triton.jit
def scales_of_tile(scale, extra, offset, at, mask, FORMAT: tl.constexpr, IS_WHOLE: tl.constexpr = True):
    """Return the scales at the indices ``at``, float32; if not ``IS_WHOLE``, without the factor of all."""
    made = tl.load(scale + at, mask, other=0)
    if FORMAT.scale == "e8m0":
        bits = tl.where(made == 0, 0x400000, made.to(tl.int32) << 23)
        made = tl.where(made == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    elif FORMAT.scale == "e4m3":
        made = _from_e4m3(made)
    elif FORMAT.scale == "nested":
        made = _look_up(_table(FORMAT.dynamic, 256), made)
        made = made * tl.load(extra + at // FORMAT.nested, mask, other=0) + tl.load(offset)
    else:
        made = made.to(tl.float32)
    if IS_WHOLE:
        made = times_global_scale(made, extra, FORMAT)
    return made


@triton.jit
def times_global_scale(x, extra, FORMAT: tl.constexpr):
    """Return ``x`` times the factor of all scales, if there is one."""
    if FORMAT.global_scale == "multiplies":
        x = x * tl.load(extra)
    if FORMAT.global_scale == "divides":
        x = tl.div_rn(x, tl.load(extra))  # a plain division is not rounded correctly
    return x


@triton.jit
def scaled_levels_of_tile(
    codes, scale, zero, extra, offset, n, is_row, k, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Return the levels times their scales, without the factor of all, exactly in ``DTYPE`` of 16 bits: (N, K)."""
    first = k + tl.arange(0, S) * (K // S)
    mask = is_row[:, None] & (first < columns)[None, :]
    at = (n // height * groups)[:, None] + (first // FORMAT.group)[None, :]
    levels = levels_of_tile(
        codes, zero, n, is_row, at, mask, k, columns, row_bytes, magic, FORMAT, N, K, S, IN_WORDS, DTYPE
    )
    by = scales_of_tile(scale, extra, offset, at, mask, FORMAT, False).to(DTYPE)
    return levels.to(DTYPE) * _spread(by, N, K, S)


@triton.jit
def _spread(values, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr):
    """Return the columns of ``values`` (N, S) repeated to the ``K`` columns of a tile; a single one can broadcast."""
    if S > 1 and S < K:
        values = tl.reshape(tl.broadcast_to(values[:, :, None], (N, S, K // S)), (N, K))
    return values


@triton.jit
def values_of_tile(
    codes, scale, zero, extra, offset, n, is_row, k, columns, row_bytes, groups, height, magic,
    FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, S: tl.constexpr, IN_WORDS: tl.constexpr,
):  # fmt: skip
    """Return the values of the rows ``n`` (N,) at the columns ``k`` to ``k + K``: (N, K) float32.

    ``S`` is the number of groups of columns in a tile: 1, several of equal width, or K if their widths differ.
    ``IN_WORDS``: a row consists of aligned words of 8 codes, each in one group.
    """
    column = k + tl.arange(0, S) * (K // S)
    is_column = column < columns
    mask = is_row[:, None] & is_column[None, :]
    if FORMAT.is_flat:
        at = (n[:, None] * columns + column[None, :]) // FORMAT.group
    elif FORMAT.family == "ordered":
        at = (n // height * groups)[:, None] + tl.load(extra + column, is_column, other=0)[None, :]
    else:
        at = (n // height * groups)[:, None] + (column // FORMAT.group)[None, :]
    if FORMAT.family == "super" or FORMAT.family == "biased" or FORMAT.family == "biased_first":
        x = _levels(_codes(codes, n, is_row, k, columns, row_bytes, FORMAT, K), FORMAT)
    if FORMAT.family == "super":
        supers = tl.cdiv(groups, FORMAT.nested)
        wide = (n * supers)[:, None] + (column // FORMAT.group // FORMAT.nested)[None, :]
        by = tl.load(extra + wide, mask, other=0).to(tl.float32)
        if scale is not None:
            by = by * tl.load(scale + at, mask, other=0).to(tl.float32)
        if FORMAT.offset != 0.0:
            x = x - FORMAT.offset
        x = x * _spread(by, N, K, S)
        if zero is not None:
            low = tl.load(offset + wide, mask, other=0).to(tl.float32)
            x = x - _spread(low * tl.load(zero + at, mask, other=0).to(tl.float32), N, K, S)
    elif FORMAT.family == "biased" or FORMAT.family == "biased_first":
        by = _rounded(tl.load(scale + at, mask, other=0).to(tl.float32), FORMAT.rounds)
        bias = _rounded(tl.load(zero + at, mask, other=0).to(tl.float32), FORMAT.rounds)
        by, bias = _spread(by, N, K, S), _spread(bias, N, K, S)
        if FORMAT.family == "biased_first":
            x = _rounded(_rounded(x + bias, FORMAT.rounds) * by, FORMAT.rounds)
        else:
            x = _rounded(_rounded(x * by, FORMAT.rounds) + bias, FORMAT.rounds)
    else:
        x = levels_of_tile(codes, zero, n, is_row, at, mask, k, columns, row_bytes, magic, FORMAT, N, K, S, IN_WORDS)
        x = x * _spread(scales_of_tile(scale, extra, offset, at, mask, FORMAT), N, K, S)
        if FORMAT.unit != 1.0:
            x = x * FORMAT.unit
    return x
