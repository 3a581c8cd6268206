// Products and decoding of quantized weights as their parts lie: nothing is packed again, nothing is kept.
//
// build.py compiles this once per machine and kind of codes (-DCODES=), with nothing but the C++ library; cpu.py
// calls it, and its entries, at the end, check every size, stride, dtype and address. Vectors are the extension of GCC and
// clang, so it compiles for any processor; AVX-512 and AVX2 get the few instructions that the extension cannot say, and
// AVX2 the rows of avx2.h.
//
// decode: value = (code + zero) * scale * unit, each step rounded to float32 as schemes/ does it: the same bits.
// linear: out[m][n] = unit * sum over groups of scale * (sum code * x - zero * sum x), rounded once.
//     Tables, float8 and float32 inputs are multiplied in float32. Integer codes and inputs of 16 bits are multiplied as
//     integers: x becomes 16-bit fixed point, with a scale per block of columns, so it moves by at most 2**-15 of the
//     largest of its block, where its own dtype rounds each to 2**-9 (bfloat16) or 2**-12 (float16).

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BW__)
#define WIDTH 64
#else
#define WIDTH 32
#endif
#if defined(__AVX512BW__) || defined(__AVX2__)
#define FIXED_POINT 1
#else
#define FIXED_POINT 0
#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && WIDTH == 32
#define FAST_ROWS 1
#else
#define FAST_ROWS 0
#endif

typedef float F __attribute__((vector_size(WIDTH)));
typedef int32_t I __attribute__((vector_size(WIDTH)));
typedef int16_t W __attribute__((vector_size(WIDTH)));
typedef uint16_t H __attribute__((vector_size(WIDTH / 2)));

// A block of columns is 8 vectors of float32, in 4-bit codes one vector of bytes.
constexpr int64_t LANES = WIDTH / 4, PLANES = 8, BLOCK = LANES * PLANES;

enum Codes { INT8, UINT8, E4M3, E5M2, TABLE4, INT4 };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16, E8M0, FP8, SIGNED, UNSIGNED, NESTED };

}  // namespace

extern "C" struct Layout {
    int64_t rows, columns, row_bytes;  // of the codes
    int64_t group, groups, height;     // columns under one scale, scales in a row, rows under one scale
    int64_t nested;                    // blocks under one nested absmax
    int32_t scale, zero;               // Dtype; Dtype, or -1 for none
    int32_t global;                    // 0: no global scale, 1: it multiplies, 2: it divides
    int32_t activations;               // what rows of x are rounded to: 0 nothing, 1 int8, 2 what no kernel knows
    float offset, unit;                // added to zero points; multiplies last
    float table[16];                   // of 4-bit codes
    const float* dynamic;              // 256 values, of nested absmax
    int64_t counts[5];                 // elements of each part: codes, scale, zero, extra, offset
    int32_t types[5];                  // their ScalarType, -1 where there is no such part
    int64_t most[3];                   // rows of x, by Dtype, up to which `linear` is the kernel to take; 0: unknown yet
    struct Entries* entries;           // of the library for these codes; null until it has been called
};


