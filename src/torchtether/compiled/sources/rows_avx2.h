// Rows of codes times rows of inputs, with the instructions of AVX2: what a decoder's step runs on most machines.
//
// kernels.cpp includes this in its own namespace, at the level of AVX2. It takes 128 columns at a time, a
// *span*, and scales over whole rows, over a multiple of 128 columns, or over 64 or 32; all else is left to kernels.cpp.
// The numbers are those that kernels.cpp describes:
//     4-bit integers: 16-bit inputs as a high byte and a low one, both signed, each multiplied with 32 codes at once.
//         Sums of 16 bits hold 128 columns: 4 * 2 * 15 * 128 < 2**15.
//     8-bit integers: 16-bit inputs, 16 products at once; sums of 32 bits.
//     tables, float8, and 4-bit integers where inputs are float32: float_rows_avx2.h.

constexpr int64_t SPAN = 128;
enum Scales { WHOLE, WIDE, G64, G32, G16 };  // columns under one scale: all, a multiple of SPAN, 64, 32, 16
enum Taken { WORDS, BYTES, FLOATS };         // inputs, as fixed point, as what they are rounded to, or as they are

constexpr bool is_integer(int codes) { return codes == INT8 || codes == UINT8 || codes == INT4; }
constexpr bool is_nibbled(int codes) { return codes == INT4 || codes == TABLE4; }

// How many columns are summed before a scale is applied.
template <int C, int S>
constexpr int64_t piece_of = S == WHOLE || S == WIDE ? SPAN : S == G16 ? 16 : S == G32 && !is_nibbled(C) ? 32 : 64;

// How many scales a span has.
template <int S> constexpr int64_t scales_of = S == G64 ? 2 : S == G32 ? 4 : S == G16 ? 8 : 1;

// How many bytes the inputs of a span of integers have.
template <int T> constexpr int64_t bytes_of = T == BYTES ? SPAN : 2 * SPAN;

struct alignas(64) Line { uint8_t bytes[64]; };

