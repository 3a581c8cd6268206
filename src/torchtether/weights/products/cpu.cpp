// Products and decoding of quantized weights as their parts lie: nothing is packed again, nothing is kept.
//
// build.py compiles this once per machine and kind of codes (-DCODES=), with nothing but the C++ library; cpu.py
// calls it, and calls.h checks every size, stride, dtype and address. Vectors are the extension of GCC and clang, so it
// compiles for any processor; AVX-512 and AVX2 get the few instructions that the extension cannot say (vectors.h), and
// AVX2 the rows of avx2.h. It is one translation unit: the headers are its chapters, in the order of what they use.
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

#include "layout.h"

namespace {

#include "vectors.h"
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

#include "python.h"
#include "tensors.h"
#include "dispatcher.h"
#include "calls.h"

}  // namespace

struct Entries {
    decltype(product)* linear;
    decltype(some_rows)* decode;
    decltype(product_of_handles)* linear_of_handles;
};

namespace {

#include "entries.h"
#include "graph_op.h"

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