namespace {

struct Parts {
    const void *codes, *scale, *zero, *extra, *offset;
};

// -- vectors ----------------------------------------------------------------------------------------------------------

template <class V> inline V load(const void* p) { V v; memcpy(&v, p, sizeof v); return v; }

inline F all(float x) {  // F{} + x would add: -0.0 + 0.0 is not -0.0
#if WIDTH == 64
    return (F)_mm512_set1_ps(x);
#elif defined(__AVX__)
    return (F)_mm256_set1_ps(x);
#else
    F v;
    for (int i = 0; i < LANES; i++) v[i] = x;
    return v;
#endif
}

// Widening and narrowing are spelled out, because the compilers take the extension's apart, element by element.
inline I bytes(const uint8_t* p) {  // LANES of them
#if WIDTH == 64
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    I v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

inline I signed_bytes(const uint8_t* p) {
#if WIDTH == 64
    return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    I v;
    for (int i = 0; i < LANES; i++) v[i] = (int8_t)p[i];
    return v;
#endif
}

inline H halves(const uint8_t* p) {  // LANES bytes
#if WIDTH == 64
    return (H)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    return (H)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
#else
    H v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

inline I widen(H h) {
#if WIDTH == 64
    return (I)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (I)_mm256_cvtepu16_epi32((__m128i)h);
#else
    I v;
    for (int i = 0; i < LANES; i++) v[i] = h[i];
    return v;
#endif
}

inline H narrow(I v) {  // of 0 to 65535
#if WIDTH == 64
    return (H)_mm512_cvtepi32_epi16((__m512i)v);
#elif defined(__AVX2__)
    return (H)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
#else
    H h;
    for (int i = 0; i < LANES; i++) h[i] = (uint16_t)v[i];
    return h;
#endif
}

#if FIXED_POINT
template <bool SIGN> inline W words(const uint8_t* p) {  // 2 * LANES bytes
#if WIDTH == 64
    const __m256i b = _mm256_loadu_si256((const __m256i*)p);
    return (W)(SIGN ? _mm512_cvtepi8_epi16(b) : _mm512_cvtepu8_epi16(b));
#else
    const __m128i b = _mm_loadu_si128((const __m128i*)p);
    return (W)(SIGN ? _mm256_cvtepi8_epi16(b) : _mm256_cvtepu8_epi16(b));
#endif
}

inline I multiply_pairs(W a, W b) {
#if WIDTH == 64
    return (I)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#else
    return (I)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

inline F fma(F a, F b, F c) {
#if WIDTH == 64
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

inline float sum(F v) {
#if WIDTH == 32 && defined(__AVX__)
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
#if WIDTH == 64
    __m512 t;
    explicit Table(const float* p) : t(_mm512_loadu_ps(p)) {}
    F operator()(I index) const { return (F)_mm512_permutexvar_ps((__m512i)index, t); }
#elif defined(__AVX2__)
    __m256 low, high;
    explicit Table(const float* p) : low(_mm256_loadu_ps(p)), high(_mm256_loadu_ps(p + 8)) {}
    F operator()(I index) const {
        const __m256i i = (__m256i)index;
        return (F)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                                   _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }
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
#if WIDTH == 64
    return (F)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps((__m128i)h);
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

#if FIXED_POINT
inline void small_e4m3(const uint8_t* p, F* out) {  // 2 * LANES bytes, their values / 256
    const W u = words<false>(p);
    W half = ((u << 8) >> 1) & (int16_t)0xbf80;  // the sign, a copy of it that goes, and 7 bits
    half |= ((half & 0x7f80) == 0x3f80) & 0x7e00;
    H parts[2];
    memcpy(parts, &half, sizeof half);
    out[0] = from_half(parts[0]), out[1] = from_half(parts[1]);
}
#endif

template <int C> inline F values(const uint8_t* p) {
    if (C == INT8) return __builtin_convertvector(signed_bytes(p), F);
    if (C == UINT8) return __builtin_convertvector(bytes(p), F);
    if (C == E4M3) return from_e4m3(p);
    return from_half(halves(p) << 8);
}

inline H to_bfloat16(F x) {  // to the nearest, halves to even
    I bits = (I)x, rounded = ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
    return narrow((bits & 0x7fffffff) > 0x7f800000 ? I{} + 0x7fc0 : rounded);
}

inline H to_half(F x) {
#if WIDTH == 64
    return (H)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    return (H)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    typedef _Float16 G __attribute__((vector_size(WIDTH / 2)));
    return (H)__builtin_convertvector(x, G);
#endif
}

// As to_bfloat16, of numbers and of nan without payload: what decoding makes.
inline I bfloat16_bits(F x) {
    I bits = (I)x;
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & 0xffff;
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
#if WIDTH == 32 && defined(__AVX2__)
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

// -- scales -----------------------------------------------------------------------------------------------------------

template <int D> void copy_scales(const void* from, int64_t at, int64_t count, float* to) {
    int64_t g = 0;
    for (; g + LANES <= count; g += LANES) {
        const F v = get<D>(from, at + g);
        memcpy(to + g, &v, sizeof v);
    }
    if (g < count) {
        const F v = get<D>(from, at + g, count - g);
        memcpy(to + g, &v, (count - g) * 4);
    }
}

template <bool SIGN> void negated_zeros(const void* from, int64_t at, int64_t count, float offset, float* to) {
    const uint8_t* p = (const uint8_t*)from + at;
    int64_t g = 0;
    for (; g + LANES <= count; g += LANES) {
        const F v = -(__builtin_convertvector(SIGN ? signed_bytes(p + g) : bytes(p + g), F) + all(offset));
        memcpy(to + g, &v, sizeof v);
    }
    for (; g < count; g++) to[g] = -((SIGN ? (float)(int8_t)p[g] : (float)p[g]) + offset);
}

// The scales of row n, and its zero points negated, as float32.
void row_scales(const Layout& L, const Parts& P, int64_t n, float* s, float* z) {
    const int64_t G = L.groups, at = (L.height == 1 ? n : n / L.height) * G;
    const uint8_t* codes = (const uint8_t*)P.scale + at;
    switch (L.scale) {
        case FLOAT32: copy_scales<FLOAT32>(P.scale, at, G, s); break;
        case BFLOAT16: copy_scales<BFLOAT16>(P.scale, at, G, s); break;
        case FLOAT16: copy_scales<FLOAT16>(P.scale, at, G, s); break;
        case E8M0:
            for (int64_t g = 0; g < G; g++) {
                const uint32_t e = codes[g], bits = e == 255 ? 0x7fc00000 : e ? e << 23 : 0x00400000;
                memcpy(s + g, &bits, 4);
            }
            break;
        case FP8:
            for (int64_t g = 0; g < G; g += LANES) {
                uint8_t some_bytes[LANES] = {};
                const int64_t some = G - g < LANES ? G - g : LANES;
                memcpy(some_bytes, codes + g, some);
                F v = from_e4m3(some_bytes);
                memcpy(s + g, &v, some * 4);
            }
            break;
        default: {
            const float offset = *(const float*)P.offset, *absmax = (const float*)P.extra + at / L.nested;
            for (int64_t g = 0, left = L.nested - at % L.nested; g < G; absmax++, left = L.nested)
                for (; g < G && left; g++, left--) {
                    const float product = L.dynamic[codes[g]] * *absmax;
                    s[g] = product + offset;
                }
        }
    }
    if (L.global) {
        const float global = *(const float*)P.extra;
        for (int64_t g = 0; g < G; g++) s[g] = L.global == 1 ? s[g] * global : s[g] / global;
    }
    for (int64_t g = 0; g < G; g++) s[g] = s[g] == s[g] ? s[g] : NAN;  // without payload, which rounding could overflow
    if (L.zero == SIGNED) negated_zeros<true>(P.zero, at, G, L.offset, z);
    else if (L.zero == UNSIGNED) negated_zeros<false>(P.zero, at, G, L.offset, z);
    else
        for (int64_t g = 0; g < G; g++) z[g] = -L.offset;
}

// Room for the scales of a row: Table reads 16 of them from any of its first entries.
int64_t room(const Layout& L) { return L.groups + (L.columns + BLOCK - 1) / BLOCK * 8 + 32; }

typedef std::vector<float> Room;

// That some thread of a parallel region has had no memory. An exception that left the region would end the process.
class Failed {
    std::atomic<bool> is_so{false};

  public:
    operator bool() const { return is_so.load(std::memory_order_relaxed); }
    template <class Work> void within(Work work) {
        try { work(); } catch (const std::exception&) { is_so = true; }
    }
    void rethrow() const { if (is_so) throw std::bad_alloc(); }
};

// item(room, i) for every i below count, by several threads if there is much to do, each in a room of its own. One thread
// is not asked through OpenMP, which would take a tenth of what a small product does.
template <class Make, class Item> inline void over(int64_t count, bool is_much, Make make, Item item) {
    if (!is_much || count < 2) {
        auto room = make();
        for (int64_t i = 0; i < count; i++) item(room, i);
        return;
    }
    Failed failed;
#pragma omp parallel
    {
        decltype(make()) room;
        failed.within([&] { room = make(); });
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < count; i++)
            if (!failed) item(room, i);
    }
    failed.rethrow();
}

// -- decode -----------------------------------------------------------------------------------------------------------

// The codes in LANES / 2 bytes, low nibbles first.
inline I nibbles(const uint8_t* p) {
    I codes;
#if WIDTH == 64
    const __m128i b = _mm_loadl_epi64((const __m128i*)p), mask = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(b, mask), high = _mm_and_si128(_mm_srli_epi16(b, 4), mask);
    codes = (I)_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
#elif defined(__AVX2__)
    uint32_t word;
    memcpy(&word, p, 4);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    codes = (I)_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)word), shifts), _mm256_set1_epi32(15));
#else
    for (int i = 0; i < LANES / 2; i++) codes[2 * i] = p[i] & 15, codes[2 * i + 1] = p[i] >> 4;
#endif
    return codes;
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

// Z: there are zero points. A unit of 1 multiplies nothing, so `U` says whether there is another. False where the row has
// to be decoded again, `by_step`.
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

struct Rows {  // `count` rows, from `start`, or those that `index` names
    const void* index;
    bool is_short;  // int32
    int64_t start, count;

    int64_t operator[](int64_t i) const {
        return !index ? start + i : is_short ? ((const int32_t*)index)[i] : ((const int64_t*)index)[i];
    }
};

template <int C, int D, bool Z, bool U> void decode_one(const Layout& L, const uint8_t* row, const float* s,
                                                        const float* z, void* out, int64_t at) {
    if (!decode_row<C, D, Z, U>(L, row, s, z, out, at)) decode_row<C, D, Z, U>(L, row, s, z, out, at, true);
}

template <int C, int D> void decode(const Layout& L, const Parts& P, const Rows& rows, void* out) {
    const bool zero = L.zero >= 0 || L.offset != 0;
    (void)zero;
    const int64_t each = room(L);
    over(rows.count, rows.count * L.columns > 32768, [&] { return Room(2 * each); }, [&](Room& room, int64_t i) {
        const int64_t n = rows[i];
        if (rows.index && i + 1 < rows.count) {  // no processor guesses where an index leads
            const char* next = (const char*)P.codes + rows[i + 1] * L.row_bytes;
            for (int64_t b = 0; b < L.row_bytes && b < 8192; b += 64) __builtin_prefetch(next + b);
        }
        float *s = room.data(), *z = s + each;
        row_scales(L, P, n, s, z);
        const uint8_t* row = (const uint8_t*)P.codes + n * L.row_bytes;
        if constexpr (C == INT8 || C == UINT8 || C == INT4) {
            if (L.unit != 1) decode_one<C, D, true, true>(L, row, s, z, out, i * L.columns);
            else if (zero) decode_one<C, D, true, false>(L, row, s, z, out, i * L.columns);
            else decode_one<C, D, false, false>(L, row, s, z, out, i * L.columns);
        } else decode_one<C, D, false, false>(L, row, s, z, out, i * L.columns);
    });
}

// -- linear -----------------------------------------------------------------------------------------------------------

// What a row of codes is multiplied with, a block of columns after the other. `stride` floats per row of x and block:
//     float32: PLANES vectors; fixed point: half as many of int16, then one float, what they are in units of
//     `sums` vectors of float32: the sums over the lanes of each group, which zero points are multiplied with
// Lane l of plane j holds column PLANES * l + j for 4-bit codes, because that is how they come out of their words,
// and column LANES * j + l for others.
struct Inputs {
    int64_t blocks, sums, stride;
    bool fixed;
    std::vector<float> data;

    const float* at(int64_t m, int64_t b) const { return data.data() + (m * blocks + b) * stride; }
    int64_t sums_at() const { return fixed ? BLOCK / 2 + LANES : BLOCK; }

    template <int D> void fill(const void* x, int64_t rows, int64_t row_stride, int64_t columns, bool nibbled) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t b = 0; b < blocks; b++) {
                float natural[BLOCK], placed[BLOCK], *to = data.data() + (m * blocks + b) * stride;
                const int64_t first = m * row_stride + b * BLOCK;
                F largest{};
                for (int64_t k = 0; k < BLOCK; k += LANES) {
                    const int64_t left = columns - b * BLOCK - k, count = left < 0 ? 0 : left < LANES ? left : LANES;
                    F v = count == LANES ? get<D>(x, first + k) : count ? get<D>(x, first + k, count) : F{};
                    memcpy(natural + k, &v, sizeof v);
                    largest = larger(largest, v);
                }
                if (fixed) fix(natural, largest, to);
                if (nibbled)
                    for (int64_t j = 0; j < PLANES; j++)
                        for (int64_t l = 0; l < LANES; l++) placed[j * LANES + l] = natural[l * PLANES + j];
                else memcpy(placed, natural, sizeof placed);
                if (!fixed) memcpy(to, placed, sizeof placed);
                else if (nibbled) place_words(natural, (int16_t*)to, true);
                else place_words(natural, (int16_t*)to, false);
                for (int64_t i = 0; i < sums; i++) {
                    F total{};
                    for (int64_t j = i * PLANES / sums; j < (i + 1) * PLANES / sums; j++)
                        total += load<F>(placed + j * LANES);
                    memcpy(to + sums_at() + i * LANES, &total, sizeof total);
                }
            }
    }

    // `natural` in whole units of to[BLOCK / 2]: a power of two, so that multiplying by it is exact. Values that are not
    // finite make the unit so, and with it every result.
    static void fix(float* natural, F largest, float* to) {
        const float most = largest_of(largest);
        int exponent = 0;
        if (!(most <= 3e38f)) { to[BLOCK / 2] = NAN; memset(natural, 0, BLOCK * 4); return; }
        if (most > 0) frexpf(most, &exponent);
        exponent = exponent < -100 ? -100 : exponent;  // most < 2**exponent
        const float unit = ldexpf(1.0f, exponent - 15), per = ldexpf(1.0f, 15 - exponent);
        to[BLOCK / 2] = unit;
        for (int64_t k = 0; k < BLOCK; k++) {
            const float r = rintf(natural[k] * per);
            natural[k] = r > 32767.0f ? 32767.0f : r;
        }
    }

    static void place_words(const float* natural, int16_t* to, bool nibbled) {
        if (!nibbled)
            for (int64_t k = 0; k < BLOCK; k++) to[k] = (int16_t)natural[k];
        else  // word i of plane j: column 4 * i + j
            for (int64_t j = 0; j < 4; j++)
                for (int64_t i = 0; i < BLOCK / 4; i++) to[j * (BLOCK / 4) + i] = (int16_t)natural[4 * i + j];
    }

    Inputs(const void* x, int dtype, int64_t rows, int64_t row_stride, int64_t columns, bool nibbled, bool fixed,
           int64_t sums)
        : blocks((columns + BLOCK - 1) / BLOCK), sums(sums), fixed(fixed) {
        stride = sums_at() + sums * LANES;
        data.resize(rows * blocks * stride);
        if (dtype == FLOAT32) fill<FLOAT32>(x, rows, row_stride, columns, nibbled);
        else if (dtype == BFLOAT16) fill<BFLOAT16>(x, rows, row_stride, columns, nibbled);
        else fill<FLOAT16>(x, rows, row_stride, columns, nibbled);
    }
};

// The dot products, lane by lane, of N vectors (of PLANES, from `first`) of one block of codes with M rows of x.
template <int C, int M, bool X, int N> inline void dot(const uint8_t* codes, const float* const* x, const Table& table,
                                                       int64_t first, F* out) {
#if FIXED_POINT
    if (X) {
        I total[M];
        for (int m = 0; m < M; m++) total[m] = I{};
#pragma GCC unroll 4
        for (int64_t i = 0; i < N / 2; i++) {
            const int64_t j = first / 2 + i;
            const W w = C == INT4 ? (W)((load<W>(codes) >> (4 * (int)j)) & 15) : words<C == INT8>(codes + j * LANES * 2);
            for (int m = 0; m < M; m++) total[m] += multiply_pairs(w, load<W>(x[m] + j * LANES));
        }
        for (int m = 0; m < M; m++) out[m] = __builtin_convertvector(total[m], F);
        return;
    }
#endif
    for (int m = 0; m < M; m++) out[m] = F{};
#if FIXED_POINT
    if (C == E4M3) {  // two vectors at a time, in units of 2**8
#pragma GCC unroll 4
        for (int64_t j = first; j < first + N; j += 2) {
            F w[2];
            small_e4m3(codes + j * LANES, w);
            for (int m = 0; m < M; m++) {
                out[m] = fma(w[0], load<F>(x[m] + j * LANES), out[m]);
                out[m] = fma(w[1], load<F>(x[m] + (j + 1) * LANES), out[m]);
            }
        }
        for (int m = 0; m < M; m++) out[m] *= 256.0f;
        return;
    }
#endif
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; i++) {
        const int64_t j = first + i;
        F w;
        if (C == TABLE4) w = table(load<I>(codes) >> (4 * (int)j));
        else if (C == INT4) w = __builtin_convertvector((load<I>(codes) >> (4 * (int)j)) & 15, F);
        else w = values<C>(codes + j * LANES);
        for (int m = 0; m < M; m++) out[m] = fma(w, load<F>(x[m] + j * LANES), out[m]);
    }
}

