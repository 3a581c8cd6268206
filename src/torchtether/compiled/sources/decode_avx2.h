// Decoding to 16 bits with AVX2: the same bits as decode.h, in fewer instructions.
//
// kernels.cpp includes this in its own namespace, at the level of AVX2. Each function decodes a row from column k towards
// `end`, where all columns share a scale, as far as whole vectors reach, and returns the column at which it stopped.
//     4-bit codes: the 16 possible values of a group are computed once, and looked up by their bytes.
//     float8 e4m3: bfloat16 has its exponents, so that only the 8 fractions are computed, once per group, and looked up;
//         the exponent is added to them. Subnormals are 8 more fractions.
//     8-bit integers: computed, 16 at once; even and odd columns apart, so that their halves need no reordering. If many
//         columns share a scale, one test before the loop finds whether any product lies halfway between two bfloat16.

// The upper halves of the float32 `even` and `odd`, rounded to nearest, interleaved. A sum of 17 bits is computed as an
// average: its top bit is the carry of the lower half, plus 0x7fff, plus the bit that decides ties.
inline __m256i rounded_halves(__m256 even, __m256 odd) {
    const __m256i x = _mm256_castps_si256(even), y = _mm256_castps_si256(odd);
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(x, 16), y, 0xaa);
    const __m256i low = _mm256_blend_epi16(x, _mm256_slli_epi32(y, 16), 0xaa);
    const __m256i half = _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi16(1)), _mm256_set1_epi16(0x7ffe));
    return _mm256_add_epi16(high, _mm256_srli_epi16(_mm256_avg_epu16(low, half), 15));
}

// Bytes of codes to prefetch ahead, to the second-level cache: processors prefetch by themselves at most to the next page.
constexpr int64_t AHEAD = 4096;

struct Sixteen { F even, odd; };  // the values of 4-bit codes

inline Sixteen sixteen(const float* values) {
    Sixteen made;
    for (int i = 0; i < 8; i++) made.even[i] = values[2 * i], made.odd[i] = values[2 * i + 1];
    return made;
}

struct ByteTable {  // of 16 words: their low bytes, their high bytes, in both lanes
    __m256i low, high;

    template <int D> static ByteTable of(Sixteen s) {
        __m256i words;
        if (D == BFLOAT16) words = rounded_halves((__m256)s.even, (__m256)s.odd);
        else {
            const __m256i even = _mm256_cvtepu16_epi32((__m128i)to_half(s.even));
            words = _mm256_or_si256(even, _mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)to_half(s.odd)), 16));
        }
        const __m256i l = _mm256_and_si256(words, _mm256_set1_epi16(255)), h = _mm256_srli_epi16(words, 8);
        const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16(l, h), 0xd8);
        return {_mm256_permute2x128_si256(both, both, 0x00), _mm256_permute2x128_si256(both, both, 0x11)};
    }
};

// The possible values of a group, from the possible levels.
template <int D, bool Z, bool U> inline ByteTable table_of(const Layout& L, Sixteen s, float scale, float zero) {
    if (Z) s = {s.even + all(zero), s.odd + all(zero)};
    s = {s.even * all(scale), s.odd * all(scale)};
    if (U) s = {s.even * all(L.unit), s.odd * all(L.unit)};
    return ByteTable::of<D>(s);
}

