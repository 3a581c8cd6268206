// Sums of products of codes and inputs in a row, by the instructions of AVX2. rows.h includes this.
//
// Inputs lie in the order in which codes come out of their bytes:
//     INT4: for each 64 columns the 32 high bytes of the even ones, their low bytes, then the same of the odd ones;
//         where inputs are rounded to 8 bits, the bytes of the even ones, then of the odd ones
//     INT8, UINT8: int16
//     E4M3, E5M2: float32
//     TABLE4, and INT4 as FLOATS: float32; lane 4 * half + i of vector 4 * odd + v holds column 2 * (16 * half + 4 * v + i) + odd of its 64
// 4-bit integers: 16-bit inputs are a high byte and a low one, both signed, each multiplied with 32 codes at once.
//     Sums of 16 bits hold 128 columns: 4 * 2 * 15 * 128 < 2**15.
// 8-bit integers: 16 products at once; sums of 32 bits.

constexpr int TOGETHER = 1;  // rows of codes that are multiplied together

// How many columns are summed before a scale is applied.
template <int C, int S, int T>
constexpr int64_t piece_of = S == WHOLE || S == WIDE ? SPAN : S == G16 ? 16 : S == G32 && !is_nibbled(C) ? 32 : 64;

inline __m256i line(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void put_line(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }

// Writes `count` bytes, and zeros. memcpy of so few takes longer than what they are for.
template <int64_t BYTES> inline void put_rest(const uint8_t* from, int64_t count, uint8_t* to) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < BYTES; k += 32) put_line(to + k, _mm256_setzero_si256());
    int64_t k = 0;
    for (; k + 16 <= count; k += 16) _mm_store_si128((__m128i*)(to + k), load<__m128i>(from + k));
    for (; k < count; k++) to[k] = from[k];
}

// In a register: else the compiler reads codes from memory twice, and reading is what takes the time.
inline __m256i kept(__m256i v) {
    __asm__("" : "+x"(v));
    return v;
}

// Four vectors of eight int32 in turn, lane by lane of four, after packing.
inline __m256i in_order(__m256i v) { return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

template <int C, int S, int T> inline void put_sums(const int16_t* words, uint8_t* to) {
    const __m256i one = _mm256_set1_epi16(1);
    constexpr int64_t piece = piece_of<C, S, T>;
    for (int64_t k = 0; k < SPAN; k += piece, to += WIDTH) {
        __m256i total = _mm256_setzero_si256();
        for (int64_t i = k; i < k + piece; i += C == INT4 ? 64 : 16) {
            __m256i v[4];
            for (int j = 0; j < (C == INT4 ? 4 : 1); j++) v[j] = _mm256_madd_epi16(line(words + i + 16 * j), one);
            total = _mm256_add_epi32(total, C != INT4 ? v[0] : in_order(_mm256_hadd_epi32(
                _mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]))));
        }
        _mm256_storeu_ps((float*)to, _mm256_cvtepi32_ps(total));
    }
}

inline __m256i packed(const __m256i* v) {
    return in_order(_mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])));
}

inline void place_bytes(const int16_t* words, uint8_t* to) {
    for (int64_t half = 0; half < 2; half++, words += 64, to += 128)
        for (int odd = 0; odd < 2; odd++) {
            __m256i high[4], low[4];
            for (int j = 0; j < 4; j++) {
                __m256i v = line(words + 16 * j);
                v = _mm256_srai_epi32(odd ? v : _mm256_slli_epi32(v, 16), 16);
                low[j] = _mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24);
                high[j] = _mm256_srai_epi32(_mm256_sub_epi32(v, low[j]), 8);
            }
            put_line(to + 64 * odd, packed(high));
            put_line(to + 64 * odd + 32, packed(low));
        }
}

inline void place_small(const int16_t* words, uint8_t* to) {  // of words that fit a byte
    for (int64_t half = 0; half < 2; half++, words += 64, to += 64)
        for (int odd = 0; odd < 2; odd++) {
            __m256i v[4];
            for (int j = 0; j < 4; j++) {
                v[j] = line(words + 16 * j);
                v[j] = _mm256_srai_epi32(odd ? v[j] : _mm256_slli_epi32(v[j], 16), 16);
            }
            put_line(to + 32 * odd, packed(v));
        }
}

inline void place_floats(const float* natural, float* to) {
    for (int64_t block = 0; block < 2; block++, natural += 64)
        for (int64_t odd = 0; odd < 2; odd++)
            for (int64_t v = 0; v < 4; v++)
                for (int64_t half = 0; half < 2; half++)
                    for (int64_t i = 0; i < 4; i++) *to++ = natural[2 * (16 * half + 4 * v + i) + odd];
}

