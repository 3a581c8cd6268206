// Products with many rows of bfloat16 inputs, by the AVX-512 instructions that add two products of bfloat16, or four of
// bytes, to a sum.
//
// Some rows of codes are interleaved, four bytes of each in turn, so that one vector multiplies 16 of them with four bytes
// of a row of inputs. The bytes are values decoded to bfloat16; or, if inputs are rounded to int8, codes minus their zero
// points, if those are signed bytes. Then, with 128 added to the rounded inputs,
//     y = step of x * unit * sum over groups of scale * (sum code * (x + 128) - 128 * sum code)
//
// blocks.cpp includes this in its own namespace.

constexpr int64_t LINES = 3, ACROSS = 16 * LINES;  // rows of codes that are interleaved
constexpr int64_t DEPTH = 512;                     // bytes of each that are interleaved at once, in the first-level cache
constexpr int64_t TALL = 8;                        // rows of inputs that are multiplied at once, half as many for small pieces

// Whether codes minus their zero points are signed bytes.
inline bool has_bytes(const Layout& L, const Parts& P) {
    if (L.kind == INT8) return L.zero < 0 && L.offset == 0;
    if (L.kind != INT4) return false;
    int least = L.zero >= 0 ? 255 : 0, most = L.zero >= 0 ? -128 : 0;
    for (int64_t i = 0; L.zero >= 0 && i < L.counts[2]; i++) {
        const int zero = L.zero == SIGNED ? (int)((const int8_t*)P.zero)[i] : (int)((const uint8_t*)P.zero)[i];
        least = zero < least ? zero : least, most = zero > most ? zero : most;
    }
    return most + L.offset <= 128 && least + L.offset >= 15 - 127;
}

// -- inputs -----------------------------------------------------------------------------------------------------------

// Rows of input bytes, padded to whole vectors with bytes that stand for zeros.
template <bool BYTES> struct Inputs {
    const uint8_t* start;
    int64_t stride, bytes;  // from row to row, and of a row
    Array<Line> data;
    Buffer steps;  // of each row, if it is rounded

    const uint8_t* at(int64_t m) const { return start + m * stride; }

    Inputs(const Layout& L, const void* x, int64_t rows, int64_t row_stride)
        : start((const uint8_t*)x), stride(row_stride * 2), bytes((L.columns * (BYTES ? 1 : 2) + 63) / 64 * 64) {
        if (!L.activations && L.columns % 32 == 0) return;
        stride = bytes + 64;  // rows a multiple of 4096 bytes apart evict each other from the cache
        data = Array<Line>::unset(rows * stride / 64);
        start = data.data()->bytes;
        steps = Buffer::unset(rows);
        over(rows, rows * L.columns > 32768, [] { return 0; }, [&](int, int64_t m) {
            uint8_t* to = data[m * stride / 64].bytes;
            memset(to + bytes - 64, BYTES ? LIFTED : 0, 64);
            if (L.activations) round(L, x, m, m * row_stride, to);
            else memcpy(to, (const uint16_t*)x + m * row_stride, L.columns * 2);
        });
    }

    void round(const Layout& L, const void* x, int64_t m, int64_t at, uint8_t* to) {
        const uint16_t* from = (const uint16_t*)x + at;
        __m512i most = _mm512_setzero_si512();  // magnitudes, as integers in the same order
        for (int64_t k = 0; k < L.columns; k += 32) {
            const __mmask32 some = L.columns - k < 32 ? (1u << (L.columns - k)) - 1 : ~0u;
            most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_maskz_loadu_epi16(some, from + k), _mm512_set1_epi16(0x7fff)));
        }
        const __m512i others = _mm512_slli_epi32(most, 16);  // of even columns; those of odd ones lie above
        const uint32_t largest = _mm512_reduce_max_epu32(_mm512_max_epu32(most, others)) & 0xffff0000;
        steps[m] = Spans::step_of(_mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest))));
        const __m512 by = _mm512_set1_ps(steps[m]);
        for (int64_t k = 0; k < L.columns; k += 16) {
            const __mmask16 some = L.columns - k < 16 ? (1 << (L.columns - k)) - 1 : 0xffff;
            const __m256i halves = _mm256_maskz_loadu_epi16(some, (const uint16_t*)x + at + k);
            const __m512 v = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
            const __m512i codes = _mm512_cvtps_epi32(_mm512_div_ps(v, by));  // to the nearest, halves to even
            const __m512i lifted = _mm512_add_epi32(codes, _mm512_set1_epi32(LIFTED));
            if (BYTES) _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8(lifted));
            else _mm256_storeu_si256((__m256i*)(to + 2 * k), (__m256i)_mm512_cvtneps_pbh(_mm512_cvtepi32_ps(codes)));
        }
    }
};

