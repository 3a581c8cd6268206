// Unpacking codes of 1 to 8 bits, a dense stream as in bits.py, to bytes.
//
// stream.cpp includes this in its own namespace.

// Whether the processor has AVX-512 VBMI: those before Ice Lake have not.
#if WIDE_ROWS
const bool HAS_VBMI = __builtin_cpu_supports("avx512vbmi");
#endif

// What codes become: bytes of a table of 64, or the codes less a number.
struct Meant {
    const uint8_t* table = nullptr;
    uint8_t less = 0;
};

#if defined(__AVX2__)
struct Places {  // of 16 codes, 8 in each half: the two bytes that hold each, and the factor that moves it to their top
    alignas(32) uint8_t bytes[32];
    alignas(32) uint16_t factors[16];
};

constexpr Places places_of(int bits) {
    Places made = {};
    for (int i = 0; i < 16; i++) {
        made.bytes[2 * i] = i % 8 * bits / 8, made.bytes[2 * i + 1] = made.bytes[2 * i] + 1;
        made.factors[i] = 1 << (16 - bits - i % 8 * bits % 8);
    }
    return made;
}

// 8 codes from `p` and 8 from 2 * B further, as words.
template <int B> inline __m256i sixteen_codes(const uint8_t* p) {
    static constexpr Places places = places_of(B);
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)), load<__m128i>(p + 2 * B), 1);
    const __m256i found = _mm256_shuffle_epi8(both, load<__m256i>(places.bytes));
    return _mm256_srli_epi16(_mm256_mullo_epi16(found, load<__m256i>(places.factors)), 16 - B);
}

// What codes become, by a table in four vectors, or less the first of them.
template <int B, bool T> inline __m256i become(const __m256i* tables, __m256i codes) {
    if (!T) return _mm256_sub_epi8(codes, tables[0]);
    if (B <= 4) return _mm256_shuffle_epi8(tables[0], codes);
    __m256i found = _mm256_setzero_si256();  // an index whose top bit is set finds 0
    for (int j = 0; j < 4; j++) {
        const __m256i away = _mm256_xor_si256(codes, _mm256_set1_epi8(16 * j));
        found = _mm256_or_si256(found, _mm256_shuffle_epi8(tables[j], _mm256_adds_epu8(away, _mm256_set1_epi8(0x70))));
    }
    return found;
}
#endif

#if defined(__aarch64__)
struct Halves {  // of 8 codes: the two bytes that hold each, and how many bits are below it
    uint8_t bytes[16];
    int16_t shifts[8];
};

constexpr Halves halves_of(int bits) {
    Halves made = {};
    for (int i = 0; i < 8; i++) {
        made.bytes[2 * i] = i * bits / 8, made.bytes[2 * i + 1] = i * bits / 8 + 1;
        made.shifts[i] = -(i * bits % 8);
    }
    return made;
}

template <int B> inline uint8x8_t eight_codes(const uint8_t* p) {
    static constexpr Halves from = halves_of(B);
    const uint16x8_t both = vreinterpretq_u16_u8(vqtbl1q_u8(vld1q_u8(p), vld1q_u8(from.bytes)));
    return vmovn_u16(vandq_u16(vshlq_u16(both, vld1q_s16(from.shifts)), vdupq_n_u16((1 << B) - 1)));
}
#endif

#if WIDE_ROWS
struct Lanes {  // of 8 bytes, with 8 codes each: the bytes that hold them, and how many bits are below each
    alignas(64) uint8_t bytes[64], shifts[64];
};

constexpr Lanes lanes_of(int bits) {
    Lanes made = {};
    for (int i = 0; i < 64; i++) made.bytes[i] = i / 8 * bits + i % 8 % bits, made.shifts[i] = i % 8 * bits;
    return made;
}

// As `unpack_codes`.
template <int B, bool T> __attribute__((target("avx512vbmi"))) void unpack_lanes(const uint8_t* p, const uint8_t* end,
                                                                               int64_t count, Meant meant, uint8_t* to) {
    static constexpr Lanes lanes = lanes_of(B);
    const __m512i places = line(lanes.bytes), shifts = line(lanes.shifts), mask = _mm512_set1_epi8((char)((1 << B) - 1));
    const __m512i table = T ? line(meant.table) : _mm512_set1_epi8((char)meant.less);
#pragma GCC unroll 2
    for (int64_t done = 0; done < count; done += 64, p += 8 * B) {
        _mm_prefetch((const char*)p + 4096, _MM_HINT_T1);
        const __m512i read = end - p >= 64 ? line(p) : _mm512_maskz_loadu_epi8((1ull << (end - p)) - 1, p);
        const __m512i codes = _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, _mm512_permutexvar_epi8(places, read)), mask);
        _mm512_storeu_si512(to + done, T ? _mm512_permutexvar_epi8(codes, table) : _mm512_sub_epi8(codes, table));
    }
}
#endif

