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
    const bool are_bytes = L.activations && has_bytes(L, P);
    if (are_bytes && !has_whole_tiles<INT8>(L)) block_linear(L, P, kernels, x, rows, stride, bias, out);
    else if (are_bytes && L.kind == INT8) tiles_linear<INT8>(L, P, kernels, x, rows, stride, bias, out);
    else if (are_bytes) tiles_linear<INT4>(L, P, kernels, x, rows, stride, bias, out);
    else tiles_linear<STREAM>(L, P, kernels, x, rows, stride, bias, out);
}