template <int C, int M, bool X, bool Z> void row(const Layout& L, const uint8_t* codes, const float* s, const float* z,
                                                 const Table& table, const Inputs& in, int64_t from, float* y) {
    constexpr bool nibbled = C == TABLE4 || C == INT4;
    constexpr int64_t bytes = nibbled ? BLOCK / 2 : BLOCK;
    const int64_t wide = L.group >= L.columns ? in.blocks : L.group / BLOCK;  // blocks under one scale; 0: less than one
    const int64_t per = wide ? 1 : BLOCK / L.group;                           // scales over one block
    I spread;  // 4-bit: the scale of each lane, where there are several in a block
    for (int l = 0; l < LANES; l++) spread[l] = wide ? 0 : (int)(l * PLANES / L.group);
    F total[M], part[M];
    for (int m = 0; m < M; m++) total[m] = F{};
    int64_t left = wide;
    for (int64_t b = 0; b < in.blocks; b++) {
        const float* x[M];
        F unit[M];
        for (int m = 0; m < M; m++) {
            x[m] = in.at(from + m, b);
            if (X) unit[m] = all(x[m][BLOCK / 2]);
        }
        const uint8_t* at = codes + b * bytes;
        uint8_t rest[bytes];
        if (L.row_bytes - b * bytes < bytes) {
            memset(rest, 0, bytes);
            memcpy(rest, at, L.row_bytes - b * bytes);
            at = rest;
        }
        const int64_t parts = nibbled ? 1 : per;  // at most 4: groups of bytes are 32 columns or more
        for (int64_t i = 0; i < parts; i++) {
            F scale = all(*s), zero = all(*z);
            if (nibbled && !wide) {
                scale = Table(s)(spread);
                if (Z) zero = Table(z)(spread);
            }
            if (nibbled || parts == 1) dot<C, M, X, 8>(at, x, table, 0, part);
            else if (parts == 2) dot<C, M, X, 4>(at, x, table, i * 4, part);
            else dot<C, M, X, 2>(at, x, table, i * 2, part);
            for (int m = 0; m < M; m++) {
                if (Z) part[m] = fma(zero, load<F>(x[m] + in.sums_at() + i * LANES), part[m]);
                total[m] = fma(X ? scale * unit[m] : scale, part[m], total[m]);
            }
            if (!wide) s += nibbled ? per : 1, z += nibbled ? per : 1;
        }
        if (wide && --left == 0) left = wide, s++, z++;
    }
    for (int m = 0; m < M; m++) y[m] = sum(total[m]) * L.unit;
}