inline __m256i line(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void put_line(void* p, __m256i v) { _mm256_storeu_si256((__m256i*)p, v); }

// Rows of inputs, a span after the other, in the order in which codes come out of their bytes:
//     INT4: for each 64 columns the 32 high bytes of the even ones, their low bytes, then the same of the odd ones;
//         where inputs are rounded to 8 bits, the bytes of the even ones, then of the odd ones
//     INT8, UINT8: int16
//     both followed by their sums as float32, lane by lane as products are summed, for each *piece*: columns under one scale
//     E4M3, E5M2: float32
//     TABLE4, and INT4 as FLOATS: float32; lane 4 * half + i of vector 4 * odd + v holds column 2 * (16 * half + 4 * v + i) + odd of its 64
struct Spans {
    int64_t spans, lines;      // lines of a span
    Array<Line> data;
    int64_t stride;            // of a row of units
    Array<float> units;  // what int16 are in units of, for each scale
    Array<float> steps;  // of each row, where inputs are rounded: floats are then whole numbers of it

    const uint8_t* at(int64_t m) const { return data[m * spans * lines].bytes; }
    const float* units_at(int64_t m) const { return units.data() + m * stride; }

    template <int C, int S, int D, int T> void fill(const Layout& L, const void* x, int64_t rows, int64_t row_stride) {
        for (int64_t m = 0; m < rows; m++) {
            if (L.activations) steps[m] = step_of<D>(x, m * row_stride, L.columns);
            for (int64_t b = 0; b < spans; b++) {
                alignas(64) float natural[SPAN];
                F largest{};
                for (int64_t k = 0; k < SPAN; k += LANES) {
                    const int64_t left = L.columns - b * SPAN - k, at = m * row_stride + b * SPAN + k;
                    const F v = left >= LANES ? get<D>(x, at) : left > 0 ? get<D>(x, at, left) : F{};
                    memcpy(natural + k, &v, sizeof v);
                    largest = larger(largest, v);
                }
                if (L.activations) round_to(natural, steps[m]);
                uint8_t* to = data[(m * spans + b) * lines].bytes;
                if constexpr (T != FLOATS) {
                    alignas(64) int16_t words[SPAN];
                    const float unit = L.activations ? steps[m] : unit_of(largest);
                    to_words(natural, L.activations ? 1 : 1 / unit, words);
                    for (int64_t i = 0; i < scales_of<S>; i++) units[m * stride + b * scales_of<S> + i] = unit;
                    put_sums<C, S>(words, to + bytes_of<T>);
                    if (T == BYTES) place_small(words, to);
                    else if (C == INT4) place_bytes(words, to);
                    else memcpy(to, words, sizeof words);
                } else if (is_nibbled(C)) place_floats(natural, (float*)to);
                else memcpy(to, natural, sizeof natural);
            }
        }
    }

    // The largest of a row is 127 of these. Values that are not finite make it nan, and with it every result.
    template <int D> static float step_of(const void* x, int64_t at, int64_t columns) {
        F largest{};
        for (int64_t k = 0; k < columns; k += LANES)
            largest = larger(largest, columns - k >= LANES ? get<D>(x, at + k) : get<D>(x, at + k, columns - k));
        const float step = largest_of(largest) / 127;
        if (!(step <= 3e38f)) return NAN;
        return step < 0x1p-126f ? 0x1p-126f : step;
    }

    static void round_to(float* natural, float step) {  // to the nearest, halves to even
        const __m256 by = _mm256_set1_ps(step);
        for (int64_t k = 0; k < SPAN; k += LANES) {
            const __m256 codes = _mm256_div_ps(_mm256_load_ps(natural + k), by);
            _mm256_store_ps(natural + k, _mm256_round_ps(codes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
    }

    // The unit is a power of two, so that multiplying by it is exact. Values that are not finite make it nan, and with
    // it every result. Where 4-bit codes follow, words are at most 32639: 127 of their high byte and 127 of the low one.
    static float unit_of(F largest) {
        const float most = largest_of(largest);
        if (!(most <= 3e38f)) return NAN;
        int32_t bits;
        memcpy(&bits, &most, 4);
        int32_t exponent = (bits >> 23) - 126;  // most < 2**exponent
        exponent = exponent < -100 ? -100 : exponent;
        if (most * power_of_two(15 - exponent) >= 32639.5f) exponent++;
        return power_of_two(exponent - 15);
    }

    static void to_words(const float* natural, float by, int16_t* words) {  // to the nearest
        const __m256 per = _mm256_set1_ps(by);
        for (int64_t k = 0; k < SPAN; k += 16) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(natural + k), per));
            const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(natural + k + 8), per));
            put_line(words + k, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
    }

    static float power_of_two(int32_t exponent) {
        const int32_t bits = (exponent + 127) << 23;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }

    // Four vectors of eight int32 in turn, lane by lane of four, after packing.
    static __m256i in_order(__m256i v) { return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }

    template <int C, int S> static void put_sums(const int16_t* words, uint8_t* to) {
        const __m256i one = _mm256_set1_epi16(1);
        constexpr int64_t piece = piece_of<C, S>;
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

    static void place_bytes(const int16_t* words, uint8_t* to) {
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

    static void place_small(const int16_t* words, uint8_t* to) {  // of words that fit a byte
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

    static __m256i packed(const __m256i* v) {
        return in_order(_mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3])));
    }

    static void place_floats(const float* natural, float* to) {
        for (int64_t block = 0; block < 2; block++, natural += 64)
            for (int64_t odd = 0; odd < 2; odd++)
                for (int64_t v = 0; v < 4; v++)
                    for (int64_t half = 0; half < 2; half++)
                        for (int64_t i = 0; i < 4; i++) *to++ = natural[2 * (16 * half + 4 * v + i) + odd];
    }

    template <int C, int S, int T> static Spans of(const Layout& L, const void* x, int dtype, int64_t rows, int64_t stride) {
        Spans made;
        made.spans = (L.columns + SPAN - 1) / SPAN;
        made.lines = T != FLOATS ? (bytes_of<T> + SPAN / piece_of<C, S> * WIDTH + 63) / 64 : 4 * SPAN / 64;
        made.data.resize(rows * made.spans * made.lines);
        made.stride = (made.spans * scales_of<S> + LANES - 1) / LANES * LANES;
        if (T != FLOATS) made.units.resize(rows * made.stride);
        if (L.activations) made.steps.resize(rows);
        if (dtype == FLOAT32) made.fill<C, S, FLOAT32, T>(L, x, rows, stride);
        else if (dtype == BFLOAT16) made.fill<C, S, BFLOAT16, T>(L, x, rows, stride);
        else made.fill<C, S, FLOAT16, T>(L, x, rows, stride);
        return made;
    }
};

// In a register: else the compiler reads codes from memory twice, and reading is what takes the time.
inline __m256i kept(__m256i v) {
    __asm__("" : "+x"(v));
    return v;
}

// The last `count` bytes of a row, and zeros. memcpy of so few takes longer than what they are for.
template <int64_t BYTES> struct alignas(32) Rest {
    uint8_t bytes[BYTES];

    void fill(const uint8_t* from, int64_t count) {
#pragma GCC unroll 4
        for (int64_t k = 0; k < BYTES; k += 32) put_line(bytes + k, _mm256_setzero_si256());
        int64_t k = 0;
        for (; k + 16 <= count; k += 16) _mm_store_si128((__m128i*)(bytes + k), load<__m128i>(from + k));
        for (; k < count; k++) bytes[k] = from[k];
    }
};

// -- rows of integers -------------------------------------------------------------------------------------------------

// What piece i of a span is multiplied with, of values of which there is one for each group.
template <int C, int S> inline F of_piece(const float* p, int64_t i) {
    if (S == G32 && is_nibbled(C)) {
        return (F)_mm256_set_m128(_mm_broadcast_ss(p + 2 * i + 1), _mm_broadcast_ss(p + 2 * i));
    }
    return all(p[i]);
}

// Adds a span of codes times M rows of inputs, lane by lane. The sums of a piece are exact, also as float32, where codes
// have 4 bits: below 16 * 15 * 2**15 < 2**24, with `zero` added to every code; then `scale` multiplies them, of which those
// of row m are `stride` times m further.
template <int C, int S, int M, bool Z, int T> inline __attribute__((always_inline)) void integer_span(
    const uint8_t* codes, const uint8_t* const* x, const float* scale, int64_t stride, const float* zero, F* total) {
    constexpr int64_t piece = piece_of<C, S>, pieces = SPAN / piece;
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
                        const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16(even, line(x[m] + k)),
                                                              _mm256_maddubs_epi16(odd, line(x[m] + k + 32)));
                        sums[m] = k == i * piece ? both : _mm256_add_epi16(sums[m], both);
                        continue;
                    }
                    const uint8_t* p = x[m] + 2 * k;
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
                    const __m256i products = _mm256_madd_epi16(w, line(x[m] + 2 * k));
                    sums[m] = k == i * piece ? products : _mm256_add_epi32(sums[m], products);
                }
            }
        }
        for (int m = 0; m < M; m++) {
            F part = (F)_mm256_cvtepi32_ps(sums[m]);
            if (Z) part = fma(of_piece<C, S>(zero, i), load<F>(x[m] + bytes_of<T> + i * WIDTH), part);
            apart[m] = fma(of_piece<C, S>(scale + m * stride, i), part, apart[m]);
        }
    }
    for (int m = 0; m < M; m++) total[m] = S == G16 ? total[m] + apart[m] : apart[m];
}

