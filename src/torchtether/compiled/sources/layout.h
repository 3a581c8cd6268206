// The kinds of codes, and the layout of the parts of a weight, which layout.py fills field by field.
//
// It uses neither Python nor torch: the kernels of every level include it, and so does the module.
#pragma once

#include <cstddef>
#include <cstdint>

enum Codes { INT8, UINT8, E4M3, E5M2, TABLE4, INT4, STREAM, KINDS, TABLE8 = KINDS };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16, E8M0, FP8, SIGNED, UNSIGNED, NESTED };
enum Family { SIMPLE, BIASED, BIASED_FIRST, SUPER_BLOCKS, ORDERED };  // row_parts.h; ORDERED: a group by column, in `extra`
constexpr int SLOTS = 5;  // the most parts that the kernels take: codes, scale, zero points, and two more

struct Layout {
    int64_t kind;                      // Codes
    int64_t rows, columns, row_bytes;  // of the codes
    int64_t group, groups, height;     // columns under one scale, scales in a row, rows under one scale
    int64_t nested;                    // blocks under one nested absmax, or super scale
    int32_t scale, zero;               // Dtype; Dtype, or -1 for none
    int32_t global_scale;              // 0: none, 1: it multiplies, 2: it divides
    int32_t activations;               // type to which rows of x are rounded: 0 none, 1 int8, 2 one that no kernel takes
    float offset, unit;                // added to zero points; multiplies last
    float table[16];                   // of 4-bit codes
    float dynamic[256];                // values of nested absmax
    int64_t counts[SLOTS];             // elements of each part: codes, scale, zero, extra, offset
    int32_t types[SLOTS];              // their ScalarType, -1 where there is no such part
    int64_t most[3];                   // rows of x, by Dtype, up to which `linear` is the kernel to take; 0: not set yet
    int64_t least[3];                  // rows of x from which on it multiplies in blocks (blocks.h); 0: never
    // of a STREAM, stream.h
    int32_t bits, source;              // bits of a code; Codes: its meaning
    int32_t family, arithmetic;        // Family; Dtype to which its steps are rounded
    int32_t is_flat;                   // whether groups and bytes cross the ends of rows
    int32_t is_whole;                  // whether all levels are small multiples of `step`, a power of two
    float step;
    float levels[256];                 // by code, of TABLE8
    uint8_t whole[64];                 // by code: levels as signed bytes, in units of `step`
};

struct Parts {
    const void *codes, *scale, *zero, *extra, *offset;
};

struct Rows {  // `count` rows: from `start` on, or those in `index`
    const void* index;
    bool is_short;  // int32
    int64_t start, count;
    int64_t stride;  // elements from one row of values to the next

    int64_t operator[](int64_t i) const {
        return !index ? start + i : is_short ? ((const int32_t*)index)[i] : ((const int64_t*)index)[i];
    }
};

// The kernels of one level for one kind of codes. They throw std::bad_alloc if memory cannot be allocated.
struct Kernels {
    void (*linear)(const Layout&, const Parts&, const void* x, int64_t rows, int64_t stride, int dtype, const void* bias,
                   void* out);
    void (*decode)(const Layout&, const Parts&, const Rows&, int dtype, void* out);
    bool (*rounds_inputs)(const Layout&, int dtype);  // whether `linear` rounds inputs to `activations`
};

// `linear` for many rows of inputs of bfloat16, on processors with AVX-512 VNNI and BF16.
void block_linear(const Layout&, const Parts&, const Kernels&, const void* x, int64_t rows, int64_t stride,
                  const void* bias, void* out);
// The same with AMX.
void tile_linear(const Layout&, const Parts&, const Kernels&, const void* x, int64_t rows, int64_t stride,
                 const void* bias, void* out);

// x (rows, L.rows) of bfloat16 times the weight that is not transposed.
void block_gradient(const Layout&, const Parts&, const Kernels&, const void* x, int64_t rows, int64_t stride, void* out);
void tile_gradient(const Layout&, const Parts&, const Kernels&, const void* x, int64_t rows, int64_t stride, void* out);

// torch_parallel_for; null until the module is bound: until then one thread does everything.
extern int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*work)(int64_t, int64_t, void*), void* with);
extern int32_t (*count_threads)(uint32_t*);
