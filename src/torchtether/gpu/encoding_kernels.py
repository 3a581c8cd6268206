"""The Triton kernels that encode; ``encoding`` calls them. Imported when a tensor on a GPU is first encoded.

A *run* is the ``width`` columns of a row that share a scale; the last run of a row may be shorter. A program takes
``RUNS`` runs of up to ``BLOCK`` columns, or a piece of ``BLOCK`` columns of a longer one.  With FLAT, runs are
contiguous, in the numbers and in the codes, so that rows do not matter; with FULL they also fill their blocks.

Bits are those of torch ops: divisions are IEEE's (``div_rn``, or ``quotients`` by the one scale of a long run; ``/`` is
approximate), products and sums stay two steps (the calls pass ``enable_fp_fusion=False``), and numbers are rounded by
adding a constant, half to even.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import target_info

TINY = tl.constexpr(2.0**-126)
LIMIT = tl.constexpr(2.0**127)  # beyond it a number that is rounded up may overflow float32
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: in a sum with it the last bit is 1
MOST_INVERSE = tl.constexpr(2.0**80)  # that ``quotients`` may be given
AFFINE, FLOAT8, NEAREST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """Return ``x``, of any dtype, as float32."""
    if x.dtype == tl.bfloat16:  # Triton's interpreter gets subnormal ones wrong
        return float_of(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def _ordered(x):
    """Return integers in the order of the floats, NaN beyond infinity. The same function maps them back."""
    bits = bits_of(x)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _begins(run, width, columns, groups, FLAT: tl.constexpr):
    """Return the indices of the numbers at which runs begin, and their lengths."""
    if FLAT:
        return run * width, width + 0 * run
    else:
        return run // groups * columns + run % groups * width, tl.minimum(width, columns - run % groups * width)


@triton.jit
def _read(x_ptr, begin, column, count, valid, FULL: tl.constexpr):
    inside = valid[:, None] & (column[None, :] >= 0 if FULL else column[None, :] < count[:, None])
    return widened(tl.load(x_ptr + begin[:, None] + column[None, :], mask=inside, other=0.0)), inside


@triton.jit
def _ends(x, inside, SIGNED: tl.constexpr):
    """Return the extremes of each row of ``x`` as ordered integers: 0 and the largest magnitude if not SIGNED."""
    if SIGNED:
        ordered = _ordered(x)
        low = tl.min(tl.where(inside, ordered, 0x7FFFFFFF), 1)
        return low, tl.max(tl.where(inside, ordered, -0x7FFFFFFF), 1)
    else:
        high = tl.max(tl.where(inside, bits_of(x) & 0x7FFFFFFF, 0), 1)
        return high * 0, high


@triton.jit
def _ends_of_runs(
    x_ptr, begin, count, valid, width,
    SIGNED: tl.constexpr, LOOPS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    x, inside = _read(x_ptr, begin, column, count, valid, FULL)
    low, high = _ends(x, inside, SIGNED)
    if LOOPS:
        for start in range(BLOCK, width, BLOCK):
            x, inside = _read(x_ptr, begin, start + column, count, valid, FULL)
            its_low, its_high = _ends(x, inside, SIGNED)
            low, high = tl.minimum(low, its_low), tl.maximum(high, its_high)
    return low, high


@triton.jit
def find_extremes(
    x_ptr, low_ptr, high_ptr, total, width, columns, groups,
    SIGNED: tl.constexpr, FLAT: tl.constexpr, FULL: tl.constexpr, LOOPS: tl.constexpr,
    RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the extremes of each run, or (not SIGNED) its largest magnitude; NaN if it holds one."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    valid = run < total
    begin, count = _begins(run, width, columns, groups, FLAT)
    low, high = _ends_of_runs(x_ptr, begin, count, valid, width, SIGNED, LOOPS, FULL, BLOCK)
    if SIGNED:
        tl.store(low_ptr + run, float_of(low ^ ((low >> 31) & 0x7FFFFFFF)), mask=valid)
        high = high ^ ((high >> 31) & 0x7FFFFFFF)
    tl.store(high_ptr + run, float_of(high), mask=valid)


@triton.jit
def _clamped(x, lowest, highest):
    return tl.minimum(tl.maximum(x, lowest), highest)


@triton.jit
def _fit(low, high, span, unit, lowest, highest, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """Return scales, divisors (NEAREST: factors) and zero points of runs, and which runs cannot be encoded."""
    if KIND == NEAREST:
        scale = tl.where(high > 0, tl.maximum(high, TINY), 0.0)
        return scale, tl.div_rn(1.0, tl.where(scale < TINY, 1.0, scale)), tl.zeros_like(scale), ~(high < LIMIT)
    else:
        extent = high - low
        scale = tl.div_rn(extent, span)
        bad = ~(extent < LIMIT) | ~(scale < LIMIT)
        scale = tl.where(extent > 0, tl.maximum(scale, TINY), 1.0)
        by = scale * unit
        zero = tl.zeros_like(scale)
        if SIGNED:
            zero = (_clamped(lowest - tl.div_rn(low, by), lowest, highest) + MAGIC) - MAGIC
        return scale, by, zero, bad | (by == 0)


@triton.jit
def _fit_power(high, span, MANTISSA: tl.constexpr, TOP: tl.constexpr, POWER: tl.constexpr):
    """Return the bytes of e8m0 scales, and their inverses, for runs whose largest magnitudes have the bits ``high``.

    ``POWER`` is the rounding, ``TOP`` the exponent of ``span``, the largest code, which has ``MANTISSA`` bits.
    """
    if POWER == "rceil":
        bits = bits_of(tl.div_rn(float_of(high), span))
        byte = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    elif POWER == "even":
        byte = ((high + (1 << (22 - MANTISSA))) >> 23) - TOP
    else:
        byte = (high >> 23) - TOP
    byte = tl.where(high > 0, tl.maximum(byte, 0), 127)  # of magnitudes below LIMIT, at most 252
    return byte, float_of((254 - byte) << 23)


@triton.jit
def _above(y, E: tl.constexpr):
    """Return the number of 15 ascending thresholds below ``y``, by binary search."""
    a = y > E[7]
    b = y > tl.where(a, E[11], E[3])
    c = y > tl.where(a, tl.where(b, E[13], E[9]), tl.where(b, E[5], E[1]))
    high = tl.where(b, tl.where(c, E[14], E[12]), tl.where(c, E[10], E[8]))
    d = y > tl.where(a, high, tl.where(b, tl.where(c, E[6], E[4]), tl.where(c, E[2], E[0])))
    return tl.where(a, 8, 0) + tl.where(b, 4, 0) + tl.where(c, 2, 0) + tl.where(d, 1, 0)


@triton.jit
def _above_7(y, E: tl.constexpr):
    a = y > E[3]
    b = y > tl.where(a, E[5], E[1])
    c = y > tl.where(a, tl.where(b, E[6], E[4]), tl.where(b, E[2], E[0]))
    return tl.where(a, 4, 0) + tl.where(b, 2, 0) + tl.where(c, 1, 0)


@triton.jit
def _above_by_place(y, E: tl.constexpr, PLACES: tl.constexpr):
    """Return the number of thresholds below ``y``, of which no two have the same nearest multiple of a step.

    ``PLACES`` are 1 / step, then those multiples. Rounding keeps the order, so that ``y`` is on the same side of all
    thresholds but the one of its own multiple, with which it is compared.
    """
    MOST: tl.constexpr = PLACES[0]
    place = tl.arange(0, 4 * MOST) - MOST  # -1 to 1 is enough, but not a power of two
    edge = tl.full((4 * MOST,), float("inf"), tl.float32)
    below = tl.zeros((4 * MOST,), tl.int32)
    for i in tl.static_range(len(PLACES) - 1):
        edge = tl.where(place == PLACES[i + 1], E[i], edge)
        below += tl.where(place > PLACES[i + 1], 1, 0)
    at = bits_of(_clamped(y, -1.0, 1.0) * MOST + MAGIC) - (0x4B400000 - MOST)  # the bits of MAGIC
    at = tl.reshape(at & (4 * MOST - 1), (at.numel,))  # of NaN, too, there is an entry
    edge, below = tl.reshape(tl.gather(edge, at, 0), y.shape), tl.reshape(tl.gather(below, at, 0), y.shape)
    return below + tl.where(y > edge, 1, 0)


@triton.jit
def quotients(x, by, inverse):
    """Return ``x / by`` in three instructions per number, where ``inverse`` is ``div_rn(1.0, by)``, as ``div_rn`` does.

    They have its bits if ``by`` is between 1 / ``MOST_INVERSE`` and 2**126, the quotient is finite and not below
    2**-22, and smaller ones are smaller than 2**-21 and have its sign, that of zeros, too: enough for whoever rounds
    them to codes, or adds an integer first.

    ``near`` is within 1.5 units in its last place of the quotient, so that the remainder is exact (Markstein), as long
    as its last bit can be 2**-149, for which both limits are chosen. A quotient cannot be so near to the middle of
    two numbers, which is half such a unit from ``near``, that the error of ``inverse`` times the remainder matters.
    Nothing is added to a zero but -0, hence the signs of the factors.
    """
    near = x * inverse
    return tl.fma(tl.fma(near, by, x * -1.0), inverse * -1.0, near)  # - x would be 0 - x, an instruction


@triton.jit
def float8_codes(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Return the codes of ``y``, NaN or what rounds to a finite one, in the lowest bytes of integers."""
    if MANTISSA == 3 and target_info.cuda_capability_geq(8, 9):
        return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return _float8_codes(y, MANTISSA, BIAS)


