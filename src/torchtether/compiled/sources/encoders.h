/* The loops of the encoders and decoders, of one level: encoders.c defines them, and module.cpp calls them. */
#ifndef ENCODERS_H
#define ENCODERS_H

#include <stdint.h>

typedef int64_t count;

enum { AFFINE, FLOAT8, NEAREST };
/* scales: float32; e8m0, rounded in one of three ways; e4m3, with a number for all rows that multiplies or divides them */
enum { FLOATS, FLOOR, EVEN, RCEIL, TIMES_WHOLE, OVER_WHOLE };

/* The settings with which the rows of one tensor are encoded; recipe.py fills it field by field. */
typedef struct {
    int32_t kind, dtype;
    count columns, width; /* of a row; of a run, except the last of a row, which may be shorter */
    count stride;         /* bytes of codes per row */
    float span;           /* the scale is the extent of a run over span; NEAREST does not use it */
    float unit;           /* a step is scale * unit */
    float lowest, highest;
    int32_t is_symmetric, offset, zero_offset, bits;
    int32_t mantissa, bias; /* of a float8; of one of 4 bits 1, 1 */
    int32_t scales, top;    /* the exponent of `span`, for e8m0 */
    float whole;            /* the number for all rows */
    float edges[15];        /* ascending thresholds between the codes, infinite where there are fewer */
    uint8_t order[16];      /* the code for each number of thresholds below */
    int32_t is_ordered;
    int32_t is_searched;      /* whether scales are searched for; what follows says how */
    int32_t kept;             /* the dtype of scales */
    float smallest;           /* of them */
    float levels[16];         /* the ascending values of a codebook, the last repeated */
    float larger[4];          /* the reciprocals of the parts of its range that a run is tried with; the first is 1, 0 after the last */
} recipe;

/* Those with a `begin` do the rows from there to `rows`. */
typedef struct {
    void (*magnitudes)(const void *x, int dtype, count begin, count rows, count columns, count width, float *out);
    void (*extremes)(const void *x, int dtype, count begin, count rows, count columns, count width, float *low, float *high);
    void (*encode_under)(const recipe *r, const void *x, count begin, count rows, count columns, const float *scale,
                         const float *zero, count scale_stride, uint8_t *codes);
    void (*fit_scales)(const recipe *r, const void *x, count begin, count rows, count columns, const float *peaks, const float *zero,
                       float *scale);
    void (*encode_biased)(const void *x, int dtype, count begin, count rows, count columns, count width, const float *scale,
                          const float *bias, count scale_stride, int bias_first, int top, int reach, int arithmetic,
                          uint8_t *out);
    void (*fit_biased)(const void *x, int dtype, count begin, count rows, count columns, count width, const float *scale, float *bias,
                       int bias_first, int top, int kept, const float *weights, count rounds);
    int (*encode)(const recipe *r, const void *x, count rows, void *scale, uint8_t *zero, uint8_t *codes);
    int (*encode_file)(const recipe *r, int file, count at, count rows, void *room, count nbytes, void *scale,
                       uint8_t *zero, uint8_t *codes);
    void (*decode_affine)(const uint8_t *codes, int bits, count begin, count rows, count columns, count width, count stride,
                          const float *scale, const float *zero, count scale_stride, float offset, float unit, void *out,
                          int dtype, count out_stride);
    void (*decode_table)(const uint8_t *codes, int bits, count begin, count rows, count columns, count width, count stride,
                         const float *scale, count scale_stride, const float *table, void *out, int dtype,
                         count out_stride);
} encoders;

#endif
