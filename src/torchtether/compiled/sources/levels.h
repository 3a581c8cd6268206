// Products with codes whose levels are whole multiples of a power of two: levels are multiplied, and not values.
//
// stream.cpp includes this in its own namespace.
//
//     y = sum over groups of scale * (sum level * x) + (scale * before + after) * (sum x)
// Codes of 4 bits lie as the rows of rows.h take them; others are unpacked to bytes, which stay in the cache. Inputs of
// float32 are multiplied with level + before, or with (level + before) * scale + after, so that their sums lose nothing where
// these are nearly 0.

inline bool has_after(const Layout& L) { return L.family == BIASED || (L.family == SUPER_BLOCKS && L.types[2] >= 0); }

// The numbers of a row: `low` is added to levels, all times `scale`, plus `after`; or, where inputs know their sums, `after`
// stands for both.
struct RowOfLevels {
    const uint8_t* codes;
    const float *scale, *low, *after;
    bool has_low, has_after;  // where not, they are 0
    bool runs_on;             // see rows.h
};

// Whether what is subtracted from all codes goes into their levels, which are then signed bytes.
inline bool unpacks_less(const Layout& L) {
    const float offset = offset_of_all(L);
    return L.source == UINT8 && L.bits < 8 && offset > 0 && offset <= 128 && offset == (int)offset;
}

bool has_levels(const Layout& L, int dtype) {
    if (L.is_flat || !(L.source == UINT8 || L.source == INT8 || L.is_whole)) return false;
    if (L.arithmetic != FLOAT32 && L.arithmetic != dtype && dtype != BFLOAT16) return false;  // its roundings are not done
    const bool is_exact = L.bits < 8 && !(L.family == BIASED && L.scale == FLOAT32);  // level times scale
    if (dtype == FLOAT32 && has_after(L) && !is_exact) return false;
    return L.group >= L.columns || L.group % LANES == 0;
}

// Rows of inputs, in the order that codes need.
struct LevelInputs {
    bool in_place, takes_rests;   // whether codes are multiplied where they lie; whether rows may end within a vector
    bool adds_low, adds_after;    // to levels; what is not added to them is multiplied with sums
    int64_t together = 1;         // rows of levels that are multiplied together
    int64_t each = 1;             // how many of a row's sums share a scale
    int64_t count = 0, wide = 0;  // sums of a row, from one row to the next
    int64_t scratch = 0;          // floats
    Buffer sums;

    // y[j * TILE + i] = row i of `count` rows of levels times row m + j of `some` of the inputs
    virtual void multiply(const Layout& L, const RowOfLevels* own, int64_t count, int64_t m, int64_t some, float* scratch,
                          float* y) const = 0;
    // Whether codes may be read up to the end of a piece, `left` bytes before the end of all.
    virtual bool may_run_on(const Layout& L, int64_t left) const = 0;
};

// What `multiply` does, by `in.rows<M>` for M rows of inputs and AT_ONCE rows of levels.
template <class Inputs> void multiply_by(const Inputs& in, const Layout& L, const RowOfLevels* own, int64_t count, int64_t m,
                                         int64_t some, float* scratch, float* y) {
    typename Inputs::Sum totals[4 * TILE];
    for (int64_t i = 0; i < count; i += Inputs::AT_ONCE) {
        if (some == 4) in.template rows<4>(L, own + i, count - i, m, scratch, totals + i);
        else if (some == 2) in.template rows<2>(L, own + i, count - i, m, scratch, totals + i);
        else in.template rows<1>(L, own + i, count - i, m, scratch, totals + i);
    }
    for (int64_t j = 0; j < some; j++)
        for (int64_t i = 0; i < count; i++) y[j * TILE + i] = sum(totals[j * TILE + i]);
}

// As float32; and where they have 16 bits, their sums under each scale.
struct FloatInputs : LevelInputs {
    typedef F Sum;
    static constexpr int AT_ONCE = 1;
    int64_t padded;
    Buffer floats;

