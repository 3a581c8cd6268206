// Products with codes whose columns name their groups: what stream.h does not multiply row by row.
//
// stream.cpp includes this in its own namespace.
//
// The codes of 8 rows lie beside each other, column by column, so that columns are taken in the order of their groups at no
// cost, and a vector holds the sums of rows:
//     y[8 rows] = sum over groups of scale[8 rows] * (sum over the columns of the group of (code + before)[8 rows] * x)
// With AVX-512, and up to 64 groups in a row, columns look up the numbers of their groups instead.

constexpr int STACK = 8, VECTORS = STACK / LANES;  // rows of codes that are interleaved

// Columns sorted by the groups that they name.
struct Order {
    Array<int32_t> columns;  // by place
    Array<int64_t> ends;     // by group: the place after its last column

    Order(const Layout& L, const Parts& P) : columns(L.columns), ends(L.groups + 1) {
        const int32_t* named = (const int32_t*)P.extra;
        for (int64_t k = 0; k < L.columns; k++) ends[named[k] + 1]++;
        for (int64_t g = 0; g < L.groups; g++) ends[g + 1] += ends[g];
        for (int64_t k = 0; k < L.columns; k++) columns[ends[named[k]]++] = k;
    }
};

// to[STACK * k + i] = codes[i * step + k]; reads whole vectors of each row.
inline void interleave(const uint8_t* codes, int64_t step, int64_t count, uint8_t* to) {
    int64_t k = 0;
#if defined(__AVX2__)
    for (; k < count; k += 16, to += 16 * STACK) {
        __m128i v[STACK], w[STACK];
        for (int i = 0; i < STACK; i++) v[i] = load<__m128i>(codes + i * step + k);
        for (int i = 0; i < 4; i++) w[i] = _mm_unpacklo_epi8(v[2 * i], v[2 * i + 1]), w[i + 4] = _mm_unpackhi_epi8(v[2 * i], v[2 * i + 1]);
        for (int i = 0; i < 8; i += 2) v[i] = _mm_unpacklo_epi16(w[i], w[i + 1]), v[i + 1] = _mm_unpackhi_epi16(w[i], w[i + 1]);
        for (int i = 0; i < 8; i += 4)  // columns 0 1, 2 3, 4 5, 6 7 of each half
            for (int j = 0; j < 2; j++) {
                _mm_storeu_si128((__m128i*)(to + 16 * (i + 2 * j)), _mm_unpacklo_epi32(v[i + j], v[i + 2 + j]));
                _mm_storeu_si128((__m128i*)(to + 16 * (i + 2 * j + 1)), _mm_unpackhi_epi32(v[i + j], v[i + 2 + j]));
            }
    }
#endif
    for (; k < count; k++)
        for (int i = 0; i < STACK; i++) *to++ = codes[i * step + k];
}

template <int C, int M, int A> inline void add_columns(const uint8_t* codes, const int32_t* columns, const F* low, const float* x,
                                                       int64_t stride, F (*sums)[2][VECTORS]) {
    for (int a = 0; a < A; a++)
        for (int v = 0; v < VECTORS; v++) {
            const F level = values<C>(codes + STACK * columns[a] + LANES * v) + low[v];
            for (int m = 0; m < M; m++) sums[m][a][v] = fma(level, all(x[m * stride + a]), sums[m][a][v]);
        }
}

// y[STACK * m + i] = row i of the tile times row m of x, whose columns are sorted; scales and `before` by group and row.
template <int C, int M> void tile_dots(const Layout& L, const Order& order, const uint8_t* codes, const float* scale,
                                       const float* before, const float* x, float* y) {
    F total[M][VECTORS] = {};
    for (int64_t g = 0, k = 0; g < L.groups; g++, scale += STACK, before += STACK) {
        const int64_t end = order.ends[g];
        F sums[M][2][VECTORS] = {}, low[VECTORS];
        for (int v = 0; v < VECTORS; v++) low[v] = load<F>(before + LANES * v);
        const int32_t* columns = order.columns.data();
        for (; k + 2 <= end; k += 2) add_columns<C, M, 2>(codes, columns + k, low, x + k, L.columns, sums);
        if (k < end) add_columns<C, M, 1>(codes, columns + k, low, x + k, L.columns, sums), k++;
        for (int m = 0; m < M; m++)
            for (int v = 0; v < VECTORS; v++)
                total[m][v] = fma(load<F>(scale + LANES * v), sums[m][0][v] + sums[m][1][v], total[m][v]);
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < VECTORS; v++) {
            const F by = total[m][v] * all(L.unit);
            memcpy(y + STACK * m + LANES * v, &by, sizeof by);
        }
}

