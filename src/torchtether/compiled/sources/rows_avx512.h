// Sums of products of codes and inputs in a row, by the instructions of AVX-512 VNNI: four products of bytes are added to a
// sum of 32 bits. rows.h includes this.
//
// Integers of 8 bits with a sign get 128 added, and sums begin with what that adds, negated. Inputs of 16 bits are a high
// byte and a low one, both signed. They lie as 64 high bytes, then 64 low ones; or, where inputs are rounded to 8 bits, as 64
// bytes; in this order:
//     INT4: of the even columns of a span, then of the odd ones
//     INT8, UINT8: column by column
//     all other codes, and INT4 as FLOATS: float32; 4-bit codes: of a span every eighth column, from the first, the second ...

constexpr int TOGETHER = 2;  // rows of codes that are multiplied together

// How many columns are summed before scales are applied, one for each lane.
template <int C, int S, int T>
constexpr int64_t piece_of = is_nibbled(C) || S == WHOLE || S == WIDE ? SPAN : T != FLOATS || S == G64 ? 64 : S == G32 ? 32 : 16;

inline __m512i line(const void* p) { return _mm512_loadu_si512(p); }
inline void put_line(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }

// Writes `count` bytes, and zeros. What is written as a line can be read as a line at once.
template <int64_t BYTES> inline void put_rest(const uint8_t* from, int64_t count, uint8_t* to) {
#pragma GCC unroll 2
    for (int64_t k = 0; k < BYTES; k += 64) {
        const int64_t left = count - k;
        const __mmask64 some = left >= 64 ? ~0ull : left > 0 ? (1ull << left) - 1 : 0;
        _mm512_store_si512(to + k, _mm512_maskz_loadu_epi8(some, from + k));
    }
}

inline __m512i products(__m512i before, __m512i codes, const uint8_t* x) { return _mm512_dpbusd_epi32(before, codes, line(x)); }

// -- inputs -----------------------------------------------------------------------------------------------------------

// Of 16 columns, one word in each lane: its low byte with the sign, and what is left as a high byte, to columns 64 apart.
inline void put_bytes(__m512i words, uint8_t* high, uint8_t* low) {
    const __m512i lows = _mm512_srai_epi32(_mm512_slli_epi32(words, 24), 24);
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(_mm512_sub_epi32(words, lows), 8)));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(lows));
}

// Writes the words of a span in the order above, and after it, for each piece, their sums, lane by lane as products are summed:
// as float32, or times -128 as int32 where the codes are INT8.
template <int C, int S, int T> inline void place(const int16_t* words, uint8_t* to) {
    constexpr int64_t whole = T == BYTES ? 64 : 128, piece = piece_of<C, S, T>;  // bytes of 64 columns
    for (int64_t j = 0; j < 2; j++)
        for (int64_t k = 0; k < 64; k += 16) {
            __m512i v;
            if (C == INT4) {
                v = line(words + 2 * k);
                v = _mm512_srai_epi32(j ? v : _mm512_slli_epi32(v, 16), 16);
            } else v = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)(words + 64 * j + k)));
            uint8_t* at = to + j * whole + k;
            if (T == BYTES) _mm_storeu_si128((__m128i*)at, _mm512_cvtepi32_epi8(v));
            else put_bytes(v, at, at + 64);
        }
    const __m512i ones = _mm512_set1_epi8(1);
    for (int64_t i = 0; i < SPAN / piece; i++) {
        __m512i high = _mm512_setzero_si512(), low = high;
        for (int64_t j = 0; j < piece / 64; j++) {
            const uint8_t* at = to + (i * piece / 64 + j) * whole;
            if (T != BYTES) high = products(high, ones, at);
            low = products(low, ones, at + whole - 64);
        }
        const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
        const __m512i lifts = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(sums, 7));
        _mm512_storeu_si512(to + bytes_of<T> + i * 64, C == INT8 ? lifts : (__m512i)_mm512_cvtepi32_ps(sums));
    }
}

inline void place_floats(const float* natural, float* to) {
    for (int64_t i = 0; i < 8; i++)
        for (int64_t k = i; k < SPAN; k += 8) *to++ = natural[k];
}

template <int C> inline V sums_at(const uint8_t* p) {
    if (C == INT8) return (V)_mm512_mul_ps(_mm512_cvtepi32_ps(line(p)), _mm512_set1_ps(-0x1p-7f));
    return load<V>(p);
}

// What the inputs sum to under scale i of a span.
template <int C, int S, int T> inline float sum_under(const uint8_t* sums, int64_t i) {
    constexpr int64_t each = scales_of<S> * piece_of<C, S, T> / SPAN;  // scales of a piece
    const V v = sums_at<C>(sums + i / each * 64);
    float total = 0;
    for (int64_t l = i % each * 16 / each; l < (i % each + 1) * 16 / each; l++) total += v[l];
    return total;
}

// -- rows of integers -------------------------------------------------------------------------------------------------

// What the lanes of piece i are multiplied with, of values of which a span has scales_of<S>.
template <int C, int S, int T> inline V of_piece(const float* p, int64_t i) {
    constexpr int64_t each = scales_of<S> * piece_of<C, S, T> / SPAN;
    if (each == 2) {
        const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m128i both = _mm_loadl_epi64((const __m128i*)(p + 2 * i));  // not as a double, which may not alias floats
        return (V)_mm512_permutexvar_ps(halves, _mm512_castps128_ps512(_mm_castsi128_ps(both)));
    }
    if (each == 4) {
        const __m512i quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        return (V)_mm512_permutexvar_ps(quarters, _mm512_castps128_ps512(_mm_loadu_ps(p + 4 * i)));
    }
    return every(p[i]);
}