    FloatInputs(const Layout& L, const void* x, int64_t rows, int64_t stride, int dtype)
        : padded(StreamRow::padded(L)), floats(as_floats(L, x, rows, stride, dtype)) {
        in_place = takes_rests = false, adds_low = true, adds_after = dtype == FLOAT32;
        count = L.groups, wide = L.groups + 2 * LANES;
        sums.resize(adds_after ? 0 : rows * wide);
        for (int64_t m = 0; m < rows && !adds_after; m++)
            for (int64_t g = 0; g < count; g++) {
                F total{};
                for (int64_t k = g * L.group; k < (g + 1) * L.group && k < L.columns; k += LANES)
                    total += load<F>(floats.data() + m * padded + k);
                sums[m * wide + g] = sum(total);
            }
    }

    bool may_run_on(const Layout&, int64_t) const override { return false; }

    void multiply(const Layout& L, const RowOfLevels* own, int64_t count, int64_t m, int64_t some, float* scratch,
                  float* y) const override {
        multiply_by(*this, L, own, count, m, some, scratch, y);
    }

    enum Numbers { SCALE, LOW, AFTER };  // what there is besides

    template <int M> void rows(const Layout& L, const RowOfLevels* own, int64_t, int64_t m, float*, F* totals) const {
        const RowOfLevels& row = *own;
        constexpr int A = M == 1 ? 4 : M == 2 ? 2 : 1;
        if (row.has_after && adds_after) row_by<M, A, AFTER>(L, row, m, totals);
        else if (L.group < 64) row.has_low ? row_by<M, 1, LOW>(L, row, m, totals) : row_by<M, 1, SCALE>(L, row, m, totals);
        else row.has_low ? row_by<M, A, LOW>(L, row, m, totals) : row_by<M, A, SCALE>(L, row, m, totals);
    }

    template <int M, int A, int N> void row_by(const Layout& L, const RowOfLevels& row, int64_t m, F* totals) const {
        const float* x = floats.data() + m * padded;
        F total[M], part[M][A];
        for (int i = 0; i < M; i++) total[i] = F{};
        for (int i = 0; i < M * A; i++) part[i / A][i % A] = F{};
        const uint8_t* codes = row.codes;
        const float *scale = row.scale, *lows = row.low, *afters = row.after;
        for (int64_t k = 0, end = L.group; k < L.columns; end += L.group) {
            end = end < L.columns ? end : L.columns;
            for (int i = 0; i < M * A && N != AFTER; i++) part[i / A][i % A] = F{};
            const F by = all(*scale++), low = N == LOW ? all(*lows++) : F{}, after = N == AFTER ? all(*afters++) : F{};
            for (; k + A * LANES <= end; k += A * LANES)
#pragma GCC unroll 4
                for (int a = 0; a < A; a++) add<M, A, N>(codes, x, k + a * LANES, a, low, by, after, part);
            for (; k < end; k += LANES) add<M, A, N>(codes, x, k, 0, low, by, after, part);
            for (int i = 0; i < M && N != AFTER; i++) {
                for (int a = 1; a < A; a++) part[i][0] += part[i][a];
                total[i] = fma(by, part[i][0], total[i]);
            }
        }
        for (int i = 0; i < M; i++) {
            for (int a = 0; a < A && N == AFTER; a++) total[i] += part[i][a];
            totals[i * TILE] = total[i];
        }
    }

    template <int M, int A, int N> inline void add(const uint8_t* codes, const float* x, int64_t k, int a, F low, F by, F after,
                                                   F (*part)[A]) const {
        F level = values<INT8>(codes + k);
        if (N == LOW) level += low;
        if (N == AFTER) level = fma(level, by, after);
#pragma GCC unroll 4
        for (int i = 0; i < M; i++) part[i][a] = fma(level, load<F>(x + i * padded + k), part[i][a]);
    }
};

#if FAST_ROWS
bool suits_spans(const Layout& L) {
    return L.group >= L.columns || L.group % SPAN == 0 || L.group == 64 || L.group == 32 || L.group == 16;
}

bool is_fixed(const Layout& L, int dtype) {
    return (dtype != FLOAT32 || L.activations) && has_levels(L, dtype) && suits_spans(L);
}

