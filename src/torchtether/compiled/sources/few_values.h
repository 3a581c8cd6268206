// Decoding codes of up to 4 bits in a stream to 16 bits: the possible values of a group are computed and rounded once, and
// looked up, with AVX2 by their bytes (decode_avx2.h).
//
// stream.h includes this.

#if WIDE_ROWS
// Groups have a multiple of 32 columns, or are whole rows.
template <int D, int A, bool FIRST> void decode_few(const Layout& L, const uint8_t* codes, const RowAt& at,
                                                    const RowParts& parts, uint16_t* to) {
    const V levels = load<V>(L.table), unit = every(L.unit);
    int64_t k = 0;
    for (int64_t g = 0, end = L.group; g < at.groups; g++, end += L.group) {
        const V scale = every(parts.scale[g]), before = every(parts.before[g]), after = every(parts.after[g]);
        const __m256i values = halves_of<D>(value_of<A, FIRST>(levels, before, scale, unit, after));
        const __m512i table = _mm512_broadcast_i64x4(values);
        for (end = end < L.columns ? end : L.columns; k < end; k += 32) {
            const __m512i index = _mm512_cvtepu8_epi16(load<__m256i>(codes + k));
            const __m512i found = _mm512_permutexvar_epi16(index, table);
            const int64_t left = L.columns - k;
            if (left >= 32) _mm512_storeu_si512(to + k, found);
            else memcpy(to + k, &found, left * 2);
        }
    }
}
#elif FAST_ROWS
// The possible values under one number of a row, from the possible levels.
template <int D, int A, bool FIRST> inline ByteTable few_values(const Layout& L, Sixteen s, const RowParts& parts, int64_t g) {
    const F scale = all(parts.scale[g]), before = all(parts.before[g]), after = all(parts.after[g]), unit = all(L.unit);
    const auto value = [&](F level) { return value_of<A, FIRST>(level, before, scale, unit, after); };
    return ByteTable::of<D>({value(s.even), value(s.odd)});
}

// Groups have a multiple of 32 columns, or are whole rows.
template <int D, int A, bool FIRST> void decode_few(const Layout& L, const uint8_t* codes, const RowAt& at,
                                                    const RowParts& parts, uint16_t* to) {
    const Sixteen levels = sixteen(L.table);
    int64_t k = 0;
    for (int64_t g = 0, end = L.group; g < at.groups; g++, end += L.group) {
        const ByteTable table = few_values<D, A, FIRST>(L, levels, parts, g);
        for (end = end < L.columns ? end : L.columns; k < end; k += 32) {
            const __m256i c = _mm256_loadu_si256((const __m256i*)(codes + k));
            const __m256i l = _mm256_shuffle_epi8(table.low, c), h = _mm256_shuffle_epi8(table.high, c);
            const __m256i w0 = _mm256_unpacklo_epi8(l, h), w1 = _mm256_unpackhi_epi8(l, h);
            const bool is_whole = L.columns - k >= 32;
            __m256i rest[2], *into = is_whole ? (__m256i*)(to + k) : rest;
            _mm256_storeu_si256(into, _mm256_permute2x128_si256(w0, w1, 0x20));
            _mm256_storeu_si256(into + 1, _mm256_permute2x128_si256(w0, w1, 0x31));
            if (!is_whole) memcpy(to + k, rest, (L.columns - k) * 2);
        }
    }
}
#endif

// Whether decode_few takes codes, to 16 bits.
inline bool has_few_values(const Layout& L) {
    return FAST_ROWS && L.bits <= 4 && !L.is_flat && L.family != ORDERED && (L.group % 32 == 0 || L.group >= L.columns);
}
