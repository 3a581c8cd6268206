// Products of bfloat16 gradients with a weight, not transposed, by AVX-512:
//     out (M, L.columns) = x (M, L.rows) @ values
// Threads decode some rows of codes each and interleave pairs of them, ACROSS columns side by side. Then each multiplies some
// of these columns, of all of these rows, with all rows of x.
//
// blocks.cpp includes this in its own namespace, after blocks.h.

constexpr int64_t PAIRED = 32, DEEP = DEPTH / 2;  // rows of codes that a thread decodes, and multiplies, at once

// Interleaves the elements of pairs of PAIRED rows, `stride` bytes apart, in ACROSS columns.
inline void lay_pairs(const uint8_t* values, int64_t stride, Line* to) {
    for (int64_t i = 0; i < PAIRED; i += 2, values += 2 * stride)
        for (int64_t l = 0; l < LINES; l++, to++) {
            const __m512i a = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)values + l));
            const __m512i b = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(values + stride) + l));
            _mm512_storeu_si512(to, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
        }
}

inline void gradient_of(const Layout& L, const Parts& P, const Kernels& kernels, const uint16_t* x, int64_t rows, int64_t stride,
                        uint16_t* out) {
    const int64_t whole = (L.rows + PAIRED - 1) / PAIRED * PAIRED, tall = (rows + TALL - 1) / TALL * TALL;
    Array<uint16_t> padded;
    if (whole != L.rows) {  // else what follows a row of x would be multiplied with the values of no row, which are 0
        padded = Array<uint16_t>(rows * whole);
        for (int64_t m = 0; m < rows; m++) memcpy(&padded[m * whole], x + m * stride, L.rows * 2);
        x = padded.data(), stride = whole;
    }
    const int64_t blocks = (L.columns + ACROSS - 1) / ACROSS, row = blocks * ACROSS * 2;
    // Rows of codes at once: the threads begin twice for them, which takes up to 75 us if they sleep meanwhile.
    const int64_t fitting = (8 << 20) / row / DEEP * DEEP, most = fitting > whole ? whole : fitting > DEEP ? fitting : DEEP;
    Array<Line> pairs = Array<Line>::unset(blocks * most / 2 * LINES);  // of a block all pairs of rows
    Buffer totals = Buffer::unset(blocks * tall * ACROSS);
    for (int64_t start = 0; start < whole; start += most) {
        const int64_t count = whole - start < most ? whole - start : most;
        in_threads(count, PAIRED, true, [&](Shares& shares) {
            Array<uint8_t> values(PAIRED * row);
            for (int64_t n, end; shares.take(&n, &end);)
                for (; n < end; n += PAIRED) {
                    const int64_t there = L.rows - start - n < PAIRED ? L.rows - start - n : PAIRED;
                    kernels.decode(L, P, {nullptr, false, start + n, there, row / 2}, BFLOAT16, values.data());
                    memset(&values[there * row], 0, (PAIRED - there) * row);
                    for (int64_t b = 0; b < blocks; b++)
                        lay_pairs(&values[b * ACROSS * 2], row, &pairs[(b * most + n) / 2 * LINES]);
                }
        });
        in_threads(blocks, 1, true, [&](Shares& shares) {
            for (int64_t b, end; shares.take(&b, &end);)
                for (; b < end; b++) {
                    float* to = &totals[b * tall * ACROSS];
                    for (int64_t n = 0; n < count; n += DEEP)
                        for (int64_t m = 0; m < rows; m += TALL) {
                            const uint8_t* some[TALL];
                            for (int i = 0; i < TALL; i++)
                                some[i] = (const uint8_t*)(x + (m + i < rows ? m + i : rows - 1) * stride + start + n);
                            multiply<false>(&pairs[(b * most + n) / 2 * LINES], (count - n < DEEP ? count - n : DEEP) / 2, some,
                                            start + n == 0, pairs.data(), to, to + m * ACROSS,
                                            std::make_index_sequence<TALL * LINES>());
                        }
                    for (int64_t m = 0; start + most >= whole && m < rows; m++)
                        for (int64_t l = 0, k = b * ACROSS; l < LINES && k < L.columns; l++, k += 16)
                            put_sums(_mm512_loadu_ps(&to[m * ACROSS + l * 16]), nullptr, out, m * L.columns, k, L.columns - k);
                }
        });
    }
}
