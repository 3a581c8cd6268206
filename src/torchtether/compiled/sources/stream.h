// Codes of 1 to 8 bits in a dense stream, with the numbers of row_parts.h: all that the kernels of one layout do not know.
//
// stream.cpp includes this in its own namespace.
//
// A row of codes is unpacked to bytes, which stay in the cache, and decoded to float32; and so are inputs. What is multiplied
// without decoding: levels.h. Columns that name their groups: ordered.h.

inline const uint8_t* levels_of(const Layout& L) { return L.is_whole ? L.whole : nullptr; }

template <int A, bool FIRST> inline V value_of(V level, V before, V scale, V unit, V after) {
    if (A == FLOAT32) return (level + before) * scale * unit + after;
    return FIRST ? rounded_to<A>(rounded_to<A>(level + before) * scale)
                 : rounded_to<A>(rounded_to<A>(level * scale) + after);
}

#include "few_values.h"

template <int C> inline V level_of(const uint8_t* p, const Few& few, const Many& many) {
    if constexpr (C == TABLE4) return few(p);
    else if constexpr (C == TABLE8) return many(p);
    else return wide_values<C>(p);
}

// Writes up to WIDE_LANES - 1 values too many. Where codes have 4 bits and groups are wide, all values of a group are computed once.
template <int C, int A, bool FIRST> void decode_codes(const Layout& L, const uint8_t* codes, const RowAt& at,
                                                      const RowParts& parts, float* to) {
    const Few table(L.table, [](V level) { return level; });
    const Many levels(L.levels, L.bits);
    const V unit = every(L.unit), step = every(L.step);
    const bool is_few = L.bits <= 4 && L.group >= 32;
    int64_t k = 0;
    for (int64_t g = 0, end = at.lead; g < at.groups; g++, k = end, end += L.group) {
        end = end < L.columns ? end : L.columns;
        const V scale = every(parts.scale[g]), before = every(parts.before[g]), after = every(parts.after[g]);
        const auto value = [&](V level) { return value_of<A, FIRST>(level, before, scale, unit, after); };
        const auto put = [&](V v) { memcpy(to + k, &v, sizeof v); };
        if (is_few) {
            const Few few(L.table, value);
            for (; k < end; k += WIDE_LANES) put(few(codes + k));
        } else
            for (; k < end; k += WIDE_LANES) {
                const V level = level_of<C>(codes + k, table, levels);
                put(value(C == INT8 ? level * step : level));
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
    static int64_t size(const Layout& L) { return RowParts::size(L) + bytes(L) / 4 + padded(L) + WIDE_LANES; }

    StreamRow(const Layout& L, float* buffer)
        : parts(L, buffer), codes((uint8_t*)(buffer + RowParts::size(L))), values((float*)(codes + bytes(L))) {}

    // The codes of row n to `to`, where the first of them is then.
    static uint8_t* unpack(const Layout& L, const Parts& P, int64_t n, const RowAt& at, Meant meant, uint8_t* to) {
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
        const uint8_t* own = unpack(L, P, n, at, {meant}, codes);
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

    // To 16 bits, by few_values.h.
    template <int D> void decode_to(const Layout& L, const Parts& P, int64_t n, uint16_t* to) {
#if FAST_ROWS
        const RowAt at(L, n);
        parts.fill(L, P, n, at);
        const uint8_t* own = unpack(L, P, n, at, {}, codes);
        const bool is_first = L.family == BIASED_FIRST;
        if (L.arithmetic == FLOAT32) decode_few<D, FLOAT32, false>(L, own, at, parts, to);
        else if (L.arithmetic == BFLOAT16 && is_first) decode_few<D, BFLOAT16, true>(L, own, at, parts, to);
        else if (L.arithmetic == BFLOAT16) decode_few<D, BFLOAT16, false>(L, own, at, parts, to);
        else if (is_first) decode_few<D, FLOAT16, true>(L, own, at, parts, to);
        else decode_few<D, FLOAT16, false>(L, own, at, parts, to);
#endif
    }
};

template <int D> void decode_stream(const Layout& L, const Parts& P, const Rows& rows, void* out) {
    const auto make = [&] { return RowParts::buffer(L, StreamRow::size(L)); };
    over(rows.count, rows.count * L.columns > 32768, make, [&](Buffer& buffer, int64_t i) {
        StreamRow row(L, buffer.data());
        char* to = (char*)out + i * rows.stride * (D == FLOAT32 ? 4 : 2);
        if constexpr (D != FLOAT32)
            if (has_few_values(L)) return row.decode_to<D>(L, P, rows[i], (uint16_t*)to);
        row.decode(L, P, rows[i], nullptr);
        int64_t k = 0;
        for (; k + 16 <= L.columns; k += 16) put_sixteen<D>(row.values + k, to, k);
        for (; k < L.columns; k += LANES)
            put<D>(load<F>(row.values + k), to, k, L.columns - k < LANES ? L.columns - k : LANES);
    });
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
        float y[3 + LANES];
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            const float* from = floats.data() + m * padded;
            if (some == 4) float_dots<4>(row.values, from, padded, y);
            else if (some == 2) float_dots<2>(row.values, from, padded, y);
            else float_dots<1>(row.values, from, padded, y);
            for (int64_t i = 0; i < some; i++) put_some(dtype, y + i, 1, bias, n, out, (m + i) * L.rows + n);
        }
    });
}
