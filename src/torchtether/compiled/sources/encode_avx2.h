/* The inner loops of encode.h on 32 numbers at a time, for processors with AVX2 and FMA.
 *
 * A division takes longer than all the rest, so numbers are multiplied by the reciprocal of their scale: once made a
 * little smaller, once a little larger, so that the true quotient lies between the two products.  Rounding is monotone,
 * also of a sum: if both products give the same code, the quotient gives it, too.  If they differ, the number is divided.
 *
 * For bfloat16 one product is enough, by a reciprocal that `agreeing` finds for a run.  The code by quotient and the code by
 * product are rising step functions of the number.  The places of the same step in both differ by less than 2**-11 of the
 * place, because errors of numbers up to 256 are below 2**-12; and two bfloat16 numbers differ by more than 2**-9 of
 * either.  So if the functions differ for any bfloat16 number, they differ for the one next to a step; and there are few
 * steps.
 */

#include <immintrin.h>

#define LESS (1.0f - 1.0f / (1 << 21)) /* a reciprocal, a product and this one are off by less than 2**-22 */
#define MORE (1.0f + 1.0f / (1 << 21))

/* Eight numbers as float32. */
INLINE __m256 eight(const void *x, int dtype, count i) {
    if (dtype == FLOAT32) return _mm256_loadu_ps((const float *)x + i);
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)((const uint16_t *)x + i)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

/* 32 integers as bytes in order, saturated to 16 and then to 8 bits. */
INLINE __m256i signed_bytes(const __m256i *v) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE int is_same(__m256i a, __m256i b) { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) == -1; }

enum { TIMES, OVER, EXACTLY }; /* the last multiplies, too, and is rounded with care */

/* Quotients that are too negative for an integer become the most negative one, but those that are too large, too. */
INLINE __m256i affine_codes(const recipe *r, int dtype, const void *x, int how, float by, float zero) {
    __m256 number = _mm256_set1_ps(by), shift = _mm256_set1_ps(zero), highest = _mm256_set1_ps(r->highest);
    __m256i codes[4];
    for (int j = 0; j < 4; j++) {
        __m256 y = eight(x, dtype, 8 * j);
        y = how == OVER ? _mm256_add_ps(_mm256_div_ps(y, number), shift) : _mm256_fmadd_ps(y, number, shift);
        codes[j] = _mm256_cvtps_epi32(_mm256_min_ps(y, highest));
    }
    __m256i bytes = signed_bytes(codes);
    return r->lowest == -128.0f ? bytes : _mm256_max_epi8(bytes, _mm256_set1_epi8((char)r->lowest));
}

/* The codes of 32 numbers. */
INLINE void affine_32(const recipe *r, int dtype, const void *x, int is_guessed, float by, float inverse, float zero,
                      uint8_t *to) {
    __m256i codes = affine_codes(r, dtype, x, TIMES, inverse * LESS, zero);
    if (!is_guessed || !is_same(codes, affine_codes(r, dtype, x, TIMES, inverse * MORE, zero)))
        codes = affine_codes(r, dtype, x, OVER, by, zero);
    _mm256_storeu_si256((__m256i *)to, _mm256_add_epi8(codes, _mm256_set1_epi8((char)r->offset)));
}

/* The same by one product, if that is known to be right. */
INLINE void affine_32_times(const recipe *r, int dtype, const void *x, float inverse, float zero, uint8_t *to) {
    __m256i codes = affine_codes(r, dtype, x, TIMES, inverse, zero);
    _mm256_storeu_si256((__m256i *)to, _mm256_add_epi8(codes, _mm256_set1_epi8((char)r->offset)));
}

/* The bfloat16 numbers nearest to numbers that are normal. */
INLINE __m256 next_bfloat16(__m256 x) {
    __m256i bits = _mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000));
    return _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32((int)0xffff0000)));
}

/* The quotients at which the code steps to the next: the first, and their number. Without a zero point those of negative
 * numbers mirror the others. */
INLINE int affine_steps(const recipe *r, float zero, float *first) {
    *first = zero == 0 ? 0.5f : r->lowest + 0.5f - zero;
    return (int)(zero != 0 ? r->highest - r->lowest : -r->lowest > r->highest ? -r->lowest : r->highest);
}

