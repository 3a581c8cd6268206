// Codes of 1 to 8 bits in a dense stream, with the numbers of row_parts.h: all that the kernels of one layout do not know.
//
// stream.cpp includes this in its own namespace.
//
// A row of codes is unpacked to bytes, which stay in the cache. Where levels are whole multiples of a power of two, the bytes
// are multiplied, by the rows of rows_avx2.h where inputs are taken as fixed point:
//     y = sum over groups of scale * (sum level * x) + (scale * before + after) * (sum x)
// Inputs of float32 are multiplied with level + before, so that their sums lose nothing where the two are nearly the same.
// In all other cases a row is decoded to float32, and so are inputs. Columns that name their groups: ordered.h.

inline const uint8_t* levels_of(const Layout& L) { return L.is_whole ? L.whole : nullptr; }

template <int A, bool FIRST> inline F value_of(F level, F before, F scale, F unit, F after) {
    if (A == FLOAT32) return (level + before) * scale * unit + after;
    return FIRST ? rounded_to<A>(rounded_to<A>(level + before) * scale)
                 : rounded_to<A>(rounded_to<A>(level * scale) + after);
}

template <int C> inline F level_of(const Layout& L, const uint8_t* p, const Table& table) {
    if constexpr (C == TABLE4) return table(bytes(p));
    else if constexpr (C == TABLE8) {
        F v;
        for (int i = 0; i < LANES; i++) v[i] = L.levels[p[i]];
        return v;
    } else return values<C>(p);
}

// Writes up to LANES - 1 values too many. Where codes have 4 bits and groups are wide, all values of a group are computed once.
template <int C, int A, bool FIRST> void decode_codes(const Layout& L, const uint8_t* codes, const RowAt& at,
                                                      const RowParts& parts, float* to) {
    const Table table(L.table);
    const F unit = all(L.unit), step = all(L.step);
    const bool is_few = L.bits <= 4 && L.group >= 32;
    int64_t k = 0;
    for (int64_t g = 0, end = at.lead; g < at.groups; g++, k = end, end += L.group) {
        end = end < L.columns ? end : L.columns;
        const F scale = all(parts.scale[g]), before = all(parts.before[g]), after = all(parts.after[g]);
        if (is_few) {
            F meant[16 / LANES];
            for (int i = 0; i < 16 / LANES; i++)
                meant[i] = value_of<A, FIRST>(load<F>(L.table + LANES * i), before, scale, unit, after);
            const Table values((const float*)meant);
            for (; k < end; k += LANES) {
                const F v = values(bytes(codes + k));
                memcpy(to + k, &v, sizeof v);
            }
        } else
            for (; k < end; k += LANES) {
                const F level = level_of<C>(L, codes + k, table);
                const F v = value_of<A, FIRST>(C == INT8 ? level * step : level, before, scale, unit, after);
                memcpy(to + k, &v, sizeof v);
            }
    }
}

// The same where each column names its group.
template <int C> void decode_named(const Layout& L, const uint8_t* codes, const int32_t* groups, const RowParts& parts,
                                   float* to) {
    for (int64_t k = 0; k < L.columns; k++) {
        const float level = C == INT8 ? (int8_t)codes[k] : codes[k];
        to[k] = (level + parts.before[groups[k]]) * parts.scale[groups[k]] * L.unit;
    }
}

// A row of codes, its numbers and its values, in a buffer of `size` floats.
struct StreamRow {
    RowParts parts;
    uint8_t* codes;
    float* values;  // from the last column on 0, up to `padded` of them

    static int64_t padded(const Layout& L) { return (L.columns + 31) / 32 * 32; }
    static int64_t bytes(const Layout& L) { return (L.columns + 71) / 64 * 64 + 64; }  // of unpacked codes
    static int64_t size(const Layout& L) { return RowParts::size(L) + bytes(L) / 4 + padded(L) + LANES; }

    StreamRow(const Layout& L, float* buffer)
        : parts(L, buffer), codes((uint8_t*)(buffer + RowParts::size(L))), values((float*)(codes + bytes(L))) {}

