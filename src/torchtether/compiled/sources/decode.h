// Decoding rows of codes to rows of values.
//
// kernels.cpp includes this in its own namespace.

// The codes in LANES / 2 bytes, low nibbles first.
inline I nibbles(const uint8_t* p) {
#if defined(__AVX2__)
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    return (I)_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(load<int32_t>(p)), shifts), _mm256_set1_epi32(15));
#elif defined(__aarch64__)
    const int32x4_t shifts = {0, -4, -8, -12};
    return (I)vandq_u32(vshlq_u32(vdupq_n_u32(load<uint16_t>(p)), shifts), vdupq_n_u32(15));
#else
    return I{p[0] & 15, p[0] >> 4, p[1] & 15, p[1] >> 4};
#endif
}

template <int C> inline F some_values(const uint8_t* row, int64_t k, const Table& table) {
    if (C == TABLE4) return table(nibbles(row + k / 2));
    if (C == INT4) return __builtin_convertvector(nibbles(row + k / 2), F);
    return values<C>(row + k);
}

template <int C, bool Z> inline F scaled(const uint8_t* row, int64_t k, const Table& table, F zero, F scale) {
    const F value = some_values<C>(row, k, table);
    return (Z ? value + zero : value) * scale;
}

#if FAST_ROWS
constexpr float INTEGERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#include "decode_avx2.h"
#endif

// Z: there are zero points. U: the unit is not 1. Returns false if the row must be decoded again with `by_step`.
template <int C, int D, bool Z, bool U> bool decode_row(const Layout& L, const uint8_t* row, const float* s,
                                                        const float* z, void* out, int64_t at, bool by_step = false) {
    constexpr bool nibbled = C == TABLE4 || C == INT4;
    const Table table(L.table);
    const F unit = all(L.unit);
    out = (char*)out + at * (D == FLOAT32 ? 4 : 2);
#if FAST_ROWS
    __m256i largest = _mm256_setzero_si256();
    Sixteen meant = {};
    if constexpr (nibbled) meant = sixteen(C == TABLE4 ? L.table : INTEGERS);
#endif
    for (int64_t g = 0; g < L.groups; g++) {
#if FAST_ROWS
        if constexpr (nibbled && D != FLOAT32)
            if (L.group == 32 && g + 1 < L.groups && (g + 2) * 32 <= L.columns) {
                decode_two_groups<D, Z, U>(L, meant, row, s + g, z + g, g * 32, out);
                g++;
                continue;
            }
#endif
        const int64_t end = (g + 1) * L.group < L.columns ? (g + 1) * L.group : L.columns;
        const F scale = all(s[g]), zero = all(z[g]);
        int64_t k = g * L.group;
#if FAST_ROWS
        if (!by_step) {
            if constexpr (nibbled && D != FLOAT32) k = decode_nibbles<D, Z, U>(L, meant, row, s[g], z[g], k, end, out);
            else if constexpr ((C == INT8 || C == UINT8) && D == BFLOAT16) {
                if (!Z && !U && end - k >= 1024 && !has_ties(s[g]))
                    k = decode_integers<C, Z, U, false>(L, row, s[g], z[g], k, end, out);
                else k = decode_integers<C, Z, U, true>(L, row, s[g], z[g], k, end, out);
            } else if constexpr (C == E4M3 && D == BFLOAT16) k = decode_e4m3(row, s[g], k, end, out, largest);
        }
#endif
        for (; k + 2 * LANES <= end; k += 2 * LANES) {
            F x = scaled<C, Z>(row, k, table, zero, scale), y = scaled<C, Z>(row, k + LANES, table, zero, scale);
            if (U) x = x * unit, y = y * unit;
            put_two<D>(x, y, out, k);
        }
        for (; k < end; k += LANES) {
            const int64_t count = end - k < LANES ? end - k : LANES;
            uint8_t rest[LANES] = {};
            memcpy(rest, row + (nibbled ? k / 2 : k), nibbled ? (count + 1) / 2 : count);
            const F x = scaled<C, Z>(rest, 0, table, zero, scale);
            put<D>(U ? x * unit : x, out, k, count);
        }
    }
#if FAST_ROWS
    if (C == E4M3 && D == BFLOAT16 && has_nan(largest)) return by_step;
#endif
    return true;
}

template <int C, int D, bool Z, bool U> void decode_one(const Layout& L, const uint8_t* row, const float* s,
                                                        const float* z, void* out, int64_t at) {
    if (!decode_row<C, D, Z, U>(L, row, s, z, out, at)) decode_row<C, D, Z, U>(L, row, s, z, out, at, true);
}

template <int C, int D> void decode(const Layout& L, const Parts& P, const Rows& rows, void* out) {
    const bool zero = L.zero >= 0 || L.offset != 0;
    (void)zero;
    const int64_t each = buffer_size(L);
    over(rows.count, rows.count * L.columns > 32768, [&] { return Buffer(2 * each); }, [&](Buffer& buffer, int64_t i) {
        const int64_t n = rows[i];
        if (rows.index && i + 1 < rows.count) {  // processors do not prefetch by an index
            const char* next = (const char*)P.codes + rows[i + 1] * L.row_bytes;
            for (int64_t b = 0; b < L.row_bytes && b < 8192; b += 64) __builtin_prefetch(next + b);
        }
        float *s = buffer.data(), *z = s + each;
        row_scales(L, P, n, s, z);
        const uint8_t* row = (const uint8_t*)P.codes + n * L.row_bytes;
        if constexpr (C == INT8 || C == UINT8 || C == INT4) {
            if (L.unit != 1) decode_one<C, D, true, true>(L, row, s, z, out, i * rows.stride);
            else if (zero) decode_one<C, D, true, false>(L, row, s, z, out, i * rows.stride);
            else decode_one<C, D, false, false>(L, row, s, z, out, i * rows.stride);
        } else decode_one<C, D, false, false>(L, row, s, z, out, i * rows.stride);
    });
}
