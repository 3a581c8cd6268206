// Products with many rows of bfloat16 inputs by AMX: a tile of 16 rows of codes, 64 bytes of each, is multiplied with a tile of
// 16 rows of inputs.
//
// As in blocks.h the bytes are values decoded to bfloat16, or codes minus their zero points. Here the inputs are interleaved,
// once for a product; of rows of codes only the distance changes, as rows a multiple of 4096 bytes apart evict each other.
//
// tiles.cpp includes this in its own namespace.

constexpr int64_t SIDE = 16;                                      // rows of a tile
constexpr int64_t TILES_DOWN = 3, DOWN = TILES_DOWN * SIDE;       // of codes that are multiplied at once

// The compiler does not know what memory the instructions for tiles read and write.
inline void settle() { asm volatile("" ::: "memory"); }

// Of a thread: 0, 1 and 2 have the sums, 3, 4 and 5 codes, 6 inputs.
class Tiles {
  public:
    Tiles() {
        struct alignas(64) { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t bytes[16] = {}; uint8_t rows[16] = {}; } all;
        for (int i = 0; i < 7; i++) all.bytes[i] = 64, all.rows[i] = SIDE;
        settle();
        _tile_loadconfig(&all);
    }
    Tiles(const Tiles&) = delete;
    ~Tiles() { _tile_release(); }

    static void clear() {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
    }
    static void read(const Line* from) {
        settle();
        _tile_loadd(0, from, 64);
        _tile_loadd(1, from + SIDE, 64);
        _tile_loadd(2, from + 2 * SIDE, 64);
    }
    static void write(Line* to) {
        _tile_stored(0, to, 64);
        _tile_stored(1, to + SIDE, 64);
        _tile_stored(2, to + 2 * SIDE, 64);
        settle();
    }
    // Adds the products of `bytes` of DOWN rows with interleaved inputs.
    template <bool BYTES> static void add(const uint8_t* codes, int64_t stride, const Line* inputs, int64_t bytes) {
        settle();
        for (int64_t k = 0; k < bytes; k += 64, inputs += SIDE) {
            _tile_loadd(6, inputs, 64);
            _tile_loadd(3, codes + k, stride);
            _tile_loadd(4, codes + SIDE * stride + k, stride);
            _tile_loadd(5, codes + 2 * SIDE * stride + k, stride);
            if constexpr (BYTES) {  // of codes with a sign and inputs without
                _tile_dpbsud(0, 3, 6);
                _tile_dpbsud(1, 4, 6);
                _tile_dpbsud(2, 5, 6);
            } else {
                _tile_dpbf16ps(0, 3, 6);
                _tile_dpbf16ps(1, 4, 6);
                _tile_dpbf16ps(2, 5, 6);
            }
        }
    }
};

// Inputs, interleaved: for 16 rows of them, a tile for each 64 bytes.
template <bool BYTES> struct Interleaved {
    const Inputs<BYTES> in;
    const int64_t blocks, each;  // of 16 rows; tiles of each
    Array<Line> lines;

    Interleaved(const Layout& L, const void* x, int64_t rows, int64_t stride)
        : in(L, x, rows, stride), blocks((rows + SIDE - 1) / SIDE), each(in.bytes / 64) {
        lines.resize(blocks * each * SIDE, Line{});
        over(blocks * each, blocks * each > 64, [] { return 0; }, [&](int, int64_t i) {
            const int64_t first = i / each * SIDE, k = i % each * 64;
            lay_side_by_side<1>([&](int j) {
                return _mm512_loadu_si512(in.at(first + j < rows ? first + j : rows - 1) + k);
            }, &lines[i * SIDE]);
        });
    }
    const Line* at(int64_t block, int64_t bytes) const { return &lines[(block * each + bytes / 64) * SIDE]; }
};