// Two groups of 32 columns, a lane each.
template <int D, bool Z, bool U> inline void decode_two_groups(const Layout& L, Sixteen s, const uint8_t* row,
                                                               const float* scales, const float* zeros, int64_t k, void* out) {
    const ByteTable a = table_of<D, Z, U>(L, s, scales[0], zeros[0]), b = table_of<D, Z, U>(L, s, scales[1], zeros[1]);
    const __m256i low = _mm256_permute2x128_si256(a.low, b.low, 0x20), high = _mm256_permute2x128_si256(a.high, b.high, 0x20);
    _mm_prefetch((const char*)row + k / 2 + AHEAD, _MM_HINT_T1);
    const __m256i c = _mm256_loadu_si256((const __m256i*)(row + k / 2)), mask = _mm256_set1_epi8(15);
    const __m256i even = _mm256_and_si256(c, mask), odd = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
    const __m256i el = _mm256_shuffle_epi8(low, even), eh = _mm256_shuffle_epi8(high, even);
    const __m256i ol = _mm256_shuffle_epi8(low, odd), oh = _mm256_shuffle_epi8(high, odd);
    const __m256i e0 = _mm256_unpacklo_epi8(el, eh), e1 = _mm256_unpackhi_epi8(el, eh);
    const __m256i o0 = _mm256_unpacklo_epi8(ol, oh), o1 = _mm256_unpackhi_epi8(ol, oh);
    const __m256i w0 = _mm256_unpacklo_epi16(e0, o0), w1 = _mm256_unpackhi_epi16(e0, o0);
    const __m256i w2 = _mm256_unpacklo_epi16(e1, o1), w3 = _mm256_unpackhi_epi16(e1, o1);
    __m256i* to = (__m256i*)((uint16_t*)out + k);
    _mm256_storeu_si256(to, _mm256_permute2x128_si256(w0, w1, 0x20));
    _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(w2, w3, 0x20));
    _mm256_storeu_si256(to + 2, _mm256_permute2x128_si256(w0, w1, 0x31));
    _mm256_storeu_si256(to + 3, _mm256_permute2x128_si256(w2, w3, 0x31));
}

// 64 columns at once: of the 32 bytes, each lane gets every other four, so that words come out in order.
template <int D, bool Z, bool U> inline int64_t decode_nibbles(const Layout& L, Sixteen s, const uint8_t* row, float scale,
                                                               float zero, int64_t k, int64_t end, void* out) {
    if (end - k < 64) return k;
    const ByteTable table = table_of<D, Z, U>(L, s, scale, zero);
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7), mask = _mm256_set1_epi8(15);
    for (; k + 64 <= end; k += 64) {
        _mm_prefetch((const char*)row + k / 2 + AHEAD, _MM_HINT_T1);
        const __m256i c = _mm256_permutevar8x32_epi32(_mm256_loadu_si256((const __m256i*)(row + k / 2)), order);
        const __m256i even = _mm256_and_si256(c, mask), odd = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
        const __m256i el = _mm256_shuffle_epi8(table.low, even), eh = _mm256_shuffle_epi8(table.high, even);
        const __m256i ol = _mm256_shuffle_epi8(table.low, odd), oh = _mm256_shuffle_epi8(table.high, odd);
        const __m256i e0 = _mm256_unpacklo_epi8(el, eh), e1 = _mm256_unpackhi_epi8(el, eh);
        const __m256i o0 = _mm256_unpacklo_epi8(ol, oh), o1 = _mm256_unpackhi_epi8(ol, oh);
        __m256i* to = (__m256i*)((uint16_t*)out + k);
        _mm256_storeu_si256(to, _mm256_unpacklo_epi16(e0, o0));
        _mm256_storeu_si256(to + 1, _mm256_unpackhi_epi16(e0, o0));
        _mm256_storeu_si256(to + 2, _mm256_unpacklo_epi16(e1, o1));
        _mm256_storeu_si256(to + 3, _mm256_unpackhi_epi16(e1, o1));
    }
    return k;
}

// As rounded_halves, where neither number lies halfway between two bfloat16.
inline __m256i rounded_up(__m256 even, __m256 odd) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    const __m256i x = _mm256_add_epi32(_mm256_castps_si256(even), half);
    return _mm256_blend_epi16(_mm256_srli_epi32(x, 16), _mm256_add_epi32(_mm256_castps_si256(odd), half), 0xaa);
}

// Whether any of 1 to 256 times the scale, as float32, lies halfway between two bfloat16.
inline bool has_ties(float scale) {
    __m256 code = _mm256_setr_ps(1, 2, 3, 4, 5, 6, 7, 8);
    __m256i found = _mm256_setzero_si256();
    for (int i = 0; i < 32; i++) {
        const __m256i low = _mm256_slli_epi32(_mm256_castps_si256(_mm256_mul_ps(code, _mm256_set1_ps(scale))), 16);
        found = _mm256_or_si256(found, _mm256_cmpeq_epi32(low, _mm256_set1_epi32((int)0x80000000)));
        code = _mm256_add_ps(code, _mm256_set1_ps(8));
    }
    return !_mm256_testz_si256(found, found);
}

