// Rows of codes times rows of inputs in float32, as rows.h has them. linear.h includes this after that.

// Adds N columns from `first` on to A sums. Where Z, `low` is added to the values; then, where G, they are multiplied with `by`,
// and `after` is added.
template <int C, int M, int A, int N, bool Z, bool G> inline __attribute__((always_inline)) void float_dot(
    Decoder<C>& decoder, const uint8_t* codes, V low, V by, V after, const uint8_t* x, int64_t across, int64_t first, V (*out)[A]) {
    constexpr int64_t step = Decoder<C>::STEP, lanes = sizeof(V) / 4;
#pragma GCC unroll 8
    for (int64_t k = first; k < first + N; k += step) {
        V w[step / lanes];
        decoder(codes + (is_nibbled(C) ? k / 2 : k), w);
#pragma GCC unroll 8
        for (int64_t v = 0; v < step / lanes; v++) {
            V value = w[v];
            if (Z) value += low;
            if (G) value = fma(value, by, after);
            const int64_t a = ((k - first) / lanes + v) % A;
            for (int m = 0; m < M; m++) out[m][a] = fma(value, load<V>(x + m * across + 4 * (k + lanes * v)), out[m][a]);
        }
    }
}

template <int M, int A> inline void gather_sums(V (*sums)[A], V* out) {
    for (int m = 0; m < M; m++) {
        out[m] = sums[m][0];
        for (int a = 1; a < A; a++) out[m] += sums[m][a];
    }
}

// How `float_row` adds up, with scales S for M rows of inputs.
template <int C, int S, int M, bool Z, bool G> struct Sums {
    static constexpr bool adds = is_integer(C) && (Z || is_decoded_lifted<C>), is_scaled = S != WHOLE && !G;  // scaled piece by piece
    static constexpr int64_t step = Decoder<C>::STEP, piece = floats_of<C, S>;
    static constexpr int64_t few = is_scaled ? piece / 32 : 4;
    static constexpr int A = M > 2 || few < 2 ? 1 : M == 2 || few == 2 ? 2 : 4;
    static constexpr int T = few < 2 && M <= 2 ? 2 : 1;  // where each addition would wait for the one before
    V total[M][T], sums[M][A];

    Sums() {
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) total[m][t] = V{};
#pragma GCC unroll 4
            for (int a = 0; a < A; a++) sums[m][a] = V{};
        }
    }

    // Adds the first `columns` of a span.
    inline __attribute__((always_inline)) void add(Decoder<C>& decoder, const uint8_t* codes, const float* scale, const float* low,
                                                   const float* after, const uint8_t* x, int64_t across, int64_t columns) {
#pragma GCC unroll 8
        for (int64_t k = 0, i = 0; k < SPAN; k += piece, i += S != WHOLE) {  // unrolled, so that sums stay in registers
            if (k >= columns) break;
            V lift{}, by{}, add{};
            if (is_scaled || G) by = of_piece<C, S, FLOATS>(scale, i);
            if (Z) lift = of_piece<C, S, FLOATS>(low, i);
            if (is_decoded_lifted<C>) lift -= every(decoder.lift);
            if (G) add = of_piece<C, S, FLOATS>(after, i);
            float_dot<C, M, A, piece, adds, G>(decoder, codes, lift, by, add, x, across, k, sums);
            if (!is_scaled) continue;
            V part[M];
            gather_sums<M, A>(sums, part);
            for (int m = 0; m < M; m++) {
                total[m][i % T] = fma(by, part[m], total[m][i % T]);
                for (int a = 0; a < A; a++) sums[m][a] = V{};
            }
        }
    }
};

// totals[m * TILE] = the row of codes, of which `scale` has those of its spans, times row `from + m` of the inputs, lane by lane.
// Where Z, `low` is added to integers; and, where G, `after` to their products with the scale. For `runs_on` see rows.h.
template <int C, int S, int M, bool Z, bool G> void float_row(const Layout& L, const uint8_t* codes, bool runs_on,
                                                              const float* scale, const float* low, const float* after,
                                                              const Decoder<C>& given, const Spans& in, int64_t from,
                                                              V* totals) {
    constexpr int64_t bytes = is_nibbled(C) ? SPAN / 2 : SPAN, scales = S == WHOLE ? 0 : scales_of<S>;
    Sums<C, S, M, Z, G> found;
    Decoder<C> decoder = given;  // what it finds is to stay in a register
    const uint8_t* x = in.at(from);
    const int64_t whole = L.row_bytes / bytes, lines = in.lines * 64, across = in.spans * lines;
    for (int64_t b = 0; b < whole; b++) {
        _mm_prefetch((const char*)codes + AHEAD, _MM_HINT_T1);
        if (bytes > 64) _mm_prefetch((const char*)codes + AHEAD + 64, _MM_HINT_T1);
        found.add(decoder, codes, scale, low, after, x, across, SPAN);
        codes += bytes, scale += scales, low += scales, after += scales, x += lines;
    }
    if (whole < in.spans) {
        Rest<bytes> rest;
        if (!runs_on) rest.fill(codes, L.row_bytes - whole * bytes);
        alignas(64) float own[3][LANES];
        if (S != WHOLE && S != WIDE) {  // what follows may be the numbers of another row
            const int64_t left = L.groups - whole * scales;
            const auto keep = [left](const float*& numbers, float* to) {
                const F v = first_of(load<F>(numbers), left);
                memcpy(to, &v, sizeof v);
                numbers = to;
            };
            keep(scale, own[0]);
            if (Z) keep(low, own[1]);
            if (G) keep(after, own[2]);
        }
        found.add(decoder, runs_on ? codes : rest.bytes, scale, low, after, x, across, L.columns - whole * SPAN);
    }
    V total[M];
    if (found.is_scaled) gather_sums<M, found.T>(found.total, total);
    else gather_sums<M, found.A>(found.sums, total);
    for (int m = 0; m < M; m++) {
        if (S == WHOLE && !G) total[m] *= every(scale[0]);
        totals[m * TILE] = decoder.found_nan() ? every(NAN) : total[m];
    }
}
