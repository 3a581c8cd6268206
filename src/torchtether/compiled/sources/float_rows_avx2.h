// Rows of codes times rows of inputs in float32, as rows_avx2.h has them:
//     tables: bytes 0 to 3 of the values are looked up apart, 32 codes at once, and then interleaved.
//     float8: by way of float16. A code that is no number makes its row nan at the end.
//     4-bit integers, where inputs are float32: a code becomes the end of 2**23, which is subtracted then.
//
// linear_avx2.h includes this after that.

constexpr float LIFT = 0x1p23f;

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

    // 4-bit: 64 columns, as 8 vectors; else 32, as 4. float8 in units of 2**8. Integers of 4 bits are LIFT too much.
    inline void operator()(const uint8_t* codes, __m256* out) {
        const __m256i c = kept(line(codes));
        if constexpr (C == INT4) {
            const __m256i mask = _mm256_set1_epi8(15), zero = _mm256_setzero_si256(), top = _mm256_set1_epi16(0x4b00);
            const __m256i some[2] = {_mm256_and_si256(c, mask), _mm256_and_si256(_mm256_srli_epi16(c, 4), mask)};
            for (int odd = 0; odd < 2; odd++) {
                const __m256i l = _mm256_unpacklo_epi8(some[odd], zero), h = _mm256_unpackhi_epi8(some[odd], zero);
                out[4 * odd] = (__m256)_mm256_unpacklo_epi16(l, top), out[4 * odd + 1] = (__m256)_mm256_unpackhi_epi16(l, top);
                out[4 * odd + 2] = (__m256)_mm256_unpacklo_epi16(h, top), out[4 * odd + 3] = (__m256)_mm256_unpackhi_epi16(h, top);
            }
        } else if constexpr (C == TABLE4) {
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

// As that, in float32, added to A sums. `low` is added to integers; then, where G, they are multiplied with `by`, and `after` is
// added.
template <int C, int M, int A, int N, bool G> inline void float_dot(Decoder<C>& decoder, const uint8_t* codes, F low, F by,
                                                                    F after, const uint8_t* const* x, int64_t first,
                                                                    F (*out)[A]) {
    constexpr int64_t step = is_nibbled(C) ? 64 : 32;
#pragma GCC unroll 4
    for (int64_t k = first; k < first + N; k += step) {
        __m256 w[step / 8];
        decoder(codes + (is_nibbled(C) ? k / 2 : k), w);
#pragma GCC unroll 8
        for (int64_t v = 0; v < step / 8; v++) {
            F value = (F)w[v];
            if (C == INT4) value += low;
            if (G) value = fma(value, by, after);
            for (int m = 0; m < M; m++) out[m][v % A] = fma(value, load<F>(x[m] + 4 * (k + 8 * v)), out[m][v % A]);
        }
    }
}

template <int M, int A> inline void gather_sums(F (*sums)[A], F* out) {
    for (int m = 0; m < M; m++) {
        out[m] = sums[m][0];
        for (int a = 1; a < A; a++) out[m] += sums[m][a];
    }
}

// y[m] = the row of codes, of which `scale` has those of its spans, times row `from + m` of the inputs. `low` is added to
// integers; and, where G, `after` to their products with the scale.
template <int C, int S, int M, bool G> void float_row(const Layout& L, const uint8_t* codes, const float* scale,
                                                      const float* low, const float* after, Decoder<C>& decoder,
                                                      const Spans& in, int64_t from, float* y) {
    constexpr int64_t bytes = is_nibbled(C) ? SPAN / 2 : SPAN, piece = S == WHOLE ? 64 : piece_of<C, S>;
    constexpr bool is_scaled = S != WHOLE && !G;  // piece by piece
    constexpr int64_t few = !is_scaled ? 4 : piece / 32, A = M > 2 || few < 2 ? 1 : M == 2 || few == 2 ? 2 : 4;
    const uint8_t* x[M];
    F total[M], part[M], sums[M][A];
    for (int m = 0; m < M; m++) {
        x[m] = in.at(from + m), total[m] = F{};
        for (int a = 0; a < A; a++) sums[m][a] = F{};
    }
    decoder.largest = _mm256_setzero_si256();
    const int64_t whole = L.row_bytes / bytes;
    Rest<bytes> rest;
    if (whole < in.spans) rest.fill(codes + whole * bytes, L.row_bytes - whole * bytes);
    for (int64_t b = 0; b < in.spans; b++) {
        const uint8_t* at = b < whole ? codes + b * bytes : rest.bytes;
        _mm_prefetch((const char*)codes + b * bytes + AHEAD, _MM_HINT_T1);
        if (bytes > 64) _mm_prefetch((const char*)codes + b * bytes + AHEAD + 64, _MM_HINT_T1);
        const int64_t left = L.columns - b * SPAN, end = left < SPAN ? left : SPAN, g = S == WHOLE ? 0 : b * scales_of<S>;
        for (int64_t k = 0, i = 0; k < end; k += piece, i += S != WHOLE) {
            F lift{}, by{}, add{};
            if (is_scaled || G) by = of_piece<C, S>(scale + g, i);
            if (C == INT4) lift = of_piece<C, S>(low + g, i) - all(LIFT);
            if (G) add = of_piece<C, S>(after + g, i);
            float_dot<C, M, A, piece, G>(decoder, at, lift, by, add, x, k, sums);
            if (!is_scaled) continue;
            gather_sums<M, A>(sums, part);
            for (int m = 0; m < M; m++) {
                total[m] = fma(by, part[m], total[m]);
                for (int a = 0; a < A; a++) sums[m][a] = F{};
            }
        }
        for (int m = 0; m < M; m++) x[m] += in.lines * 64;
    }
    if (!is_scaled) gather_sums<M, A>(sums, total);
    for (int m = 0; m < M; m++) {
        y[m] = sum(total[m]);
        if (S == WHOLE && !G) y[m] *= scale[0];
        if (C == E4M3) y[m] *= 256.0f;
        if (L.activations) y[m] *= in.steps[from + m];
        y[m] = decoder.found_nan() ? NAN : y[m] * L.unit;
    }
}
