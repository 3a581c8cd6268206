/* Encoding rows with their scales in one pass: the extremes of each run are found while it is loaded into the first-level
 * cache, and it is encoded from there.  Part of encoders.c; it computes and rounds as the torch ops in schemes/ do.
 */

#define LIMIT float_of(254u << 23)  /* 2**127: beyond it a number that is rounded up may overflow float32 */
#define TINY float_of(1u << 23)     /* the smallest normal number */

#define INLINE static inline __attribute__((always_inline))

INLINE float number(const void *x, int dtype, count i) {
    if (dtype == FLOAT32) return ((const float *)x)[i];
    uint16_t bits = ((const uint16_t *)x)[i];
    return dtype == BFLOAT16 ? float_of((uint32_t)bits << 16) : from_half(bits);
}

INLINE const void *behind(const void *x, int dtype, count n) {
    return (const char *)x + n * (dtype == FLOAT32 ? 4 : 2);
}

#if defined(__AVX2__) && defined(__FMA__)
#define FAST
#include "encode_avx2.h"
#endif

#define RUNS 64    /* at most that many at once: their scales are computed together */

#include "search.h"

#define SOME 32
#define LONG 1024 /* runs from which on checking every step between codes pays; a float8 has fewer steps */

/* Whether the reciprocal is a normal number with some margin. */
INLINE int is_invertible(float by) { return by > float_of(64u << 23) && by < float_of(190u << 23); }

/* Whether numbers are multiplied by `by`, and not divided. */
INLINE int multiplies(const recipe *r) { return r->scales != FLOATS && r->scales != OVER_WHOLE; }

INLINE void encode_affine(const recipe *r, int dtype, const void *restrict x, count n, float by, float zero,
                          uint8_t *restrict to) {
    float lowest = r->lowest, highest = r->highest;
    uint32_t offset = (uint32_t)r->offset;
    count i = 0;
#ifdef FAST
    int is_guessed = is_invertible(by);
    float inverse = 1.0f / by, sure = 0;
    int is_code = zero >= lowest && zero <= highest && zero == (zero + MAGIC) - MAGIC;
    if (dtype == BFLOAT16 && is_guessed && is_code && n >= LONG && !multiplies(r)) sure = agreeing(r, by, zero, 0, 0);
    if (sure != 0)
        for (; i + SOME <= n; i += SOME) affine_32_times(r, dtype, behind(x, dtype, i), sure, zero, to + i);
    for (; i + SOME <= n && !multiplies(r); i += SOME)
        affine_32(r, dtype, behind(x, dtype, i), is_guessed, by, inverse, zero, to + i);
#endif
    for (; i < n; i++) {
        float y = number(x, dtype, i);
        y = (multiplies(r) ? y * by : y / by) + zero;
        y = y < lowest ? lowest : y;
        y = y > highest ? highest : y;
        to[i] = (uint8_t)(bits_of(y + MAGIC) + offset);
    }
}