// Whether the rows of rows.h take codes as they lie.
bool is_nibbled(const Layout& L) {
    return L.bits == 4 && L.source == UINT8 && suits_spans(L) && (L.group != 16 || L.columns <= 16);
}

// As the rows of rows.h take them; and as fixed point, their sums.
template <int C, int S, int T> struct SpanInputs : LevelInputs {
    typedef V Sum;
    static constexpr int AT_ONCE = T != FLOATS ? TOGETHER : 1;
    Spans in;

    SpanInputs(const Layout& L, const void* x, int64_t rows, int64_t stride, int dtype)
        : in(Spans::of<C, S, T>(L, x, dtype, rows, stride)) {
        in_place = C == INT4, takes_rests = true, adds_low = adds_after = T == FLOATS;
        count = in.spans * scales_of<S>, wide = in.stride + LANES, together = AT_ONCE, scratch = 4 * AT_ONCE * wide;
        if (S == WIDE) each = L.group < L.columns ? L.group / SPAN : count;
        sums.resize(T == FLOATS ? 0 : rows * wide);
        for (int64_t m = 0; m < rows && T != FLOATS; m++)
            for (int64_t i = 0; i < count; i++) {
                const int64_t span = i / scales_of<S>, own = i % scales_of<S>;
                const uint8_t* p = in.at(m) + span * in.lines * 64 + bytes_of<T>;
                sums[m * wide + i] = sum_under<C, S, T>(p, own) * in.units_at(m)[i];
            }
    }

    bool may_run_on(const Layout& L, int64_t left) const override { return can_run_on<C, S, T>(L, left); }

    void multiply(const Layout& L, const RowOfLevels* own, int64_t count, int64_t m, int64_t some, float* scratch,
                  float* y) const override {
        multiply_by(*this, L, own, count, m, some, scratch, y);
    }

    template <int M> void rows(const Layout& L, const RowOfLevels* own, int64_t left, int64_t m, float* scratch,
                               V* totals) const {
        if constexpr (T != FLOATS) {
            const bool are_two = AT_ONCE > 1 && left > 1;  // else the last row twice
            const int64_t bytes = are_two ? own[1].codes - own->codes : 0, stride = are_two ? own[1].scale - own->scale : 0;
            const RowsOfCodes rows = {own->codes, own->scale, own->low, bytes, stride, false, own->runs_on};
            integer_rows<C, S, M, AT_ONCE, false, T>(L, rows, in, m, scratch, totals);
        } else {
            const Decoder<C> decoder(L);
            const auto row = own->has_after ? float_row<C, S, M, false, true>  // no scheme has both
                             : own->has_low ? float_row<C, S, M, true, false>
                                            : float_row<C, S, M, false, false>;
            row(L, own->codes, own->runs_on, own->scale, own->low, own->after, decoder, in, m, totals);
        }
    }
};
#else
bool is_fixed(const Layout&, int) { return false; }
#endif

// Unsigned bytes, less 128, as signed ones.
inline void copy_flipped(const uint8_t* from, int64_t count, uint8_t* to) {
    int64_t k = 0;
    for (; k + WIDTH <= count; k += WIDTH) {
        const I v = load<I>(from + k) ^ (int32_t)0x80808080;
        memcpy(to + k, &v, sizeof v);
    }
    for (; k < count; k++) to[k] = from[k] ^ 0x80;
}

// Sums of products of `count` numbers; reads whole vectors, and what lies after the last of `b` is finite.
inline float dot(const float* a, const float* b, int64_t count) {
    F even{}, odd{};  // two sums, because each addition waits for the one before
    int64_t k = 0;
    for (; k + 2 * LANES <= count; k += 2 * LANES) {
        even = fma(load<F>(a + k), load<F>(b + k), even);
        odd = fma(load<F>(a + k + LANES), load<F>(b + k + LANES), odd);
    }
    for (; k < count; k += LANES) even = fma(first_of(load<F>(a + k), count - k), load<F>(b + k), even);
    return sum(even + odd);
}

