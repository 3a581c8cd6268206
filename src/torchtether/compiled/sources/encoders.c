/* The loops over every element of a weight: numbers to codes and back, each element in one pass.
 *
 * They compute as the torch ops in schemes/ do, in the same order and with the same rounding, so that the bits are the
 * same: compile without fast-math and without contraction (-ffp-contract=off).  A tensor is `rows` of `columns`, each
 * row in runs of `width` (the last may be shorter).  Scales and zero points have one entry per run; those of the next row
 * are `scale_stride` further on, which is 0 if all rows share them.
 * A row is processed in stretches that stay in the first-level cache.  Nothing is allocated and nothing is kept.
 */

#define _XOPEN_SOURCE 700 /* pread */
#define _FILE_OFFSET_BITS 64

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "encoders.h"

#define STRETCH 1024 /* elements; even, so that a stretch of 4-bit codes begins with a byte */
#define MAGIC 12582912.0f /* 1.5 * 2**23: adding it rounds to an integer, halves to even, and leaves it in the low bits */

enum { FLOAT32, BFLOAT16, FLOAT16 };

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline count least(count a, count b) { return a < b ? a : b; }

/* float16 as float32 and back, by integers only: compilers differ in whether they know the type. */

static inline float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    float normal = float_of((rest << 13) + (112u << 23));
    float special = float_of((rest << 13) + (224u << 23));
    float subnormal = float_of((rest << 13) | (113u << 23)) - float_of(113u << 23);
    float x = rest >= 0x7c00 ? special : rest >= 0x0400 ? normal : subnormal;
    return float_of(bits_of(x) | sign);
}

static inline uint16_t to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    uint32_t large = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
    return (uint16_t)(sign | (rest >= 0x477ff000 ? large : rest < (113u << 23) ? subnormal : normal));
}

static inline uint16_t to_bfloat16(float x) {
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

/* x rounded to `dtype` */
static inline float to_dtype(float x, int dtype) {
    return dtype == FLOAT32 ? x : dtype == BFLOAT16 ? float_of((uint32_t)to_bfloat16(x) << 16) : from_half(to_half(x));
}

/* reads n elements of a tensor, from the index `at`, as float32 */
static inline void fetch(const void *x, int dtype, count at, count n, float *restrict out) {
    if (dtype == FLOAT32) {
        memcpy(out, (const float *)x + at, (size_t)n * 4);
    } else if (dtype == BFLOAT16) {
        const uint16_t *restrict from = (const uint16_t *)x + at;
        for (count i = 0; i < n; i++) out[i] = float_of((uint32_t)from[i] << 16);
    } else {
        const uint16_t *restrict from = (const uint16_t *)x + at;
        for (count i = 0; i < n; i++) out[i] = from_half(from[i]);
    }
}

static inline void store(const float *restrict x, count n, void *out, int dtype, count at) {
    if (dtype == FLOAT32) {
        memcpy((float *)out + at, x, (size_t)n * 4);
    } else if (dtype == BFLOAT16) {
        uint16_t *restrict to = (uint16_t *)out + at;
        for (count i = 0; i < n; i++) to[i] = to_bfloat16(x[i]);
    } else {
        uint16_t *restrict to = (uint16_t *)out + at;
        for (count i = 0; i < n; i++) to[i] = to_half(x[i]);
    }
}

/* two codes to a byte, the first one low; an odd last one alone */
static inline void pack4(const uint8_t *restrict codes, count n, uint8_t *restrict out) {
    for (count i = 0; i < n / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, 2);
        out[i] = (uint8_t)(pair | pair >> 4); /* the machine is little-endian: see setup_build.py */
    }
    if (n & 1) out[n / 2] = codes[n - 1];
}

static inline void unpack4(const uint8_t *restrict packed, count n, uint8_t *restrict codes) {
    for (count i = 0; i < n / 2; i++) {
        codes[2 * i] = packed[i] & 15;
        codes[2 * i + 1] = packed[i] >> 4;
    }
    if (n & 1) codes[n - 1] = packed[n / 2] & 15;
}

/* ---- extremes -------------------------------------------------------------------------------------------------- */

/* Bits of numbers without the sign have the order of the magnitudes, infinity and then NaN last. */
static inline float magnitude(const void *x, int dtype, count at, count n) {
    if (dtype == FLOAT32) {
        const uint32_t *restrict from = (const uint32_t *)x + at;
        int32_t most = 0;
        for (count i = 0; i < n; i++) {
            int32_t bits = (int32_t)(from[i] & 0x7fffffff);
            most = bits > most ? bits : most;
        }
        return float_of((uint32_t)most);
    }
    const uint16_t *restrict from = (const uint16_t *)x + at;
    int16_t most = 0;
    for (count i = 0; i < n; i++) {
        int16_t bits = (int16_t)(from[i] & 0x7fff);
        most = bits > most ? bits : most;
    }
    return dtype == BFLOAT16 ? float_of((uint32_t)most << 16) : from_half((uint16_t)most);
}

/* If all bits but the sign of negative numbers are inverted, integers have the order of the numbers: NaN is beyond infinity,
 * on either side. */