template <int D> void put_one(float y, const void* bias, int64_t n, void* out, int64_t at) {
    if (bias) y += get<D>(bias, n, 1)[0];
    put<D>(all(y), out, at, 1);
}

template <int C, bool X, bool Z> void linear(const Layout& L, const Parts& P, const void* x, int64_t rows,
                                             int64_t stride, int dtype, const void* bias, void* out) {
    constexpr bool nibbled = C == TABLE4 || C == INT4;
    const int64_t per = L.group >= BLOCK || L.group >= L.columns ? 1 : BLOCK / L.group;
    const Inputs in(x, dtype, rows, stride, L.columns, nibbled, X, !Z ? 0 : nibbled ? 1 : per);
    const int64_t each = room(L);
    const Table table(L.table);
    const auto make = [&] { return Room(2 * each); };
    over(L.rows, rows * L.rows * L.columns > 65536, make, [&](Room& room, int64_t n) {
        float *s = room.data(), *z = s + each, y[4];
        row_scales(L, P, n, s, z);
        const uint8_t* codes = (const uint8_t*)P.codes + n * L.row_bytes;
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            if (some == 4) row<C, 4, X, Z>(L, codes, s, z, table, in, m, y);
            else if (some == 2) row<C, 2, X, Z>(L, codes, s, z, table, in, m, y);
            else row<C, 1, X, Z>(L, codes, s, z, table, in, m, y);
            for (int64_t i = 0; i < some; i++) {
                const int64_t at = (m + i) * L.rows + n;
                if (dtype == FLOAT32) put_one<FLOAT32>(y[i], bias, n, out, at);
                else if (dtype == BFLOAT16) put_one<BFLOAT16>(y[i], bias, n, out, at);
                else put_one<FLOAT16>(y[i], bias, n, out, at);
            }
        }
    });
}