    // The codes of row n to `to`, where the first of them is then.
    static uint8_t* unpack(const Layout& L, const Parts& P, int64_t n, const RowAt& at, const uint8_t* meant, uint8_t* to) {
        const uint8_t *first = (const uint8_t*)P.codes, *end = first + L.counts[0];
        unpack_bits(L.bits, first + n * L.row_bytes + at.octet * L.bits, end, at.skip + L.columns, meant, to);
        return to + at.skip;
    }

    template <int C, int A = FLOAT32, bool FIRST = false> void decode(const Layout& L, const uint8_t* own, const RowAt& at) {
        decode_codes<C, A, FIRST>(L, own, at, parts, values);
    }

    template <int A> void decode_biased(const Layout& L, const uint8_t* own, const RowAt& at) {
        if (L.family == BIASED) decode<UINT8, A, false>(L, own, at);
        else decode<UINT8, A, true>(L, own, at);
    }

    void decode(const Layout& L, const Parts& P, int64_t n, const uint8_t* meant) {
        const RowAt at(L, n);
        parts.fill(L, P, n, at);
        const uint8_t* own = unpack(L, P, n, at, meant, codes);
        if (L.family == ORDERED) {
            const int32_t* groups = (const int32_t*)P.extra;
            if (L.source == INT8) decode_named<INT8>(L, own, groups, parts, values);
            else decode_named<UINT8>(L, own, groups, parts, values);
        } else if (meant) decode<INT8>(L, own, at);
        else if (L.arithmetic == BFLOAT16) decode_biased<BFLOAT16>(L, own, at);
        else if (L.arithmetic == FLOAT16) decode_biased<FLOAT16>(L, own, at);
        else if (L.source == INT8) decode<INT8>(L, own, at);
        else if (L.source == UINT8) decode<UINT8>(L, own, at);
        else if (L.source == E4M3) decode<E4M3>(L, own, at);
        else if (L.source == E5M2) decode<E5M2>(L, own, at);
        else if (L.source == TABLE4) decode<TABLE4>(L, own, at);
        else decode<TABLE8>(L, own, at);
        memset(values + L.columns, 0, (padded(L) - L.columns) * 4);
    }
};

template <int D> void decode_stream(const Layout& L, const Parts& P, const Rows& rows, void* out) {
    const auto make = [&] { return RowParts::buffer(L, StreamRow::size(L)); };
    over(rows.count, rows.count * L.columns > 32768, make, [&](Buffer& buffer, int64_t i) {
        StreamRow row(L, buffer.data());
        row.decode(L, P, rows[i], nullptr);
        char* to = (char*)out + i * rows.stride * (D == FLOAT32 ? 4 : 2);
        int64_t k = 0;
        for (; k + 2 * LANES <= L.columns; k += 2 * LANES)
            put_two<D>(load<F>(row.values + k), load<F>(row.values + k + LANES), to, k);
        for (; k < L.columns; k += LANES)
            put<D>(load<F>(row.values + k), to, k, L.columns - k < LANES ? L.columns - k : LANES);
    });
}

template <int D> void put_one(float y, const void* bias, int64_t n, void* out, int64_t at) {
    if (bias) y += get<D>(bias, n, 1)[0];
    put<D>(all(y), out, at, 1);
}

void put_sums(const float* y, int64_t count, const Layout& L, int dtype, const void* bias, int64_t n, void* out, int64_t m) {
    for (int64_t i = 0; i < count; i++)
        if (dtype == FLOAT32) put_one<FLOAT32>(y[i], bias, n, out, (m + i) * L.rows + n);
        else if (dtype == BFLOAT16) put_one<BFLOAT16>(y[i], bias, n, out, (m + i) * L.rows + n);
        else put_one<FLOAT16>(y[i], bias, n, out, (m + i) * L.rows + n);
}

// -- by way of float32 ----------------------------------------------------------------------------------------------------

template <int D> void to_floats(const void* x, int64_t rows, int64_t stride, int64_t columns, int64_t padded, float* to) {
    for (int64_t m = 0; m < rows; m++, to += padded)
        for (int64_t k = 0; k < columns; k += LANES) {
            const F v = k + LANES <= columns ? get<D>(x, m * stride + k) : get<D>(x, m * stride + k, columns - k);
            memcpy(to + k, &v, sizeof v);
        }
}