// In a register: else the compiler reads codes from memory twice, and reading is what takes the time.
inline __m512i kept(__m512i v) {
    __asm__("" : "+v"(v));
    return v;
}

// A line of inputs, which the compiler would read again for each of R rows of codes.
template <int R> inline __m512i input(const uint8_t* p) { return R == 1 ? line(p) : kept(line(p)); }

// Adds a span of R rows of codes times M rows of inputs, lane by lane. The sums of a piece are exact, also as float32, where
// codes have 4 bits: below 8 * 15 * 2**15 < 2**24, with `zero` added to every code; then `scale` multiplies them, of which
// those of rows m and r are `stride` times m * R + r further.
template <int C, int S, int M, int R, bool Z, int T> inline __attribute__((always_inline)) void integer_span(
    const RowsOfCodes& rows, const uint8_t* x, int64_t across, const float* scale, int64_t stride, V* total) {
    constexpr int64_t piece = piece_of<C, S, T>, whole = T == BYTES ? 64 : 128;
    __m512i c[R][2];
    for (int r = 0; r < R; r++) {
        const uint8_t* codes = rows.codes + r * rows.bytes;
        if (C == INT4) {
            const __m512i both = kept(line(codes)), mask = _mm512_set1_epi8(15);
            c[r][0] = _mm512_and_si512(both, mask), c[r][1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        } else {
            const __m512i lift = _mm512_set1_epi8(C == INT8 ? (char)0x80 : 0);
            c[r][0] = _mm512_xor_si512(line(codes), lift), c[r][1] = _mm512_xor_si512(line(codes + 64), lift);
        }
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < SPAN / piece; i++) {
        V lows[R];
        for (int r = 0; r < R && Z; r++) lows[r] = of_piece<C, S, T>(rows.zero + r * rows.stride, i);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            const uint8_t *at = x + m * across, *own = at + bytes_of<T> + i * 64;
            __m512i high[R], low[R];
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) high[r] = _mm512_setzero_si512(), low[r] = C == INT8 ? line(own) : high[r];
#pragma GCC unroll 2
            for (int64_t j = i * piece / 64; j < (i + 1) * piece / 64; j++) {
                const __m512i h = T == BYTES ? high[0] : input<R>(at + j * whole), l = input<R>(at + (j + 1) * whole - 64);
#pragma GCC unroll 2
                for (int r = 0; r < R; r++) {
                    if (T != BYTES) high[r] = _mm512_dpbusd_epi32(high[r], c[r][j], h);
                    low[r] = _mm512_dpbusd_epi32(low[r], c[r][j], l);
                }
            }
#pragma GCC unroll 2
            for (int r = 0; r < R; r++) {
                const __m512i sums = T == BYTES ? low[r] : _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
                V part = (V)_mm512_cvtepi32_ps(sums);
                if (Z) part = fma(lows[r], sums_at<C>(own), part);
                total[m * R + r] = fma(of_piece<C, S, T>(scale + (m * R + r) * stride, i), part, total[m * R + r]);
            }
        }
    }
}

// -- rows of floats ---------------------------------------------------------------------------------------------------

template <int C> constexpr bool is_decoded_lifted = false;  // whether codes are too large by what a decoder says

template <int C> struct Decoder {
    static constexpr float lift = 0;
    __m512 table;
    __m256i largest = _mm256_setzero_si256();

    explicit Decoder(const Layout& L) {
        const V codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        table = C == TABLE4 ? _mm512_loadu_ps(L.table) : (__m512)(codes - every(offset_of_all(L)));
    }

    bool found_nan() const {
        const __m256i is_nan = _mm256_cmpeq_epi8(largest, _mm256_set1_epi8(-1));
        return C == E4M3 && !_mm256_testz_si256(is_nan, is_nan);
    }

    static constexpr int64_t STEP = is_nibbled(C) ? SPAN : is_integer(C) ? 16 : 32;  // columns

    // STEP codes as vectors of values, float8 in units of 2**8.
    inline void operator()(const uint8_t* codes, V* out) {
        if constexpr (C == INT8 || C == UINT8) {
            const __m128i c = _mm_loadu_si128((const __m128i*)codes);
            *out = (V)_mm512_cvtepi32_ps(C == INT8 ? _mm512_cvtepi8_epi32(c) : _mm512_cvtepu8_epi32(c));
        } else if constexpr (is_nibbled(C)) {
            const __m512i c = kept(line(codes));
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) out[i] = (V)_mm512_permutexvar_ps(_mm512_srli_epi32(c, 4 * i), table);  // by 4 bits
        } else {
            const __m256i c = _mm256_loadu_si256((const __m256i*)codes);
            __m512i halves;
            if (C == E4M3) {  // the sign, a copy of it that goes, and 7 bits: as float16, with an exponent 8 too low
                halves = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(c), 7), _mm512_set1_epi16((int16_t)0xbf80));
                largest = _mm256_max_epu8(largest, _mm256_or_si256(c, _mm256_set1_epi8((char)0x80)));
            } else halves = _mm512_slli_epi16(_mm512_cvtepu8_epi16(c), 8);
            out[0] = (V)_mm512_cvtph_ps(_mm512_castsi512_si256(halves));
            out[1] = (V)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
        }
    }
};