#if FAST_ROWS
#include "avx2.h"

template <int C, int S, int M, bool E> void fast_row(const Layout& L, const uint8_t* codes, const float* scale,
                                             const float* zero, Decoder<C>& decoder, const Spans& in, int64_t m,
                                             float* scratch, float* y) {
    if constexpr (!is_integer(C)) float_row<C, S, M>(L, codes, scale, decoder, in, m, scratch, y);
    else if (E || L.zero >= 0 || L.offset != 0) integer_row<C, S, M, true, E>(L, codes, scale, zero, in, m, scratch, y);
    else integer_row<C, S, M, E, E>(L, codes, scale, zero, in, m, scratch, y);  // with E, zero points always
}

// out[at + i] = y[i] + bias[n + i]
template <int D> void put_some(const float* y, int64_t count, const void* bias, int64_t n, void* out, int64_t at) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int64_t some = count - i < LANES ? count - i : LANES;
        const F v = load<F>(y + i);
        put<D>(bias ? v + get<D>(bias, n + i, some) : v, out, at + i, some);
    }
}

// E: inputs are rounded to 8 bits, and 4-bit codes are multiplied with one byte of each instead of two.
template <int C, int S, bool E> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                         int dtype, const void* bias, void* out) {
    constexpr int64_t TILE = 16;  // rows of codes, so that many rows of inputs are read from the cache
    const Spans in = Spans::of<C, S, E>(L, x, dtype, rows, stride);
    const int64_t count = in.spans * scales_of<S>, each = is_integer(C) ? in.stride : room(L);
    const bool is_much = L.rows > 1 && rows * L.rows * L.columns > 65536;
    const int64_t tile = L.rows >= 256 || !is_much ? TILE : 1;  // few rows are shared between threads one by one
    Failed failed;
    const auto work = [&] {
        std::vector<float> s, z, scratch, scales, zeros;
        failed.within([&] {
            s.resize(room(L)), z.resize(room(L)), scratch.resize(4 * in.stride + LANES);
            scales.resize(tile * each + LANES), zeros.resize(tile * each + LANES, -L.offset);
        });
        Decoder<C> decoder(L);
        alignas(64) float y[4][TILE];
#pragma omp for schedule(guided, 2)  // a core that has other work, too, takes fewer rows
        for (int64_t first = 0; first < L.rows; first += tile) {
            if (failed) continue;
            const int64_t end = first + tile < L.rows ? first + tile : L.rows;
            if constexpr (is_integer(C))
                scales_of_rows<S>(L, P, first, end - first, count, each, s.data(), z.data(), scales.data(), zeros.data());
            else
                for (int64_t n = first; n < end; n++) row_scales(L, P, n, &scales[(n - first) * each], z.data());
            for (int64_t m = 0, some; m < rows; m += some) {
                some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
                for (int64_t n = first; n < end; n++) {
                    const uint8_t* codes = (const uint8_t*)P.codes + n * L.row_bytes;
                    const float *scale = &scales[(n - first) * each], *zero = &zeros[(n - first) * each];
                    float sums[4];
                    if (some == 4) fast_row<C, S, 4, E>(L, codes, scale, zero, decoder, in, m, scratch.data(), sums);
                    else if (some == 2) fast_row<C, S, 2, E>(L, codes, scale, zero, decoder, in, m, scratch.data(), sums);
                    else fast_row<C, S, 1, E>(L, codes, scale, zero, decoder, in, m, scratch.data(), sums);
                    for (int64_t i = 0; i < some; i++) y[i][n - first] = sums[i];
                }
                for (int64_t i = 0; i < some; i++) {
                    const int64_t at = (m + i) * L.rows + first;
                    if (dtype == FLOAT32) put_some<FLOAT32>(y[i], end - first, bias, first, out, at);
                    else if (dtype == BFLOAT16) put_some<BFLOAT16>(y[i], end - first, bias, first, out, at);
                    else put_some<FLOAT16>(y[i], end - first, bias, first, out, at);
                }
            }
        }
    };
    if (is_much) {
#pragma omp parallel
        work();
    } else work();  // OpenMP would take a tenth of what a small product does
    failed.rethrow();
}