// Rows of inputs, `padded` with zeros.
Buffer as_floats(const Layout& L, const void* x, int64_t rows, int64_t stride, int dtype) {
    const int64_t padded = StreamRow::padded(L);
    Buffer made(rows * padded);
    if (dtype == FLOAT32) to_floats<FLOAT32>(x, rows, stride, L.columns, padded, made.data());
    else if (dtype == BFLOAT16) to_floats<BFLOAT16>(x, rows, stride, L.columns, padded, made.data());
    else to_floats<FLOAT16>(x, rows, stride, L.columns, padded, made.data());
    return made;
}

// y[m] = w times row m of x; `count` is a multiple of 32.
template <int M> void float_dots(const float* w, const float* x, int64_t count, float* y) {
    constexpr int A = M == 4 ? 2 : 4;
    F sums[M][A];
    for (int m = 0; m < M; m++)
        for (int a = 0; a < A; a++) sums[m][a] = F{};
    for (int64_t k = 0; k < count; k += A * LANES)
#pragma GCC unroll 4
        for (int a = 0; a < A; a++) {
            const F v = load<F>(w + k + a * LANES);
            for (int m = 0; m < M; m++) sums[m][a] = fma(v, load<F>(x + m * count + k + a * LANES), sums[m][a]);
        }
    for (int m = 0; m < M; m++) {
        for (int a = 1; a < A; a++) sums[m][0] += sums[m][a];
        y[m] = sum(sums[m][0]);
    }
}

void decoded_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                    const void* bias, void* out) {
    const int64_t padded = StreamRow::padded(L);
    const Buffer floats = as_floats(L, x, rows, stride, dtype);
    const auto make = [&] { return RowParts::buffer(L, StreamRow::size(L)); };
    over(L.rows, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t n) {
        StreamRow row(L, buffer.data());
        row.decode(L, P, n, L.bits > 4 ? levels_of(L) : nullptr);
        float y[4];
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            const float* from = floats.data() + m * padded;
            if (some == 4) float_dots<4>(row.values, from, padded, y);
            else if (some == 2) float_dots<2>(row.values, from, padded, y);
            else float_dots<1>(row.values, from, padded, y);
            put_sums(y, some, L, dtype, bias, n, out, m);
        }
    });
}

// -- by way of levels -----------------------------------------------------------------------------------------------------

bool has_levels(const Layout& L, int dtype) {
    if (L.is_flat || !(L.source == UINT8 || L.source == INT8 || L.is_whole)) return false;
    if (L.arithmetic != FLOAT32 && L.arithmetic != dtype && dtype != BFLOAT16) return false;  // its roundings are not done
    const bool has_after = L.family == BIASED || (L.family == SUPER_BLOCKS && L.types[2] >= 0);
    if (dtype == FLOAT32 && has_after) return false;  // where a value is nearly 0, its two sums would lose it
    return L.group >= L.columns || L.group % LANES == 0;
}

// Rows of inputs as float32, and their sums under each scale.
struct FloatInputs {
    static constexpr bool reads_within_rows = false, adds_before = true;
    int64_t padded, count, wide, each = 1;
    Buffer floats, sums;

