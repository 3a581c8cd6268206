// Rows of codes times rows of inputs, with the instructions of AVX2: what a decoder's step runs on most machines.
//
// cpu.cpp includes this in its own namespace, where AVX2 is there and AVX-512 is not. It takes 128 columns at a time, a
// *span*, and scales over whole rows, over a multiple of 128 columns, or over 64 or 32; all else is left to cpu.cpp.
// The numbers are those that cpu.cpp describes:
//     4-bit integers: 16-bit inputs as a high byte (signed) and a low one (unsigned), each multiplied with 32 codes at
//         once. Sums of 16 bits hold 128 columns: 4 * 2 * 15 * 255 < 2**15.
//     8-bit integers: 16-bit inputs, 16 products at once; sums of 32 bits.
//     tables: float32. Bytes 0 to 3 of the values are looked up apart, 32 codes at once, and then interleaved.
//     float8: float32, by way of float16. A code that is no number makes its row nan at the end.

constexpr int64_t SPAN = 128;
enum Scales { WHOLE, WIDE, G64, G32 };  // columns under one scale: all, a multiple of SPAN, 64, 32

constexpr bool is_integer(int codes) { return codes == INT8 || codes == UINT8 || codes == INT4; }
constexpr bool is_nibbled(int codes) { return codes == INT4 || codes == TABLE4; }

// How many columns are summed before a scale is applied.
template <int C, int S>
constexpr int64_t piece_of = S == WHOLE || S == WIDE ? SPAN : S == G32 && !is_nibbled(C) ? 32 : 64;

struct alignas(64) Line { uint8_t bytes[64]; };

// Rows of inputs, a span after the other, in the order in which codes come out of their bytes:
//     INT4: for each 64 columns the 32 high bytes of the even ones, their low bytes, then the same of the odd ones
//     INT8, UINT8: int16
//     both followed by their sums, lane by lane as products are summed, for each *piece*: columns under one scale
//     E4M3, E5M2: float32
//     TABLE4: float32; lane 4 * half + i of vector 4 * odd + v holds column 2 * (16 * half + 4 * v + i) + odd of its 64
struct Spans {
    int64_t spans, lines;      // lines of a span
    std::vector<Line> data;
    std::vector<float> units;  // what int16 are in units of, by span

    const uint8_t* at(int64_t m) const { return data[m * spans * lines].bytes; }
    const float* units_at(int64_t m) const { return units.data() + m * spans; }