template <int C, int S> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride,
                                         int dtype, const void* bias, void* out) {
    if constexpr (C == INT4) {
        if (L.activations) return fast_linear<C, S, true>(L, P, x, rows, stride, dtype, bias, out);
    }
    fast_linear<C, S, false>(L, P, x, rows, stride, dtype, bias, out);
}

// Inputs of float32 are not fixed point unless that is asked for.
template <int C> bool is_fast(const Layout& L, int dtype) {
    if (is_integer(C) && dtype == FLOAT32 && !L.activations) return false;
    return L.group >= L.columns || L.group % SPAN == 0 || L.group == 64 || L.group == 32;
}

template <int C> void fast_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                                  const void* bias, void* out) {
    if (L.group >= L.columns) fast_linear<C, WHOLE>(L, P, x, rows, stride, dtype, bias, out);
    else if (L.group % SPAN == 0) fast_linear<C, WIDE>(L, P, x, rows, stride, dtype, bias, out);
    else if (L.group == 64) fast_linear<C, G64>(L, P, x, rows, stride, dtype, bias, out);
    else fast_linear<C, G32>(L, P, x, rows, stride, dtype, bias, out);
}
#else
template <int C> bool is_fast(const Layout&, int) { return false; }
#endif

template <int C> void decode_as(const Layout& L, const Parts& P, const Rows& rows, int dtype, void* out) {
    if (dtype == FLOAT32) decode<C, FLOAT32>(L, P, rows, out);
    else if (dtype == BFLOAT16) decode<C, BFLOAT16>(L, P, rows, out);
    else decode<C, FLOAT16>(L, P, rows, out);
}

template <int C> void linear_of(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                                const void* bias, void* out) {
#if FAST_ROWS
    if (is_fast<C>(L, dtype)) return fast_linear<C>(L, P, x, rows, stride, dtype, bias, out);
#endif
    if constexpr (C == INT8 || C == UINT8 || C == INT4) {
        const bool zero = L.zero >= 0 || L.offset != 0;
#if FIXED_POINT
        if (dtype != FLOAT32) {
            if (zero) linear<C, true, true>(L, P, x, rows, stride, dtype, bias, out);
            else linear<C, true, false>(L, P, x, rows, stride, dtype, bias, out);
            return;
        }
#endif
        if (zero) linear<C, false, true>(L, P, x, rows, stride, dtype, bias, out);
        else linear<C, false, false>(L, P, x, rows, stride, dtype, bias, out);
    } else linear<C, false, false>(L, P, x, rows, stride, dtype, bias, out);
}

#include "python.h"
#include "tensors.h"
#include "dispatcher.h"

// Each answers None, with nothing computed, where the call does not suit, and NotImplemented where it would if the input
// were contiguous.

// x (..., L.columns) times the transposed weight, plus bias if there is one; all of one dtype.
struct Product {
    Seen x, bias{};  // without a bias, `at` is null
    Parts parts;
    int dtype;
    int64_t rows, stride;
    bool is_much;
    std::vector<char> own;  // a bias is a parameter, and another thread may give it other memory meanwhile

    enum Fit { NOT, IF_CONTIGUOUS, FITS };

    Fit fit(const Layout& L) {
        dtype = dtype_of(x.dtype);
        if (dtype < 0 || x.dim == 0 || x.sizes[x.dim - 1] != L.columns) return NOT;
        if (L.activations > 1 || (L.activations && !is_fast<CODES>(L, dtype))) return NOT;
        if (bias.at && (bias.dtype != x.dtype || bias.dim != 1 || bias.count != L.rows || !bias.is_contiguous)) return NOT;
        const bool in_rows = x.dim == 2 && (x.strides[1] == 1 || L.columns == 1);
        if (!in_rows && !x.is_contiguous) return IF_CONTIGUOUS;
        rows = x.count / L.columns, stride = in_rows ? x.strides[0] : L.columns;
        is_much = rows * L.rows * L.columns > 65536;
        if (is_much && bias.at) {
            own.assign((const char*)bias.at, (const char*)bias.at + bias.count * size_of(bias.dtype));
            bias.at = own.data();
        }
        return FITS;
    }

    void into(const Layout& L, void* out) const {
        linear_of<CODES>(L, parts, x.at, rows, stride, dtype, bias.at, out);
    }
};

// work(), a new reference; where there is no memory for it null, with Python's error set.
template <class Work> Object* or_memory_error(Work work) {
    try {
        return work();
    } catch (const std::exception&) {
        python.raise(python.memory_error, "out of memory: a product or decoding found no room for what it works with");
        return nullptr;
    }
}

// A product as a new tensor (..., L.rows); `given_bias` may be None.
Object* try_product(const Layout& L, Object* given_x, Object* given_bias, Object* const* given, intptr_t count) {
    Product made;
    Seen seen, &bias = made.bias;
    int64_t cdata;
    const auto look = [&](intptr_t i, Seen& part) { return part.look(cdata_of(given[i])); };
    if (!is_as_it_lies(given_x, &cdata) || !made.x.look(cdata) || !look_at_parts(L, count, made.parts, look))
        return again(python.none);
    if (given_bias != python.none && (!is_as_it_lies(given_bias, &cdata) || !bias.look(cdata))) return again(python.none);
    const auto fit = made.fit(L);
    if (fit != Product::FITS) return again(fit == Product::NOT ? python.none : python.not_implemented);
    Held out(new_tensor(made.x.sizes, made.x.dim - 1, L.rows, made.dtype));
    if (!out.object) return nullptr;
    if (!seen.look(cdata_of(out.object))) return again(python.none);
    aside(made.is_much, [&] { made.into(L, seen.at); });
    return out.release();
}