    FloatInputs(const Layout& L, const void* x, int64_t rows, int64_t stride, int dtype)
        : padded(StreamRow::padded(L)), count(L.groups), wide(L.groups + 2 * LANES),
          floats(as_floats(L, x, rows, stride, dtype)), sums(rows * wide) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t g = 0; g < count; g++) {
                F total{};
                for (int64_t k = g * L.group; k < (g + 1) * L.group && k < L.columns; k += LANES)
                    total += load<F>(floats.data() + m * padded + k);
                sums[m * wide + g] = sum(total);
            }
    }

    // `before`, if it is there, is added to the levels of each group: exactly, where a sum of its own would cancel.
    template <int M> void row(const Layout& L, const uint8_t* codes, const float* scale, const float* before, int64_t m,
                              float*, float* y) const {
        constexpr int A = M == 1 ? 4 : M == 2 ? 2 : 1;
        if (L.group < 32) before ? row_by<M, 1, true>(L, codes, scale, before, m, y)
                                 : row_by<M, 1, false>(L, codes, scale, before, m, y);
        else before ? row_by<M, A, true>(L, codes, scale, before, m, y) : row_by<M, A, false>(L, codes, scale, before, m, y);
    }

    template <int M, int A, bool Z> void row_by(const Layout& L, const uint8_t* codes, const float* scale, const float* before,
                                                int64_t m, float* y) const {
        const float* x = floats.data() + m * padded;
        F total[M];
        for (int i = 0; i < M; i++) total[i] = F{};
        for (int64_t k = 0, end = L.group; k < L.columns; end += L.group, scale++) {
            end = end < L.columns ? end : L.columns;
            F part[M][A];
            for (int i = 0; i < M * A; i++) part[i / A][i % A] = F{};
            const F low = Z ? all(*before++) : F{};
            for (; k + A * LANES <= end; k += A * LANES)
#pragma GCC unroll 4
                for (int a = 0; a < A; a++) add<M, A, Z>(codes, x, k + a * LANES, a, low, part);
            for (; k < end; k += LANES) add<M, A, Z>(codes, x, k, 0, low, part);
            for (int i = 0; i < M; i++) {
                for (int a = 1; a < A; a++) part[i][0] += part[i][a];
                total[i] = fma(all(*scale), part[i][0], total[i]);
            }
        }
        for (int i = 0; i < M; i++) y[i] = sum(total[i]) * L.unit;
    }

    template <int M, int A, bool Z> inline void add(const uint8_t* codes, const float* x, int64_t k, int a, F low,
                                                    F (*part)[A]) const {
        F level = values<INT8>(codes + k);
        if (Z) level += low;
#pragma GCC unroll 4
        for (int i = 0; i < M; i++) part[i][a] = fma(level, load<F>(x + i * padded + k), part[i][a]);
    }
};

#if FAST_ROWS
bool is_fixed(const Layout& L, int dtype) {
    if ((dtype == FLOAT32 && !L.activations) || !has_levels(L, dtype)) return false;
    return L.group >= L.columns || L.group % SPAN == 0 || L.group == 64 || L.group == 32 || L.group == 16;
}