// -- codes ------------------------------------------------------------------------------------------------------------

// The codes of a row in columns k to k + 63, zeros after the last column.
template <int C> inline __m512i codes_at(const uint8_t* row, int64_t k, int64_t columns) {
    const int64_t left = columns - k;
    if (C == INT8) return _mm512_maskz_loadu_epi8(left < 64 ? (1ull << left) - 1 : ~0ull, row + k);
    const __mmask32 some = left < 64 ? (1ull << (left + 1) / 2) - 1 : ~0u;
    const __m512i c = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(some, row + k / 2));
    return _mm512_and_si512(_mm512_or_si512(c, _mm512_slli_epi16(c, 4)), _mm512_set1_epi8(15));
}

// Interleaves 16 rows, four bytes of each in turn, into every STEP-th line.
template <int64_t STEP, class Row> inline __attribute__((always_inline)) void lay_side_by_side(Row row, Line* to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = row(i);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2)
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // a[i + j]: of rows i to i + 3, in each lane bytes 4 j of it
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i p = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), q = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        const __m512i r = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        const __m512i s = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(to + (j + 0) * STEP, _mm512_shuffle_i32x4(p, r, 0x88));
        _mm512_storeu_si512(to + (j + 4) * STEP, _mm512_shuffle_i32x4(q, s, 0x88));
        _mm512_storeu_si512(to + (j + 8) * STEP, _mm512_shuffle_i32x4(p, r, 0xdd));
        _mm512_storeu_si512(to + (j + 12) * STEP, _mm512_shuffle_i32x4(q, s, 0xdd));
    }
}

// -- products ---------------------------------------------------------------------------------------------------------

// Sums have just the types that the instructions take: GCC copies a variable at every step if it is used as two types.
typedef int32_t Integers __attribute__((vector_size(64)));

inline Integers plus_products(Integers sum, __m512i codes, __m512i x) {  // of four bytes, those of x without a sign
    return (Integers)_mm512_dpbusd_epi32((__m512i)sum, x, codes);
}
inline __m512 plus_products(__m512 sum, __m512i codes, __m512i x) {  // of two bfloat16; subnormal ones count as 0
    return _mm512_dpbf16_ps(sum, (__m512bh)codes, (__m512bh)x);
}

inline __m512 scaled(Integers sum, const float* by, __m512 before) {
    return _mm512_fmadd_ps(_mm512_loadu_ps(by), _mm512_cvtepi32_ps((__m512i)sum), before);
}
inline __m512 scaled(__m512 sum, const float*, __m512) { return sum; }

inline __m512i four_at(const uint8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

// to[i] += the product of line i % LINES of the codes, over `steps` steps, with row i / LINES of x; for bytes the sum begins
// with `lows` and is multiplied by `scales`. If `is_first`, to[i] is 0 before. One variable per index of I, because GCC does
// not keep arrays that loops index in registers.
template <bool BYTES, size_t... I>
inline void multiply(const Line* codes, int64_t steps, const uint8_t* const* rows, bool is_first, const Line* lows,
                     const float* scales, float* to, std::index_sequence<I...>) {
    const uint8_t* x[] = {rows[I / LINES]...};
    const auto before = [&](size_t i) { return is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(to + 16 * i); };
    const auto begin = [&](size_t i) {
        if constexpr (BYTES) return load<Integers>(lows + i % LINES);
        else return before(i);
    };
    decltype(begin(0)) sums[] = {begin(I)...};
    for (int64_t i = 0; i < steps; i++, codes += LINES) {
        const __m512i w[LINES] = {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 1), _mm512_loadu_si512(codes + 2)};
        ((sums[I] = plus_products(sums[I], w[I % LINES], four_at(x[I] + 4 * i))), ...);
    }
    (_mm512_storeu_ps(to + 16 * I, scaled(sums[I], scales + I % LINES * 16, BYTES ? before(I) : __m512{})), ...);
}

