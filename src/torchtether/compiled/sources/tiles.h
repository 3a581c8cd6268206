// Products with many rows of bfloat16 inputs by AMX: a tile of 16 rows of codes, 64 bytes of each, is multiplied with a tile of
// 16 rows of inputs.
//
// As in blocks.h the bytes are values decoded to bfloat16, or codes minus their zero points; these only under one scale for
// each row, because scaling the sums of 64 bytes takes longer than multiplying twice as many. Here the inputs are
// interleaved, once for a product. DEPTH bytes of DOWN rows of codes stay in the first-level cache while those of all inputs
// pass by from the second.
//
// tiles.cpp includes this in its own namespace.

constexpr int64_t SIDE = 16, DOWN = 2 * SIDE;  // rows of a tile; rows of codes that are multiplied at once

// The bytes from one of several rows to the next, so that DEPTH bytes of each do not evict each other: an odd multiple of DEPTH.
inline int64_t apart_for(int64_t bytes) { return (bytes + DEPTH - 1) / DEPTH * DEPTH | DEPTH; }

// The compiler does not know what memory the instructions for tiles read and write.
inline void settle() { asm volatile("" ::: "memory"); }

// Of a thread: 0 to 3 have the sums, 4 and 5 codes, 6 and 7 inputs.
class Tiles {
  public:
    Tiles() {
        struct alignas(64) { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } all;
        for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = SIDE;
        settle();
        _tile_loadconfig(&all);
    }
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    // Adds the products of `bytes` of DOWN rows of codes with one or TWO blocks of inputs, `apart` lines from each other, to
    // DOWN lines of sums for each block; if `is_first`, these are 0 before.
    template <bool BYTES, bool TWO>
    static void add(const uint8_t* codes, int64_t stride, const Line* x, int64_t apart, int64_t bytes, bool is_first, Line* to) {
        settle();
        if (is_first) {
            _tile_zero(0);
            _tile_zero(1);
            if (TWO) _tile_zero(2);
            if (TWO) _tile_zero(3);
        } else {
            _tile_loadd(0, to, 64);
            _tile_loadd(1, to + SIDE, 64);
            if (TWO) _tile_loadd(2, to + DOWN, 64);
            if (TWO) _tile_loadd(3, to + DOWN + SIDE, 64);
        }
        for (int64_t k = 0; k < bytes; k += 64, x += SIDE) {
            _tile_loadd(6, x, 64);
            if (TWO) _tile_loadd(7, x + apart, 64);
            _tile_loadd(4, codes + k, stride);
            _tile_loadd(5, codes + SIDE * stride + k, stride);
            if constexpr (BYTES) {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 5, 6);
                if (TWO) _tile_dpbssd(2, 4, 7);
                if (TWO) _tile_dpbssd(3, 5, 7);
            } else {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 5, 6);
                if (TWO) _tile_dpbf16ps(2, 4, 7);
                if (TWO) _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, to, 64);
        _tile_stored(1, to + SIDE, 64);
        if (TWO) _tile_stored(2, to + DOWN, 64);
        if (TWO) _tile_stored(3, to + DOWN + SIDE, 64);
        settle();
    }
};

// Inputs in blocks of 16 rows, each a tile for every 64 bytes, interleaved; `step` bytes of all blocks, then the next.
template <bool BYTES> struct Interleaved {
    const Inputs<BYTES> in;
    const int64_t blocks, step;
    Array<Line> lines;

    Interleaved(const Layout& L, const void* x, int64_t rows, int64_t stride)
        : in(L, x, rows, stride), blocks((rows + SIDE - 1) / SIDE), step(blocks > 2 ? even_step(in.bytes) : in.bytes) {
        const int64_t each = in.bytes / 64;
        lines = Array<Line>::unset(blocks * each * SIDE);
        over(blocks * each, blocks * each > 64, [] { return 0; }, [&](int, int64_t i) {
            const int64_t block = i / each, first = block * SIDE, k = i % each * 64;
            lay_side_by_side<1>([&](int j) {
                return _mm512_loadu_si512(in.at(first + j < rows ? first + j : rows - 1) + k);
            }, &lines[(at(block, k) + k % step / 64) * SIDE]);
        });
    }
    // About DEPTH bytes, so that no rest is left for which reading and writing sums takes longer than multiplying.
    static int64_t even_step(int64_t bytes) {
        const int64_t most = bytes < 4 * DEPTH ? DEPTH + 128 : DEPTH, steps = (bytes + most - 1) / most;
        return ((bytes + steps - 1) / steps + 63) / 64 * 64;
    }
    int64_t until(int64_t k) const { return k + step < in.bytes ? k + step : in.bytes; }  // the end of what lies together
    int64_t at(int64_t block, int64_t k) const {  // the index of the first tile of such bytes
        const int64_t from = k / step * step;
        return (from * blocks + block * (until(from) - from)) / 64;
    }
    const Line* tiles(int64_t block, int64_t from) const { return &lines[at(block, from) * SIDE]; }
};