    template <int C, int S, int D> void fill(const Layout& L, const void* x, int64_t rows, int64_t row_stride) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t b = 0; b < spans; b++) {
                alignas(64) float natural[SPAN];
                F largest{};
                for (int64_t k = 0; k < SPAN; k += LANES) {
                    const int64_t left = L.columns - b * SPAN - k, at = m * row_stride + b * SPAN + k;
                    const F v = left >= LANES ? get<D>(x, at) : left > 0 ? get<D>(x, at, left) : F{};
                    memcpy(natural + k, &v, sizeof v);
                    const F size = v < 0 ? -v : v;
                    largest = largest < size || size != size ? size : largest;
                }
                uint8_t* to = data[(m * spans + b) * lines].bytes;
                if constexpr (is_integer(C)) {
                    alignas(64) int16_t words[SPAN];
                    units[m * spans + b] = to_words(natural, largest, words);
                    add_sums<C, S>(words, (int32_t*)(to + 2 * SPAN));
                    if (C == INT4) place_bytes(words, to);
                    else memcpy(to, words, sizeof words);
                } else if (C == TABLE4) place_floats(natural, (float*)to);
                else memcpy(to, natural, sizeof natural);
            }
    }

    // The unit is a power of two, so that multiplying by it is exact. Values that are not finite make it nan, and with
    // it every result.
    static float to_words(const float* natural, F largest, int16_t* words) {
        float most = 0;
        for (int64_t l = 0; l < LANES; l++)
            if (!(largest[l] <= most)) most = largest[l];
        if (!(most <= 3e38f)) { memset(words, 0, SPAN * 2); return NAN; }
        int exponent = 0;
        if (most > 0) frexpf(most, &exponent);
        exponent = exponent < -100 ? -100 : exponent;  // most < 2**exponent
        const __m256 per = _mm256_set1_ps(ldexpf(1.0f, 15 - exponent));
        for (int64_t k = 0; k < SPAN; k += 16) {  // to the nearest, and at most 32767
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(natural + k), per));
            const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(natural + k + 8), per));
            _mm256_store_si256((__m256i*)(words + k), _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
        return ldexpf(1.0f, exponent - 15);
    }

    template <int C, int S> static void add_sums(const int16_t* words, int32_t* to) {
        for (int64_t k = 0; k < SPAN; k++)
            to[k / piece_of<C, S> * LANES + (C == INT4 ? k % 64 / 8 : k % 16 / 2)] += words[k];
    }

    static void place_bytes(const int16_t* words, uint8_t* to) {
        for (int64_t half = 0; half < 2; half++, words += 64, to += 128)
            for (int64_t i = 0; i < 32; i++) {
                to[i] = (uint8_t)(words[2 * i] >> 8), to[32 + i] = (uint8_t)words[2 * i];
                to[64 + i] = (uint8_t)(words[2 * i + 1] >> 8), to[96 + i] = (uint8_t)words[2 * i + 1];
            }
    }

    static void place_floats(const float* natural, float* to) {
        for (int64_t block = 0; block < 2; block++, natural += 64)
            for (int64_t odd = 0; odd < 2; odd++)
                for (int64_t v = 0; v < 4; v++)
                    for (int64_t half = 0; half < 2; half++)
                        for (int64_t i = 0; i < 4; i++) *to++ = natural[2 * (16 * half + 4 * v + i) + odd];
    }

    template <int C, int S> static Spans of(const Layout& L, const void* x, int dtype, int64_t rows, int64_t stride) {
        Spans made;
        made.spans = (L.columns + SPAN - 1) / SPAN;
        made.lines = is_integer(C) ? (2 * SPAN + SPAN / piece_of<C, S> * WIDTH + 63) / 64 : 4 * SPAN / 64;
        made.data.resize(rows * made.spans * made.lines);
        if (is_integer(C)) made.units.resize(rows * made.spans);
        if (dtype == FLOAT32) made.fill<C, S, FLOAT32>(L, x, rows, stride);
        else if (dtype == BFLOAT16) made.fill<C, S, BFLOAT16>(L, x, rows, stride);
        else made.fill<C, S, FLOAT16>(L, x, rows, stride);
        return made;
    }
};

