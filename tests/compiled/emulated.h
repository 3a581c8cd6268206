// The instructions of AVX-512 and AMX that the kernels use, lane by lane, on processors without them: emulated.py.
//
// Every source is compiled with this before it. Where EMULATED is 1, names of intrinsics stand for the functions below.

#ifdef __cplusplus
#include <atomic>
#include <cmath>
#include <cpuid.h>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <immintrin.h>
#include <new>
#include <sys/syscall.h>
#include <unistd.h>
#include <utility>

// What module.cpp asks of the processor and of Linux: EMULATED_LEVEL says what there is.
namespace emulated {
inline bool is_level(const char* name) {
    const char* asked = getenv("EMULATED_LEVEL");
    return asked && !strcmp(asked, name);
}
}  // namespace emulated
#define __builtin_cpu_supports(unit) \
    (!((!strcmp(unit, "avx512bf16") || !strcmp(unit, "avx512vbmi")) && emulated::is_level("avx512_vnni")))
#undef __get_cpuid_count
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(d) = ~0u, 1)
#define syscall(...) (emulated::is_level("avx512_amx") ? 0 : -1)

#if EMULATED
#define __AVX512VNNI__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __asm__(...)  // it would name registers that there are not
#define target(...)   // of one function: the compiler would use its instructions

namespace emulated {

template <class T, int BYTES = 64> struct Lanes {
    static constexpr int N = BYTES / sizeof(T);
    T of[N];

    Lanes() : of() {}
    template <class V> Lanes(const V& v) { static_assert(sizeof v == BYTES); memcpy(of, &v, BYTES); }
    template <class V> operator V() const { V v; static_assert(sizeof v == BYTES); memcpy(&v, of, BYTES); return v; }
};

template <class T, class Op, class... L> inline Lanes<T> each_lane(Op op, const L&... given) {
    Lanes<T> made;
    for (int i = 0; i < made.N; i++) made.of[i] = op(given.of[i]...);
    return made;
}
template <class T, class R, class Op, class... V> inline R each(Op op, const V&... given) {
    return each_lane<T>(op, Lanes<T>(given)...);
}

template <class To, class From, class R, class V> inline R converted(const V& given) {  // as many as the wider have lanes
    constexpr int N = sizeof(V) / sizeof(From);
    const Lanes<From, sizeof(V)> from(given);
    Lanes<To, N * sizeof(To)> made;
    for (int i = 0; i < N; i++) made.of[i] = (To)from.of[i];
    return made;
}

template <class R> inline R read(const void* p) { R r; memcpy(&r, p, sizeof r); return r; }
template <class V> inline void write(void* p, const V& v) { memcpy(p, &v, sizeof v); }
template <class R, class V> inline R half(const V& v, int i) { return read<R>((const char*)&v + i * sizeof(R)); }

template <class T, class R> inline R read_some(uint64_t some, const void* p) {
    Lanes<T, sizeof(R)> made;
    for (int i = 0; i < made.N; i++)
        if (some >> i & 1) memcpy(made.of + i, (const T*)p + i, sizeof(T));
    return made;
}
template <class T, class V> inline void write_some(void* p, uint64_t some, const V& v) {
    const Lanes<T, sizeof(V)> from(v);
    for (int i = 0; i < from.N; i++)
        if (some >> i & 1) memcpy((T*)p + i, from.of + i, sizeof(T));
}
template <class T, class R> inline R chosen(uint64_t second, const R& a, const R& b) {
    Lanes<T> made(a);
    const Lanes<T> other(b);
    for (int i = 0; i < made.N; i++)
        if (second >> i & 1) made.of[i] = other.of[i];
    return made;
}
template <class T, class Test, class V> inline uint64_t found(Test test, const V& a, const V& b) {
    const Lanes<T> x(a), y(b);
    uint64_t made = 0;
    for (int i = 0; i < x.N; i++) made |= (uint64_t)test(x.of[i], y.of[i]) << i;
    return made;
}

template <class T, class R> inline R every(T x) {
    Lanes<T> made;
    for (T& lane : made.of) lane = x;
    return made;
}
template <class T, class R, class... X> inline R listed(X... x) {
    const T all[] = {(T)x...};
    return read<R>(all);
}

// Of each 128 bits the lower or the upper halves of a and b in turn.
template <class T> inline __m512i unpacked(const __m512i& a, const __m512i& b, bool upper) {
    constexpr int N = 16 / sizeof(T);
    const Lanes<T> x(a), y(b);
    Lanes<T> made;
    for (int i = 0; i < made.N; i++) made.of[i] = (i % 2 ? y : x).of[i / N * N + upper * N / 2 + i % N / 2];
    return made;
}

// Quarters of 128 bits: two of a, two of b.
inline __m512i shuffled(const __m512i& a, const __m512i& b, int which) {
    char made[64];
    for (int i = 0; i < 4; i++) memcpy(made + 16 * i, (const char*)(i < 2 ? &a : &b) + 16 * (which >> 2 * i & 3), 16);
    return read<__m512i>(made);
}

inline __m512 looked_up(const __m512& a, const __m512i& index, const __m512& b) {
    const Lanes<uint32_t> first(a), second(b);
    return each<uint32_t, __m512>([&](uint32_t i) { return (i & 16 ? second : first).of[i & 15]; }, index);
}

inline __m512 from_halves(const __m256i& v) {
    __m256 both[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))};
    return read<__m512>(both);
}

