// Vectors: loading, widening, narrowing and converting them; what the extension cannot say, per instruction set.
//
// kernels.cpp includes this in its own namespace.

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define FAST_ROWS 1
#define WIDTH 32  // bytes of a vector, but in rows_avx512.h: elsewhere wider ones have gained nothing where they were measured
#else
#define FAST_ROWS 0
#define WIDTH 16  // compilers keep vectors in memory that are wider than the processor's
#endif
#if FAST_ROWS && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WIDE_ROWS 1  // rows of codes by vectors of 64 bytes
#else
#define WIDE_ROWS 0
#endif

typedef float F __attribute__((vector_size(WIDTH)));
typedef int32_t I __attribute__((vector_size(WIDTH)));
typedef int16_t W __attribute__((vector_size(WIDTH)));
typedef uint16_t H __attribute__((vector_size(WIDTH / 2)));

// A block of columns is 8 vectors of float32, in 4-bit codes one vector of bytes.
constexpr int64_t LANES = WIDTH / 4, PLANES = 8, BLOCK = LANES * PLANES;

constexpr int64_t TILE = 16;  // rows of codes taken in turn, so that many rows of inputs are read from the cache

template <class V> inline V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }

inline F all(float x) {  // F{} + x would add: -0.0 + 0.0 is not -0.0
#if defined(__AVX__)
    return (F)_mm256_set1_ps(x);
#else
    return F{x, x, x, x};
#endif
}