// Returns the scales of `rows` rows from n for each scale of their spans, `count` of them, and those of the next row `stride`
// further: in `scale`, or where they lie. `zero` gets their zero points negated. `s` and `z` have space for a row.
template <int S> const float* scales_of_rows(const Layout& L, const Parts& P, int64_t n, int64_t rows, int64_t count,
                                             int64_t stride, float* s, float* z, float* scale, float* zero) {
    const int64_t each = S == WHOLE ? count : S == WIDE ? L.group / SPAN : 1;
    if (each == 1 && L.height == 1 && L.groups == stride && !L.global_scale && L.scale <= FLOAT16) {  // as they lie
        const int64_t at = n * stride;
        if (L.scale == BFLOAT16) copy_scales<BFLOAT16>(P.scale, at, rows * stride, scale);
        else if (L.scale == FLOAT16) copy_scales<FLOAT16>(P.scale, at, rows * stride, scale);
        if (L.zero == SIGNED) negated_zeros<true>(P.zero, at, rows * stride, L.offset, zero);
        else if (L.zero == UNSIGNED) negated_zeros<false>(P.zero, at, rows * stride, L.offset, zero);
        return L.scale == FLOAT32 ? (const float*)P.scale + at : scale;
    }
    for (int64_t r = 0; r < rows; r++) {
        row_scales(L, P, n + r, s, z);
        spread(s, each, count, scale + r * stride);
        if (L.zero >= 0) spread(z, each, count, zero + r * stride);
    }
    return scale;
}

// y[m] = a row of codes times row `from + m` of the inputs. `scale` and `zero` are those of its spans; `buffer` is for M rows
// of scales.
template <int C, int S, int M, bool Z, int T> void integer_row(const Layout& L, const uint8_t* codes, const float* scale,
                                                        const float* zero, const Spans& in, int64_t from, float* buffer,
                                                        float* y) {
    constexpr int64_t bytes = is_nibbled(C) ? SPAN / 2 : SPAN;
    const uint8_t* x[M];
    F total[M];
    for (int m = 0; m < M; m++) {
        x[m] = in.at(from + m), total[m] = F{};
        const float* units = in.units_at(from + m);
        for (int64_t k = 0; k < in.stride; k += LANES) {
            const F v = load<F>(scale + k) * load<F>(units + k);
            memcpy(buffer + m * in.stride + k, &v, sizeof v);
        }
    }
    const int64_t whole = L.row_bytes / bytes;
    for (int64_t b = 0; b < whole; b++) {
        _mm_prefetch((const char*)codes + AHEAD, _MM_HINT_T1);
        if (bytes > 64) _mm_prefetch((const char*)codes + AHEAD + 64, _MM_HINT_T1);
        integer_span<C, S, M, Z, T>(codes, x, buffer, in.stride, zero, total);
        codes += bytes, buffer += scales_of<S>, zero += scales_of<S>;
        for (int m = 0; m < M; m++) x[m] += in.lines * 64;
    }
    if (whole < in.spans) {
        Rest<bytes> rest;
        rest.fill(codes, L.row_bytes - whole * bytes);
        integer_span<C, S, M, Z, T>(rest.bytes, x, buffer, in.stride, zero, total);
    }
    for (int m = 0; m < M; m++) y[m] = sum(total[m]) * L.unit;
}