@triton.jit
def _float8_codes(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    CUT: tl.constexpr = 23 - MANTISSA
    UNIT: tl.constexpr = (128 - BIAS + CUT) << 23
    bits = bits_of(y)
    rest = bits & 0x7FFFFFFF
    normal = (rest - ((127 - BIAS) << 23) + ((1 << (CUT - 1)) - 1) + ((rest >> CUT) & 1)) >> CUT
    subnormal = bits_of(float_of(rest) + float_of(tl.full(rest.shape, UNIT, tl.int32))) - UNIT
    codes = ((bits >> 24) & 0x80) | tl.where(rest < ((128 - BIAS) << 23), subnormal, normal)
    return tl.where(y == y, codes, codes | 0x7F)


@triton.jit
def _codes(
    x, by, inverse, is_usual, shift, lowest, highest, offset,
    KIND: tl.constexpr, DIVIDES: tl.constexpr, ONCE: tl.constexpr, SHIFTS: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, EDGES: tl.constexpr, PLACES: tl.constexpr, ORDER: tl.constexpr,
):  # fmt: skip
    """Return the codes of ``x``, in the lowest bytes of integers."""
    if ONCE:
        y = quotients(x, by, inverse) if is_usual else tl.div_rn(x, by)
    else:
        y = tl.div_rn(x, by) if DIVIDES else x * by
    if SHIFTS:
        y = y + shift
    if KIND == AFFINE:
        return bits_of(_clamped(y, lowest, highest) + MAGIC) + offset
    elif KIND == FLOAT8:
        return float8_codes(_clamped(y, lowest, highest), MANTISSA, BIAS)
    elif len(EDGES) == 7:  # of magnitudes; the sign is the highest of four bits
        bits = bits_of(y)
        return ((bits >> 28) & 8) | _above_7(float_of(bits & 0x7FFFFFFF), EDGES)
    else:
        place = _above_by_place(y, EDGES, PLACES) if len(PLACES) > 0 else _above(y, EDGES)
        if len(ORDER) > 0:
            place = (tl.where(place > 7, ORDER[1], ORDER[0]) >> ((place & 7) * 4)) & 15
        return place


@triton.jit
def _store(
    codes_ptr, codes, begin, column, count, valid,
    BITS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """Store codes of each run, which begins at the byte ``begin``, from its ``column`` on."""
    at = column + tl.arange(0, BLOCK)
    inside = at[None, :] >= 0 if FULL else at[None, :] < count[:, None]
    if BITS == 4:
        codes = tl.where(inside, codes & 15, 0)  # the byte of an odd last code is filled up with zeros
        low, high = tl.split(tl.reshape(codes, [RUNS, BLOCK // 2, 2]))
        codes = low | (high << 4)
        at = column // 2 + tl.arange(0, BLOCK // 2)
        inside = at[None, :] >= 0 if FULL else at[None, :] * 2 < count[:, None]
    tl.store(codes_ptr + begin[:, None] + at[None, :], codes.to(tl.uint8), mask=valid[:, None] & inside)


@triton.jit
def encode(
    x_ptr, scale_ptr, zero_ptr, codes_ptr, fine_ptr,
    total, width, columns, groups, stride, pieces, span, unit, lowest, highest, offset, zero_offset,
    KIND: tl.constexpr, BITS: tl.constexpr, FITS: tl.constexpr, LOOPS: tl.constexpr, DIVIDES: tl.constexpr,
    SHIFTS: tl.constexpr, FLAT: tl.constexpr, SHARED: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    EDGES: tl.constexpr, PLACES: tl.constexpr, ORDER: tl.constexpr, FULL: tl.constexpr, RUNS: tl.constexpr,
    BLOCK: tl.constexpr, POWER: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Write the codes of each run, under given scales (SHARED: one row of them for all rows), or (FITS) under its own.

    With FITS, scales (with POWER, of e8m0) and zero points are written, too, and 0 to ``fine`` if a number is not
    finite or too large. Without it, scales and zero points are float32, and a long run is cut into ``pieces``. With
    LOOPS one program processes a whole long run.
    """
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)
    first = 0
    if not FITS:
        first = (tl.program_id(0) % pieces) * BLOCK
        run = tl.program_id(0).to(tl.int64) // pieces * RUNS + tl.arange(0, RUNS)
    valid = run < total
    begin, count = _begins(run, width, columns, groups, FLAT)
    to = run * width * BITS // 8 if FLAT else run // groups * stride + run % groups * width * BITS // 8
    if FITS:
        low, high = _ends_of_runs(x_ptr, begin, count, valid, width, SHIFTS, LOOPS, FULL, BLOCK)
        if SHIFTS:
            low, high = tl.minimum(low, 0), tl.maximum(high, 0)  # 0 is its own ordered integer
            low, high = low ^ ((low >> 31) & 0x7FFFFFFF), high ^ ((high >> 31) & 0x7FFFFFFF)
        if POWER != "":
            byte, by = _fit_power(high, span, MANTISSA, TOP, POWER)
            shift, bad = by, ~(float_of(high) < LIMIT)
            tl.store(scale_ptr + run, byte.to(tl.uint8), mask=valid)
        else:
            scale, by, shift, bad = _fit(float_of(low), float_of(high), span, unit, lowest, highest, KIND, SHIFTS)
            tl.store(scale_ptr + run, scale, mask=valid)
        if SHIFTS:
            tl.store(zero_ptr + run, (bits_of(shift + MAGIC) + zero_offset).to(tl.uint8), mask=valid)
        tl.store(fine_ptr + 0 * run, tl.full([RUNS], 0, tl.int32), mask=valid & bad)
    else:
        at = run % groups if SHARED else run
        by = tl.load(scale_ptr + at, mask=valid, other=1.0)
        shift = by
        if SHIFTS:
            shift = tl.load(zero_ptr + at, mask=valid, other=0.0)
    by, shift = by[:, None], shift[:, None]
    inverse, is_usual = by, True
    ONCE: tl.constexpr = FITS and DIVIDES and RUNS == 1  # and with FITS no quotient overflows
    if ONCE:
        inverse = tl.div_rn(1.0, by)
        is_usual = (tl.min(by) * MOST_INVERSE >= 1) & (tl.max(by) < LIMIT / 2)
    for start in range(first, width if LOOPS else first + BLOCK, BLOCK):
        x, _ = _read(x_ptr, begin, start + tl.arange(0, BLOCK), count, valid, FULL)
        codes = _codes(
            x, by, inverse, is_usual, shift, lowest, highest, offset, KIND, DIVIDES, ONCE, SHIFTS,
            MANTISSA, BIAS, EDGES, PLACES, ORDER,
        )  # fmt: skip
        _store(codes_ptr, codes, to, start, count, valid, BITS, FULL, BLOCK, RUNS)