// Widening and narrowing are spelled out, because the compilers take the extension's apart, element by element.
#if defined(__AVX2__)
inline I bytes(const uint8_t* p) { return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }  // LANES of them
inline I signed_bytes(const uint8_t* p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
inline H halves(const uint8_t* p) { return (H)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)); }  // LANES bytes
inline I widen(H h) { return (I)_mm256_cvtepu16_epi32((__m128i)h); }
inline H narrow(I v) {  // of 0 to 65535
    return (H)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
}
#elif defined(__aarch64__)
inline uint8x8_t four(const uint8_t* p) { return vreinterpret_u8_u32(vdup_n_u32(load<uint32_t>(p))); }
inline H halves(const uint8_t* p) { return (H)vget_low_u16(vmovl_u8(four(p))); }
inline I widen(H h) { return (I)vmovl_u16((uint16x4_t)h); }
inline H narrow(I v) { return (H)vmovn_u32((uint32x4_t)v); }
inline I bytes(const uint8_t* p) { return widen(halves(p)); }
inline I signed_bytes(const uint8_t* p) { return (I)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four(p))))); }
#else
inline I bytes(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
inline I signed_bytes(const uint8_t* p) { return I{(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]}; }
inline H halves(const uint8_t* p) { return H{p[0], p[1], p[2], p[3]}; }
inline I widen(H h) { return I{h[0], h[1], h[2], h[3]}; }
inline H narrow(I v) { return H{(uint16_t)v[0], (uint16_t)v[1], (uint16_t)v[2], (uint16_t)v[3]}; }
#endif

#if FAST_ROWS
template <bool SIGN> inline W words(const uint8_t* p) {  // 2 * LANES bytes
    const __m128i b = _mm_loadu_si128((const __m128i*)p);
    return (W)(SIGN ? _mm256_cvtepi8_epi16(b) : _mm256_cvtepu8_epi16(b));
}
#endif

inline F fma(F a, F b, F c) {
#if defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The first `count` values, and zeros.
inline F first_of(F values, int64_t count) {
#if WIDTH == 32
    const I lanes = {0, 1, 2, 3, 4, 5, 6, 7};
#else
    const I lanes = {0, 1, 2, 3};
#endif
    return (F)((I)values & (lanes < I{} + (int32_t)count));
}

inline float sum(F v) {
#if defined(__AVX__)
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#endif
    float x[LANES];
    memcpy(x, &v, sizeof v);
    for (int64_t step = LANES / 2; step; step /= 2)
        for (int64_t i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

inline F larger(F most, F v) {  // lane by lane the larger magnitude; nan if one is
    const F size = v < 0 ? -v : v;
    return most < size || size != size ? size : most;
}

inline float largest_of(F v) {  // nan if one is
    float most = 0;
    for (int64_t l = 0; l < LANES; l++)
        if (v[l] > most || v[l] != v[l]) most = v[l];
    return most;
}

struct Table {  // values[index & 15], lane by lane
#if defined(__AVX2__)
    __m256 low, high;
    explicit Table(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    F operator()(I index) const {
        const __m256i i = (__m256i)index;
        return (F)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                   _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }
#elif defined(__aarch64__)
    uint8x16x4_t t;
    explicit Table(const float* p) { memcpy(&t, p, sizeof t); }
    F operator()(I index) const { return (F)vqtbl4q_u8(t, (uint8x16_t)((index & 15) * 0x04040404 + 0x03020100)); }
#else
    float t[16];
    explicit Table(const float* p) { memcpy(t, p, sizeof t); }
    F operator()(I index) const {
        F o;
        for (int i = 0; i < LANES; i++) o[i] = t[index[i] & 15];
        return o;
    }
#endif
};

inline F from_half(H h) {
#if defined(__F16C__)
    return (F)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (F)vcvt_f32_f16((float16x4_t)h);
#else  // subnormals by a subtraction: those of float32 may be flushed
    I u = widen(h), low = u & 0x7fff;
    I normal = (low << 13) + (112 << 23), small = (low << 13) | (113 << 23);
    F value = low < 0x400 ? (F)small - 0x1p-14f : (F)normal;
    I bits = (I)value | ((u & 0x8000) << 16);
    return (F)(low >= 0x7c00 ? bits | 0x7f800000 : bits);
#endif
}

inline F from_e4m3(const uint8_t* p) {  // as float16, of which the exponent is 8 too low; 0x7f is not a number
    H u = halves(p), low = (u & 0x7f) << 7, half = ((u & 0x80) << 8) | low;
    return from_half(low == 0x3f80 ? half | 0x7e00 : half) * 256.0f;
}

template <int C> inline F values(const uint8_t* p) {
    if (C == INT8) return __builtin_convertvector(signed_bytes(p), F);
    if (C == UINT8) return __builtin_convertvector(bytes(p), F);
    if (C == E4M3) return from_e4m3(p);
    return from_half(halves(p) << 8);
}

// To bfloat16, the upper halves of what this returns: to the nearest, halves to even; of numbers, and of nan without payload.
inline I rounded_bits(F x) { return (I)x + 0x7fff + (((I)x >> 16) & 1); }
inline I bfloat16_bits(F x) { return (rounded_bits(x) >> 16) & 0xffff; }

inline H to_bfloat16(F x) { return narrow(((I)x & 0x7fffffff) > 0x7f800000 ? I{} + 0x7fc0 : bfloat16_bits(x)); }

inline H to_half(F x) {
#if defined(__F16C__)
    return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    return (H)vcvt_f16_f32((float32x4_t)x);
#else
    // no _Float16: compilers before GCC 12 and clang 15 have none. The sum with 0.5 rounds what is subnormal as a half.
    I bits = (I)x, most = bits & 0x7fffffff;
    I normal = ((most + 0xfff + ((most >> 13) & 1)) >> 13) - (112 << 10);
    I small = (I)((F)most + 0.5f) - 0x3f000000;
    I half = most < 0x38800000 ? small : most < 0x477ff000 ? normal : I{} + 0x7c00;
    half = most > 0x7f800000 ? ((most >> 13) & 0x3ff) | 0x7e00 : half;
    return narrow(half | ((bits >> 16) & 0x8000));
#endif
}

template <int A> inline F rounded_to(F x) {  // of numbers, and of NaN without payload
    if (A == BFLOAT16) return (F)(rounded_bits(x) & (int32_t)0xffff0000);
    return A == FLOAT16 ? from_half(to_half(x)) : x;
}

template <int D> inline void put_two(F x, F y, void* out, int64_t at) {
    if (D == FLOAT32) {
        memcpy((float*)out + at, &x, sizeof x);
        memcpy((float*)out + at + LANES, &y, sizeof y);
        return;
    }
    uint16_t* to = (uint16_t*)out + at;
    H h[2];
    if (D == FLOAT16) h[0] = to_half(x), h[1] = to_half(y);
    else {
#if defined(__AVX2__)
        const __m256i both = _mm256_packus_epi32((__m256i)bfloat16_bits(x), (__m256i)bfloat16_bits(y));
        _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(both, 0xd8));
        return;
#else
        h[0] = narrow(bfloat16_bits(x)), h[1] = narrow(bfloat16_bits(y));
#endif
    }
    memcpy(to, h, sizeof h);
}

template <int D> inline void put(F x, void* out, int64_t at, int64_t count = LANES) {
    if (D == FLOAT32) memcpy((float*)out + at, &x, count * 4);
    else {
        const H h = D == FLOAT16 ? to_half(x) : to_bfloat16(x);
        memcpy((uint16_t*)out + at, &h, count * 2);
    }
}

template <int D> inline F get(const void* p, int64_t at, int64_t count = LANES) {
    if (D == FLOAT32) { F x{}; memcpy(&x, (const float*)p + at, count * 4); return x; }
    H h{};
    memcpy(&h, (const uint16_t*)p + at, count * 2);
    return D == FLOAT16 ? from_half(h) : (F)(widen(h) << 16);
}

// out[at + i] = y[i] + bias[n + i], if there is one. Reads whole vectors of y.
template <int D> void put_some(const float* y, int64_t count, const void* bias, int64_t n, void* out, int64_t at) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t some = count - i < LANES ? count - i : LANES;
        const F v = load<F>(y + i);
        put<D>(bias ? v + get<D>(bias, n + i, some) : v, out, at + i, some);
    }
}

inline void put_some(int dtype, const float* y, int64_t count, const void* bias, int64_t n, void* out, int64_t at) {
    if (dtype == FLOAT32) put_some<FLOAT32>(y, count, bias, n, out, at);
    else if (dtype == BFLOAT16) put_some<BFLOAT16>(y, count, bias, n, out, at);
    else put_some<FLOAT16>(y, count, bias, n, out, at);
}
