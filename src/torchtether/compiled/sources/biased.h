/* Integers with a scale and a float bias: their codes, and the biases that half-quadratic quantization finds.  Part of
 * encoders.c; sums are of integers, so that their order makes no difference.
 */

/* The unrounded codes of n numbers. */
static inline void positions(const float *restrict x, count n, float by, float bias, int bias_first, float *restrict to) {
    if (bias_first)
        for (count i = 0; i < n; i++) to[i] = x[i] / by - bias;
    else
        for (count i = 0; i < n; i++) to[i] = (x[i] - bias) / by;
}

INLINE float biased_error(float code, float x, float by, float bias, int bias_first, int dtype) {
    float y = bias_first ? to_dtype(to_dtype(code + bias, dtype) * by, dtype) : to_dtype(to_dtype(code * by, dtype) + bias, dtype);
    return float_of(bits_of(y - x) & 0x7fffffff);
}

/* The codes that decode nearest, among the one at the rounded position and those up to `reach` away from it. */
INLINE void nearest_biased(const float *restrict x, const float *restrict position, count n, float by, float bias,
                           int bias_first, float top, int reach, int dtype, uint8_t *restrict to) {
    for (count i = 0; i < n; i++) {
        float y = position[i];
        y = y < 0 ? 0 : y;
        y = y > top ? top : y;
        y = (y + MAGIC) - MAGIC;
        float found = y, error = biased_error(y, x[i], by, bias, bias_first, dtype);
        for (int j = 1; j <= reach; j++) {
            float less = y - j < 0 ? 0 : y - j, more = y + j > top ? top : y + j;
            float below = biased_error(less, x[i], by, bias, bias_first, dtype);
            found = below < error ? less : found;
            error = below < error ? below : error;
            float above = biased_error(more, x[i], by, bias, bias_first, dtype);
            found = above < error ? more : found;
            error = above < error ? above : error;
        }
        to[i] = (uint8_t)bits_of(found + MAGIC);
    }
}

/* One code per byte; decoding rounds both of its steps to the dtype `arithmetic`; scale and bias are rounded already. */
static void encode_biased(const void *x, int dtype, count begin, count rows, count columns, count width, const float *scale,
                          const float *bias, count scale_stride, int bias_first, int top, int reach, int arithmetic,
                          uint8_t *out) {
    float numbers[STRETCH], position[STRETCH];
    scale += begin * scale_stride, bias += begin * scale_stride;
    for (count row = begin; row < rows; row++, scale += scale_stride, bias += scale_stride) {
        for (count start = 0, n; start < columns; start += n) {
            float by = scale[start / width], its = bias[start / width], divisor = by == 0 ? 1.0f : by;
            n = least(least(STRETCH, columns - start), width - start % width);
            fetch(x, dtype, row * columns + start, n, numbers);
            positions(numbers, n, divisor, its, bias_first, position);
            uint8_t *to = out + row * columns + start;
            if (arithmetic != FLOAT32) nearest_biased(numbers, position, n, by, its, bias_first, (float)top, reach, arithmetic, to);
            else if (bias_first) nearest_biased(numbers, position, n, by, its, 1, (float)top, 1, FLOAT32, to);
            else nearest_biased(numbers, position, n, by, its, 0, (float)top, 1, FLOAT32, to);
        }
    }
}

/* Adding one of these rounds a number to multiples of 2**-16 or 2**-20, which the low bits then count. */
#define NORM_MAGIC (MAGIC / 65536)
#define MEAN_MAGIC (MAGIC / 1048576)
#define RELAXATION 4.0f /* of the mean of the errors: the mean alone converges slowly */
#define QUARTER 0x4f57d000u /* minus a quarter of the bits of a number, it approximates the bits of its power of -1/4 */

/* Adds the 3/4-norm of the errors of n positions to `norm`, and the part of them that does not count as outliers to `sum`. */
INLINE void half_quadratic(const float *restrict position, count n, float away, float top, float weight, int64_t *norm,
                           int64_t *sum) {
    uint32_t powers = 0, rest = 0;
    for (count i = 0; i < n; i++) {
        float y = position[i] - away, code = y < 0 ? 0 : y;
        code = code > top ? top : code;
        float error = y - ((code + MAGIC) - MAGIC), size = float_of(bits_of(error) & 0x7fffffff);
        size = size < 128.0f ? size : 128.0f;
        float power = float_of(QUARTER - (bits_of(size) >> 2)), square = power * power;
        power = power * (1.25f - 0.25f * (size * square * square)); /* size**-0.25, to 0.3 % */
        float most = power * weight;
        powers += bits_of(size * power + NORM_MAGIC);
        error = error < most ? error : most;
        error = error > -most ? error : -most;
        rest += bits_of(error + MEAN_MAGIC);
    }
    *norm += powers - (uint32_t)n * bits_of(NORM_MAGIC);
    *sum += (int32_t)(rest - (uint32_t)n * bits_of(MEAN_MAGIC));
}

/* Moves each bias, of the dtype `kept`, by at most a step to where the 3/4-norm of the errors of its run is least; each
 * round has a weight. */
static void fit_biased(const void *x, int dtype, count begin, count rows, count columns, count width, const float *scale, float *bias,
                       int bias_first, int top, int kept, const float *weights, count rounds) {
    float numbers[STRETCH], position[STRETCH];
    count before = begin * ((columns + width - 1) / width);
    scale += before, bias += before;
    for (count row = begin; row < rows; row++) {
        for (count start = 0; start < columns; start += width, scale++, bias++) {
            count end = least(start + width, columns);
            float by = *scale, own = *bias, now = own, fewest = 0, limit = bias_first ? 1.0f : by, size = (float)(end - start);
            for (count round = 0; round < rounds; round++) {
                float away = bias_first ? now - own : (now - own) / by;
                int64_t norm = 0, sum = 0;
                for (count at = start; at < end; at += STRETCH) {
                    count n = least(STRETCH, end - at);
                    if (!round || end - start > STRETCH) {
                        fetch(x, dtype, row * columns + at, n, numbers);
                        positions(numbers, n, by, own, bias_first, position);
                    }
                    half_quadratic(position, n, away, (float)top, weights[round], &norm, &sum);
                }
                if (!round || (float)norm < fewest) fewest = (float)norm, *bias = now;
                float mean = (float)sum * (RELAXATION / 1048576) / size;
                now += bias_first ? mean : mean * by;
                now = now < own - limit ? own - limit : now;
                now = now > own + limit ? own + limit : now;
                now = to_dtype(now, kept);
            }
        }
    }
}
