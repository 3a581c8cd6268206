// Codes of 1 to 8 bits, a dense stream as bits.py has it, to bytes.
//
// stream.cpp includes this in its own namespace.

struct Unpack {
    int bits;
    const uint8_t* meant;  // bytes that codes stand for, at most 64; null: themselves
#if defined(__AVX2__)
    __m256i order, factors, tables[4];  // of 8 codes in each half: where two bytes lie that hold each; what moves it to their top
#endif

    explicit Unpack(const Layout& L, const uint8_t* meant = nullptr) : bits(L.bits), meant(meant) {
#if defined(__AVX2__)
        uint8_t at[32];
        uint16_t by[16];
        for (int i = 0; i < 16; i++) {
            at[2 * i] = (i % 8) * bits / 8, at[2 * i + 1] = at[2 * i] + 1;
            by[i] = 1 << (16 - bits - (i % 8) * bits % 8);
        }
        order = load<__m256i>(at), factors = load<__m256i>(by);
        for (int j = 0; meant && j < 4; j++) tables[j] = _mm256_broadcastsi128_si256(load<__m128i>(meant + 16 * j));
#endif
    }

    // The first `count` codes from `p`, and nothing from `end` on. Writes up to 63 bytes too many.
    void operator()(const uint8_t* p, const uint8_t* end, int64_t count, uint8_t* to) const {
        if (bits == 8) {
            memcpy(to, p, count);
            return;
        }
        int64_t done = 0;
#if defined(__AVX2__)
        if (bits == 4)
            for (; done < count && end - p >= 32; done += 64, p += 32) {
                _mm_prefetch((const char*)p + 4096, _MM_HINT_T1);
                const __m256i c = load<__m256i>(p), mask = _mm256_set1_epi8(15);
                const __m256i even = looked_up(_mm256_and_si256(c, mask));
                const __m256i odd = looked_up(_mm256_and_si256(_mm256_srli_epi16(c, 4), mask));
                const __m256i low = _mm256_unpacklo_epi8(even, odd), high = _mm256_unpackhi_epi8(even, odd);
                _mm256_storeu_si256((__m256i*)(to + done), _mm256_permute2x128_si256(low, high, 0x20));
                _mm256_storeu_si256((__m256i*)(to + done + 32), _mm256_permute2x128_si256(low, high, 0x31));
            }
        for (; done < count && end - p >= 3 * bits + 16; done += 32, p += 4 * bits) {
            _mm_prefetch((const char*)p + 4096, _MM_HINT_T1);
            const __m256i words = _mm256_packus_epi16(sixteen_at(p), sixteen_at(p + bits));
            _mm256_storeu_si256((__m256i*)(to + done), looked_up(words));
        }
#endif
        for (; done < count; done += 8, p += bits) {
            uint64_t word = 0;
            memcpy(&word, p, end - p < bits ? end - p : bits);
            for (int i = 0; i < 8; i++) {
                const uint8_t code = (word >> (bits * i)) & ((1 << bits) - 1);
                to[done + i] = meant ? meant[code] : code;
            }
        }
    }

#if defined(__AVX2__)
    // 8 codes from `p` and 8 from 2 * bits further, as words.
    inline __m256i sixteen_at(const uint8_t* p) const {
        const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(p)), load<__m128i>(p + 2 * bits), 1);
        const __m256i top = _mm256_mullo_epi16(_mm256_shuffle_epi8(both, order), factors);
        return _mm256_srl_epi16(top, _mm_cvtsi32_si128(16 - bits));
    }

    inline __m256i looked_up(__m256i codes) const {
        if (!meant) return codes;
        if (bits <= 4) return _mm256_shuffle_epi8(tables[0], codes);
        __m256i found = _mm256_setzero_si256();  // an index whose top bit is set finds 0
        for (int j = 0; j < 4; j++) {
            const __m256i away = _mm256_xor_si256(codes, _mm256_set1_epi8(16 * j));
            found = _mm256_or_si256(found, _mm256_shuffle_epi8(tables[j], _mm256_adds_epu8(away, _mm256_set1_epi8(0x70))));
        }
        return found;
    }
#endif
};
