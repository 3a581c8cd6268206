// Products by the rows of rows.h, in threads; nothing of it at other levels.
//
// kernels.cpp includes this in its own namespace.

#if FAST_ROWS
#include "rows.h"
#include "float_rows.h"

// totals[m * TILE + n] = row n of the `count` rows of codes times row `from + m` of the M rows of inputs, lane by lane.
template <int C, int S, int M, bool Z, int T> void fast_rows(const Layout& L, const RowsOfCodes& rows, int64_t count,
                                                          const Decoder<C>& decoder, const Spans& in, int64_t from,
                                                          float* scratch, V* totals) {
    // One row of inputs waits for the memory of bytes, which comes faster for one row of codes at a time.
    constexpr int R = T != FLOATS && (M > 1 || is_nibbled(C)) ? TOGETHER : 1;
    const auto row = [&](int64_t n) {
        RowsOfCodes own = rows;
        own.codes += n * rows.bytes, own.scale += n * rows.stride, own.zero += n * rows.stride;
        return own;
    };
    if constexpr (T == FLOATS)
        for (int64_t n = 0; n < count; n++) {
            const RowsOfCodes own = row(n);
            float_row<C, S, M, Z, false>(L, own.codes, own.runs_on, own.scale, own.zero, own.zero, decoder, in, from, totals + n);
        }
    else
        for (int64_t n = 0; n < count; n += R) {
            RowsOfCodes own = row(n);
            if (n + R > count) own.bytes = own.stride = 0;  // the last row twice
            integer_rows<C, S, M, R, Z, T>(L, own, in, from, scratch, totals + n);
        }
}

template <int C, int S, bool Z, int T> void fast_rows(const Layout& L, const RowsOfCodes& rows, int64_t count,
                                                    const Decoder<C>& decoder, const Spans& in, int64_t from, int64_t some,
                                                    float* scratch, V* totals) {
    if (some == 4) fast_rows<C, S, 4, Z, T>(L, rows, count, decoder, in, from, scratch, totals);
    else if (some == 2) fast_rows<C, S, 2, Z, T>(L, rows, count, decoder, in, from, scratch, totals);
    else fast_rows<C, S, 1, Z, T>(L, rows, count, decoder, in, from, scratch, totals);
}

inline bool has_zeros(const Layout& L) { return L.zero >= 0 || L.offset != 0; }

// BYTES: codes are multiplied with one byte of each input instead of two.
template <int C, int S, int T> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                        int dtype, const void* bias, void* out) {
    constexpr int64_t most = WIDE_ROWS && T == FLOATS ? 2 : 4;  // more rows of floats do not stay in the nearest cache
    constexpr bool folds = C == INT4 && T == FLOATS;  // what all codes are too large by, into the decoder
    constexpr bool always = is_integer(C) && C != INT8 && !folds, may = always || folds || (C == INT8 && T != FLOATS);
    const bool has_own = folds ? L.zero >= 0 : has_zeros(L);
    const Spans in = Spans::of<C, S, T>(L, x, dtype, rows, stride);
    const bool is_spread = are_spread(L);
    const int64_t each = is_spread ? in.stride : L.groups;
    const bool is_much = L.rows > 1 && rows * L.rows * L.columns > 65536;
    const int64_t tile = L.rows >= 256 || !is_much ? TILE : L.rows >= 64 ? 4 : TOGETHER;  // few rows are shared between threads
    const int64_t share = share_of(L.rows, is_much) / tile * tile;
    in_threads(L.rows, share > tile ? share : tile, is_much, [&](Shares& shares) {
        Buffer s(is_spread ? tile * L.groups + LANES : 0), z(is_spread ? tile * L.groups + LANES : 0);
        Buffer scratch(4 * TOGETHER * in.stride + LANES);
        Buffer scales(tile * each + LANES), zeros(tile * each + LANES, -L.offset);
        const Decoder<C> decoder(L);
        V totals[4 * TILE];
        alignas(64) float y[TILE];
        for (int64_t start, stop; shares.take(&start, &stop);) for (int64_t first = start; first < stop; first += tile) {
            const int64_t end = first + tile < stop ? first + tile : stop;
            const float* lie = scales_of_rows(L, P, first, end - first, in.spans, each, s.data(), z.data(), scales.data(),
                                              zeros.data());
            const RowsOfCodes own = {(const uint8_t*)P.codes + first * L.row_bytes, lie, zeros.data(), L.row_bytes, each,
                                     L.group >= L.columns, can_run_on<C, S, T>(L, (L.rows - end) * L.row_bytes)};
            for (int64_t m = 0, some; m < rows; m += some) {
                some = rows - m >= 4 && most == 4 ? 4 : rows - m >= 2 ? 2 : 1;
                if (always || has_own) fast_rows<C, S, may, T>(L, own, end - first, decoder, in, m, some, scratch.data(), totals);
                else fast_rows<C, S, always, T>(L, own, end - first, decoder, in, m, some, scratch.data(), totals);
                for (int64_t i = 0; i < some; i++) {
                    float by = C == E4M3 ? 256 : 1;
                    if (T == FLOATS && L.activations) by *= in.steps[m + i];
                    for (int64_t n = 0; n < end - first; n++) y[n] = sum(totals[i * TILE + n]) * by * L.unit;
                    put_some(dtype, y, end - first, bias, first, out, (m + i) * L.rows + first);
                }
            }
        }
    });
}

// Inputs of float32 are not fixed point unless that is asked for: levels.h has integers with AVX2, and those with zero points.
template <int C> bool is_fast(const Layout& L, int dtype) {
    if (is_integer(C) && dtype == FLOAT32 && !L.activations && !(WIDE_ROWS && (C != INT8 || !has_zeros(L)))) return false;
    return L.group >= L.columns || L.group % SPAN == 0 || L.group == 64 || L.group == 32;
}

template <int C, int T> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                         int dtype, const void* bias, void* out) {
    const bool is_whole = L.group >= L.columns;
    if constexpr (T == FLOATS)
        if (is_whole) return fast_linear<C, WHOLE, T>(L, P, x, rows, stride, dtype, bias, out);
    if (is_whole || L.group % SPAN == 0) fast_linear<C, WIDE, T>(L, P, x, rows, stride, dtype, bias, out);
    else if (L.group == 64) fast_linear<C, G64, T>(L, P, x, rows, stride, dtype, bias, out);
    else fast_linear<C, G32, T>(L, P, x, rows, stride, dtype, bias, out);
}

template <int C> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                                  const void* bias, void* out) {
    if constexpr (C == INT4 || (WIDE_ROWS && is_integer(C)))
        if (L.activations) return fast_linear<C, BYTES>(L, P, x, rows, stride, dtype, bias, out);
    if constexpr (WIDE_ROWS && is_integer(C))
        if (dtype == FLOAT32 && !L.activations) return fast_linear<C, FLOATS>(L, P, x, rows, stride, dtype, bias, out);
    fast_linear<C, is_integer(C) ? WORDS : FLOATS>(L, P, x, rows, stride, dtype, bias, out);
}
#else
template <int C> bool is_fast(const Layout&, int) { return false; }
#endif