template <int C, bool Z, bool U, bool T> inline int64_t decode_integers(const Layout& L, const uint8_t* row, float scale,
                                                                        float zero, int64_t k, int64_t end, void* out) {
    const __m256 by = _mm256_set1_ps(scale), add = _mm256_set1_ps(zero), unit = _mm256_set1_ps(L.unit);
#pragma GCC unroll 4
    for (; k + 16 <= end; k += 16) {
        _mm_prefetch((const char*)row + k + AHEAD, _MM_HINT_T1);
        const __m256i w = (__m256i)words<C == INT8>(row + k);
        __m256 x = _mm256_cvtepi32_ps(_mm256_madd_epi16(w, _mm256_set1_epi32(1)));
        __m256 y = _mm256_cvtepi32_ps(_mm256_madd_epi16(w, _mm256_set1_epi32(1 << 16)));
        if (Z) x = _mm256_add_ps(x, add), y = _mm256_add_ps(y, add);
        x = _mm256_mul_ps(x, by), y = _mm256_mul_ps(y, by);
        if (U) x = _mm256_mul_ps(x, unit), y = _mm256_mul_ps(y, unit);
        _mm256_storeu_si256((__m256i*)((uint16_t*)out + k), T ? rounded_halves(x, y) : rounded_up(x, y));
    }
    return k;
}

// For these scales all products of e4m3 numbers are normal, so that their exponents differ as those of the numbers do. A
// NaN code is found in `largest`; then the row must be decoded again.
inline int64_t decode_e4m3(const uint8_t* row, float scale, int64_t k, int64_t end, void* out, __m256i& largest) {
    const float size = fabsf(scale);
    if (!(size > 0x1p-100f && size < 0x1p100f)) return k;
    const F even = {8, 10, 12, 14, 0, 2, 4, 6}, odd = {9, 11, 13, 15, 1, 3, 5, 7};  // eighths, and below subnormals
    const F units = {0x1p-10f, 0x1p-10f, 0x1p-10f, 0x1p-10f, 0x1p-9f, 0x1p-9f, 0x1p-9f, 0x1p-9f};
    const ByteTable table = ByteTable::of<BFLOAT16>({even * units * all(scale), odd * units * all(scale)});
    const __m256i fraction = _mm256_set1_epi8(7), exponent = _mm256_set1_epi8(0x78), sign = _mm256_set1_epi8((char)0x80);
    const __m256i nothing = _mm256_setzero_si256(), eight = _mm256_set1_epi8(8);
    for (; k + 32 <= end; k += 32) {
        _mm_prefetch((const char*)row + k + AHEAD, _MM_HINT_T1);
        const __m256i c = _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)(row + k)), 0xd8);
        largest = _mm256_max_epu8(largest, _mm256_or_si256(c, sign));
        const __m256i e = _mm256_and_si256(c, exponent), is_small = _mm256_cmpeq_epi8(e, nothing);
        const __m256i i = _mm256_or_si256(_mm256_and_si256(c, fraction), _mm256_and_si256(is_small, eight));
        const __m256i low = _mm256_shuffle_epi8(table.low, i);
        const __m256i high = _mm256_xor_si256(_mm256_shuffle_epi8(table.high, i), _mm256_and_si256(c, sign));
        const __m256i first = _mm256_slli_epi16(_mm256_unpacklo_epi8(e, nothing), 4);
        const __m256i second = _mm256_slli_epi16(_mm256_unpackhi_epi8(e, nothing), 4);
        __m256i* to = (__m256i*)((uint16_t*)out + k);
        _mm256_storeu_si256(to, _mm256_add_epi16(_mm256_unpacklo_epi8(low, high), first));
        _mm256_storeu_si256(to + 1, _mm256_add_epi16(_mm256_unpackhi_epi8(low, high), second));
    }
    return k;
}

inline bool has_nan(__m256i largest) {
    const __m256i is_nan = _mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1));
    return !_mm256_testz_si256(is_nan, is_nan);
}
