/* The inner loops of encode.h on 32 numbers at a time, for processors with AVX2 and FMA.
 *
 * A division takes longer than all the rest, so numbers are multiplied by the reciprocal of their scale: once made a
 * little smaller, once a little larger, so that the true quotient lies between the two products.  Rounding keeps order,
 * also of a sum: where both give the same code, the quotient gives it too.  Where they differ nothing is claimed, and the caller divides.
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

/* 32 integers as bytes in order, those beyond 16 and then 8 bits cut off at the ends. */
INLINE __m256i signed_bytes(const __m256i *v) {
    __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

INLINE int is_same(__m256i a, __m256i b) { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(a, b)) == -1; }

INLINE __m256i affine_codes(const void *x, int dtype, __m256 by, __m256 zero, __m256i lowest, __m256i highest) {
    __m256i codes[4];
    for (int j = 0; j < 4; j++)
        codes[j] = _mm256_cvtps_epi32(_mm256_fmadd_ps(eight(x, dtype, 8 * j), by, zero));
    return _mm256_min_epi8(_mm256_max_epi8(signed_bytes(codes), lowest), highest);
}

/* Whether the codes of 32 numbers are known, and written. */
INLINE int affine_32(const recipe *r, int dtype, const void *x, float inverse, float zero, uint8_t *to) {
    __m256 shift = _mm256_set1_ps(zero);
    __m256i lowest = _mm256_set1_epi8((char)r->lowest), highest = _mm256_set1_epi8((char)r->highest);
    __m256i codes = affine_codes(x, dtype, _mm256_set1_ps(inverse * LESS), shift, lowest, highest);
    __m256i other = affine_codes(x, dtype, _mm256_set1_ps(inverse * MORE), shift, lowest, highest);
    if (!is_same(codes, other)) return 0;
    _mm256_storeu_si256((__m256i *)to, _mm256_add_epi8(codes, _mm256_set1_epi8((char)r->offset)));
    return 1;
}

/* The same for float8, if none of them is subnormal; zero is. */
INLINE int float8_32(const recipe *r, int dtype, const void *x, float inverse, int mantissa, int bias, uint8_t *to) {
    int cut = 23 - mantissa;
    __m256 less = _mm256_set1_ps(inverse * LESS), more = _mm256_set1_ps(inverse * MORE);
    __m256 highest = _mm256_set1_ps(r->highest), magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256i half = _mm256_set1_epi32((1 << (cut - 1)) - ((127 - bias) << 23));
    __m256 least = highest;
    __m256i codes[4], other[4], signs[4];
    for (int j = 0; j < 4; j++) {
        __m256 y = eight(x, dtype, 8 * j), size = _mm256_and_ps(y, magnitude);
        __m256 low = _mm256_min_ps(_mm256_mul_ps(size, less), highest);
        __m256 high = _mm256_min_ps(_mm256_mul_ps(size, more), highest);
        least = _mm256_min_ps(least, low);
        codes[j] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(low), half), cut);
        other[j] = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(high), half), cut);
        signs[j] = _mm256_srai_epi32(_mm256_castps_si256(y), 31);
    }
    __m256i made = signed_bytes(codes);
    float smallest = float_of((uint32_t)(128 - bias) << 23);
    if (_mm256_movemask_ps(_mm256_cmp_ps(least, _mm256_set1_ps(smallest), _CMP_LT_OQ))) return 0;
    if (!is_same(made, signed_bytes(other))) return 0;
    __m256i sign = _mm256_and_si256(signed_bytes(signs), _mm256_set1_epi8((char)0x80));
    _mm256_storeu_si256((__m256i *)to, _mm256_or_si256(made, sign));
    return 1;
}

/* The thresholds in the order in which halving asks for them. */
typedef struct {
    __m256 half, first, third, quarters, eighths;
} halving;

INLINE halving halved(const float *e) {
    return (halving){_mm256_set1_ps(e[7]), _mm256_set1_ps(e[3]), _mm256_set1_ps(e[11]),
                     _mm256_setr_ps(e[1], e[5], e[9], e[13], 0, 0, 0, 0),
                     _mm256_setr_ps(e[0], e[2], e[4], e[6], e[8], e[10], e[12], e[14])};
}

/* How many of 15 thresholds lie below each of 32 products. */
INLINE void nearest_32(const halving *h, int dtype, const void *x, float by, uint8_t *to) {
    const __m256i none = _mm256_setzero_si256();
    __m256i codes[4];
    for (int j = 0; j < 4; j++) {
        __m256 y = _mm256_mul_ps(eight(x, dtype, 8 * j), _mm256_set1_ps(by));
        __m256 above = _mm256_cmp_ps(y, h->half, _CMP_GT_OQ);
        __m256i code = _mm256_castps_si256(above); /* minus the number of them */
        above = _mm256_cmp_ps(y, _mm256_blendv_ps(h->first, h->third, above), _CMP_GT_OQ);
        code = _mm256_add_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(above));
        __m256 edge = _mm256_permutevar8x32_ps(h->quarters, _mm256_sub_epi32(none, code));
        above = _mm256_cmp_ps(y, edge, _CMP_GT_OQ);
        code = _mm256_add_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(above));
        edge = _mm256_permutevar8x32_ps(h->eighths, _mm256_sub_epi32(none, code));
        above = _mm256_cmp_ps(y, edge, _CMP_GT_OQ);
        codes[j] = _mm256_add_epi32(_mm256_add_epi32(code, code), _mm256_castps_si256(above));
    }
    _mm256_storeu_si256((__m256i *)to, _mm256_sub_epi8(none, signed_bytes(codes)));
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
    most = _mm_minpos_epu16(_mm_xor_si128(most, _mm_set1_epi16(0x7fff))); /* the largest is the smallest unsigned */
    return (int16_t)((uint16_t)_mm_cvtsi128_si32(most) ^ 0x7fff);
}

/* The largest of n numbers of 16 bits without their signs, and of which many are seen: a multiple of 16. */
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