INLINE void encode_float8(const recipe *r, int dtype, const void *restrict x, count n, float by, int mantissa, int bias,
                          uint8_t *restrict to) {
    float lowest = r->lowest, highest = r->highest;
    int cut = 23 - mantissa;
    uint32_t smallest = (uint32_t)(128 - bias) << 23, unit = (uint32_t)(128 - bias + cut) << 23;
    uint32_t rebias = ((uint32_t)(127 - bias) << 23) - ((1u << (cut - 1)) - 1);
    count i = 0;
#ifdef FAST
    int is_guessed = is_invertible(by);
    float inverse = 1.0f / by, sure = 0;
    if (multiplies(r))
        for (; i + SOME <= n; i += SOME) float8_32_exactly(r, dtype, behind(x, dtype, i), by, mantissa, bias, to + i);
    else if (dtype == BFLOAT16 && is_guessed && n >= LONG / 8) sure = agreeing(r, by, 0, mantissa, bias);
    if (sure != 0)
        for (; i + SOME <= n; i += SOME)
            float8_32(r, dtype, behind(x, dtype, i), 1, 1, by, sure, mantissa, bias, to + i);
    for (; i + SOME <= n; i += SOME)
        float8_32(r, dtype, behind(x, dtype, i), is_guessed, 0, by, inverse, mantissa, bias, to + i);
#endif
    for (; i < n; i++) {
        float y = number(x, dtype, i);
        y = multiplies(r) ? y * by : y / by;
        y = y < lowest ? lowest : y;
        y = y > highest ? highest : y;
        uint32_t bits = bits_of(y), sign = bits >> (mantissa == 1 ? 28 : 24) & (mantissa == 1 ? 8 : 0x80), rest = bits & 0x7fffffff;
        uint32_t normal = (rest - rebias + (rest >> cut & 1)) >> cut;
        uint32_t subnormal = bits_of(float_of(rest) + float_of(unit)) - unit;
        to[i] = (uint8_t)(sign | (rest < smallest ? subnormal : normal));
    }
}

/* How many of the thresholds lie below each number. */
INLINE void encode_nearest(const recipe *r, int dtype, const void *restrict x, count n, float by, uint8_t *restrict to) {
    const float *e = r->edges;
    count i = 0;
#ifdef FAST
    const halving h = halved(e);
    for (; i + SOME <= n; i += SOME) nearest_32(&h, dtype, behind(x, dtype, i), by, to + i);
#endif
    for (; i < n; i++) {
        float y = number(x, dtype, i) * by;
        int32_t code = 0;
        for (int j = 0; j < 15; j++) code += y > e[j];
        to[i] = (uint8_t)code;
    }
    if (!r->is_ordered)
        for (i = 0; i < n; i++) to[i] = r->order[to[i]];
}

/* `magnitude` and `extremes` of a run from its start. */
INLINE float run_magnitude(const void *x, int dtype, count n) {
#ifdef FAST
    if (dtype != FLOAT32 && n % 16 == 0) {
        int most = magnitude_16((const uint16_t *)x, n);
        return dtype == BFLOAT16 ? float_of((uint32_t)most << 16) : from_half((uint16_t)most);
    }
#endif
    return magnitude(x, dtype, 0, n);
}

INLINE void run_extremes(const void *x, int dtype, count n, float *low, float *high) {
#ifdef FAST
    if (dtype != FLOAT32 && n % 16 == 0) {
        int lowest, highest;
        extremes_16((const uint16_t *)x, n, &lowest, &highest);
        uint16_t first = (uint16_t)(lowest ^ (lowest >> 15 & 0x7fff)), last = (uint16_t)(highest ^ (highest >> 15 & 0x7fff));
        *low = dtype == BFLOAT16 ? float_of((uint32_t)first << 16) : from_half(first);
        *high = dtype == BFLOAT16 ? float_of((uint32_t)last << 16) : from_half(last);
        return;
    }
#endif
    extremes(x, dtype, 0, n, low, high);
}

INLINE void run_pack4(const uint8_t *restrict codes, count n, uint8_t *restrict out) {
    count i = 0;
#ifdef FAST
    for (; i + SOME <= n; i += SOME) pack4_32(codes + i, out + i / 2);
#endif
    if (i < n) pack4(codes + i, n - i, out + i / 2);
}

/* The codes of n numbers in runs of `width`, each with its own entry of `by` and, unless all are 0, `shift`; one function for
 * bfloat16 and one for float32.  float16 is converted to float32 first. */
#define EACH_RUN(WORK)                                                             \
    for (count i = 0; i < n; i += width, x += width, to += width, by++, shift++) { \
        count m = least(width, n - i);                                             \
        WORK;                                                                      \
    }
#define ENCODER(KIND, NAME, TYPE, WORK)                                                                                  \
    static void KIND##_##NAME(const recipe *r, const TYPE *x, count n, count width, const float *by, const float *shift, \
                              uint8_t *to) {                                                                             \
        WORK                                                                                                             \
    }