// The rows from `start` to `stop`, or those that `given_index` (int64 or int32, of any rank) names if that is not None.
// `given_out`, if that is not None, holds them, and may be larger.
Object* try_some_rows(const Layout& L, int64_t dtype, Object* given_index, int64_t start, int64_t stop, Object* given_out,
                      Object* const* given, intptr_t count) {
    Rows rows = {nullptr, false, start, stop - start};
    Parts parts;
    Seen index, seen;
    int64_t cdata;
    const auto look = [&](intptr_t i, Seen& part) { return part.look(cdata_of(given[i])); };
    if (dtype < 0 || dtype > 2 || !look_at_parts(L, count, parts, look)) return again(python.none);
    if (given_index != python.none) {
        if (!is_as_it_lies(given_index, &cdata) || !index.look(cdata)) return again(python.none);
        if (index.dtype != 4 && index.dtype != 3) return again(python.none);
        if (!index.is_contiguous) return again(python.not_implemented);
        rows = {index.at, index.dtype == 3, 0, index.count};
        for (int64_t i = 0; i < rows.count; i++)
            if (rows[i] < 0 || rows[i] >= L.rows) {
                python.raise(python.index_error, "index out of range in self");
                return nullptr;
            }
    } else if (rows.start < 0 || rows.count < 1 || rows.count > L.rows - rows.start) return again(python.none);
    Held out(given_out != python.none ? again(given_out)
             : rows.index ? new_tensor(index.sizes, index.dim, L.columns, dtype)
                          : new_tensor(&rows.count, 1, L.columns, dtype));
    if (!out.object) return nullptr;
    if (!seen.look(cdata_of(out.object)) || !seen.is_contiguous) return again(python.none);
    if (dtype_of(seen.dtype) != dtype || seen.count < rows.count * L.columns) return again(python.none);
    aside(rows.count * L.columns > 65536, [&] { decode_as<CODES>(L, parts, rows, dtype, seen.at); });
    return out.release();
}

Object* product(const Layout& L, Object* x, Object* bias, Object* const* given, intptr_t count) {
    return or_memory_error([&] { return try_product(L, x, bias, given, count); });
}

Object* some_rows(const Layout& L, int64_t dtype, Object* index, int64_t start, int64_t stop, Object* out,
                  Object* const* given, intptr_t count) {
    return or_memory_error([&] { return try_some_rows(L, dtype, index, start, stop, out, given, count); });
}

// The same from and to handles; 0 where the call does not suit, or there is no memory. Python need not be held.
uint64_t product_of_handles(const Layout& L, const void* x, const void* bias, const uint64_t* given, intptr_t count) {
    Product made;
    const auto look = [&](intptr_t i, Seen& part) { return part.look_at((const void*)given[i]); };
    if (!made.x.look_at(x) || (bias && !made.bias.look_at(bias))) return 0;
    if (!look_at_parts(L, count, made.parts, look)) return 0;
    uint64_t out = 0;
    try {
        if (made.fit(L) != Product::FITS || made.rows > L.most[made.dtype]) return 0;
        Seen seen;
        out = empty_as(made.x, L.rows);
        if (out && seen.look_at((const void*)out)) {
            made.into(L, seen.at);
            return out;
        }
    } catch (const std::exception&) {
    }
    if (out) dispatcher.drop_tensor((void*)out);
    return 0;
}

}  // namespace

struct Entries {
    decltype(product)* linear;
    decltype(some_rows)* decode;
    decltype(product_of_handles)* linear_of_handles;
};

namespace {

Entries own = {product, some_rows, nullptr};

Layout* layout_at(Object* address) {
    Layout* L = (Layout*)python.address(address);
    L->entries = &own;
    return L;
}

// (address of the Layout, x, bias or None, *parts)
Object* enter_linear(Object*, Object* const* given, intptr_t count) {
    if (count < 4) return again(python.none);
    return product(*layout_at(given[0]), given[1], given[2], given + 3, count - 3);
}

// (address of the Layout, dtype as a number, index or None, start, stop, out or None, *parts)
Object* enter_decode(Object*, Object* const* given, intptr_t count) {
    if (count < 7) return again(python.none);
    const int64_t start = python.number(given[3]), stop = python.number(given[4]);
    return some_rows(*layout_at(given[0]), python.number(given[1]), given[2], start, stop, given[5], given + 6, count - 6);
}

// A Weight whose kernels are known, while no graph is recorded of it or of `x` or `bias`, and nothing looks on.
struct Known {
    Held dict, spec, dtype;
    Layout* L = nullptr;
    Object* parts[5];
    intptr_t count = 0;
    int number = -1;  // Dtype of the Weight