inline __m256i line(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// What decoding needs besides the codes, and what it finds.
template <int C> struct Decoder {
    __m256i tables[4];  // byte i of each value
    __m256i largest = _mm256_setzero_si256();

    explicit Decoder(const Layout& L) {
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

    // 4-bit: 64 columns, as 8 vectors; else 32, as 4. float8 in units of 2**8.
    inline void operator()(const uint8_t* codes, __m256* out) {
        const __m256i c = line(codes);
        if constexpr (C == TABLE4) {
            const __m256i mask = _mm256_set1_epi8(15);
            const __m256i some[2] = {_mm256_and_si256(c, mask), _mm256_and_si256(_mm256_srli_epi16(c, 4), mask)};
            for (int odd = 0; odd < 2; odd++) {
                __m256i b[4];
                for (int i = 0; i < 4; i++) b[i] = _mm256_shuffle_epi8(tables[i], some[odd]);
                const __m256i l01 = _mm256_unpacklo_epi8(b[0], b[1]), l23 = _mm256_unpacklo_epi8(b[2], b[3]);
                const __m256i h01 = _mm256_unpackhi_epi8(b[0], b[1]), h23 = _mm256_unpackhi_epi8(b[2], b[3]);
                out[4 * odd] = (__m256)_mm256_unpacklo_epi16(l01, l23);
                out[4 * odd + 1] = (__m256)_mm256_unpackhi_epi16(l01, l23);
                out[4 * odd + 2] = (__m256)_mm256_unpacklo_epi16(h01, h23);
                out[4 * odd + 3] = (__m256)_mm256_unpackhi_epi16(h01, h23);
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
            out[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(low)), out[1] = _mm256_cvtph_ps(_mm256_castsi256_si128(high));
            out[2] = _mm256_cvtph_ps(_mm256_extracti128_si256(low, 1));
            out[3] = _mm256_cvtph_ps(_mm256_extracti128_si256(high, 1));
        }
    }
};

// The sums over N columns from `first` of a span, lane by lane, with `zero` added to every code: exact.
template <int C, int M, int N, bool Z> inline void integer_dot(const uint8_t* codes, const uint8_t* const* x,
                                                               int64_t first, __m256i zero, F* out) {
    __m256i total[M], low[M];
    for (int m = 0; m < M; m++) total[m] = low[m] = _mm256_setzero_si256();
    if constexpr (C == INT4) {
        const __m256i mask = _mm256_set1_epi8(15);
#pragma GCC unroll 2
        for (int64_t k = first; k < first + N; k += 64) {
            const __m256i c = line(codes + k / 2);
            const __m256i even = _mm256_and_si256(c, mask), odd = _mm256_and_si256(_mm256_srli_epi16(c, 4), mask);
            for (int m = 0; m < M; m++) {
                const uint8_t* p = x[m] + 2 * k;
                const __m256i he = _mm256_maddubs_epi16(even, line(p)), le = _mm256_maddubs_epi16(line(p + 32), even);
                const __m256i ho = _mm256_maddubs_epi16(odd, line(p + 64)), lo = _mm256_maddubs_epi16(line(p + 96), odd);
                total[m] = _mm256_add_epi16(total[m], _mm256_add_epi16(he, ho));
                low[m] = _mm256_add_epi16(low[m], _mm256_add_epi16(le, lo));
            }
        }
        for (int m = 0; m < M; m++)
            total[m] = _mm256_add_epi32(_mm256_madd_epi16(total[m], _mm256_set1_epi16(256)),
                                        _mm256_madd_epi16(low[m], _mm256_set1_epi16(1)));
    } else {
#pragma GCC unroll 8
        for (int64_t k = first; k < first + N; k += 16) {
            const __m256i w = (__m256i)words<C == INT8>(codes + k);
            for (int m = 0; m < M; m++)
                total[m] = _mm256_add_epi32(total[m], _mm256_madd_epi16(w, line(x[m] + 2 * k)));
        }
    }
    for (int m = 0; m < M; m++) {
        if (Z) total[m] = _mm256_add_epi32(total[m], _mm256_mullo_epi32(zero, line(x[m] + 2 * SPAN + first / N * WIDTH)));
        out[m] = (F)_mm256_cvtepi32_ps(total[m]);
    }
}

// As that, in float32, added to A sums.
template <int C, int M, int A, int N> inline void float_dot(Decoder<C>& decoder, const uint8_t* codes,
                                                            const uint8_t* const* x, int64_t first, F (*out)[A]) {
    constexpr int64_t step = is_nibbled(C) ? 64 : 32;
#pragma GCC unroll 4
    for (int64_t k = first; k < first + N; k += step) {
        __m256 w[step / 8];
        decoder(codes + (is_nibbled(C) ? k / 2 : k), w);
#pragma GCC unroll 8
        for (int64_t v = 0; v < step / 8; v++)
            for (int m = 0; m < M; m++) out[m][v % A] = fma((F)w[v], load<F>(x[m] + 4 * (k + 8 * v)), out[m][v % A]);
    }
}

template <int M, int A> inline void gather_sums(F (*sums)[A], F* out) {
    for (int m = 0; m < M; m++) {
        out[m] = sums[m][0];
        for (int a = 1; a < A; a++) out[m] += sums[m][a];
    }
}

// to[b] = what span b has of values of which there is one for `each` spans.
inline void spread(const float* values, int64_t each, int64_t spans, float* to) {
    if (each == 1) { memcpy(to, values, spans * 4); return; }
    for (int64_t b = 0, left = each; b < spans; b++) {
        to[b] = *values;
        if (--left == 0) left = each, values++;
    }
}

// The values of the pieces of 64 columns, or of 32, that begin at p.
template <int C, int S> inline F of_piece(const float* p) {
    if (S == G32 && is_nibbled(C)) return (F)_mm256_set_m128(_mm_set1_ps(p[1]), _mm_set1_ps(p[0]));
    return all(*p);
}

// y[m] = the row of codes, of which `s` are the scales and `z` what is added to codes, times row `from + m` of the
// inputs. `room` is for (M + 1) * in.spans floats.
template <int C, int S, int M, bool Z> void fast_row(const Layout& L, const uint8_t* codes, const float* s,
                                                     const float* z, Decoder<C>& decoder, const Spans& in, int64_t from,
                                                     float* room, float* y) {
    constexpr int64_t bytes = is_nibbled(C) ? SPAN / 2 : SPAN, A = M == 1 ? 4 : M == 2 ? 2 : 1;
    constexpr int64_t piece = piece_of<C, S>, step = S == G32 && is_nibbled(C) ? 2 : 1;
    constexpr bool narrow = S == G64 || S == G32;
    const uint8_t* x[M];
    const float* scale[M];
    for (int m = 0; m < M; m++) {
        x[m] = in.at(from + m);
        scale[m] = is_integer(C) ? in.units_at(from + m) : room;
    }
    if (S == WIDE) {  // scales times units
        for (int m = 0; m < (is_integer(C) ? M : 1); m++) {
            float* to = room + m * in.spans;
            spread(s, L.group / SPAN, in.spans, to);
            if (is_integer(C))
                for (int64_t b = 0; b < in.spans; b++) to[b] *= scale[m][b];
        }
        for (int m = 0; m < M; m++) scale[m] = room + (is_integer(C) ? m * in.spans : 0);
        if (Z) spread(z, L.group / SPAN, in.spans, room + M * in.spans);
        z = room + M * in.spans;
    }
    F total[M], part[M], sums[M][A];
    for (int m = 0; m < M; m++) {
        total[m] = F{};
        for (int a = 0; a < A; a++) sums[m][a] = F{};
    }
    for (int64_t b = 0; b < in.spans; b++) {
        const uint8_t* at = codes + b * bytes;
        uint8_t rest[bytes];
        _mm_prefetch((const char*)at + 1024, _MM_HINT_T0);
        if (bytes > 64) _mm_prefetch((const char*)at + 1088, _MM_HINT_T0);
        if (L.row_bytes - b * bytes < bytes) {
            memset(rest, 0, bytes);
            memcpy(rest, at, L.row_bytes - b * bytes);
            at = rest;
        }
#pragma GCC unroll 4
        for (int64_t k = 0; k < SPAN; k += piece) {
            if constexpr (is_integer(C)) {
                __m256i zero = _mm256_setzero_si256();
                if (Z) zero = _mm256_cvtps_epi32((__m256)(narrow ? of_piece<C, S>(z) : all(S == WIDE ? z[b] : z[0])));
                integer_dot<C, M, piece, Z>(at, x, k, zero, part);
            } else {
                if (S != WHOLE)
                    for (int m = 0; m < M; m++)
                        for (int a = 0; a < A; a++) sums[m][a] = F{};
                float_dot<C, M, A, piece>(decoder, at, x, k, sums);
                if (S == WHOLE) continue;
                gather_sums<M, A>(sums, part);
            }
            const F of_scale = narrow ? of_piece<C, S>(s) : F{};
            for (int m = 0; m < M; m++) {
                const F by = !narrow ? all(scale[m][b]) : is_integer(C) ? of_scale * all(scale[m][b]) : of_scale;
                total[m] = fma(by, part[m], total[m]);
            }
            if (narrow) s += step, z += step;
        }
        for (int m = 0; m < M; m++) x[m] += in.lines * 64;
    }
    if (S == WHOLE && !is_integer(C)) gather_sums<M, A>(sums, total);
    for (int m = 0; m < M; m++) {
        y[m] = sum(total[m]);
        if (S == WHOLE) y[m] *= s[0];
        if (C == E4M3) y[m] *= 256.0f;
        y[m] *= L.unit;
    }
}