void levels_linear(const Layout& given, const Parts& P, const LevelInputs& in, int64_t rows, int dtype, const void* bias,
                   void* out) {
    Layout L = given;  // of the levels
    if (!in.in_place) L.row_bytes = L.columns;
    const bool is_less = !in.in_place && unpacks_less(L);
    const Meant meant = {levels_of(L), is_less ? (uint8_t)L.offset : (uint8_t)0};
    const bool is_offset = L.offset != 0 && !is_less && !(in.in_place && in.adds_low);  // then the decoder subtracts it
    const bool flips = L.source == UINT8 && L.bits == 8;  // codes from -128 on
    const float lift = flips ? 128 : 0, step = L.is_whole ? L.step : 1, per_step = 1 / step;  // exact: a power of two
    const bool is_there = in.in_place || (L.source == INT8 && (in.takes_rests || L.columns % LANES == 0));
    const bool is_lifted = flips || L.family == BIASED_FIRST || L.zero >= 0 || is_offset;
    const bool adds_low = in.adds_low, is_shifted = !in.adds_after && (has_after(L) || (is_lifted && !adds_low));
    const bool adds = is_shifted || (in.adds_after && has_after(L));  // else 0 stays there
    const int64_t bytes = is_there ? 0 : StreamRow::bytes(L);
    int64_t tile = rows > 4 || L.rows >= 256 ? TILE : in.together;  // rows of codes in the cache, for few inputs in the nearest
    while (rows <= 4 && tile > in.together && tile * bytes > 16384) tile /= 2;
    const int64_t tiles = (L.rows + tile - 1) / tile;
    const bool is_piece = L.height == 1 && (L.family != SUPER_BLOCKS || L.groups % L.nested == 0);
    const int64_t at_once = is_piece ? tile : 1;  // rows whose numbers lie in one piece
    const bool is_spread = in.each > 1, are_filled = is_piece && step == 1 && !is_lifted && !is_spread;  // as rows need them
    const int64_t wide = is_spread ? in.wide : L.groups;  // numbers of a row
    const int64_t length = tile * L.groups + LANES, spread_length = is_spread ? tile * wide : 0, scratch_size = in.scratch;
    Layout all_rows = L;
    all_rows.groups *= at_once;
    const int64_t size = RowParts::size(all_rows) + scratch_size + 3 * (length + spread_length) + tile * bytes / 4;
    const auto make = [&] { return RowParts::buffer(all_rows, size); };
    over(tiles, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t t) {
        RowParts parts(all_rows, buffer.data());
        float *scratch = buffer.data() + RowParts::size(all_rows), *moved = scratch + scratch_size, *spreads = moved + 3 * length;
        float *scale = parts.scale, *low = parts.before, *after = parts.after;
        uint8_t* codes = (uint8_t*)(spreads + 3 * spread_length);
        const int64_t first = t * tile, count = first + tile < L.rows ? tile : L.rows - first;
        const int64_t groups = L.groups;  // this and these of our own: compilers read again what others' writes may reach
        const bool lifts = is_lifted, writes = adds, moves = !are_filled, shifts = is_shifted, pieces = is_piece;
        const F steps = all(step), per = all(per_step), up = all(lift), unit = all(L.unit);
        const float whole = L.unit;
        for (int64_t i = 0; i < (pieces ? 1 : count); i++) {
            RowAt at(L, first + i);
            if (pieces) at.groups *= count;
            parts.fill(given, P, first + i, at);
            float *by = moved + i * groups, *less = by + length, *add = less + length;
            for (int64_t g = 0; g < at.groups && moves; g += LANES) {
                const auto put = [g](F v, float* to) { memcpy(to + g, &v, sizeof v); };
                const F s = load<F>(parts.scale + g);
                put(s * steps, by);
                F added = load<F>(parts.after + g);
                if (lifts) {
                    const F lifted = load<F>(parts.before + g) + up;
                    if (adds_low) put(lifted * per, less);
                    else added += lifted * s * unit;
                }
                if (writes) put(added, add);
            }
        }
        if (moves) scale = moved, low = scale + length, after = low + length;
        if (is_spread) {
            const auto over_spans = [&](float** numbers, float* to) {
                for (int64_t i = 0; i < count; i++) spread(*numbers + i * groups, in.each, in.count, to + i * wide);
                *numbers = to;
            };
            over_spans(&scale, spreads);
            if (is_lifted && adds_low) over_spans(&low, spreads + spread_length);
            if (adds) over_spans(&after, spreads + 2 * spread_length);
        }
        const bool runs_on = !is_there || in.may_run_on(L, (L.rows - first - count) * L.row_bytes);
        RowOfLevels own[TILE];
        for (int64_t i = 0; i < count; i++) {
            const uint8_t* lie = (const uint8_t*)P.codes + (first + i) * given.row_bytes;
            uint8_t* to = codes + i * bytes;
            if (flips) copy_flipped(lie, L.columns, to), lie = to;
            else if (!is_there) lie = StreamRow::unpack(given, P, first + i, RowAt(L, first + i), meant, to);
            const int64_t from = i * wide;
            own[i] = {lie, scale + from, low + from, after + from, is_lifted, has_after(L), runs_on};
        }
        alignas(64) float y[4 * TILE];
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            in.multiply(L, own, count, m, some, scratch, y);
            for (int64_t j = 0; j < some; j++) {
                float* own_y = y + j * TILE;
                for (int64_t i = 0; i < count; i++) {
                    own_y[i] *= whole;
                    if (shifts) own_y[i] += dot(own[i].after, in.sums.data() + (m + j) * in.wide, is_spread ? in.count : groups);
                }
                put_some(dtype, own_y, count, bias, first, out, (m + j) * L.rows + first);
            }
        }
    });
}