// Some rows of codes, and their products with all rows of x. C is INT8 or INT4 for codes as bytes, under one scale for each
// row, else STREAM.
template <int C> struct Panel {
    static constexpr bool BYTES = C != STREAM;
    const Layout& L;
    const Parts& P;
    const Interleaved<BYTES>& x;
    const int64_t rows, stride;  // of inputs; bytes from one row of `codes` to the next
    int64_t first, count;        // the rows of codes
    Array<uint8_t> codes;
    Buffer scales, s, z;         // of each row
    Array<Line> totals;          // for DOWN rows of codes, and 16 rows of inputs, DOWN lines

    Panel(const Layout& L, const Parts& P, const Interleaved<BYTES>& x, int64_t rows, int64_t most)
        : L(L), P(P), x(x), rows(rows), stride(apart_for(x.in.bytes)), codes(Array<uint8_t>::unset(most * stride)), scales(BYTES ? most : 0),
          s(buffer_size(L)), z(buffer_size(L)), totals(Array<Line>::unset(most * x.blocks)) {
        for (int64_t r = 0; r < most; r++) memset(&codes[r * stride + x.in.bytes - 64], 0, 64);  // what fills up the last tile
    }

    void fill(const Kernels& kernels) {
        if (!BYTES) return kernels.decode(L, P, {nullptr, false, first, count, stride / 2}, BFLOAT16, codes.data());
        for (int64_t r = 0; r < count; r++) {
            row_scales(L, P, first + r, s.data(), z.data());
            scales[r] = s[0];
            const uint8_t* row = (const uint8_t*)P.codes + (first + r) * L.row_bytes;
            for (int64_t k = 0; k < x.in.bytes; k += 64) {
                _mm_prefetch((const char*)row + k / (C == INT4 ? 2 : 1) + 4096, _MM_HINT_T0);  // processors do in a page
                const __m512i c = codes_at<C>(row, k, L.columns);
                _mm512_storeu_si512(&codes[r * stride + k], C == INT4 ? _mm512_add_epi8(c, _mm512_set1_epi8((int8_t)z[0])) : c);
            }
        }
    }

    void multiply() {
        for (int64_t from = 0; from < x.in.bytes; from = x.until(from)) {
            const int64_t bytes = x.until(from) - from, apart = bytes / 64 * SIDE;
            for (int64_t r = 0; r < count; r += DOWN) {
                const uint8_t* some = &codes[r * stride + from];
                Line* to = &totals[r * x.blocks];
                int64_t block = 0;
                for (; block + 2 <= x.blocks; block += 2, to += 2 * DOWN)
                    Tiles::add<BYTES, true>(some, stride, x.tiles(block, from), apart, bytes, !from, to);
                if (block < x.blocks) Tiles::add<BYTES, false>(some, stride, x.tiles(block, from), apart, bytes, !from, to);
            }
        }
    }

    void put(const void* bias, void* out) const {
        Line turned[SIDE];
        for (int64_t block = 0; block < x.blocks; block++)
            for (int64_t r = 0; r < count; r += SIDE) {
                const Line* sums = &totals[(r / DOWN * x.blocks + block) * DOWN + r % DOWN];
                lay_side_by_side<1>([&](int i) { return _mm512_loadu_si512(sums + i); }, turned);
                for (int64_t m = block * SIDE; m < rows && m < (block + 1) * SIDE; m++) {
                    const __m512i sum = _mm512_loadu_si512(turned + m % SIDE);
                    const __m512 by = _mm512_set1_ps((L.activations ? x.in.steps[m] : 1) * (BYTES ? L.unit : 1));
                    const __m512 y = BYTES ? _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_loadu_ps(&scales[r])) : (__m512)sum;
                    put_sums(_mm512_mul_ps(y, by), bias, out, m * L.rows, first + r, count - r);
                }
            }
    }
};

template <int C> void tiles_linear(const Layout& L, const Parts& P, const Kernels& kernels, const void* given, int64_t rows,
                                   int64_t stride, const void* bias, void* out) {
    const Interleaved<C != STREAM> x(L, given, rows, stride);
    // Of inputs that do not fit into the second-level cache, each is read once for several DOWN rows of codes.
    int64_t most = rows * x.in.bytes <= 1 << 20 ? 1 : 256 / DOWN;
    uint32_t threads = 1;
    if (parallel_for) count_threads(&threads);
    while (most > 1 && (most * DOWN * x.in.bytes > 8 << 20 || L.rows < 4 * (int64_t)threads * most * DOWN)) most /= 2;
    most *= DOWN;
    in_threads(L.rows, most, rows * L.rows * L.columns > 65536, [&](Shares& shares) {
        Panel<C> panel(L, P, x, rows, most);
        const Tiles tiles;
        for (int64_t start, stop; shares.take(&start, &stop);)
            for (panel.first = start; panel.first < stop; panel.first += most) {
                panel.count = stop - panel.first < most ? stop - panel.first : most;
                panel.fill(kernels);
                panel.multiply();
                panel.put(bias, out);
            }
    });
}