/* Whether no bfloat16 number is so near to a step that the rounding of the reciprocal and the product matters: that is less
 * than 2**-22 of the number, and with a zero point less than 2**-23 of the range of codes, twice. */
INLINE int affine_is_clear(const recipe *r, float by, float zero) {
    float first;
    int count = affine_steps(r, zero, &first), near = zero == 0 ? 8 : 8 * (count + 1); /* in units of the last bit */
    __m256 step = _mm256_add_ps(_mm256_set1_ps(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i least = _mm256_set1_epi32(0xffff);
    for (int i = 0; i < count; i += 8, step = _mm256_add_ps(step, _mm256_set1_ps(8))) {
        __m256i bits = _mm256_castps_si256(_mm256_mul_ps(step, _mm256_set1_ps(by)));
        bits = _mm256_and_si256(_mm256_add_epi32(bits, _mm256_set1_epi32(near)), _mm256_set1_epi32(0xffff));
        least = _mm256_min_epi32(least, bits);
    }
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(least, _mm256_set1_epi32(2 * near))) == -1;
}

/* Whether x * inverse + zero and x / by + zero round to the same integer next to every step. */
INLINE int affine_agrees(const recipe *r, float by, float inverse, float zero) {
    float first;
    int count = affine_steps(r, zero, &first);
    __m256 number = _mm256_set1_ps(by), times = _mm256_set1_ps(inverse), shift = _mm256_set1_ps(zero);
    __m256 step = _mm256_add_ps(_mm256_set1_ps(first), _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7));
    __m256i same = _mm256_set1_epi32(-1);
    for (int i = 0; i < count; i += 8, step = _mm256_add_ps(step, _mm256_set1_ps(8))) {
        __m256 x = next_bfloat16(_mm256_mul_ps(step, number));
        __m256i over = _mm256_cvtps_epi32(_mm256_add_ps(_mm256_div_ps(x, number), shift));
        same = _mm256_and_si256(same, _mm256_cmpeq_epi32(over, _mm256_cvtps_epi32(_mm256_fmadd_ps(x, times, shift))));
    }
    return _mm256_movemask_epi8(same) == -1;
}

/* The codes of 8 magnitudes, scaled and clipped, as float8. Products are rounded without care for ties and subnormals. */
INLINE __m256i float8_code(__m256 y, int how, int mantissa, int bias) {
    int cut = 23 - mantissa;
    uint32_t smallest = (uint32_t)(128 - bias) << 23, unit = (uint32_t)(128 - bias + cut) << 23;
    __m256i bits = _mm256_castps_si256(y), half = _mm256_set1_epi32((1 << (cut - 1)) - ((127 - bias) << 23));
    if (how == TIMES) return _mm256_srli_epi32(_mm256_add_epi32(bits, half), cut);
    /* halves to even, and subnormals by adding the number whose last bit has their unit */
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, cut), _mm256_set1_epi32(1));
    __m256i code = _mm256_add_epi32(_mm256_add_epi32(bits, half), _mm256_sub_epi32(odd, _mm256_set1_epi32(1)));
    __m256 sum = _mm256_add_ps(y, _mm256_set1_ps(float_of(unit)));
    __m256i low = _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_set1_epi32((int)unit));
    __m256i is_low = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)smallest), bits);
    return _mm256_blendv_epi8(_mm256_srli_epi32(code, cut), low, is_low);
}

/* The same for 32 numbers that are not scaled yet, 16 with each scale; `least` holds the smallest scaled magnitudes. */
INLINE __m256i float8_codes(const recipe *r, int dtype, const void *x, int how, float by, float next, int mantissa,
                            int bias, __m256 *least) {
    __m256 highest = _mm256_set1_ps(r->highest);
    __m256 bare = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256i codes[4];
    *least = highest;
    for (int j = 0; j < 4; j++) {
        __m256 y = _mm256_and_ps(eight(x, dtype, 8 * j), bare), number = _mm256_set1_ps(j < 2 ? by : next);
        y = _mm256_min_ps(how == OVER ? _mm256_div_ps(y, number) : _mm256_mul_ps(y, number), highest);
        *least = _mm256_min_ps(*least, y);
        codes[j] = float8_code(y, how, mantissa, bias);
    }
    return signed_bytes(codes);
}