inline __m256i to_halves(const __m512& v, int) {  // to the nearest
    const __m128i both[] = {_mm256_cvtps_ph(half<__m256>(v, 0), 0), _mm256_cvtps_ph(half<__m256>(v, 1), 0)};
    return read<__m256i>(both);
}

inline __m512i bytes_at(const __m512i& index, const __m512i& a) {
    const Lanes<uint8_t> from(a);
    return each<uint8_t, __m512i>([&](uint8_t i) { return from.of[i & 63]; }, index);
}

inline __m512i words_at(const __m512i& index, const __m512i& a) {
    const Lanes<uint16_t> from(a);
    return each<uint16_t, __m512i>([&](uint16_t i) { return from.of[i & 31]; }, index);
}

template <class R, class V> inline R joined(const V& low, const V& high) {
    const V both[] = {low, high};
    return read<R>(both);
}

inline __m512i bits_at(const __m512i& first, const __m512i& a) {  // 8 from each byte of `first` on, of the 64 around it
    const Lanes<uint64_t> from(a);
    Lanes<uint8_t> made(first);
    for (int i = 0; i < 64; i++) {
        const uint64_t lane = from.of[i / 8];
        const int by = made.of[i] & 63;
        made.of[i] = lane >> by | (by ? lane << (64 - by) : 0);
    }
    return made;
}

inline uint32_t largest(const __m512i& v) {
    uint32_t most = 0;
    for (const uint32_t lane : Lanes<uint32_t>(v).of) most = lane > most ? lane : most;
    return most;
}

inline __m512i bytes_added(const __m512i& sums, const __m512i& a, const __m512i& b) {  // a without a sign
    const Lanes<uint8_t> x(a);
    const Lanes<int8_t> y(b);
    Lanes<int32_t> made(sums);
    for (int i = 0; i < 64; i++) made.of[i / 4] += x.of[i] * y.of[i];
    return made;
}

inline float kept(float x) {  // subnormal numbers count as 0
    const uint32_t bits = read<uint32_t>(&x), flushed = bits & 0x80000000;
    return bits & 0x7f800000 ? x : read<float>(&flushed);
}
inline float of_bfloat16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    return kept(read<float>(&bits));
}
inline float added(float sum, uint16_t a, uint16_t b) { return kept(fmaf(of_bfloat16(a), of_bfloat16(b), kept(sum))); }