// The same of bytes for several pieces of `steps` steps, with their sums in registers from one to the next.
template <size_t... I>
inline void multiply_pieces(const Line* codes, int64_t pieces, int64_t steps, const uint8_t* const* rows, bool is_first,
                            const Line* lows, const float* scales, float* to, std::index_sequence<I...>) {
    const uint8_t* x[] = {rows[I / LINES]...};
    __m512 totals[] = {(is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(to + 16 * I))...};
    for (int64_t k = 0; k < pieces * steps; lows += LINES, scales += ACROSS) {
        Integers sums[] = {load<Integers>(lows + I % LINES)...};
        for (const int64_t end = k + steps; k < end; k++, codes += LINES) {
            const __m512i w[LINES] = {_mm512_loadu_si512(codes), _mm512_loadu_si512(codes + 1), _mm512_loadu_si512(codes + 2)};
            ((sums[I] = plus_products(sums[I], w[I % LINES], four_at(x[I] + 4 * k))), ...);
        }
        ((totals[I] = scaled(sums[I], scales + I % LINES * 16, totals[I])), ...);
    }
    (_mm512_storeu_ps(to + 16 * I, totals[I]), ...);
}

// Rounds to nearest, halves to even, also subnormal numbers, which the instruction for it would flush to 0.
inline __m256i to_sixteen_bits(__m512 v) {
    const __m512i bits = (__m512i)v, last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(sum, 16), is_nan, _mm512_set1_epi32(0x7fc0)));
}

