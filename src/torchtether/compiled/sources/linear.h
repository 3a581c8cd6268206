// Products by the rows of rows.h, in threads; nothing of it at other levels.
//
// kernels.cpp includes this in its own namespace.

#if FAST_ROWS
#include "rows.h"
#include "float_rows.h"

template <int C, int S, int M, int R, int T> void fast_rows(const Layout& L, const RowsOfCodes& rows, Decoder<C>& decoder,
                                                          const Spans& in, int64_t m, float* scratch, float (*y)[4]) {
    constexpr bool always = T == BYTES && C == INT4;  // there are zero points
    if constexpr (T == FLOATS)
        for (int r = 0; r < R; r++) {
            const float *zero = rows.zero + r * rows.stride, *scale = rows.scale + r * rows.stride;
            float_row<C, S, M, false>(L, rows.codes + r * rows.bytes, scale, zero, zero, decoder, in, m, y[r]);
        }
    else if (always || L.zero >= 0 || L.offset != 0) integer_rows<C, S, M, R, true, T>(L, rows, in, m, scratch, y);
    else integer_rows<C, S, M, R, always, T>(L, rows, in, m, scratch, y);
}

template <int C, int S, int R, int T> void fast_rows(const Layout& L, const RowsOfCodes& rows, Decoder<C>& decoder,
                                                   const Spans& in, int64_t m, int64_t some, float* scratch, float (*y)[4]) {
    if (some == 4) fast_rows<C, S, 4, R, T>(L, rows, decoder, in, m, scratch, y);
    else if (some == 2) fast_rows<C, S, 2, R, T>(L, rows, decoder, in, m, scratch, y);
    else fast_rows<C, S, 1, R, T>(L, rows, decoder, in, m, scratch, y);
}

// BYTES: codes are multiplied with one byte of each input instead of two.
template <int C, int S, int T> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                        int dtype, const void* bias, void* out) {
    constexpr int64_t TILE = 16;  // rows of codes, so that many rows of inputs are read from the cache
    constexpr int64_t most = WIDE_ROWS && T == FLOATS ? 2 : 4;  // more rows of floats do not stay in the nearest cache
    const Spans in = Spans::of<C, S, T>(L, x, dtype, rows, stride);
    const int64_t count = in.spans * scales_of<S>, each = in.stride;
    const bool is_much = L.rows > 1 && rows * L.rows * L.columns > 65536;
    const int64_t tile = L.rows >= 256 || !is_much ? TILE : 1;  // few rows are shared between threads one by one
    in_threads(L.rows, tile, is_much, [&](Shares& shares) {
        Buffer s(buffer_size(L)), z(buffer_size(L)), scratch(4 * TOGETHER * in.stride + LANES);
        Buffer scales(tile * each + LANES), zeros(tile * each + LANES, -L.offset);
        Decoder<C> decoder(L);
        alignas(64) float y[4][TILE];
        for (int64_t start, stop; shares.take(&start, &stop);) for (int64_t first = start; first < stop; first += tile) {
            const int64_t end = first + tile < stop ? first + tile : stop;
            const float* lie = scales_of_rows<S>(L, P, first, end - first, count, each, s.data(), z.data(), scales.data(),
                                                 zeros.data());
            for (int64_t m = 0, some; m < rows; m += some) {
                some = rows - m >= 4 && most == 4 ? 4 : rows - m >= 2 ? 2 : 1;
                for (int64_t n = first, taken; n < end; n += taken) {
                    // One row of inputs waits for the memory of bytes, which comes faster for one row of codes at a time.
                    taken = end - n >= TOGETHER && (some > 1 || is_nibbled(C)) ? TOGETHER : 1;
                    const int64_t at = (n - first) * each;
                    const uint8_t* codes = (const uint8_t*)P.codes + n * L.row_bytes;
                    const RowsOfCodes own = {codes, lie + at, &zeros[at], L.row_bytes, each};
                    float sums[TOGETHER][4];
                    if (taken == TOGETHER) fast_rows<C, S, TOGETHER, T>(L, own, decoder, in, m, some, scratch.data(), sums);
                    else fast_rows<C, S, 1, T>(L, own, decoder, in, m, some, scratch.data(), sums);
                    for (int64_t r = 0; r < taken; r++)
                        for (int64_t i = 0; i < some; i++) y[i][n - first + r] = sums[r][i];
                }
                for (int64_t i = 0; i < some; i++) put_some(dtype, y[i], end - first, bias, first, out, (m + i) * L.rows + first);
            }
        }
    });
}

template <int C, int S> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                         int dtype, const void* bias, void* out) {
    if constexpr (C == INT4 || (WIDE_ROWS && is_integer(C))) {
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
