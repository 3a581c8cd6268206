// Products with many rows of inputs on processors with AMX, for all kinds of codes.

#include <utility>

#include "kernels.h"

namespace {

constexpr int64_t MOST = 1024;  // rows of inputs at once, which are copied
constexpr int LIFTED = 0;  // tiles multiply bytes that both have signs
#include "blocks.h"
#include "tiles.h"
#include "tile_gradient.h"

}  // namespace

void tile_linear(const Layout& L, const Parts& P, const Kernels& kernels, const void* x, int64_t rows, int64_t stride,
                 const void* bias, void* out) {
    const bool are_bytes = L.activations && L.group >= L.columns && L.columns <= 1 << 17 && has_bytes(L, P);
    const auto multiply = !are_bytes ? tiles_linear<STREAM> : L.kind == INT8 ? tiles_linear<INT8> : tiles_linear<INT4>;
    for (int64_t m = 0; m < rows; m += MOST)
        multiply(L, P, kernels, (const uint16_t*)x + m * stride, rows - m < MOST ? rows - m : MOST, stride, bias,
                 (uint16_t*)out + m * L.rows);
}

void tile_gradient(const Layout& L, const Parts& P, const Kernels& kernels, const void* x, int64_t rows, int64_t stride,
                   void* out) {
    for (int64_t m = 0; m < rows; m += MOST)
        gradient_of(L, P, kernels, (const uint16_t*)x + m * stride, rows - m < MOST ? rows - m : MOST, stride,
                    (uint16_t*)out + m * L.columns);
}