// The same as fixed point, for the rows of rows_avx2.h.
template <int S> struct FixedInputs {
    static constexpr bool reads_within_rows = true, adds_before = false;
    Spans in;
    int64_t count, wide, each;
    Buffer sums;

    FixedInputs(const Layout& L, const void* x, int64_t rows, int64_t stride, int dtype)
        : in(Spans::of<INT8, S, false>(L, x, dtype, rows, stride)), count(in.spans * scales_of<S>), wide(in.stride + LANES),
          each(S == WHOLE ? count : S == WIDE ? L.group / SPAN : 1), sums(rows * wide) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t i = 0; i < count; i++) {
                const int64_t span = i / scales_of<S>, piece = i % scales_of<S>;
                const F v = load<F>(in.at(m) + span * in.lines * 64 + bytes_of<false> + piece * WIDTH);
                sums[m * wide + i] = sum(v) * in.units_at(m)[i];
            }
    }

    template <int M> void row(const Layout& L, const uint8_t* codes, const float* scale, const float*, int64_t m,
                              float* scratch, float* y) const {
        integer_row<INT8, S, M, false, false>(L, codes, scale, scale, in, m, scratch, y);
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

template <class Inputs> void levels_linear(const Layout& given, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                           int dtype, const void* bias, void* out) {
    Layout L = given;  // of the levels, a byte each
    L.row_bytes = L.columns;
    const Inputs in(L, x, rows, stride, dtype);
    const bool flips = L.source == UINT8 && L.bits == 8;  // codes from -128 on
    const float lift = flips ? 128 : 0, step = L.is_whole ? L.step : 1;
    const bool is_there = L.source == INT8 && (Inputs::reads_within_rows || L.columns % LANES == 0);  // as signed bytes
    const bool is_lifted = flips || L.family == BIASED_FIRST || L.zero >= 0 || L.offset != 0;
    const bool is_shifted = L.family != SIMPLE || (is_lifted && !Inputs::adds_before);
    const int64_t tile = rows > 4 || L.rows >= 256 ? 16 : 1, tiles = (L.rows + tile - 1) / tile;  // rows of codes in the cache
    const int64_t at_once = L.height == 1 && L.family != SUPER_BLOCKS ? tile : 1;  // rows whose numbers lie in one piece
    Layout all_rows = L;
    all_rows.groups *= at_once;
    const int64_t bytes = StreamRow::bytes(L), size = RowParts::size(all_rows) + 4 * in.wide + tile * (3 * in.wide + bytes / 4);
    const auto make = [&] { return RowParts::buffer(all_rows, size); };
    over(tiles, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t t) {
        RowParts parts(all_rows, buffer.data());
        float *scratch = buffer.data() + RowParts::size(all_rows), *scales = scratch + 4 * in.wide, *shifts = scales + tile * in.wide;
        float* lows = shifts + tile * in.wide;
        uint8_t* codes = (uint8_t*)(lows + tile * in.wide);
        const uint8_t* own[16];
        const int64_t first = t * tile, end = first + tile < L.rows ? first + tile : L.rows;
        for (int64_t n = first, i = 0; n < end; n++, i++) {
            RowAt at(L, n);
            at.groups *= end - n < at_once ? end - n : at_once;
            if (i % at_once == 0) parts.fill(given, P, n, at);
            const int64_t from = i % at_once * L.groups;
            float *scale = scales + i * in.wide, *shift = shifts + i * in.wide, *low = lows + i * in.wide;
            float *by = in.each == 1 ? scale : scratch, *add = in.each == 1 ? shift : scratch + in.wide;
            for (int64_t g = 0; g < L.groups; g += LANES) {
                const F s = load<F>(parts.scale + from + g), stepped = s * all(step);
                const F lifted = load<F>(parts.before + from + g) + all(lift), after = load<F>(parts.after + from + g);
                const F moved = Inputs::adds_before ? after : lifted * s * all(L.unit) + after;
                memcpy(by + g, &stepped, sizeof stepped), memcpy(add + g, &moved, sizeof moved);
                const F units = lifted * all(1 / step);  // exact: a power of two
                if (Inputs::adds_before) memcpy(low + g, &units, sizeof units);
            }
            if (in.each > 1) spread(by, in.each, in.count, scale), spread(add, in.each, in.count, shift);
            const uint8_t* eights = (const uint8_t*)P.codes + n * L.columns;  // where codes have 8 bits
            if (is_there) own[i] = eights;
            else if (flips) own[i] = codes + i * bytes, copy_flipped(eights, L.columns, codes + i * bytes);
            else own[i] = StreamRow::unpack(given, P, n, at, levels_of(L), codes + i * bytes);
        }
        float y[4];
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            for (int64_t n = first, i = 0; n < end; n++, i++) {
                const float *scale = scales + i * in.wide, *shift = shifts + i * in.wide;
                const float* low = Inputs::adds_before && is_lifted ? lows + i * in.wide : nullptr;
                if (some == 4) in.template row<4>(L, own[i], scale, low, m, scratch, y);
                else if (some == 2) in.template row<2>(L, own[i], scale, low, m, scratch, y);
                else in.template row<1>(L, own[i], scale, low, m, scratch, y);
                for (int64_t j = 0; is_shifted && j < some; j++) {
                    F total{};
                    for (int64_t k = 0; k < in.count; k += LANES)
                        total = fma(load<F>(shift + k), load<F>(in.sums.data() + (m + j) * in.wide + k), total);
                    y[j] += sum(total);
                }
                put_sums(y, some, L, dtype, bias, n, out, m);
            }
        }
    });
}

void stream_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype, const void* bias,
                   void* out) {
#if FAST_ROWS
    if (is_fixed(L, dtype)) {
        if (L.group >= L.columns) levels_linear<FixedInputs<WHOLE>>(L, P, x, rows, stride, dtype, bias, out);
        else if (L.group % SPAN == 0) levels_linear<FixedInputs<WIDE>>(L, P, x, rows, stride, dtype, bias, out);
        else if (L.group == 64) levels_linear<FixedInputs<G64>>(L, P, x, rows, stride, dtype, bias, out);
        else if (L.group == 32) levels_linear<FixedInputs<G32>>(L, P, x, rows, stride, dtype, bias, out);
        else levels_linear<FixedInputs<G16>>(L, P, x, rows, stride, dtype, bias, out);
        return;
    }
#endif
    if (has_levels(L, dtype)) levels_linear<FloatInputs>(L, P, x, rows, stride, dtype, bias, out);
    else decoded_linear(L, P, x, rows, stride, dtype, bias, out);
}
