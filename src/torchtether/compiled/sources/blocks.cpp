// Products with many rows of inputs on processors with AVX-512 VNNI and BF16, for all kinds of codes.

#include <utility>

#include "kernels.h"

namespace {

constexpr int64_t MOST = 1024;  // rows of gradients at once: the sums of more do not stay in the cache
constexpr int LIFTED = 128;  // added to rounded inputs: one of two bytes that are multiplied has no sign
#include "blocks.h"
#include "block_gradient.h"

}  // namespace

void block_linear(const Layout& L, const Parts& P, const Kernels& kernels, const void* x, int64_t rows, int64_t stride,
                  const void* bias, void* out) {
    const bool are_bytes = L.activations && has_bytes(L, P);
    if (are_bytes && L.kind == INT8) blocks_linear<INT8>(L, P, kernels, x, rows, stride, bias, out);
    else if (are_bytes) blocks_linear<INT4>(L, P, kernels, x, rows, stride, bias, out);
    else blocks_linear<STREAM>(L, P, kernels, x, rows, stride, bias, out);
}

void block_gradient(const Layout& L, const Parts& P, const Kernels& kernels, const void* x, int64_t rows, int64_t stride,
                    void* out) {
    for (int64_t m = 0; m < rows; m += MOST)
        gradient_of(L, P, kernels, (const uint16_t*)x + m * stride, rows - m < MOST ? rows - m : MOST, stride,
                    (uint16_t*)out + m * L.columns);
}
