// Products and decoding of quantized weights from their parts in place: nothing is packed again, nothing is kept.
//
// It is compiled once for each level and kind of codes (-DLEVEL=avx2 -DCODES=INT8); module.cpp picks the level of the
// processor, and checks every size, stride, dtype and address before. Vectors are the extension of GCC and clang, so that
// it compiles for any processor; with AVX2, and on 64-bit ARM, vectors.h adds instructions that the extension lacks, and with
// AVX2 rows.h multiplies whole rows. Many rows of inputs are multiplied in blocks if the processor supports it: blocks.cpp.
//
// decode: value = (code + zero) * scale * unit, each step rounded to float32 as in schemes/: the same bits.
// linear: out[m][n] = unit * sum over groups of scale * (sum code * x - zero * sum x), rounded once.
//     Codes in other layouts than those of rows.h are unpacked to bytes first, a row at a time (stream.h, levels.h).
//     Tables, float8 and float32 inputs are multiplied in float32. Integer codes and 16-bit inputs are multiplied as
//     integers: x becomes 16-bit fixed point, with a scale per block of columns, so its error is at most 2**-15 of the
//     largest of its block, where its own dtype rounds each to 2**-9 (bfloat16) or 2**-12 (float16).

#include "kernels.h"

extern const Kernels NAME(LEVEL, STREAM);  // stream.cpp

namespace {

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
    NAME(LEVEL, STREAM).linear(L, P, x, rows, stride, dtype, bias, out);
}

}  // namespace

const Kernels NAME(LEVEL, CODES) = {linear_of<CODES>, decode_as<CODES>, is_fast<CODES>};