static inline void extremes(const void *x, int dtype, count at, count n, float *low, float *high) {
    if (dtype == FLOAT32) {
        const int32_t *restrict from = (const int32_t *)x + at;
        int32_t lowest = INT32_MAX, highest = INT32_MIN;
        for (count i = 0; i < n; i++) {
            int32_t key = from[i] ^ (from[i] >> 31 & 0x7fffffff);
            lowest = key < lowest ? key : lowest;
            highest = key > highest ? key : highest;
        }
        *low = float_of((uint32_t)(lowest ^ (lowest >> 31 & 0x7fffffff)));
        *high = float_of((uint32_t)(highest ^ (highest >> 31 & 0x7fffffff)));
        return;
    }
    const int16_t *restrict from = (const int16_t *)x + at;
    int16_t lowest = INT16_MAX, highest = INT16_MIN;
    for (count i = 0; i < n; i++) {
        int16_t key = (int16_t)(from[i] ^ (from[i] >> 15 & 0x7fff));
        lowest = key < lowest ? key : lowest;
        highest = key > highest ? key : highest;
    }
    uint16_t first = (uint16_t)(lowest ^ (lowest >> 15 & 0x7fff));
    uint16_t last = (uint16_t)(highest ^ (highest >> 15 & 0x7fff));
    *low = dtype == BFLOAT16 ? float_of((uint32_t)first << 16) : from_half(first);
    *high = dtype == BFLOAT16 ? float_of((uint32_t)last << 16) : from_half(last);
}

#include "encode.h"
#include "biased.h"

/* ---- extremes of all runs ---------------------------------------------------------------------------------------- */

static void all_magnitudes(const void *x, int dtype, count begin, count rows, count columns, count width, float *out) {
    out += begin * ((columns + width - 1) / width);
    for (count row = begin; row < rows; row++)
        for (count start = 0; start < columns; start += width)
            *out++ = run_magnitude(behind(x, dtype, row * columns + start), dtype, least(width, columns - start));
}

static void all_extremes(const void *x, int dtype, count begin, count rows, count columns, count width, float *low, float *high) {
    count before = begin * ((columns + width - 1) / width);
    low += before, high += before;
    for (count row = begin; row < rows; row++)
        for (count start = 0; start < columns; start += width)
            run_extremes(behind(x, dtype, row * columns + start), dtype, least(width, columns - start), low++, high++);
}

/* ---- codes to numbers ------------------------------------------------------------------------------------------ */

/* ((q - zero) * scale) * unit; codes are unsigned, or signed if bits is -8 */
static void all_decode_affine(const uint8_t *codes, int bits, count begin, count rows, count columns, count width,
                              count stride, const float *scale, const float *zero, count scale_stride, float offset,
                              float unit, void *out, int dtype, count out_stride) {
    float numbers[STRETCH];
    uint8_t some[STRETCH];
    codes += begin * stride, scale += begin * scale_stride;
    for (count row = begin; row < rows; row++, codes += stride, scale += scale_stride) {
        for (count start = 0; start < columns; start += STRETCH) {
            count n = least(STRETCH, columns - start);
            if (bits == -8) {
                const int8_t *restrict from = (const int8_t *)codes + start;
                for (count i = 0; i < n; i++) numbers[i] = (float)from[i];
            } else {
                const uint8_t *restrict from = codes + start;
                if (bits == 4) {
                    unpack4(codes + start / 2, n, some);
                    from = some;
                }
                for (count i = 0; i < n; i++) numbers[i] = (float)(int32_t)from[i];
            }
            for (count i = 0; i < n;) {
                count run = least(width - (start + i) % width, n - i), group = (start + i) / width;
                float by = scale[group], low = zero ? zero[row * scale_stride + group] : offset;
                for (count j = i; j < i + run; j++) numbers[j] = (numbers[j] - low) * by;
                i += run;
            }
            if (unit != 1.0f)
                for (count i = 0; i < n; i++) numbers[i] = numbers[i] * unit;
            store(numbers, n, out, dtype, row * out_stride + start);
        }
    }
}

/* table[q] * scale, with codes of 4 bits or of 8 */
static void all_decode_table(const uint8_t *codes, int bits, count begin, count rows, count columns, count width,
                             count stride, const float *scale, count scale_stride, const float *table, void *out, int dtype,
                             count out_stride) {
    float numbers[STRETCH];
    uint8_t some[STRETCH];
    codes += begin * stride, scale += begin * scale_stride;
    for (count row = begin; row < rows; row++, codes += stride, scale += scale_stride) {
        for (count start = 0; start < columns; start += STRETCH) {
            count n = least(STRETCH, columns - start);
            const uint8_t *from = codes + start;
            if (bits == 4) {
                unpack4(codes + start / 2, n, some);
                from = some;
            }
            for (count i = 0, run; i < n; i += run) {
                float by = scale[(start + i) / width];
                run = least(width - (start + i) % width, n - i);
                for (count j = i; j < i + run; j++) numbers[j] = table[from[j]] * by;
            }
            store(numbers, n, out, dtype, row * out_stride + start);
        }
    }
}

#define JOIN(LEVEL) encoders_##LEVEL
#define NAME(LEVEL) JOIN(LEVEL)
const encoders NAME(LEVEL) = {
    .magnitudes = all_magnitudes,
    .extremes = all_extremes,
    .encode_under = encode_under,
    .fit_scales = fit_scales,
    .encode_biased = encode_biased,
    .fit_biased = fit_biased,
    .encode = encode,
    .encode_file = encode_file,
    .decode_affine = all_decode_affine,
    .decode_table = all_decode_table,
};
