// Products and decoding of quantized weights as their parts lie: nothing is packed again, nothing is kept.
//
// It is compiled once for each level and kind of codes (-DLEVEL=avx2 -DCODES=INT8); module.cpp asks the processor which
// level it takes, and checks every size, stride, dtype and address before. Vectors are the extension of GCC and clang, so
// that it compiles for any processor; where the compiler may use AVX2, vectors.h says what the extension cannot, and
// rows_avx2.h multiplies whole rows. The headers are the chapters of one translation unit, in the order of what they use.
//
// decode: value = (code + zero) * scale * unit, each step rounded to float32 as schemes/ does it: the same bits.
// linear: out[m][n] = unit * sum over groups of scale * (sum code * x - zero * sum x), rounded once.
//     Streams of codes that suit no layout of their own are unpacked to bytes first, a row at a time (stream.h).
//     Tables, float8 and float32 inputs are multiplied in float32. Integer codes and inputs of 16 bits are multiplied as
//     integers: x becomes 16-bit fixed point, with a scale per block of columns, so it moves by at most 2**-15 of the
//     largest of its block, where its own dtype rounds each to 2**-9 (bfloat16) or 2**-12 (float16).

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "layout.h"

namespace {

#include "vectors.h"
#include "memory.h"
#include "scales.h"
#include "threads.h"
#include "decode.h"
#include "linear.h"
#include "linear_avx2.h"
#include "unpack.h"
#include "row_parts.h"
#include "stream.h"

template <int C> void decode_as(const Layout& L, const Parts& P, const Rows& rows, int dtype, void* out) {
    if constexpr (C == STREAM) {
        if (dtype == FLOAT32) decode_stream<FLOAT32>(L, P, rows, out);
        else if (dtype == BFLOAT16) decode_stream<BFLOAT16>(L, P, rows, out);
        else decode_stream<FLOAT16>(L, P, rows, out);
    } else if (dtype == FLOAT32) decode<C, FLOAT32>(L, P, rows, out);
    else if (dtype == BFLOAT16) decode<C, BFLOAT16>(L, P, rows, out);
    else decode<C, FLOAT16>(L, P, rows, out);
}

template <int C> void aligned_linear(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                                     const void* bias, void* out) {
#if FAST_ROWS
    if (is_fast<C>(L, dtype)) return fast_linear<C>(L, P, x, rows, stride, dtype, bias, out);
#endif
    if constexpr (C == INT8 || C == UINT8 || C == INT4) {
        if (dtype == FLOAT32) return levels_linear<FloatInputs>(L, P, x, rows, stride, dtype, bias, out);
        const bool zero = L.zero >= 0 || L.offset != 0;
        if (zero) linear<C, FIXED_POINT, true>(L, P, x, rows, stride, dtype, bias, out);
        else linear<C, FIXED_POINT, false>(L, P, x, rows, stride, dtype, bias, out);
    } else linear<C, false, false>(L, P, x, rows, stride, dtype, bias, out);
}

template <int C> void linear_of(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype,
                                const void* bias, void* out) {
    if constexpr (C == STREAM) stream_linear(L, P, x, rows, stride, dtype, bias, out);
    else aligned_linear<C>(L, P, x, rows, stride, dtype, bias, out);
}

}  // namespace

#define JOIN(LEVEL, CODES) kernels_##LEVEL##_##CODES
#define NAME(LEVEL, CODES) JOIN(LEVEL, CODES)
extern const Kernels NAME(LEVEL, CODES);
const Kernels NAME(LEVEL, CODES) = {linear_of<CODES>, decode_as<CODES>, is_fast<CODES>};