// DOWN rows of codes, and their products with all rows of x. C is INT8 or INT4 for codes as bytes, else STREAM.
template <int C> struct Band {
    static constexpr bool BYTES = C != STREAM;
    const Layout& L;
    const Parts& P;
    const Interleaved<BYTES>& x;
    const int64_t rows, piece, pieces;  // of inputs; bytes under one scale, and their number
    int64_t first, count;               // the rows of codes
    const int64_t stride;               // bytes from one row of `codes` to the next
    Array<uint8_t> codes;
    Buffer scales, s, z;
    Array<int32_t> lows;                // -128 times the sum of the codes of each piece
    Array<Line> totals;                 // for 16 rows of inputs, DOWN lines

    Band(const Layout& L, const Parts& P, const Interleaved<BYTES>& x, int64_t rows)
        : L(L), P(P), x(x), rows(rows), piece(BYTES ? Tile<C>::piece_of(L) : DEPTH),
          pieces((x.in.bytes + piece - 1) / piece), stride(x.in.bytes + 64), codes(DOWN * stride), scales(BYTES ? pieces * DOWN : 0),
          s(buffer_size(L)), z(buffer_size(L)), lows(BYTES ? pieces * DOWN : 0), totals(x.blocks * DOWN) {}

    void begin(const Kernels& kernels, int64_t start, int64_t stop) {
        first = start, count = stop - start < DOWN ? stop - start : DOWN;
        if (!BYTES) return kernels.decode(L, P, {nullptr, false, first, count, stride / 2}, BFLOAT16, codes.data());
        for (int64_t r = 0; r < count; r++) {
            row_scales(L, P, first + r, s.data(), z.data());
            const uint8_t* row = (const uint8_t*)P.codes + (first + r) * L.row_bytes;
            for (int64_t i = 0; i < pieces; i++) {
                const int64_t from = i * piece, g = from / L.group < L.groups ? from / L.group : L.groups - 1;
                const int64_t end = from + piece < x.in.bytes ? from + piece : x.in.bytes;
                __m512i sum = _mm512_setzero_si512();
                for (int64_t k = from; k < end; k += 64) {
                    _mm_prefetch((const char*)row + k / (C == INT4 ? 2 : 1) + 4096, _MM_HINT_T0);  // processors do in a page
                    __m512i c = codes_at<C>(row, k, L.columns);
                    if (C == INT4) c = _mm512_add_epi8(c, _mm512_set1_epi8((int8_t)z[g]));
                    _mm512_storeu_si512(&codes[r * stride + k], c);
                    sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8((char)128), c);
                }
                scales[i * DOWN + r] = s[g], lows[i * DOWN + r] = -_mm512_reduce_add_epi32(sum);
            }
        }
    }

    // Adds the products of bytes `from` to `end` with 16 rows of inputs.
    void add(int64_t block, int64_t from, int64_t end) {
        Line* to = &totals[block * DOWN];
        if constexpr (!BYTES) {
            if (from) Tiles::read(to);
            else Tiles::clear();
            Tiles::add<false>(&codes[from], stride, x.at(block, from), end - from);
            Tiles::write(to);
        } else {
            Line sums[DEPTH / 64 * DOWN];
            const int64_t several = (end - from + piece - 1) / piece, i = from / piece;
            for (int64_t j = 0; j < several; j++) {
                const int64_t k = from + j * piece;
                Tiles::clear();
                Tiles::add<true>(&codes[k], stride, x.at(block, k), end - k < piece ? end - k : piece);
                Tiles::write(sums + j * DOWN);
            }
            for (int64_t r = 0; r < DOWN; r++) {
                __m512 total = from ? _mm512_loadu_ps(to + r) : _mm512_setzero_ps();
                for (int64_t j = 0; j < several; j++) {
                    const __m512i low = _mm512_set1_epi32(lows[(i + j) * DOWN + r]);
                    const __m512i sum = _mm512_add_epi32(_mm512_loadu_si512(sums + j * DOWN + r), low);
                    total = _mm512_fmadd_ps(_mm512_set1_ps(scales[(i + j) * DOWN + r]), _mm512_cvtepi32_ps(sum), total);
                }
                _mm512_storeu_ps(to + r, total);
            }
        }
    }

    void put(const void* bias, void* out) const {
        Line turned[SIDE];
        for (int64_t block = 0; block < x.blocks; block++)
            for (int64_t r = 0; r < count; r += SIDE) {
                const Line* sums = &totals[block * DOWN + r];
                lay_side_by_side<1>([&](int i) { return _mm512_loadu_si512(sums + i); }, turned);
                for (int64_t m = block * SIDE; m < rows && m < (block + 1) * SIDE; m++) {
                    const __m512 by = _mm512_set1_ps((L.activations ? x.in.steps[m] : 1) * (BYTES ? L.unit : 1));
                    put_sums(_mm512_mul_ps(_mm512_loadu_ps(turned + m % SIDE), by), bias, out, m * L.rows, first + r, count - r);
                }
            }
    }
};

template <int C> void tiles_linear(const Layout& L, const Parts& P, const Kernels& kernels, const void* given, int64_t rows,
                                   int64_t stride, const void* bias, void* out) {
    const Interleaved<C != STREAM> x(L, given, rows, stride);
    const int64_t bytes = x.in.bytes, step = C != STREAM || x.blocks > 1 ? DEPTH : bytes;  // codes in the first-level cache
    // of inputs that do not fit into the second-level cache, each is read once for several bands
    int64_t most = rows * bytes <= 1 << 20 ? 1 : C == STREAM ? 2 : 4;
    uint32_t threads = 1;
    if (parallel_for) count_threads(&threads);
    while (most > 1 && L.rows < 4 * (int64_t)threads * most * DOWN) most /= 2;  // so that each thread has some
    in_threads(L.rows, most * DOWN, rows * L.rows * L.columns > 65536, [&](Shares& shares) {
        std::vector<Band<C>> bands;
        bands.reserve(most);
        while ((int64_t)bands.size() < most) bands.emplace_back(L, P, x, rows);
        const Tiles tiles;
        for (int64_t start, stop; shares.take(&start, &stop);)
            for (; start < stop; start += most * DOWN) {
                const int64_t left = (stop - start + DOWN - 1) / DOWN, count = left < most ? left : most;
                for (int64_t i = 0; i < count; i++) bands[i].begin(kernels, start + i * DOWN, stop);
                for (int64_t from = 0; from < bytes; from += step)
                    for (int64_t block = 0; block < x.blocks; block++)
                        for (int64_t i = 0; i < count; i++)
                            bands[i].add(block, from, from + step < bytes ? from + step : bytes);
                for (int64_t i = 0; i < count; i++) bands[i].put(bias, out);
            }
    });
}