#define ENCODERS(NAME, TYPE, DTYPE)                                                                                     \
    ENCODER(affine, NAME, TYPE, EACH_RUN(encode_affine(r, DTYPE, x, m, *by, r->is_symmetric ? 0 : *shift, to)))         \
    ENCODER(e4m3, NAME, TYPE, EACH_RUN(encode_float8(r, DTYPE, x, m, *by, 3, 7, to)))                                   \
    ENCODER(e5m2, NAME, TYPE, EACH_RUN(encode_float8(r, DTYPE, x, m, *by, 2, 15, to)))                                  \
    ENCODER(e2m1, NAME, TYPE, SHORT_RUNS(DTYPE) EACH_RUN(encode_float8(r, DTYPE, x, m, *by, 1, 1, to)))                 \
    ENCODER(nearest, NAME, TYPE, EACH_RUN(encode_nearest(r, DTYPE, x, m, *by, to)))                                     \
    static void codes_##NAME(const recipe *r, const TYPE *x, count n, count width, const float *by, const float *shift, \
                             uint8_t *to) {                                                                             \
        if (r->kind == AFFINE) affine_##NAME(r, x, n, width, by, shift, to);                                            \
        else if (r->kind == NEAREST) nearest_##NAME(r, x, n, width, by, shift, to);                                     \
        else if (r->mantissa == 3) e4m3_##NAME(r, x, n, width, by, shift, to);                                          \
        else if (r->mantissa == 2) e5m2_##NAME(r, x, n, width, by, shift, to);                                          \
        else e2m1_##NAME(r, x, n, width, by, shift, to);                                                                \
    }
#ifdef FAST /* two runs of 16 at once */
#define SHORT_RUNS(DTYPE)                                                                                 \
    for (; width == SOME / 2 && n >= SOME; n -= SOME, x += SOME, to += SOME, by += 2, shift += 2) \
        float8_16_twice(r, DTYPE, x, multiplies(r), by, 1, 1, to);
#else
#define SHORT_RUNS(DTYPE)
#endif
ENCODERS(float32, float, FLOAT32)
ENCODERS(bfloat16, uint16_t, BFLOAT16)

#define BAND 4096  /* numbers that are encoded at once: they stay in the first-level cache; even */

/* Computes scales of e8m0, 2**-127 to 2**127, and their inverses from magnitudes; returns whether these are
 * finite and small enough. */
static int fit_powers(const recipe *r, count runs, const float *restrict high, uint8_t *restrict scale, float *restrict by) {
    int bad = 0;
    uint32_t lift = r->scales == EVEN ? 1u << (22 - r->mantissa) : 0;
    for (count i = 0; i < runs; i++) {
        uint32_t bits = bits_of(r->scales == RCEIL ? high[i] / r->span : high[i]); /* a NaN's may carry into the sign */
        int32_t byte = r->scales == RCEIL ? (int32_t)((bits + 0x7fffff) >> 23) : (int32_t)((bits + lift) >> 23) - r->top;
        bad |= !(high[i] < LIMIT);
        byte = byte < 0 ? 0 : byte > 254 ? 254 : byte;
        byte = high[i] > 0 ? byte : 127;
        scale[i] = (uint8_t)byte;
        by[i] = float_of(byte < 254 ? (uint32_t)(254 - byte) << 23 : 1u << 22);
    }
    return !bad;
}

/* Computes scales of e4m3 with a number for all rows, normal ones, and what multiplies or divides values; returns whether
 * the magnitudes are small enough. */