/* Writes 32 codes with the signs of the numbers. */
INLINE void put_float8(__m256i codes, int dtype, const void *x, int mantissa, uint8_t *to) {
    __m256i signs[4];
    for (int j = 0; j < 4; j++) signs[j] = _mm256_srai_epi32(_mm256_castps_si256(eight(x, dtype, 8 * j)), 31);
    __m256i sign = _mm256_and_si256(signed_bytes(signs), _mm256_set1_epi8((char)(mantissa == 1 ? 8 : 0x80)));
    _mm256_storeu_si256((__m256i *)to, _mm256_or_si256(codes, sign));
}

/* The codes of 32 products. */
INLINE void float8_32_exactly(const recipe *r, int dtype, const void *x, float by, int mantissa, int bias, uint8_t *to) {
    __m256 least;
    put_float8(float8_codes(r, dtype, x, EXACTLY, by, by, mantissa, bias, &least), dtype, x, mantissa, to);
}

/* The codes of twice 16 numbers, each time divided or multiplied by an entry of `by`. */
INLINE void float8_16_twice(const recipe *r, int dtype, const void *x, int is_product, const float *by, int mantissa,
                            int bias, uint8_t *to) {
    __m256 least;
    __m256i codes = is_product ? float8_codes(r, dtype, x, EXACTLY, by[0], by[1], mantissa, bias, &least)
                               : float8_codes(r, dtype, x, OVER, by[0], by[1], mantissa, bias, &least);
    put_float8(codes, dtype, x, mantissa, to);
}

/* The codes of 32 numbers as float8; `is_sure` if one product is known to be right.  If one of them is subnormal, they are
 * divided in any case. */
INLINE void float8_32(const recipe *r, int dtype, const void *x, int is_guessed, int is_sure, float by, float inverse,
                      int mantissa, int bias, uint8_t *to) {
    float guess = is_sure ? inverse : inverse * LESS, over = inverse * MORE;
    __m256 least, more, smallest = _mm256_set1_ps(float_of((uint32_t)(128 - bias) << 23));
    __m256i codes = float8_codes(r, dtype, x, TIMES, guess, guess, mantissa, bias, &least);
    if (!is_guessed || _mm256_movemask_ps(_mm256_cmp_ps(least, smallest, _CMP_LT_OQ)) ||
        (!is_sure && !is_same(codes, float8_codes(r, dtype, x, TIMES, over, over, mantissa, bias, &more))))
        codes = float8_codes(r, dtype, x, OVER, by, by, mantissa, bias, &least);
    put_float8(codes, dtype, x, mantissa, to);
}

/* Whether products and quotients give the same float8 next to every step from 1 to 2; other binades repeat these. */
INLINE int float8_agrees(float by, float inverse, int mantissa, int bias) {
    __m256 step = _mm256_setr_ps(0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f), number = _mm256_set1_ps(by);
    step = _mm256_fmadd_ps(step, _mm256_set1_ps(1.0f / (1 << mantissa)), _mm256_set1_ps(1.0f));
    __m256 x = next_bfloat16(_mm256_mul_ps(step, number));
    __m256i over = float8_code(_mm256_div_ps(x, number), OVER, mantissa, bias);
    return is_same(over, float8_code(_mm256_mul_ps(x, _mm256_set1_ps(inverse)), TIMES, mantissa, bias));
}

/* A reciprocal with which products give the codes of quotients for every bfloat16 number; 0 if none was found. */
INLINE float agreeing(const recipe *r, float by, float zero, int mantissa, int bias) {
    float inverse = 1.0f / by, tried[] = {inverse, inverse * LESS, inverse * MORE};
    if (!mantissa && affine_is_clear(r, by, zero)) return inverse;
    for (int i = 0; i < 3; i++)
        if (mantissa ? float8_agrees(by, tried[i], mantissa, bias) : affine_agrees(r, by, tried[i], zero)) return tried[i];
    return 0;
}