// Writes the words of a span in the order above, and after it, for each piece, their sums as float32, lane by lane as products
// are summed.
template <int C, int S, int T> inline void place(const int16_t* words, uint8_t* to) {
    put_sums<C, S, T>(words, to + bytes_of<T>);
    if (T == BYTES) place_small(words, to);
    else if (C == INT4) place_bytes(words, to);
    else memcpy(to, words, 2 * SPAN);
}

// What the inputs sum to under scale i of a span.
template <int C, int S, int T> inline float sum_under(const uint8_t* sums, int64_t i) {
    constexpr int64_t some = S == G32 && C == INT4 ? LANES / 2 : LANES;  // lanes under one scale
    F v{};
    memcpy(&v, (const float*)sums + i * some, some * 4);
    return sum(v);
}

// -- rows of integers -------------------------------------------------------------------------------------------------

// What piece i of a span is multiplied with, of values of which there is one for each group.
template <int C, int S, int T> inline F of_piece(const float* p, int64_t i) {
    if (S == G32 && is_nibbled(C)) {
        return (F)_mm256_set_m128(_mm_broadcast_ss(p + 2 * i + 1), _mm_broadcast_ss(p + 2 * i));
    }
    return all(p[i]);
}

// Adds a span of codes times M rows of inputs, lane by lane. The sums of a piece are exact, also as float32, where codes
// have 4 bits: below 16 * 15 * 2**15 < 2**24, with `zero` added to every code; then `scale` multiplies them, of which those
// of row m are `stride` times m further.
template <int C, int S, int M, int R, bool Z, int T> inline __attribute__((always_inline)) void integer_span(
    const RowsOfCodes& rows, const uint8_t* x, int64_t across, const float* scale, int64_t stride, F* total) {
    static_assert(R == 1, "one row of codes");
    const uint8_t* codes = rows.codes;
    const float* zero = rows.zero;
    constexpr int64_t piece = piece_of<C, S, T>, pieces = SPAN / piece;
    F apart[M];  // many pieces are a chain of additions, which is not to wait for that of the last span
    for (int m = 0; m < M; m++) apart[m] = S == G16 ? F{} : total[m];
#pragma GCC unroll 8
    for (int64_t i = 0; i < pieces; i++) {
        __m256i sums[M], low[M];
        if constexpr (C == INT4) {
            const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 2
            for (int64_t k = i * piece; k < (i + 1) * piece; k += 64) {
                const __m256i c = kept(line(codes + k / 2));
                const __m256i even = _mm256_and_si256(c, mask), odd = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
                for (int m = 0; m < M; m++) {
                    if constexpr (T == BYTES) {
                        const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(even, line(x + m * across + k)),
                                                              _mm256_maddubs_epi16(odd, line(x + m * across + k + 32)));
                        sums[m] = k == i * piece ? both : _mm256_add_epi16(sums[m], both);
                        continue;
                    }
                    const uint8_t* p = x + m * across + 2 * k;
                    const __m256i h = _mm256_add_epi16(_mm256_maddubs_epi16(even, line(p)),
                                                       _mm256_maddubs_epi16(odd, line(p + 64)));
                    const __m256i l = _mm256_add_epi16(_mm256_maddubs_epi16(even, line(p + 32)),
                                                       _mm256_maddubs_epi16(odd, line(p + 96)));
                    sums[m] = k == i * piece ? h : _mm256_add_epi16(sums[m], h);
                    low[m] = k == i * piece ? l : _mm256_add_epi16(low[m], l);
                }
            }
            for (int m = 0; m < M; m++) {
                if constexpr (T == BYTES) sums[m] = _mm256_madd_epi16(sums[m], _mm256_set1_epi16(1));
                else sums[m] = _mm256_add_epi32(_mm256_madd_epi16(sums[m], _mm256_set1_epi16(256)),
                                                _mm256_madd_epi16(low[m], _mm256_set1_epi16(1)));
            }
        } else {
#pragma GCC unroll 8
            for (int64_t k = i * piece; k < (i + 1) * piece; k += 16) {
                const __m256i w = (__m256i)words<C == INT8>(codes + k);
                for (int m = 0; m < M; m++) {
                    const __m256i products = _mm256_madd_epi16(w, line(x + m * across + 2 * k));
                    sums[m] = k == i * piece ? products : _mm256_add_epi32(sums[m], products);
                }
            }
        }
        for (int m = 0; m < M; m++) {
            F part = (F)_mm256_cvtepi32_ps(sums[m]);
            if (Z) part = fma(of_piece<C, S, T>(zero, i), load<F>(x + m * across + bytes_of<T> + i * WIDTH), part);
            apart[m] = fma(of_piece<C, S, T>(scale + m * stride, i), part, apart[m]);
        }
    }
    for (int m = 0; m < M; m++) total[m] = S == G16 ? total[m] + apart[m] : apart[m];
}