// Unpacks the first `count` codes from `p`, reading nothing from `end` on; T is whether a table says what they become. Writes
// up to 63 bytes beyond the last code.
template <int B, bool T> void unpack_codes(const uint8_t* p, const uint8_t* end, int64_t count, Meant meant, uint8_t* to) {
    int64_t done = 0;
#if WIDE_ROWS
    if (HAS_VBMI) return unpack_lanes<B, T>(p, end, count, meant, to);
#endif
#if defined(__AVX2__)
    __m256i tables[4] = {_mm256_set1_epi8((char)meant.less)};
    for (int j = 0; T && j < 4; j++) tables[j] = _mm256_broadcastsi128_si256(load<__m128i>(meant.table + 16 * j));
    if (B == 4)
        for (; done < count && end - p >= 32; done += 64, p += 32) {
            _mm_prefetch((const char*)p + 4096, _MM_HINT_T1);
            const __m256i c = load<__m256i>(p), mask = _mm256_set1_epi8(15);
            const __m256i even = become<B, T>(tables, _mm256_and_si256(c, mask));
            const __m256i odd = become<B, T>(tables, _mm256_and_si256(_mm256_srli_epi16(c, 4), mask));
            const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
            _mm256_storeu_si256((__m256i*)(to + done), _mm256_permute2x128_si256(low, high, 0x20));
            _mm256_storeu_si256((__m256i*)(to + done + 32), _mm256_permute2x128_si256(low, high, 0x31));
        }
#pragma GCC unroll 2
    for (; done < count && end - p >= 3 * B + 16; done += 32, p += 4 * B) {
        _mm_prefetch((const char*)p + 4096, _MM_HINT_T1);
        const __m256i codes = _mm256_packus_epi16(sixteen_codes<B>(p), sixteen_codes<B>(p + B));
        _mm256_storeu_si256((__m256i*)(to + done), become<B, T>(tables, codes));
    }
#elif defined(__aarch64__)
    uint8x16x4_t table = {};
    if (T) memcpy(&table, meant.table, sizeof table);
    const uint8x16_t less = vdupq_n_u8(meant.less);
    for (; done < count && end - p >= B + 16; done += 16, p += 2 * B) {
        const uint8x16_t codes = vcombine_u8(eight_codes<B>(p), eight_codes<B>(p + B));
        vst1q_u8(to + done, !T ? vsubq_u8(codes, less) : B <= 4 ? vqtbl1q_u8(table.val[0], codes) : vqtbl4q_u8(table, codes));
    }
#endif
    for (; done < count; done += 8, p += B) {
        uint64_t word = 0;
        memcpy(&word, p, end - p < B ? end - p : B);
        for (int i = 0; i < 8; i++) {
            const uint8_t code = (word >> (B * i)) & ((1 << B) - 1);
            to[done + i] = T ? meant.table[code] : (uint8_t)(code - meant.less);
        }
    }
}

template <int B> void unpack_codes(const uint8_t* p, const uint8_t* end, int64_t count, Meant meant, uint8_t* to) {
    if (meant.table) unpack_codes<B, true>(p, end, count, meant, to);
    else unpack_codes<B, false>(p, end, count, meant, to);
}

void unpack_bits(int bits, const uint8_t* p, const uint8_t* end, int64_t count, Meant meant, uint8_t* to) {
    switch (bits) {
        case 1: return unpack_codes<1>(p, end, count, meant, to);
        case 2: return unpack_codes<2>(p, end, count, meant, to);
        case 3: return unpack_codes<3>(p, end, count, meant, to);
        case 4: return unpack_codes<4>(p, end, count, meant, to);
        case 5: return unpack_codes<5>(p, end, count, meant, to);
        case 6: return unpack_codes<6>(p, end, count, meant, to);
        case 7: return unpack_codes<7, false>(p, end, count, meant, to);
        default: memcpy(to, p, count);
    }
}
