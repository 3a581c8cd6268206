// Products with many rows of inputs on processors with AMX, for all kinds of codes.

#include <utility>
#include <vector>

#include "kernels.h"

namespace {

#include "blocks.h"
#include "tiles.h"

// Whether bytes under one scale fill whole tiles.
template <int C> bool has_whole_tiles(const Layout& L) { return Tile<C>::piece_of(L) % 64 == 0; }

}  // namespace

void tile_linear(const Layout& L, const Parts& P, const Kernels& kernels, const void* x, int64_t rows, int64_t stride,
                 const void* bias, void* out) {
    constexpr int64_t MOST = 4096;  // rows of inputs at once, which are copied
    const bool are_bytes = L.activations && has_bytes(L, P);
    const auto multiply = !are_bytes                   ? tiles_linear<STREAM>
                          : !has_whole_tiles<INT8>(L) ? block_linear
                          : L.kind == INT8            ? tiles_linear<INT8>
                                                      : tiles_linear<INT4>;
    for (int64_t m = 0; m < rows; m += MOST)
        multiply(L, P, kernels, (const uint16_t*)x + m * stride, rows - m < MOST ? rows - m : MOST, stride, bias,
                 (uint16_t*)out + m * L.rows);
}
