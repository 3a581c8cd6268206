// Rows of codes times rows of inputs, with vectors of AVX2 or AVX-512: what a decoder's step runs on most machines.
//
// kernels.cpp includes this in its own namespace. It takes 128 columns at a time, a
// *span*, and scales over whole rows, over a multiple of 128 columns, or over 64 or 32; all else is left to kernels.cpp.
// The numbers are those that kernels.cpp describes: integers are multiplied with inputs of 16 bits, in sums of integers
// for the columns under one scale, a *piece* (rows_avx2.h, rows_avx512.h); tables, float8, and integers where inputs are
// float32, in float32 (float_rows.h).

constexpr int64_t SPAN = 128;
enum Scales { WHOLE, WIDE, G64, G32, G16 };  // columns under one scale: all, a multiple of SPAN (or all), 64, 32, 16
enum Taken { WORDS, BYTES, FLOATS };         // inputs, as fixed point, as what they are rounded to, or as they are

constexpr bool is_integer(int codes) { return codes == INT8 || codes == UINT8 || codes == INT4; }
constexpr bool is_nibbled(int codes) { return codes == INT4 || codes == TABLE4; }

// How many scales a span has.
template <int S> constexpr int64_t scales_of = S == G64 ? 2 : S == G32 ? 4 : S == G16 ? 8 : 1;

// How many bytes the inputs of a span of integers have.
template <int T> constexpr int64_t bytes_of = T == BYTES ? SPAN : 2 * SPAN;

struct alignas(64) Line { uint8_t bytes[64]; };

// Rows of codes: the scales of their spans, and what is added to codes, their zero points negated.
struct RowsOfCodes {
    const uint8_t* codes;
    const float *scale, *zero;
    int64_t bytes, stride;      // from one row to the next, of codes and of the others
    bool is_whole;              // whether a row has one of each
    bool runs_on;               // whether what follows a row may be read with it
};

#if WIDE_ROWS
#include "rows_avx512.h"
#else
#include "rows_avx2.h"
#endif

// Writes a span of `left` inputs from `at` on as float32, and zeros; returns the largest magnitudes, lane by lane.
template <int D> F floats_of_span(const void* x, int64_t at, int64_t left, float* natural) {
    F largest{};
    for (int64_t k = 0; k < SPAN; k += LANES, left -= LANES) {
        const F v = left >= LANES ? get<D>(x, at + k) : left > 0 ? get<D>(x, at + k, left) : F{};
        memcpy(natural + k, &v, sizeof v);
        largest = larger(largest, v);
    }
    return largest;
}

inline F floats_of_span(const void* x, int dtype, int64_t at, int64_t left, float* natural) {
    const auto read = dtype == FLOAT32    ? floats_of_span<FLOAT32>
                      : dtype == BFLOAT16 ? floats_of_span<BFLOAT16>
                                          : floats_of_span<FLOAT16>;
    return read(x, at, left, natural);
}

// Rows of inputs, a span after the other, each in the order that the codes need, integers with their sums for each piece.
struct Spans {
    int64_t spans, lines;      // lines of a span
    Array<Line> data;
    int64_t stride;            // of a row of units
    Array<float> units;  // what int16 are in units of, for each scale
    Array<float> steps;  // of each row, where inputs are rounded: floats are then whole numbers of it

    const uint8_t* at(int64_t m) const { return data[m * spans * lines].bytes; }
    const float* units_at(int64_t m) const { return units.data() + m * stride; }

    template <int C, int S, int T> void fill(const Layout& L, const void* x, int dtype, int64_t rows, int64_t row_stride) {
        for (int64_t m = 0; m < rows; m++) {
            if (L.activations) steps[m] = step_of_row(x, dtype, m * row_stride, L.columns);
            for (int64_t b = 0; b < spans; b++) {
                alignas(64) float natural[SPAN];
                const F largest = floats_of_span(x, dtype, m * row_stride + b * SPAN, L.columns - b * SPAN, natural);
                if (L.activations) round_to(natural, steps[m]);
                uint8_t* to = data[(m * spans + b) * lines].bytes;
                if constexpr (T != FLOATS) {
                    alignas(64) int16_t words[SPAN];
                    const float unit = L.activations ? steps[m] : unit_of(largest);
                    to_words(natural, L.activations ? 1 : 1 / unit, words);
                    for (int64_t i = 0; i < scales_of<S>; i++) units[m * stride + b * scales_of<S> + i] = unit;
                    place<C, S, T>(words, to);
                } else if (is_nibbled(C)) place_floats(natural, (float*)to);
                else memcpy(to, natural, sizeof natural);
            }
        }
    }