template <class V> inline __m512 bfloat16_added(const __m512& sums, const V& a, const V& b) {
    const Lanes<uint16_t> x(a), y(b);
    Lanes<float> made(sums);
    for (int i = 31; i >= 0; i--) made.of[i / 2] = added(made.of[i / 2], x.of[i], y.of[i]);
    return made;
}
inline __m256bh to_bfloat16(const __m512& v) {
    const Lanes<float> from(v);
    Lanes<uint16_t, 32> made;
    for (int i = 0; i < 16; i++) {
        const float x = kept(from.of[i]);
        const uint32_t bits = read<uint32_t>(&x);
        made.of[i] = (x != x ? bits | 1 << 22 : bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
    return made;
}

// Tiles of 16 rows of 64 bytes: the only size that the kernels configure.
inline thread_local char tiles[8][16][64];

inline void load_tile(int t, const void* p, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy(tiles[t][r], (const char*)p + r * stride, 64);
}
inline void store_tile(int t, void* p, int64_t stride) {
    for (int r = 0; r < 16; r++) memcpy((char*)p + r * stride, tiles[t][r], 64);
}
// sums[m][n] = add(sums[m][n], a[m][PER * k + j], b[k][PER * n + j])
template <class Sum, class T, class Add> inline void add_tiles(Add add, int sums, int a, int b) {
    constexpr int PER = 4 / sizeof(T);
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            Sum* sum = (Sum*)tiles[sums][m] + n;
            for (int k = 0; k < 16 * PER; k++)
                *sum = add(*sum, ((const T*)tiles[a][m])[k], ((const T*)tiles[b][k / PER])[PER * n + k % PER]);
        }
}

}  // namespace emulated

#define BINARY(name, T, R, operation) \
    inline R emulated_##name(R x, R y) { return emulated::each<T, R>([](T a, T b) -> T { return operation; }, x, y); }
#define SHIFT(name, T, operation) \
    inline __m512i emulated_##name(__m512i x, int n) { return emulated::each<T, __m512i>([n](T a) -> T { return operation; }, x); }
BINARY(add_epi32, uint32_t, __m512i, a + b)
BINARY(add_epi8, uint8_t, __m512i, a + b)
BINARY(sub_epi8, uint8_t, __m512i, a - b)
BINARY(sub_epi32, uint32_t, __m512i, a - b)
BINARY(and_si512, uint32_t, __m512i, a & b)
BINARY(or_si512, uint32_t, __m512i, a | b)
BINARY(xor_si512, uint32_t, __m512i, a ^ b)
BINARY(max_epu16, uint16_t, __m512i, a > b ? a : b)
BINARY(max_epu32, uint32_t, __m512i, a > b ? a : b)
BINARY(add_ps, float, __m512, a + b)
BINARY(mul_ps, float, __m512, a * b)
BINARY(div_ps, float, __m512, a / b)
SHIFT(slli_epi16, uint16_t, n > 15 ? 0 : a << n)
SHIFT(slli_epi32, uint32_t, n > 31 ? 0 : a << n)
SHIFT(srli_epi16, uint16_t, n > 15 ? 0 : a >> n)
SHIFT(srli_epi32, uint32_t, n > 31 ? 0 : a >> n)
SHIFT(srai_epi32, int32_t, a >> (n > 31 ? 31 : n))

