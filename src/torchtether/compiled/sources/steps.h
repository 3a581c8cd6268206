// Products with integers that have a scale and a bias for each group, where values are rounded after each step of decoding.
//
// stream.cpp includes this in its own namespace; levels.h says when it is needed. Few values are computed once for each group,
// and looked up.

#if FAST_ROWS
bool has_steps(const Layout& L) {
    return (L.family == BIASED || L.family == BIASED_FIRST) && !L.is_flat && (L.group >= L.columns || L.group % WIDE_LANES == 0);
}

// y[m * TILE] = a row of codes times row m of x; `scale` and `bias` have a number for each group. FEW: codes have at most 4 bits.
template <int A, bool FIRST, bool FEW, int M> void stepped_dots(const Layout& L, const uint8_t* codes, const float* scale,
                                                                const float* bias, const float* x, int64_t padded, float* y) {
    V sums[M][2] = {};
    int64_t k = 0;
    for (int64_t end = L.group; k < L.columns; end += L.group) {
        const V by = every(*scale++), more = every(*bias++), none = every(-0.0f);
        const auto decoded = [&](V level) __attribute__((always_inline)) {
            return value_of<A, FIRST>(level, FIRST ? more : none, by, every(1), FIRST ? none : more);
        };
        const Few few(INTEGERS, decoded);
        const auto add = [&](int64_t k, int64_t count, int a) __attribute__((always_inline)) {
            V value = FEW ? few(codes + k) : decoded(wide_values<UINT8>(codes + k));
            if (count < WIDE_LANES) value = first_of(value, count);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sums[m][a] = fma(value, load<V>(x + m * padded + k), sums[m][a]);
        };
        end = end < L.columns ? end : L.columns;
        for (; k + 2 * WIDE_LANES <= end; k += 2 * WIDE_LANES) add(k, WIDE_LANES, 0), add(k + WIDE_LANES, WIDE_LANES, 1);
        for (; k < end; k += WIDE_LANES) add(k, end - k, 0);
    }
    for (int m = 0; m < M; m++) y[m * TILE] = sum(sums[m][0] + sums[m][1]);
}

template <int A, bool FIRST, bool FEW> auto stepped_dots_of(int64_t rows) {
    return rows == 4   ? stepped_dots<A, FIRST, FEW, 4>
           : rows == 3 ? stepped_dots<A, FIRST, FEW, 3>
           : rows == 2 ? stepped_dots<A, FIRST, FEW, 2>
                       : stepped_dots<A, FIRST, FEW, 1>;
}

template <int A> auto stepped_dots_of(const Layout& L, int64_t rows) {
    if (L.family == BIASED_FIRST) return L.bits <= 4 ? stepped_dots_of<A, true, true>(rows) : stepped_dots_of<A, true, false>(rows);
    return L.bits <= 4 ? stepped_dots_of<A, false, true>(rows) : stepped_dots_of<A, false, false>(rows);
}

// Of up to 4 rows of inputs: for more of them, it is faster to decode each row of codes once.
void stepped_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype, const void* bias,
                    void* out) {
    const int64_t padded = StreamRow::padded(L);
    const Buffer floats = as_floats(L, x, rows, stride, dtype);
    const auto dots = L.arithmetic == BFLOAT16  ? stepped_dots_of<BFLOAT16>(L, rows)
                      : L.arithmetic == FLOAT16 ? stepped_dots_of<FLOAT16>(L, rows)
                                                : stepped_dots_of<FLOAT32>(L, rows);
    const int64_t tile = L.height > 1 ? 1 : L.rows >= 256 ? TILE : 4;  // rows whose numbers lie in one piece
    Layout all_rows = L;
    all_rows.groups *= tile;
    const auto make = [&] { return RowParts::buffer(all_rows, StreamRow::size(all_rows)); };
    over((L.rows + tile - 1) / tile, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t t) {
        StreamRow row(all_rows, buffer.data());
        const int64_t first = t * tile, count = first + tile < L.rows ? tile : L.rows - first;
        RowAt at(L, first);
        at.groups *= count;
        row.parts.fill(L, P, first, at);
        const float *scale = row.parts.scale, *added = L.family == BIASED ? row.parts.after : row.parts.before;
        alignas(64) float y[4 * TILE];
        for (int64_t i = 0; i < count; i++, scale += L.groups, added += L.groups) {
            const uint8_t* codes = (const uint8_t*)P.codes + (first + i) * L.row_bytes;
            if (L.bits < 8 || L.columns % WIDE_LANES) codes = StreamRow::unpack(L, P, first + i, at, {}, row.codes);
            dots(L, codes, scale, added, floats.data(), padded, y + i);
        }
        for (int64_t m = 0; m < rows; m++) put_some(dtype, y + m * TILE, count, bias, first, out, m * L.rows + first);
    });
}
#endif
