// What kernels.cpp does with codes that suit no layout of rows.h, or with inputs that do not: -DLEVEL=, -DCODES=STREAM

#include "kernels.h"

namespace {

#include "unpack.h"
#include "row_parts.h"
#include "stream.h"
#include "steps.h"
#include "levels.h"
#include "ordered.h"

void decode_as(const Layout& L, const Parts& P, const Rows& rows, int dtype, void* out) {
    if (dtype == FLOAT32) decode_stream<FLOAT32>(L, P, rows, out);
    else if (dtype == BFLOAT16) decode_stream<BFLOAT16>(L, P, rows, out);
    else decode_stream<FLOAT16>(L, P, rows, out);
}

void linear_as(const Layout& L, const Parts& P, const void* x, int64_t rows, int64_t stride, int dtype, const void* bias,
               void* out) {
    if (L.family == ORDERED) ordered_linear(L, P, x, rows, stride, dtype, bias, out);
    else stream_linear(L, P, x, rows, stride, dtype, bias, out);
}

}  // namespace

const Kernels NAME(LEVEL, CODES) = {linear_as, decode_as, is_fixed};
