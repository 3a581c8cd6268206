// The widest vectors of float32 that rows of codes take: of 64 bytes with AVX-512, else those of vectors.h.
//
// kernels.cpp includes this in its own namespace.

#if WIDE_ROWS
typedef float V __attribute__((vector_size(64)));

inline V every(float x) { return (V)_mm512_set1_ps(x); }
inline V fma(V a, V b, V c) { return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline float sum(V v) {  // not by its address: GCC then stores it at every step
    return sum((F)_mm512_castps512_ps256((__m512)v) + (F)_mm512_extractf32x8_ps((__m512)v, 1));
}
inline V first_of(V v, int64_t count) { return (V)_mm512_maskz_mov_ps((1 << count) - 1, (__m512)v); }

typedef int32_t J __attribute__((vector_size(64)));

inline J rounded_bits(V v) { return (J)v + 0x7fff + (((J)v >> 16) & 1); }
template <int D> inline __m256i halves_of(V v) {
    if (D == BFLOAT16) return _mm512_cvtepi32_epi16((__m512i)(rounded_bits(v) >> 16));
    return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
template <int A> inline V rounded_to(V v) {
    if (A == BFLOAT16) return (V)(rounded_bits(v) & (int32_t)0xffff0000);
    return A == FLOAT16 ? (V)_mm512_cvtph_ps(halves_of<FLOAT16>(v)) : v;
}

template <int C> inline V wide_values(const uint8_t* p) {
    if (C == INT8) return (V)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
    if (C == UINT8) return (V)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load<__m128i>(p)));
    return (V)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)values<C>(p)), (__m256)values<C>(p + LANES), 1);
}

template <int D> inline void put_sixteen(const float* from, void* out, int64_t at) {
    if (D == FLOAT32) memcpy((float*)out + at, from, 64);
    else _mm256_storeu_si256((__m256i*)((uint16_t*)out + at), halves_of<D>(load<V>(from)));
}

// The values of codes below 16, by the values of 16 levels.
struct Few {
    __m512 values;

    template <class Value> inline Few(const float* levels, Value value) : values((__m512)value(load<V>(levels))) {}
    V operator()(const uint8_t* p) const { return (V)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(load<__m128i>(p)), values); }
};

// The numbers of up to 32 groups, or of TWICE as many, looked up for 16 columns; or those of as many codes.
template <bool TWICE> struct Looked {
    __m512 numbers[TWICE ? 4 : 2];

    explicit Looked(const float* p) {  // reads all, also where there are fewer groups
        for (int i = 0; i < (TWICE ? 4 : 2); i++) numbers[i] = _mm512_loadu_ps(p + 16 * i);
    }
    __m512 operator()(__m512i group) const {
        const __m512 low = _mm512_permutex2var_ps(numbers[0], group, numbers[1]);
        if constexpr (!TWICE) return low;
        else return _mm512_mask_blend_ps(_mm512_test_epi32_mask(group, _mm512_set1_epi32(32)), low,
                                         _mm512_permutex2var_ps(numbers[2], group, numbers[3]));
    }
};

// The values of codes of any number of bits. Those of up to 6 stay in registers.
struct Many {
    const float* values;
    bool are_kept;
    Looked<true> kept;

    Many(const float* values, int bits) : values(values), are_kept(bits <= 6), kept(values) {}
    V operator()(const uint8_t* p) const {
        if (are_kept) return (V)kept(_mm512_cvtepu8_epi32(load<__m128i>(p)));
        V v;
        for (int i = 0; i < 16; i++) v[i] = values[p[i]];
        return v;
    }
};
#else
typedef F V;

inline V every(float x) { return all(x); }
template <int C> inline V wide_values(const uint8_t* p) { return values<C>(p); }
template <int D> inline void put_sixteen(const float* from, void* out, int64_t at) {
    for (int64_t i = 0; i < 16; i += 2 * LANES) put_two<D>(load<F>(from + i), load<F>(from + i + LANES), out, at + i);
}

class Few {
    struct Values {
        F of[16 / LANES];
        template <class Value> inline Values(const float* levels, Value value) {
            for (int i = 0; i < 16 / LANES; i++) of[i] = value(load<F>(levels + LANES * i));
        }
    };
    Table table;

  public:
    template <class Value> inline Few(const float* levels, Value value) : table((const float*)Values(levels, value).of) {}
    V operator()(const uint8_t* p) const { return table(bytes(p)); }
};

struct Many {
    const float* values;

    Many(const float* values, int) : values(values) {}
    V operator()(const uint8_t* p) const {
        V v;
        for (int i = 0; i < LANES; i++) v[i] = values[p[i]];
        return v;
    }
};
#endif

constexpr int64_t WIDE_LANES = sizeof(V) / 4;