    Known(Object* weight, Object* x, Object* bias) : dict(nullptr), spec(nullptr), dtype(nullptr) {
        if ((torch_says.records_graphs() && any_requires_grad(weight, x, bias)) || is_observed()) return;
        dict.object = python.dict(weight);
        if (!dict.object) python.forget();
        if (!dict.object) return;
        Object* layout = python.item(dict.object, python.kernel_layout);
        if (!layout) return;
        const Held type(python.type(layout));
        if (type.object != python.layout) return;
        spec.object = again(python.item(dict.object, python.spec));
        if (!spec.object) return;
        dtype.object = python.get(spec.object, python.dtype);
        for (int i = 0; i < 3; i++)
            if (dtype.object == python.dtypes[i]) number = i;
        L = (Layout*)python.address(python.field(layout, 0));
        Object* names = python.field(layout, 1);
        for (; count < 5; count++) {
            Object* name = count < python.length(names) ? python.field(names, count) : nullptr;
            Object* part = name ? python.item(dict.object, name) : nullptr;
            if (!part) break;
            parts[count] = again(part);  // another thread may replace it meanwhile
        }
        if (number < 0) L = nullptr;
    }
    ~Known() { for (intptr_t i = 0; i < count; i++) python.drop(parts[i]); }
};

Object* or_none(Object* made) {
    if (made != python.not_implemented) return made;
    python.drop(made);
    return again(python.none);
}

// Both take what `__torch_function__` is given, the arguments and their names, and give None where it takes more thought.

// How many arguments there are, none of them by name; -1 if that is not so.
intptr_t positional(Object* args, Object* names) {
    const intptr_t count = python.length(args), named = names == python.none ? 0 : python.size(names);
    if (count < 0 || named < 0) python.forget();
    return named == 0 ? count : -1;
}

// ((x, Weight) or (x, Weight, bias or None), {})
Object* shortcut_linear(Object*, Object* const* given, intptr_t count) {
    const intptr_t length = count == 2 ? positional(given[0], given[1]) : -1;
    if (length != 2 && length != 3) return again(python.none);
    Object *given_x = python.field(given[0], 0), *bias = length == 3 ? python.field(given[0], 2) : python.none;
    const Known known(python.field(given[0], 1), given_x, bias);
    if (!known.L || !known.L->entries || !known.L->most[known.number]) return again(python.none);
    Seen x;
    if (!x.look(cdata_of(given_x)) || dtype_of(x.dtype) != known.number) return again(python.none);
    if (x.count / known.L->columns > known.L->most[known.number]) return again(python.none);
    return or_none(known.L->entries->linear(*known.L, given_x, bias, known.parts, known.count));
}

// ((index, Weight), options of F.embedding): but for max_norm they say something of gradients only; what they must not say
// is for torch to refuse.
Object* shortcut_gather(Object*, Object* const* given, intptr_t count) {
    if (count != 2 || positional(given[0], python.none) != 2) return again(python.none);
    Object* max_norm = given[1] == python.none ? nullptr : python.item(given[1], python.max_norm);
    if (max_norm && max_norm != python.none) return again(python.none);
    Object* index = python.field(given[0], 0);
    const Known known(python.field(given[0], 1), index, python.none);
    if (!known.L || !known.L->entries) return again(python.none);
    const Layout& L = *known.L;
    Object* padding = given[1] == python.none ? nullptr : python.item(given[1], python.padding_idx);
    if (padding && padding != python.none) {
        const int64_t row = python.number(padding);  // -1 where it is no number
        if (row < 0) python.forget();
        if (row < 0 || row >= L.rows) return again(python.none);
    }
    return or_none(L.entries->decode(L, known.number, index, 0, 0, python.none, known.parts, known.count));
}

// -- in compiled graphs -----------------------------------------------------------------------------------------------

struct Remembered {
    const Layout* L;
    size_t parts;                // that the op is given
    std::vector<int64_t> order;  // which of them the kernels take
};
std::unordered_map<std::string, Remembered> remembered;  // by what the op is told of the Weight
std::shared_mutex remembering;

// torchtether::linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor
void linear_in_graph(uint64_t* stack, uint64_t, uint64_t) {
    const Remembered* found = nullptr;
    {
        std::shared_lock<std::shared_mutex> lock(remembering);
        const auto at = remembered.find(text_of(stack[3]));
        if (at != remembered.end()) found = &at->second;  // which stays there
    }
    const std::vector<uint64_t> parts = items_of(stack[2]);
    uint64_t made = 0, taken[5];
    if (found && parts.size() == found->parts && found->L->entries && found->L->entries->linear_of_handles) {
        const intptr_t count = found->order.size();
        for (intptr_t i = 0; i < count; i++) taken[i] = parts[found->order[i]];
        const void* bias = stack[1] ? (const void*)*(const uint64_t*)stack[1] : nullptr;
        made = found->L->entries->linear_of_handles(*found->L, (const void*)stack[0], bias, taken, count);
    }
    if (!made) return pass_on("torchtether::any_linear", stack);
    drop_tensor(stack[0]), drop_optional_tensor(stack[1]), drop_text(stack[3]);
    for (const uint64_t part : parts) drop_tensor(part);
    dispatcher.drop_list((void*)stack[2]);
    stack[0] = made;
}

}  // namespace

// Each library makes tensors by itself; the `linear_in_graph` of one of them becomes the op's kernel on the CPU.
extern "C" int tether_serve(const void* from_torch, int is_first) {
    memcpy(&dispatcher, from_torch, sizeof dispatcher);
    own.linear_of_handles = product_of_handles;
    return is_first && implement("linear", linear_in_graph);
}

// From now on it knows the Weights that the op is told to be `weight`.
extern "C" void tether_remember(const char* weight, const Layout* L, int64_t parts, const int64_t* order, int64_t count) {
    std::unique_lock<std::shared_mutex> lock(remembering);
    remembered.emplace(weight, Remembered{L, (size_t)parts, std::vector<int64_t>(order, order + count)});
}

extern "C" {
Method tether_linear = {"linear", enter_linear, METH_FASTCALL, nullptr};
Method tether_decode = {"decode", enter_decode, METH_FASTCALL, nullptr};
Method tether_shortcut_linear = {"shortcut_linear", shortcut_linear, METH_FASTCALL, nullptr};
Method tether_shortcut_gather = {"shortcut_gather", shortcut_gather, METH_FASTCALL, nullptr};
}

// Whether torch's functions say of a tensor, given by `_cdata`, what is known of it: (2, 3) float32, contiguous, at `at`
// and there 4 bytes into its storage.
extern "C" int tether_bind(const void* from_python, const void* from_torch, int64_t cdata, const void* at) {
    memcpy(&python, from_python, sizeof python);
    memcpy(&torch_says, from_torch, sizeof torch_says);
    Seen seen;
    const void* handle = &cdata;
    int64_t offset = 0, bytes = 0;
    if (!seen.look(cdata) || torch_says.offset(handle, &offset) || torch_says.bytes(handle, &bytes)) return 0;
    const bool shape = seen.dim == 2 && seen.sizes[0] == 2 && seen.sizes[1] == 3 && seen.strides[0] == 3;
    return shape && seen.strides[1] == 1 && seen.dtype == 6 && seen.at == at && offset == 1 && bytes == 28;
}
