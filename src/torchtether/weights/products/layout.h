// The widths of vectors on this processor, the kinds of codes, and how the parts of a weight lie: `Layout` of layout.py.

namespace {

#if defined(__AVX512BW__)
#define WIDTH 64
#else
#define WIDTH 32
#endif
#if defined(__AVX512BW__) || defined(__AVX2__)
#define FIXED_POINT 1
#else
#define FIXED_POINT 0
#endif

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && WIDTH == 32
#define FAST_ROWS 1
#else
#define FAST_ROWS 0
#endif

typedef float F __attribute__((vector_size(WIDTH)));
typedef int32_t I __attribute__((vector_size(WIDTH)));
typedef int16_t W __attribute__((vector_size(WIDTH)));
typedef uint16_t H __attribute__((vector_size(WIDTH / 2)));

// A block of columns is 8 vectors of float32, in 4-bit codes one vector of bytes.
constexpr int64_t LANES = WIDTH / 4, PLANES = 8, BLOCK = LANES * PLANES;

enum Codes { INT8, UINT8, E4M3, E5M2, TABLE4, INT4, STREAM, TABLE8 };
enum Dtype { FLOAT32, BFLOAT16, FLOAT16, E8M0, FP8, SIGNED, UNSIGNED, NESTED };

}  // namespace

extern "C" struct Layout {
    int64_t rows, columns, row_bytes;  // of the codes
    int64_t group, groups, height;     // columns under one scale, scales in a row, rows under one scale
    int64_t nested;                    // blocks under one nested absmax, or super scale
    int32_t scale, zero;               // Dtype; Dtype, or -1 for none
    int32_t global;                    // 0: no global scale, 1: it multiplies, 2: it divides
    int32_t activations;               // what rows of x are rounded to: 0 nothing, 1 int8, 2 what no kernel knows
    float offset, unit;                // added to zero points; multiplies last
    float table[16];                   // of 4-bit codes
    const float* dynamic;              // 256 values, of nested absmax
    int64_t counts[5];                 // elements of each part: codes, scale, zero, extra, offset
    int32_t types[5];                  // their ScalarType, -1 where there is no such part
    int64_t most[3];                   // rows of x, by Dtype, up to which `linear` is the kernel to take; 0: unknown yet
    struct Entries* entries;           // of the library for these codes; null until it has been called
    // of a STREAM, stream.h
    int32_t bits, source;              // of a code; Codes: what it means
    int32_t family, arithmetic;        // Family of row_parts.h; Dtype that its steps are rounded to
    int32_t is_flat;                   // whether groups and bytes lie across rows
    float step;                        // of whole levels
    const float* levels;               // 256, by code, of TABLE8
    const uint8_t* whole;              // 64, by code: levels as signed bytes, in units of step; null where they are not
};

namespace {

struct Parts {
    const void *codes, *scale, *zero, *extra, *offset;
};

}  // namespace