static int fit_e4m3(const recipe *r, count runs, const float *restrict high, uint8_t *restrict scale, float *restrict by) {
    int bad = 0, divides = r->scales == OVER_WHOLE;
    float whole = r->whole, inverse = 1.0f / whole, least_scale = float_of(121u << 23);
    for (count i = 0; i < runs; i++) {
        float ratio = high[i] / r->span;
        bad |= !(high[i] < LIMIT);
        ratio = divides ? ratio * whole : ratio / whole;
        ratio = ratio < least_scale ? least_scale : ratio;
        ratio = ratio > 448.0f ? 448.0f : ratio;
        uint32_t bits = bits_of(ratio), code = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20; /* halves to even */
        float stored = float_of(code << 20);
        scale[i] = (uint8_t)(code - (120u << 3));
        by[i] = divides ? stored / whole : inverse / stored;
    }
    return !bad;
}

/* Fits scales of a byte. */
static int fit_bytes(const recipe *r, count runs, const float *restrict high, uint8_t *restrict scale, float *restrict by) {
    return r->scales <= RCEIL ? fit_powers(r, runs, high, scale, by) : fit_e4m3(r, runs, high, scale, by);
}

/* Computes from extremes the entries of `scale` and `zero`, the divisors `by` (for NEAREST factors) and `shift`; returns
 * whether all are finite and small enough. */
static int fit(const recipe *r, count runs, const float *restrict low, const float *restrict high, float *restrict scale,
               uint8_t *restrict zero, float *restrict by, float *restrict shift) {
    int bad = 0;
    if (r->kind == NEAREST) {
        for (count i = 0; i < runs; i++) {
            float most = high[i];
            bad |= !(most < LIMIT);
            most = most > 0 ? (most < TINY ? TINY : most) : 0;
            scale[i] = most;
            by[i] = 1.0f / (most < TINY ? 1.0f : most);
        }
        return !bad;
    }
    for (count i = 0; i < runs; i++) {
        float range = high[i] - low[i], found = range / r->span;
        bad |= !(range < LIMIT) | !(found < LIMIT);
        found = range > 0 ? (found < TINY ? TINY : found) : 1.0f;
        scale[i] = found;
        by[i] = found * r->unit;
        bad |= by[i] == 0;
    }
    if (r->is_symmetric) return !bad;
    float lowest = r->lowest, highest = r->highest;
    for (count i = 0; i < runs; i++) {
        float at = lowest - low[i] / by[i];
        at = at < lowest ? lowest : at;
        at = at > highest ? highest : at;
        shift[i] = (at + MAGIC) - MAGIC;
        zero[i] = (uint8_t)(bits_of(at + MAGIC) + (uint32_t)r->zero_offset);
    }
    return !bad;
}

/* The codes of at most BAND numbers, contiguous in memory as their codes are, from the column `start` on of a row whose runs
 * have the entries `by` and `shift`. */
static void encode_band(const recipe *r, const void *x, count start, count n, const float *by, const float *shift,
                        uint8_t *to) {
    float numbers[BAND];
    uint8_t some[BAND], *codes = r->bits == 8 ? to : some;
    int dtype = r->dtype;
    if (dtype == FLOAT16) {
        fetch(x, FLOAT16, 0, n, numbers);
        x = numbers, dtype = FLOAT32;
    }
    for (count i = 0, m; i < n; i += m) { /* the rest of the run before `start`, then whole runs */
        count run = (start + i) / r->width, rest = (start + i) % r->width;
        m = rest ? least(r->width - rest, n - i) : n - i;
        const void *from = behind(x, dtype, i);
        if (dtype == BFLOAT16) codes_bfloat16(r, from, m, r->width, by + run, shift + run, codes + i);
        else codes_float32(r, from, m, r->width, by + run, shift + run, codes + i);
    }
    if (r->bits == 4) run_pack4(some, n, to);
}

/* The codes of the rows from `begin` on under given scales and zero points; `columns` is that of the recipe. */
static void encode_under(const recipe *r, const void *x, count begin, count rows, count columns, const float *scale,
                         const float *zero, count scale_stride, uint8_t *codes) {
    for (count row = begin; row < rows; row++)
        for (count start = 0; start < columns; start += BAND) {
            const float *by = scale + row * scale_stride, *shift = r->is_symmetric ? by : zero + row * scale_stride;
            const void *from = behind(x, r->dtype, row * columns + start);
            encode_band(r, from, start, least(BAND, columns - start), by, shift, codes + row * r->stride + start * r->bits / 8);
        }
}