#define _mm512_add_epi32 emulated_add_epi32
#define _mm512_add_epi8 emulated_add_epi8
#define _mm512_sub_epi8 emulated_sub_epi8
#define _mm512_sub_epi32 emulated_sub_epi32
#define _mm512_and_si512 emulated_and_si512
#define _mm512_or_si512 emulated_or_si512
#define _mm512_xor_si512 emulated_xor_si512
#define _mm512_max_epu16 emulated_max_epu16
#define _mm512_max_epu32 emulated_max_epu32
#define _mm512_add_ps emulated_add_ps
#define _mm512_mul_ps emulated_mul_ps
#define _mm512_div_ps emulated_div_ps
#undef _mm512_slli_epi16
#define _mm512_slli_epi16 emulated_slli_epi16
#undef _mm512_slli_epi32
#define _mm512_slli_epi32 emulated_slli_epi32
#undef _mm512_srli_epi16
#define _mm512_srli_epi16 emulated_srli_epi16
#undef _mm512_srli_epi32
#define _mm512_srli_epi32 emulated_srli_epi32
#undef _mm512_srai_epi32
#define _mm512_srai_epi32 emulated_srai_epi32
#define _mm512_fmadd_ps(x, y, z) emulated::each<float, __m512>([](float a, float b, float c) { return fmaf(a, b, c); }, x, y, z)
#define _mm512_dpbusd_epi32 emulated::bytes_added
#define _mm512_dpbf16_ps emulated::bfloat16_added

#define _mm512_cvtepi8_epi16 emulated::converted<int16_t, int8_t, __m512i>
#define _mm512_cvtepu8_epi16 emulated::converted<int16_t, uint8_t, __m512i>
#define _mm512_cvtepi8_epi32 emulated::converted<int32_t, int8_t, __m512i>
#define _mm512_cvtepu8_epi32 emulated::converted<int32_t, uint8_t, __m512i>
#define _mm512_cvtepi16_epi32 emulated::converted<int32_t, int16_t, __m512i>
#define _mm512_cvtepu16_epi32 emulated::converted<int32_t, uint16_t, __m512i>
#define _mm512_cvtepi32_epi8 emulated::converted<int8_t, int32_t, __m128i>
#define _mm512_cvtepi32_epi16 emulated::converted<int16_t, int32_t, __m256i>
#define _mm512_cvtepi32_ps emulated::converted<float, int32_t, __m512>
#define _mm512_cvtps_epi32(x) emulated::each<int32_t, __m512i>([](int32_t a) { return _mm_cvtss_si32(_mm_castsi128_ps(_mm_cvtsi32_si128(a))); }, x)
#undef _mm512_cvtph_ps
#define _mm512_cvtph_ps emulated::from_halves
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph emulated::to_halves
#define _mm512_cvtneps_pbh emulated::to_bfloat16

#define _mm512_castps128_ps512(x) emulated::read_some<float, __m512>(15, &(const __m128&)(x))
#define _mm512_castps256_ps512(x) emulated::joined<__m512>((__m256)(x), (__m256)(x))
#define _mm512_castps512_ps256(x) emulated::half<__m256>(x, 0)
#define _mm512_castsi512_si256(x) emulated::half<__m256i>(x, 0)
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps emulated::half<__m256>
#undef _mm512_extracti64x4_epi64
#define _mm512_extracti64x4_epi64 emulated::half<__m256i>

#define _mm512_loadu_ps emulated::read<__m512>
#define _mm512_loadu_si512 emulated::read<__m512i>
#define _mm512_store_si512 emulated::write<__m512i>
#define _mm512_storeu_si512 emulated::write<__m512i>
#define _mm512_storeu_ps emulated::write<__m512>
#define _mm512_maskz_loadu_epi8 emulated::read_some<int8_t, __m512i>
#define _mm512_maskz_loadu_epi16 emulated::read_some<int16_t, __m512i>
#define _mm512_maskz_loadu_epi32 emulated::read_some<int32_t, __m512i>
#define _mm_maskz_loadu_epi8 emulated::read_some<int8_t, __m128i>
#define _mm256_maskz_loadu_epi8 emulated::read_some<int8_t, __m256i>
#define _mm256_maskz_loadu_epi16 emulated::read_some<int16_t, __m256i>
#define _mm256_mask_storeu_epi16 emulated::write_some<int16_t, __m256i>