    // The largest of a row is 127 of these. Values that are not finite make it nan, and with it every result.
    static float step_of_row(const void* x, int dtype, int64_t at, int64_t columns) {
        alignas(64) float natural[SPAN];
        F largest{};
        for (int64_t k = 0; k < columns; k += SPAN)
            largest = larger(largest, floats_of_span(x, dtype, at + k, columns - k, natural));
        return step_of(largest_of(largest));
    }
    static float step_of(float largest) {
        const float step = largest / 127;
        if (!(step <= 3e38f)) return NAN;
        return step < 0x1p-126f ? 0x1p-126f : step;
    }

    static void round_to(float* natural, float step) {  // to the nearest, halves to even
        const __m256 by = _mm256_set1_ps(step);
        for (int64_t k = 0; k < SPAN; k += LANES) {
            const __m256 codes = _mm256_div_ps(_mm256_load_ps(natural + k), by);
            _mm256_store_ps(natural + k, _mm256_round_ps(codes, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        }
    }

    // The unit is a power of two, so that multiplying by it is exact. Values that are not finite make it nan, and with
    // it every result. Words are at most 32639: 127 of their high byte and 127 of the low one.
    static float unit_of(F largest) {
        const float most = largest_of(largest);
        if (!(most <= 3e38f)) return NAN;
        int32_t bits;
        memcpy(&bits, &most, 4);
        int32_t exponent = (bits >> 23) - 126;  // most < 2**exponent
        exponent = exponent < -100 ? -100 : exponent;
        if (most * power_of_two(15 - exponent) >= 32639.5f) exponent++;
        return power_of_two(exponent - 15);
    }

    static void to_words(const float* natural, float by, int16_t* words) {  // to the nearest
        const __m256 per = _mm256_set1_ps(by);
        for (int64_t k = 0; k < SPAN; k += 16) {
            const __m256i low = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(natural + k), per));
            const __m256i high = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(natural + k + 8), per));
            put_line(words + k, _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8));
        }
    }

    static float power_of_two(int32_t exponent) {
        const int32_t bits = (exponent + 127) << 23;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }

    template <int C, int S, int T> static Spans of(const Layout& L, const void* x, int dtype, int64_t rows, int64_t stride) {
        Spans made;
        made.spans = (L.columns + SPAN - 1) / SPAN;
        made.lines = T != FLOATS ? (bytes_of<T> + SPAN / piece_of<C, S, T> * (int64_t)sizeof(V) + 63) / 64 : 4 * SPAN / 64;
        made.data.resize(rows * made.spans * made.lines);
        made.stride = (made.spans * scales_of<S> + LANES - 1) / LANES * LANES;
        if (T != FLOATS) made.units.resize(rows * made.stride);
        if (L.activations) made.steps.resize(rows);
        made.fill<C, S, T>(L, x, dtype, rows, stride);
        return made;
    }
};

// The last `count` bytes of a row, and zeros.
template <int64_t BYTES> struct alignas(64) Rest {
    uint8_t bytes[BYTES];

    void fill(const uint8_t* from, int64_t count) { put_rest<BYTES>(from, count, bytes); }
};

// Whether several spans share a scale, and rows have several.
inline bool are_spread(const Layout& L) { return L.group > SPAN && L.group < L.columns; }

// Returns the scales of `rows` rows from n, in `scale` or where they lie: L.groups of a row; or, where groups are wider than a
// span, one for each of `spans` spans, those of the next row `stride` further. `zero` gets their zero points negated. Whole
// vectors can be read of both. `s` and `z` have space for TILE rows of groups.
const float* scales_of_rows(const Layout& L, const Parts& P, int64_t n, int64_t rows, int64_t spans, int64_t stride, float* s,
                            float* z, float* scale, float* zero) {
    const int64_t groups = L.groups, at = n * groups;
    const bool is_spread = are_spread(L);
    if (L.height == 1 && !L.global_scale && L.scale <= FLOAT16 && !is_spread) {
        const bool lie = L.scale == FLOAT32 && groups % LANES == 0 && L.columns % SPAN == 0;
        if (L.scale == BFLOAT16) copy_scales<BFLOAT16>(P.scale, at, rows * groups, scale);
        else if (L.scale == FLOAT16) copy_scales<FLOAT16>(P.scale, at, rows * groups, scale);
        else if (!lie) copy_scales<FLOAT32>(P.scale, at, rows * groups, scale);
        if (L.zero == SIGNED) negated_zeros<true>(P.zero, at, rows * groups, L.offset, zero);
        else if (L.zero == UNSIGNED) negated_zeros<false>(P.zero, at, rows * groups, L.offset, zero);
        return lie ? (const float*)P.scale + at : scale;
    }
    float *by = is_spread ? s : scale, *less = is_spread ? z : zero;
    if (L.height == 1) scales_at(L, P, at, rows * groups, by, less);
    else for (int64_t r = 0; r < rows; r++) row_scales(L, P, n + r, by + r * groups, less + r * groups);
    for (int64_t r = 0; r < rows && is_spread; r++) {
        spread(s + r * groups, L.group / SPAN, spans, scale + r * stride);
        if (L.zero >= 0) spread(z + r * groups, L.group / SPAN, spans, zero + r * stride);
    }
    return scale;
}