/* Rows to codes, scales and zero points; 0 if a number is not finite or too large: then the outputs are undefined. */
static int encode(const recipe *r, const void *x, count rows, void *scales, uint8_t *zero, uint8_t *codes) {
    count width = r->width, columns = r->columns, most = width * RUNS;
    if (most > BAND) most = width > BAND ? width : BAND / width * width;
    if (columns % width == 0 && r->stride * 8 == columns * r->bits) { /* rows without gaps: one long row */
        columns *= rows;
        rows = 1;
    }
    float low[RUNS] = {0}, high[RUNS], by[RUNS], shift[RUNS] = {0}, *scale = scales;
    uint8_t *byte = scales;
    for (count row = 0; row < rows; row++, codes += r->stride) {
        for (count start = 0; start < columns; start += most) {
            count n = least(most, columns - start), runs = 0;
            for (count at = 0; at < n; at += width, runs++) {
                const void *from = behind(x, r->dtype, at);
                count m = least(width, n - at);
                if (r->is_symmetric) {
                    high[runs] = run_magnitude(from, r->dtype, m);
                } else {
                    float least_one, largest_one;
                    run_extremes(from, r->dtype, m, &least_one, &largest_one);
                    low[runs] = least_one > 0 ? 0 : least_one; /* a NaN stays one */
                    high[runs] = largest_one < 0 ? 0 : largest_one;
                }
            }
            if (!(r->scales ? fit_bytes(r, runs, high, byte, by) : fit(r, runs, low, high, scale, zero, by, shift))) return 0;
            if (r->is_searched) {
                for (count i = 0; i < runs; i++) high[i] = high[i] > -low[i] ? high[i] : -low[i];
                search_runs(r, x, n, high, shift, scale);
                for (count i = 0; i < runs; i++)
                    by[i] = r->kind == NEAREST ? 1.0f / (scale[i] < TINY ? 1.0f : scale[i]) : scale[i] * r->unit;
            }
            for (count at = 0; at < n; at += BAND) { /* one, unless a run is longer */
                uint8_t *to = r->bits == 8 ? codes + start + at : codes + (start + at) / 2;
                encode_band(r, behind(x, r->dtype, at), at, least(BAND, n - at), by, shift, to);
            }
            x = behind(x, r->dtype, n);
            if (r->scales) byte += runs;
            else scale += runs;
            zero += r->is_symmetric ? 0 : runs;
        }
    }
    return 1;
}

/* The same for rows of a file, from the byte `at` on: pieces of at most `nbytes` are read into `room`, and encoded while
 * they are in the cache.  0 also if the file cannot be read or is too short; the caller reads it again and raises. */
static int encode_file(const recipe *r, int file, count at, count rows, void *room, count nbytes, void *scale, uint8_t *zero,
                   uint8_t *codes) {
    count row = r->columns * (r->dtype == FLOAT32 ? 4 : 2), groups = (r->columns + r->width - 1) / r->width;
    count most = nbytes / row;
    if (most < 1) return 0;
    for (count done = 0; done < rows;) {
        count some = least(most, rows - done), size = some * row;
        for (count filled = 0; filled < size;) {
            ssize_t got = pread(file, (char *)room + filled, (size_t)(size - filled), (off_t)(at + filled));
            if (got <= 0) return 0;
            filled += got;
        }
        if (!encode(r, room, some, scale, zero, codes)) return 0;
        at += size;
        done += some;
        scale = (char *)scale + some * groups * (r->scales ? 1 : 4);
        zero += r->is_symmetric ? 0 : some * groups;
        codes += some * r->stride;
    }
    return 1;
}