#define _mm512_mask_blend_ps emulated::chosen<float, __m512>
#define _mm512_mask_mov_epi32(a, some, b) emulated::chosen<int32_t, __m512i>(some, a, b)
#define _mm512_mask_set1_epi8(a, some, x) emulated::chosen<int8_t, __m512i>(some, a, _mm512_set1_epi8(x))
#define _mm512_maskz_mov_ps(some, a) emulated::chosen<float, __m512>(some, _mm512_setzero_ps(), a)
#define _mm512_maskz_mul_ps(some, a, b) emulated::chosen<float, __m512>(some, _mm512_setzero_ps(), _mm512_mul_ps(a, b))
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, unordered) emulated::found<float>([](float x, float y) { return x != x || y != y; }, a, b)
#define _mm512_test_epi32_mask(a, b) emulated::found<uint32_t>([](uint32_t x, uint32_t y) { return (x & y) != 0; }, a, b)
#define _mm512_reduce_max_epu32 emulated::largest

#define _mm512_set1_epi8 emulated::every<int8_t, __m512i>
#define _mm512_set1_epi16 emulated::every<int16_t, __m512i>
#define _mm512_set1_epi32 emulated::every<int32_t, __m512i>
#define _mm512_set1_ps emulated::every<float, __m512>
#define _mm512_setzero_ps() emulated::every<float, __m512>(0)
#define _mm512_setzero_si512() emulated::every<int32_t, __m512i>(0)
#undef _mm512_setr_epi32
#define _mm512_setr_epi32 emulated::listed<int32_t, __m512i>
#undef _mm512_setr_ps
#define _mm512_setr_ps emulated::listed<float, __m512>

#define _mm512_unpacklo_epi16(a, b) emulated::unpacked<int16_t>(a, b, false)
#define _mm512_unpackhi_epi16(a, b) emulated::unpacked<int16_t>(a, b, true)
#define _mm512_unpacklo_epi32(a, b) emulated::unpacked<int32_t>(a, b, false)
#define _mm512_unpackhi_epi32(a, b) emulated::unpacked<int32_t>(a, b, true)
#define _mm512_unpacklo_epi64(a, b) emulated::unpacked<int64_t>(a, b, false)
#define _mm512_unpackhi_epi64(a, b) emulated::unpacked<int64_t>(a, b, true)
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 emulated::shuffled
#define _mm512_permutex2var_ps emulated::looked_up
#define _mm512_permutexvar_epi8 emulated::bytes_at
#define _mm512_permutexvar_epi16 emulated::words_at
#undef _mm512_insertf32x8
#define _mm512_insertf32x8(a, b, upper) emulated::joined<__m512>(emulated::half<__m256>(a, 0), b)
#define _mm512_broadcast_i64x4(a) emulated::joined<__m512i>(a, a)
#define _mm512_multishift_epi64_epi8 emulated::bits_at
#define _mm512_permutexvar_ps(index, a) emulated::looked_up(a, _mm512_and_si512(index, _mm512_set1_epi32(15)), a)

#undef _tile_loadconfig
#define _tile_loadconfig(configuration)
#undef _tile_release
#define _tile_release()
#undef _tile_zero
#define _tile_zero(t) memset(emulated::tiles[t], 0, sizeof emulated::tiles[t])
#undef _tile_loadd
#define _tile_loadd emulated::load_tile
#undef _tile_stored
#define _tile_stored emulated::store_tile
#undef _tile_dpbssd
#define _tile_dpbssd(sums, a, b) \
    emulated::add_tiles<int32_t, int8_t>([](int32_t sum, int8_t x, int8_t y) { return sum + x * y; }, sums, a, b)
#undef _tile_dpbf16ps
#define _tile_dpbf16ps(sums, a, b) emulated::add_tiles<float, uint16_t>(emulated::added, sums, a, b)
#endif  // EMULATED
#endif  // __cplusplus