// -- rows of floats ---------------------------------------------------------------------------------------------------

//     tables: bytes 0 to 3 of the values are looked up apart, 32 codes at once, and then interleaved.
//     float8: by way of float16. A code that is no number makes its row nan at the end.
//     4-bit integers: a code becomes the end of 2**23, which is subtracted then.

template <int C> constexpr bool is_decoded_lifted = C == INT4;  // whether codes are too large by what a decoder says

// What decoding needs besides the codes, and what it finds.
template <int C> struct Decoder {
    float lift;
    __m256i tables[4];  // byte i of each value
    __m256i largest = _mm256_setzero_si256();

    explicit Decoder(const Layout& L) : lift(0x1p23f + offset_of_all(L)) {
        for (int i = 0; C == TABLE4 && i < 4; i++) {
            uint8_t bytes[16], all[64];
            memcpy(all, L.table, sizeof all);
            for (int j = 0; j < 16; j++) bytes[j] = all[4 * j + i];
            tables[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes));
        }
    }

    bool found_nan() const {
        const __m256i is_nan = _mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1));
        return C == E4M3 && !_mm256_testz_si256(is_nan, is_nan);
    }

    static constexpr int64_t STEP = is_nibbled(C) ? 64 : is_integer(C) ? 16 : 32;  // columns

    // STEP codes as vectors of values, float8 in units of 2**8. Integers of 4 bits are `lift` too large.
    inline void operator()(const uint8_t* codes, V* out) {
        if constexpr (C == INT8 || C == UINT8) {
            out[0] = values<C>(codes), out[1] = values<C>(codes + LANES);
            return;
        }
        const __m256i c = kept(line(codes));
        if constexpr (C == INT4) {
            const __m256i mask = _mm256_set1_epi8(15), zero = _mm256_setzero_si256(), top = _mm256_set1_epi16(0x4b00);
            const __m256i some[2] = {_mm256_and_si256(c, mask), _mm256_and_si256(_mm256_srli_epi16(c, 4), mask)};
            for (int odd = 0; odd < 2; odd++) {
                const __m256i l = _mm256_unpacklo_epi8(some[odd], zero), h = _mm256_unpackhi_epi8(some[odd], zero);
                out[4 * odd] = (V)_mm256_unpacklo_epi16(l, top), out[4 * odd + 1] = (V)_mm256_unpackhi_epi16(l, top);
                out[4 * odd + 2] = (V)_mm256_unpacklo_epi16(h, top), out[4 * odd + 3] = (V)_mm256_unpackhi_epi16(h, top);
            }
        } else if constexpr (C == TABLE4) {
            const __m256i mask = _mm256_set1_epi8(15);
            const __m256i some[2] = {_mm256_and_si256(c, mask), _mm256_and_si256(_mm256_srli_epi16(c, 4), mask)};
            for (int odd = 0; odd < 2; odd++) {
                __m256i b[4];
                for (int i = 0; i < 4; i++) b[i] = _mm256_shuffle_epi8(tables[i], some[odd]);
                const __m256i l01 = _mm256_unpacklo_epi8(b[0], b[1]), l23 = _mm256_unpacklo_epi8(b[2], b[3]);
                const __m256i h01 = _mm256_unpackhi_epi8(b[0], b[1]), h23 = _mm256_unpackhi_epi8(b[2], b[3]);
                out[4 * odd] = (V)_mm256_unpacklo_epi16(l01, l23);
                out[4 * odd + 1] = (V)_mm256_unpackhi_epi16(l01, l23);
                out[4 * odd + 2] = (V)_mm256_unpacklo_epi16(h01, h23);
                out[4 * odd + 3] = (V)_mm256_unpackhi_epi16(h01, h23);
            }
        } else {
            __m256i low = _mm256_unpacklo_epi8(_mm256_setzero_si256(), c);
            __m256i high = _mm256_unpackhi_epi8(_mm256_setzero_si256(), c);
            if (C == E4M3) {  // the sign, a copy of it that goes, and 7 bits: as float16, with an exponent 8 too low
                const __m256i keep = _mm256_set1_epi16((int16_t)0xbf80);
                low = _mm256_and_si256(_mm256_srai_epi16(low, 1), keep);
                high = _mm256_and_si256(_mm256_srai_epi16(high, 1), keep);
                largest = _mm256_max_epu8(largest, _mm256_or_si256(c, _mm256_set1_epi8((char)0x80)));
            }
            out[0] = (V)_mm256_cvtph_ps(_mm256_castsi256_si128(low)), out[1] = (V)_mm256_cvtph_ps(_mm256_castsi256_si128(high));
            out[2] = (V)_mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
            out[3] = (V)_mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
        }
    }
};