#if FAST_ROWS
template <int C, int T> void spans_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                          int dtype, const void* bias, void* out) {
    const auto by = [&](const LevelInputs& in) { levels_linear(L, P, in, rows, dtype, bias, out); };
    if constexpr (C == INT8)
        if (L.group == 16 && L.columns > 16) return by(SpanInputs<C, G16, T>(L, x, rows, stride, dtype));
    if (L.group >= L.columns || L.group % SPAN == 0) by(SpanInputs<C, WIDE, T>(L, x, rows, stride, dtype));
    else if (L.group == 64) by(SpanInputs<C, G64, T>(L, x, rows, stride, dtype));
    else by(SpanInputs<C, G32, T>(L, x, rows, stride, dtype));
}
#endif

void stream_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype, const void* bias,
                   void* out) {
    if (!has_levels(L, dtype)) {
#if FAST_ROWS
        if (rows <= 4 && has_steps(L)) return stepped_linear(L, P, x, rows, stride, dtype, bias, out);
#endif
        return decoded_linear(L, P, x, rows, stride, dtype, bias, out);
    }
#if FAST_ROWS
    if (is_fixed(L, dtype) && is_nibbled(L)) {
        if (L.activations) return spans_linear<INT4, BYTES>(L, P, x, rows, stride, dtype, bias, out);
        return spans_linear<INT4, WORDS>(L, P, x, rows, stride, dtype, bias, out);
    }
    constexpr int ROUNDED = WIDE_ROWS ? BYTES : WORDS;
    if (is_fixed(L, dtype) && L.activations) return spans_linear<INT8, ROUNDED>(L, P, x, rows, stride, dtype, bias, out);
    if (is_fixed(L, dtype)) return spans_linear<INT8, WORDS>(L, P, x, rows, stride, dtype, bias, out);
    const bool are_integers = L.family != BIASED_FIRST;  // what is added to levels, as rows_avx2.h needs it
    if (dtype == FLOAT32 && is_nibbled(L) && (are_integers || WIDE_ROWS))
        return spans_linear<INT4, FLOATS>(L, P, x, rows, stride, dtype, bias, out);
    if (dtype == FLOAT32 && suits_spans(L) && (WIDE_ROWS || L.group <= 32))  // wider groups need no loops that are unrolled
        return spans_linear<INT8, FLOATS>(L, P, x, rows, stride, dtype, bias, out);
#endif
    levels_linear(L, P, FloatInputs(L, x, rows, stride, dtype), rows, dtype, bias, out);
}