// Writes up to 16 sums, with the biases from `column` on, to that column of the row of `out` that begins at `row`.
inline void put_sums(__m512 sums, const void* bias, void* out, int64_t row, int64_t column, int64_t left) {
    const __mmask16 some = left < 16 ? (1 << left) - 1 : 0xffff;
    if (bias) {
        const __m256i b = _mm256_maskz_loadu_epi16(some, (const uint16_t*)bias + column);
        sums = _mm512_add_ps(sums, (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
    }
    _mm256_mask_storeu_epi16((uint16_t*)out + row + column, some, to_sixteen_bits(sums));
}

// ACROSS rows of codes, and their products with all rows of x.
template <int C> struct Tile {
    static constexpr bool BYTES = C != STREAM;
    const Layout& L;
    const Parts& P;
    const Inputs<BYTES>& in;
    const int64_t rows, piece, pieces;  // rows of inputs; bytes under one scale, and their number
    int64_t first, count;               // the rows of codes
    Array<Line> codes, lows;            // DEPTH bytes of each row; the start of the sums of bytes, for each piece
    const int64_t stride;               // bytes from one row of bfloat16 values to the next
    Array<uint16_t> values;
    Buffer scales, s, z, totals;        // a scale for each piece; products, a row for each row of x
    const int64_t halves;
    Array<int8_t> zeros;                // added to codes, one for each 32 of a row

    static int64_t piece_of(const Layout& L) {
        const int64_t most = L.group & -L.group;
        return L.group >= L.columns || most > DEPTH ? DEPTH : most;
    }

    Tile(const Layout& L, const Parts& P, const Inputs<BYTES>& in, int64_t rows)
        : L(L), P(P), in(in), rows(rows), piece(BYTES ? piece_of(L) : DEPTH), pieces((in.bytes + piece - 1) / piece),
          codes(DEPTH / 4 * LINES), lows(DEPTH / piece * LINES), stride(in.bytes + 64),
          values(BYTES ? 0 : ACROSS * stride / 2), scales(BYTES ? pieces * ACROSS : 0),
          s(buffer_size(L)), z(buffer_size(L)), totals((rows + TALL) * ACROSS),
          halves(in.bytes / 32), zeros(C == INT4 ? ACROSS * halves : 0) {}

    void fill_scales() {
        const int64_t each = L.group / piece, wide = L.group / 32;
        for (int64_t r = 0; r < count; r++) {
            row_scales(L, P, first + r, s.data(), z.data());
            for (int64_t g = 0, i = 0, h = 0; g < L.groups; g++) {
                const bool is_last = g + 1 == L.groups;
                for (const int64_t end = is_last ? pieces : i + each; i < end; i++) scales[i * ACROSS + r] = s[g];
                if (C != INT4) continue;
                for (const int64_t end = is_last ? halves : h + wide; h < end; h++) zeros[r * halves + h] = (int8_t)z[g];
            }
        }
    }

    inline __m512i bytes_at(int64_t r, int64_t k, int64_t ahead) const {
        if (!BYTES) return _mm512_loadu_si512((const uint8_t*)values.data() + r * stride + k);
        const uint8_t* row = (const uint8_t*)P.codes + (first + r) * L.row_bytes;
        _mm_prefetch((const char*)row + (k + ahead) / (C == INT4 ? 2 : 1), _MM_HINT_T0);
        const __m512i c = codes_at<C>(row, k, L.columns);
        if (C == INT8) return c;
        const int8_t* zero = &zeros[r * halves + k / 32];
        return _mm512_add_epi8(c, _mm512_mask_set1_epi8(_mm512_set1_epi8(zero[0]), ~0ull << 32, zero[1]));
    }

    void lay(int64_t from, int64_t end) {
        const int64_t ahead = end < L.columns ? end - from : ACROSS * L.row_bytes * (C == INT4 ? 2 : 1) - from;
        for (int64_t l = 0; l * 16 < count; l++)
            for (int64_t k = from; k < end; k += 64)
                lay_side_by_side<LINES>([&](int i) { return bytes_at(l * 16 + i < count ? l * 16 + i : 0, k, ahead); },
                                        codes.data() + (k - from) / 4 * LINES + l);
        for (int64_t k = from; BYTES && k < end; k += piece)
            fill_lows((k - from) / piece, (end - k < piece ? end - k : piece) / 4);
    }

    // Computes what the 128 added to each input adds to the sums of a piece, negated.
    void fill_lows(int64_t i, int64_t steps) {
        const Line* some = &codes[i * piece / 4 * LINES];
        Integers a = {}, b = {}, c = {};
        const __m512i x = _mm512_set1_epi8((char)128);
        for (int64_t j = 0; j < steps; j++, some += LINES) {
            a = plus_products(a, _mm512_loadu_si512(some), x);
            b = plus_products(b, _mm512_loadu_si512(some + 1), x);
            c = plus_products(c, _mm512_loadu_si512(some + 2), x);
        }
        const Integers made[LINES] = {-a, -b, -c};
        memcpy(&lows[i * LINES], made, sizeof made);
    }

    // Adds the products of bytes `from` to `end` with M rows of inputs from row m on; rows after the last are undefined.
    template <int M> void add(int64_t m, int64_t from, int64_t end) {
        const uint8_t* x[M];
        for (int i = 0; i < M; i++) x[i] = in.at(m + i < rows ? m + i : rows - 1) + from;
        if constexpr (BYTES && M == TALL / 2)
            if (piece < DEPTH && (end - from) % piece == 0)  // else the last one is smaller
                return multiply_pieces(codes.data(), (end - from) / piece, piece / 4, x, !from, lows.data(),
                                       scales.data() + from / piece * ACROSS, &totals[m * ACROSS],
                                       std::make_index_sequence<M * LINES>());
        for (int64_t k = from; k < end; k += piece) {
            const int64_t steps = (end - k < piece ? end - k : piece) / 4, i = (k - from) / 4 * LINES;
            multiply<BYTES>(&codes[i], steps, x, !k, &lows[(k - from) / piece * LINES], scales.data() + k / piece * ACROSS,
                            &totals[m * ACROSS], std::make_index_sequence<M * LINES>());
            for (int i = 0; i < M; i++) x[i] += piece;
        }
    }

    void multiply_with(const Kernels& kernels) {
        if (BYTES) fill_scales();
        else kernels.decode(L, P, {nullptr, false, first, count, stride / 2}, BFLOAT16, values.data());
        for (int64_t from = 0; from < in.bytes; from += DEPTH) {
            const int64_t end = from + DEPTH < in.bytes ? from + DEPTH : in.bytes;
            lay(from, end);
            for (int64_t m = 0, some; m < rows; m += some) {
                some = rows - m > TALL / 2 && piece == DEPTH ? TALL : TALL / 2;
                if (some == TALL) add<TALL>(m, from, end);
                else add<TALL / 2>(m, from, end);
            }
        }
    }

    void put(const void* bias, void* out) const {
        for (int64_t m = 0; m < rows; m++) {
            const __m512 by = _mm512_set1_ps((L.activations ? in.steps[m] : 1) * (BYTES ? L.unit : 1));
            for (int64_t r = 0; r < count; r += 16)
                put_sums(_mm512_mul_ps(_mm512_loadu_ps(&totals[m * ACROSS + r]), by), bias, out, m * L.rows, first + r, count - r);
        }
    }
};

template <int C> void blocks_linear(const Layout& L, const Parts& P, const Kernels& kernels, const void* x, int64_t rows,
                                    int64_t stride, const void* bias, void* out) {
    const Inputs<C != STREAM> in(L, x, rows, stride);
    in_threads(L.rows, ACROSS, rows * L.rows * L.columns > 65536, [&](Shares& shares) {
        Tile<C> tile(L, P, in, rows);
        for (int64_t start, stop; shares.take(&start, &stop);)
            for (tile.first = start; tile.first < stop; tile.first += ACROSS) {
                tile.count = stop - tile.first < ACROSS ? stop - tile.first : ACROSS;
                tile.multiply_with(kernels);
                tile.put(bias, out);
            }
    });
}
