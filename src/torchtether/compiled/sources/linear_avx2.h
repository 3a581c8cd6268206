// The same by the rows of rows_avx2.h, in threads; nothing of it at other levels.
//
// kernels.cpp includes this in its own namespace.

#if FAST_ROWS
#include "rows_avx2.h"
#include "float_rows_avx2.h"

template <int C, int S, int M, int T> void fast_row(const Layout& L, const uint8_t* codes, const float* scale,
                                             const float* zero, Decoder<C>& decoder, const Spans& in, int64_t m,
                                             float* scratch, float* y) {
    constexpr bool always = T == BYTES;  // there are zero points
    if constexpr (T == FLOATS) float_row<C, S, M, false>(L, codes, scale, zero, zero, decoder, in, m, y);
    else if (always || L.zero >= 0 || L.offset != 0) integer_row<C, S, M, true, T>(L, codes, scale, zero, in, m, scratch, y);
    else integer_row<C, S, M, always, T>(L, codes, scale, zero, in, m, scratch, y);
}

// BYTES: 4-bit codes are multiplied with one byte of each input instead of two.
template <int C, int S, int T> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                        int dtype, const void* bias, void* out) {
    constexpr int64_t TILE = 16;  // rows of codes, so that many rows of inputs are read from the cache
    const Spans in = Spans::of<C, S, T>(L, x, dtype, rows, stride);
    const int64_t count = in.spans * scales_of<S>, each = in.stride;
    const bool is_much = L.rows > 1 && rows * L.rows * L.columns > 65536;
    const int64_t tile = L.rows >= 256 || !is_much ? TILE : 1;  // few rows are shared between threads one by one
    in_threads(L.rows, tile, is_much, [&](Shares& shares) {
        Buffer s(buffer_size(L)), z(buffer_size(L)), scratch(4 * in.stride + LANES);
        Buffer scales(tile * each + LANES), zeros(tile * each + LANES, -L.offset);
        Decoder<C> decoder(L);
        alignas(64) float y[4][TILE];
        for (int64_t start, stop; shares.take(&start, &stop);) for (int64_t first = start; first < stop; first += tile) {
            const int64_t end = first + tile < stop ? first + tile : stop;
            const float* lie = scales_of_rows<S>(L, P, first, end - first, count, each, s.data(), z.data(), scales.data(),
                                                 zeros.data());
            for (int64_t m = 0, some; m < rows; m += some) {
                some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
                for (int64_t n = first; n < end; n++) {
                    const uint8_t* codes = (const uint8_t*)P.codes + n * L.row_bytes;
                    const float *scale = lie + (n - first) * each, *zero = &zeros[(n - first) * each];
                    float sums[4];
                    if (some == 4) fast_row<C, S, 4, T>(L, codes, scale, zero, decoder, in, m, scratch.data(), sums);
                    else if (some == 2) fast_row<C, S, 2, T>(L, codes, scale, zero, decoder, in, m, scratch.data(), sums);
                    else fast_row<C, S, 1, T>(L, codes, scale, zero, decoder, in, m, scratch.data(), sums);
                    for (int64_t i = 0; i < some; i++) y[i][n - first] = sums[i];
                }
                for (int64_t i = 0; i < some; i++) put_some(dtype, y[i], end - first, bias, first, out, (m + i) * L.rows + first);
            }
        }
    });
}

template <int C, int S> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                         int dtype, const void* bias, void* out) {
    if constexpr (C == INT4) {
        if (L.activations) return fast_linear<C, S, BYTES>(L, P, x, rows, stride, dtype, bias, out);
    }
    fast_linear<C, S, is_integer(C) ? WORDS : FLOATS>(L, P, x, rows, stride, dtype, bias, out);
}

// Inputs of float32 are not fixed point unless that is asked for.
template <int C> bool is_fast(const Layout& L, int dtype) {
    if (is_integer(C) && dtype == FLOAT32 && !L.activations) return false;
    return L.group >= L.columns || L.group % SPAN == 0 || L.group == 64 || L.group == 32;
}

template <int C> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                                  const void* bias, void* out) {
    if (L.group >= L.columns) fast_linear<C, WHOLE>(L, P, x, rows, stride, dtype, bias, out);
    else if (L.group % SPAN == 0) fast_linear<C, WIDE>(L, P, x, rows, stride, dtype, bias, out);
    else if (L.group == 64) fast_linear<C, G64>(L, P, x, rows, stride, dtype, bias, out);
    else fast_linear<C, G32>(L, P, x, rows, stride, dtype, bias, out);
}
#else
template <int C> bool is_fast(const Layout&, int) { return false; }
#endif