template <int C> void ordered_linear_of(const Layout& L, const Parts& P, const Order& order, const float* x, int64_t rows,
                                        int dtype, const void* bias, void* out) {
    const int64_t bytes = StreamRow::bytes(L), codes_size = STACK * bytes / 4, numbers = STACK * L.groups;
    const int64_t size = RowParts::size(L) + 2 * numbers + codes_size + STACK * (L.columns + 16) / 4;
    const auto make = [&] { return RowParts::buffer(L, size); };
    over((L.rows + STACK - 1) / STACK, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t t) {
        RowParts parts(L, buffer.data());
        float *scale = buffer.data() + RowParts::size(L), *before = scale + numbers;
        uint8_t *codes = (uint8_t*)(before + numbers), *tile = codes + STACK * bytes;
        const int64_t first = t * STACK, count = L.rows - first < STACK ? L.rows - first : STACK;
        for (int64_t i = 0; i < count; i++) {
            const RowAt at(L, first + i);
            parts.fill(L, P, first + i, at);
            for (int64_t g = 0; g < L.groups; g++) scale[STACK * g + i] = parts.scale[g], before[STACK * g + i] = parts.before[g];
            StreamRow::unpack(L, P, first + i, at, {}, codes + i * bytes);
        }
        interleave(codes, bytes, L.columns, tile);
        float y[4 * STACK];
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            const float* from = x + m * L.columns;
            if (some == 4) tile_dots<C, 4>(L, order, tile, scale, before, from, y);
            else if (some == 2) tile_dots<C, 2>(L, order, tile, scale, before, from, y);
            else tile_dots<C, 1>(L, order, tile, scale, before, from, y);
            for (int64_t j = 0; j < some; j++) put_some(dtype, y + STACK * j, count, bias, first, out, (m + j) * L.rows + first);
        }
    });
}

#if WIDE_ROWS
// y[m] = a row of codes times row m of x
template <int C, bool TWICE, int M> void looked_dots(const Layout& L, const uint8_t* codes, const Looked<TWICE>& scale,
                                                     const Looked<TWICE>& before, const int32_t* groups, const float* x,
                                                     int64_t padded, float* y) {
    V sums[M][2] = {};
    const auto add = [&](int64_t k, __mmask16 some, int a) __attribute__((always_inline)) {
        const __m512i group = _mm512_maskz_loadu_epi32(some, groups + k);
        const __m128i c = load<__m128i>(codes + k);
        const __m512 level = _mm512_cvtepi32_ps(C == INT8 ? _mm512_cvtepi8_epi32(c) : _mm512_cvtepu8_epi32(c));
        const V value = (V)_mm512_maskz_mul_ps(some, _mm512_add_ps(level, before(group)), scale(group));
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m][a] = fma(value, load<V>(x + m * padded + k), sums[m][a]);
    };
    int64_t k = 0;
    for (; k + 32 <= L.columns; k += 32) add(k, 0xffff, 0), add(k + 16, 0xffff, 1);
    for (; k < L.columns; k += 16) add(k, L.columns - k < 16 ? (1 << (L.columns - k)) - 1 : 0xffff, 0);
    for (int m = 0; m < M; m++) y[m] = sum(sums[m][0] + sums[m][1]) * L.unit;
}

// Row by row, each column with the scale of its group.
template <int C, bool TWICE> void looked_linear(const Layout& L, const Parts& P, const float* x, int64_t rows, int dtype,
                                                const void* bias, void* out) {
    const auto make = [&] { return RowParts::buffer(L, StreamRow::size(L)); };
    over(L.rows, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t n) {
        const StreamRow row(L, buffer.data());
        const RowAt at(L, n);
        RowParts(row.parts).fill(L, P, n, at);
        const uint8_t* codes = StreamRow::unpack(L, P, n, at, {}, row.codes);
        const Looked<TWICE> scale(row.parts.scale), before(row.parts.before);
        const int32_t* groups = (const int32_t*)P.extra;
        const int64_t padded = StreamRow::padded(L);
        float y[3 + LANES];
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            const float* from = x + m * padded;
            if (some == 4) looked_dots<C, TWICE, 4>(L, codes, scale, before, groups, from, padded, y);
            else if (some == 2) looked_dots<C, TWICE, 2>(L, codes, scale, before, groups, from, padded, y);
            else looked_dots<C, TWICE, 1>(L, codes, scale, before, groups, from, padded, y);
            for (int64_t i = 0; i < some; i++) put_some(dtype, y + i, 1, bias, n, out, (m + i) * L.rows + n);
        }
    });
}
#endif

void ordered_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype, const void* bias,
                    void* out) {
    const int64_t padded = StreamRow::padded(L);
    const Buffer floats = as_floats(L, x, rows, stride, dtype);
#if WIDE_ROWS
    if (L.groups <= 64) {
        const auto by_row = L.source == INT8 ? (L.groups <= 32 ? looked_linear<INT8, false> : looked_linear<INT8, true>)
                                             : (L.groups <= 32 ? looked_linear<UINT8, false> : looked_linear<UINT8, true>);
        return by_row(L, P, floats.data(), rows, dtype, bias, out);
    }
#endif
    const Order order(L, P);
    Buffer sorted(rows * L.columns);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t k = 0; k < L.columns; k++) sorted[m * L.columns + k] = floats[m * padded + order.columns[k]];
    if (L.source == INT8) ordered_linear_of<INT8>(L, P, order, sorted.data(), rows, dtype, bias, out);
    else ordered_linear_of<UINT8>(L, P, order, sorted.data(), rows, dtype, bias, out);
}
