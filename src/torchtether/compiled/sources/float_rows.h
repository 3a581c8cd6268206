// Rows of codes times rows of inputs in float32, as rows.h has them. linear.h includes this after that.

// Adds N columns from `first` on to A sums. `low` is added to integers; then, where G, they are multiplied with `by`, and `after` is
// added.
template <int C, int M, int A, int N, bool G> inline void float_dot(Decoder<C>& decoder, const uint8_t* codes, V low, V by,
                                                                    V after, const uint8_t* const* x, int64_t first,
                                                                    V (*out)[A]) {
    constexpr int64_t step = Decoder<C>::STEP, lanes = sizeof(V) / 4;
#pragma GCC unroll 8
    for (int64_t k = first; k < first + N; k += step) {
        V w[step / lanes];
        decoder(codes + (is_nibbled(C) ? k / 2 : k), w);
#pragma GCC unroll 8
        for (int64_t v = 0; v < step / lanes; v++) {
            V value = w[v];
            if (is_integer(C)) value += low;
            if (G) value = fma(value, by, after);
            const int64_t a = ((k - first) / lanes + v) % A;
            for (int m = 0; m < M; m++) out[m][a] = fma(value, load<V>(x[m] + 4 * (k + lanes * v)), out[m][a]);
        }
    }
}

template <int M, int A> inline void gather_sums(V (*sums)[A], V* out) {
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
    constexpr int64_t bytes = is_nibbled(C) ? SPAN / 2 : SPAN, piece = S == WHOLE ? 64 : piece_of<C, S, FLOATS>;
    constexpr bool is_scaled = S != WHOLE && !G;  // piece by piece
    constexpr int64_t few = !is_scaled ? 4 : piece / 32, A = M > 2 || few < 2 ? 1 : M == 2 || few == 2 ? 2 : 4;
    const uint8_t* x[M];
    V total[M], part[M], sums[M][A];
    for (int m = 0; m < M; m++) {
        x[m] = in.at(from + m), total[m] = V{};
        for (int a = 0; a < A; a++) sums[m][a] = V{};
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
            V lift{}, by{}, add{};
            if (is_scaled || G) by = of_piece<C, S, FLOATS>(scale + g, i);
            if (is_integer(C)) lift = of_piece<C, S, FLOATS>(low + g, i) - every(LIFT);
            if (G) add = of_piece<C, S, FLOATS>(after + g, i);
            float_dot<C, M, A, piece, G>(decoder, at, lift, by, add, x, k, sums);
            if (!is_scaled) continue;
            gather_sums<M, A>(sums, part);
            for (int m = 0; m < M; m++) {
                total[m] = fma(by, part[m], total[m]);
                for (int a = 0; a < A; a++) sums[m][a] = V{};
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