/* The thresholds in the order in which the binary search reads them. */
typedef struct {
    __m256 half, first, third, quarters, eighths;
} halving;

/* The number of thresholds found so far is kept negative, and indexes the next one in a register modulo 8. */
INLINE halving halved(const float *e) {
    return (halving){_mm256_set1_ps(e[7]), _mm256_set1_ps(e[3]), _mm256_set1_ps(e[11]),
                     _mm256_setr_ps(e[1], 0, 0, 0, 0, e[13], e[9], e[5]),
                     _mm256_setr_ps(e[0], e[14], e[12], e[10], e[8], e[6], e[4], e[2])};
}

/* The negated number of 15 thresholds that lie below each number; and whether the middle one does. */
INLINE __m256i halve(const halving *h, __m256 y, __m256 *is_high) {
    __m256 above = *is_high = _mm256_cmp_ps(y, h->half, _CMP_GT_OQ);
    __m256i code = _mm256_castps_si256(above);
    above = _mm256_cmp_ps(y, _mm256_blendv_ps(h->first, h->third, above), _CMP_GT_OQ);
    code = _mm256_add_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(above));
    above = _mm256_cmp_ps(y, _mm256_permutevar8x32_ps(h->quarters, code), _CMP_GT_OQ);
    code = _mm256_add_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(above));
    above = _mm256_cmp_ps(y, _mm256_permutevar8x32_ps(h->eighths, code), _CMP_GT_OQ);
    return _mm256_add_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(above));
}

/* The codes of 32 products. */
INLINE void nearest_32(const halving *h, int dtype, const void *x, float by, uint8_t *to) {
    __m256 is_high;
    __m256i codes[4];
    for (int j = 0; j < 4; j++) codes[j] = halve(h, _mm256_mul_ps(eight(x, dtype, 8 * j), _mm256_set1_ps(by)), &is_high);
    _mm256_storeu_si256((__m256i *)to, _mm256_sub_epi8(_mm256_setzero_si256(), signed_bytes(codes)));
}

/* 32 codes of 4 bits, two to a byte. */
INLINE void pack4_32(const uint8_t *codes, uint8_t *out) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i *)codes), _mm256_set1_epi16(0x1001));
    __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(bytes));
}

/* The largest of 16 signed integers. */
INLINE int largest_of(__m256i v) {
    __m128i most = _mm_max_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    most = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(0x7fff))); /* now the largest is the smallest unsigned one */
    return (int16_t)((uint16_t)_mm_cvtsi128_si32(most) ^ 0x7fff);
}

/* The largest of n 16-bit numbers without their signs; n is a multiple of 16. */
INLINE int magnitude_16(const uint16_t *x, count n) {
    const __m256i bare = _mm256_set1_epi16(0x7fff);
    __m256i most = _mm256_setzero_si256(), more = most;
    count i = 0;
    for (; i + 32 <= n; i += 32) {
        most = _mm256_max_epi16(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), bare));
        more = _mm256_max_epi16(more, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i + 16)), bare));
    }
    if (i < n) most = _mm256_max_epi16(most, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + i)), bare));
    return largest_of(_mm256_max_epi16(most, more));
}

/* The smallest and the largest, as integers in the order of the numbers; n is a multiple of 16. */
INLINE void extremes_16(const uint16_t *x, count n, int *lowest, int *highest) {
    __m256i low = _mm256_set1_epi16(0x7fff), high = _mm256_set1_epi16((short)0x8000);
    for (count i = 0; i < n; i += 16) {
        __m256i key = _mm256_loadu_si256((const __m256i *)(x + i));
        key = _mm256_xor_si256(key, _mm256_srli_epi16(_mm256_srai_epi16(key, 15), 1));
        low = _mm256_min_epi16(low, key);
        high = _mm256_max_epi16(high, key);
    }
    *highest = largest_of(high);
    *lowest = ~largest_of(_mm256_xor_si256(low, _mm256_set1_epi16(-1)));
}