// How many columns are multiplied as floats at a time, under one scale for each lane.
template <int C, int S>
constexpr int64_t floats_of = S != WHOLE ? piece_of<C, S, FLOATS> : Decoder<C>::STEP > 64 ? Decoder<C>::STEP : 64;

// Whether rows of codes, `left` bytes before the end, may be read up to the end of a piece. What follows a row is codes of
// another and multiplied with zeros; but float8 has codes that make nan of zeros.
template <int C, int S, int T> inline bool can_run_on(const Layout& L, int64_t left) {
    const int64_t piece = T != FLOATS ? SPAN : floats_of<C, S>, columns = (L.columns + piece - 1) / piece * piece;
    const int64_t more = (is_nibbled(C) ? columns / 2 : columns) - L.row_bytes;
    return more <= (C == E4M3 || C == E5M2 ? 0 : left);
}

// totals[m * TILE + r] = row r of R rows of codes times row `from + m` of the inputs, lane by lane. `buffer` is for M * R rows of
// scales. Places in arrays are one pointer and a distance: compilers keep arrays of pointers in memory.
template <int C, int S, int M, int R, bool Z, int T> void integer_rows(const Layout& L, const RowsOfCodes& given, const Spans& in,
                                                                  int64_t from, float* buffer, V* totals) {
    constexpr int64_t bytes = is_nibbled(C) ? SPAN / 2 : SPAN;
    RowsOfCodes rows = given;  // in registers
    const uint8_t* x = in.at(from);
    const int64_t stride = in.stride, scales = S == WIDE ? in.spans : L.groups, zeros = rows.is_whole ? 0 : scales_of<S>;
    const int64_t even = rows.is_whole ? stride : scales / LANES * LANES;
    V total[M * R];
#pragma GCC unroll 8
    for (int i = 0; i < M * R; i++) {
        const float *units = in.units_at(from + i / R), *scale = rows.scale + i % R * rows.stride;
        total[i] = V{};
        const auto put = [=](int64_t k, F by) {
            by *= load<F>(units + k);
            memcpy(buffer + i * stride + k, &by, sizeof by);
        };
        int64_t k = 0;
        for (; k < even; k += LANES) put(k, rows.is_whole ? all(*scale) : load<F>(scale + k));
        if (k < stride) put(k, first_of(load<F>(scale + k), scales - k));  // what follows may be the scales of another row
    }
    const int64_t whole = L.row_bytes / bytes, lines = in.lines * 64, across = in.spans * lines;
    const int64_t ahead = R > 1 && rows.bytes <= AHEAD ? AHEAD + (R - 1) * rows.bytes : AHEAD;  // past the other rows
    Rest<bytes> rest[R];
    for (int64_t b = 0, end = whole;; end = in.spans) {  // whole spans; then, by the same instructions, the rest
        for (; b < end; b++) {
            for (int r = 0; r < R; r++) {
                _mm_prefetch((const char*)rows.codes + r * rows.bytes + ahead, _MM_HINT_T1);
                if (bytes > 64) _mm_prefetch((const char*)rows.codes + r * rows.bytes + ahead + 64, _MM_HINT_T1);
            }
            integer_span<C, S, M, R, Z, T>(rows, x, across, buffer, stride, total);
            buffer += scales_of<S>, rows.codes += bytes, rows.zero += zeros, x += lines;
        }
        if (end == in.spans) break;
        if (rows.runs_on) continue;
        for (int r = 0; r < R; r++) rest[r].fill(rows.codes + r * rows.bytes, L.row_bytes - whole * bytes);
        rows.codes = rest[0].bytes, rows.bytes = sizeof *rest;
    }
#pragma GCC unroll 8
    for (int i = 0; i < M * R; i++) totals[i / R * TILE + i % R] = total[i];
}
