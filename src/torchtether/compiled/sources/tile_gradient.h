// Products of bfloat16 gradients with a weight, not transposed, by AMX:
//     out (M, L.columns) = x (M, L.rows) @ values
// The values of some rows of codes are decoded; of 32 of their columns a thread interleaves pairs of rows, DEPTH bytes of each
// row of x deep, and multiplies them with all rows of x.
//
// tiles.cpp includes this in its own namespace, after tiles.h.

constexpr int64_t BESIDE = 2 * SIDE, DEEP = DEPTH / 2;  // columns of two tiles; rows of codes that are multiplied at once

// Rows of x, of which the last bytes and the last rows are 0: a multiple of DOWN rows.
struct Gradients {
    const int64_t rows, bytes, stride;
    Array<uint8_t> data;

    Gradients(const Layout& L, const uint16_t* x, int64_t count, int64_t row_stride)
        : rows((count + DOWN - 1) / DOWN * DOWN), bytes((L.rows * 2 + 63) / 64 * 64), stride(apart_for(bytes)),
          data(Array<uint8_t>::unset(rows * stride)) {
        over(rows, rows * bytes > 65536, [] { return 0; }, [&](int, int64_t m) {
            uint8_t* to = &data[m * stride];
            memset(to + bytes - 64, 0, 64);
            if (m < count) memcpy(to, x + m * row_stride, L.rows * 2);
            else memset(to, 0, bytes);
        });
    }
};

// Two tiles of pairs of rows: of each 128 bits of a row of 32 columns the first tile has the first half.
inline void lay_pairs(const uint8_t* values, int64_t stride, int64_t tiles, Line* first, Line* second) {
    for (int64_t i = 0; i < tiles * SIDE; i++, values += 2 * stride) {
        const __m512i a = _mm512_loadu_si512(values), b = _mm512_loadu_si512(values + stride);
        _mm512_storeu_si512(first + i, _mm512_unpacklo_epi16(a, b));
        _mm512_storeu_si512(second + i, _mm512_unpackhi_epi16(a, b));
    }
}

// Writes the sums of a row of x with 32 columns from `column` on, of which `left` are there.
inline void put_across(__m512 first, __m512 second, void* out, int64_t row, int64_t column, int64_t left) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    put_sums(_mm512_permutex2var_ps(first, low, second), nullptr, out, row, column, left);
    if (left > 16) put_sums(_mm512_permutex2var_ps(first, high, second), nullptr, out, row, column + 16, left - 16);
}

void gradient_of(const Layout& L, const Parts& P, const Kernels& kernels, const uint16_t* given, int64_t rows, int64_t stride,
                 uint16_t* out) {
    const Gradients x(L, given, rows, stride);
    const int64_t blocks = (L.columns + BESIDE - 1) / BESIDE, row = blocks * 64 + 64;
    const int64_t fitting = ((2 << 20) / row < L.rows ? (2 << 20) / row : L.rows + DEEP - 1) / DEEP * DEEP;
    const int64_t most = fitting > DEEP ? fitting : DEEP;  // rows of codes that are decoded at once
    Array<uint8_t> values = Array<uint8_t>::unset(most * row);
    Array<Line> totals = Array<Line>::unset(blocks * x.rows * 2);
    for (int64_t start = 0; start < L.rows; start += most) {
        const int64_t count = L.rows - start < most ? L.rows - start : most, whole = (count + 31) / 32 * 32;
        kernels.decode(L, P, {nullptr, false, start, count, row / 2}, BFLOAT16, values.data());
        memset(values.data() + count * row, 0, (whole - count) * row);
        const bool is_last = start + most >= L.rows;
        in_threads(blocks, share_of(blocks, true), true, [&](Shares& shares) {
            constexpr int64_t apart = DEPTH / 64 * SIDE;  // lines of all first tiles
            Array<Line> pairs = Array<Line>::unset(2 * apart);
            const Tiles tiles;
            for (int64_t b, end; shares.take(&b, &end);) for (; b < end; b++) {
                Line* to = &totals[b * x.rows * 2];
                for (int64_t n = 0; n < whole; n += DEEP) {
                    const int64_t some = (whole - n < DEEP ? whole - n : DEEP) / 32;
                    lay_pairs(&values[n * row + b * 64], row, some, pairs.data(), &pairs[apart]);
                    for (int64_t m = 0; m < x.rows; m += DOWN)
                        Tiles::add<false, true>(&x.data[m * x.stride + (start + n) * 2], x.stride, pairs.data(), apart, some * 64,
                                                start + n == 0, to + m * 2);
                }
                for (int64_t m = 0; is_last && m < rows; m++) {
                    const Line* sums = to + m / DOWN * 2 * DOWN + m % DOWN;
                    put_across(_mm512_loadu_ps(sums), _mm512_loadu_ps(sums + DOWN), out, m * L.columns, b * BESIDE,
                               L.columns - b * BESIDE);
                }
            }
        });
    }
}
