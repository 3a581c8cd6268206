/* Scales that lose less than those of the whole range: which of some candidates loses least in each run, by float32 of the
 * squared error; the first of equals.  Part of encoders.c.
 *
 * Most candidates are ruled out by what they clip of some of the largest numbers, and most others by a rough error.  Only
 * those that may be the one are computed in full.
 */

#define CANDIDATES 32
#define LONGEST 8192 /* numbers of a run that are kept as float32 */
#define ROUGH 32
#define TINY_SQUARES float_of(37u << 23) /* 2**-90: below it squares lose bits of float32 */

/* The squared error of n numbers as integers of one scale and zero point. */
static inline double squared_error(const float *restrict x, count n, float by, float zero, int divides, float lowest,
                                   float highest) {
    double sums[8] = {0};
    float inverse = 1.0f / by;
    for (count i = 0; i < n; i += 8) {
        for (int j = 0; j < 8; j++) {
            float y = divides ? x[i + j] / by : x[i + j] * inverse;
            y = y + zero;
            y = y < lowest ? lowest : y;
            y = y > highest ? highest : y;
            double error = (double)(x[i + j] - ((y + MAGIC) - MAGIC - zero) * by);
            sums[j] += error * error;
        }
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The same but for what float32 sums and a reciprocal lose: at most SLACK of it, and LAST_BITS of the numbers' squares. */
#define SLACK (1.0f / 8192)
#define LAST_BITS float_of(87u << 23) /* 2**-40: squares of the last bits of numbers, where errors are nothing else */
static inline float rough_error(const float *restrict x, count n, float by, float zero, float lowest, float highest) {
    float sums[8] = {0}, inverse = 1.0f / by;
#ifdef FAST
    const __m256 scale = _mm256_set1_ps(by), factor = _mm256_set1_ps(inverse), shift = _mm256_set1_ps(zero);
    const __m256 low = _mm256_set1_ps(lowest), high = _mm256_set1_ps(highest);
    __m256 squares[ROUGH / 8] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (count i = 0; i < n; i += ROUGH)
#pragma GCC unroll 4
        for (int j = 0; j < ROUGH / 8; j++) {
            __m256 number = _mm256_loadu_ps(x + i + 8 * j), code = _mm256_fmadd_ps(number, factor, shift);
            code = _mm256_min_ps(_mm256_max_ps(code, low), high);
            code = _mm256_round_ps(code, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
            number = _mm256_fnmadd_ps(_mm256_sub_ps(code, shift), scale, number);
            squares[j] = _mm256_fmadd_ps(number, number, squares[j]);
        }
    _mm256_storeu_ps(sums, _mm256_add_ps(_mm256_add_ps(squares[0], squares[1]), _mm256_add_ps(squares[2], squares[3])));
#else
    for (count i = 0; i < n; i += ROUGH) {
        for (int j = 0; j < ROUGH; j++) {
            float y = x[i + j] * inverse + zero;
            y = y < lowest ? lowest : y;
            y = y > highest ? highest : y;
            float error = x[i + j] - ((y + MAGIC) - MAGIC - zero) * by;
            sums[j % 8] += error * error;
        }
    }
#endif
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The values of a codebook of up to 16, ascending, and the thresholds between them; the last of both are repeated, and infinite. */
typedef struct {
    float values[16], edges[15];
} codebook;

/* The squared error of n numbers as values of a codebook, of which `inverse` undoes the scale. */
static inline double squared_table_error(const codebook *t, const float *restrict x, count n, float by, float inverse) {
    double sums[8] = {0};
    for (count i = 0; i < n; i++) {
        float y = x[i] * inverse;
        int code = 0;
        for (int j = 0; j < 15; j++) code += y > t->edges[j];
        double error = (double)(x[i] - t->values[code] * by);
        sums[i % 8] += error * error;
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* The same but for what float32 sums lose. */
static inline float rough_table_error(const codebook *t, const float *restrict x, count n, float by, float inverse) {
    count i = 0;
    float sum = 0;
#ifdef FAST
    const float *v = t->values;
    const halving h = halved(t->edges);
    const __m256 low = _mm256_setr_ps(v[0], v[7], v[6], v[5], v[4], v[3], v[2], v[1]); /* by the last bits of -code */
    const __m256 high = _mm256_setr_ps(v[8], v[15], v[14], v[13], v[12], v[11], v[10], v[9]);
    const __m256 scale = _mm256_set1_ps(by), factor = _mm256_set1_ps(inverse);
    __m256 squares[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    float sums[8];
    for (; i + 16 <= n; i += 16)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            __m256 number = _mm256_loadu_ps(x + i + 8 * j), y = _mm256_mul_ps(number, factor), is_high;
            __m256i code = halve(&h, y, &is_high);
            __m256 value = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code), is_high);
            number = _mm256_fnmadd_ps(value, scale, number);
            squares[j] = _mm256_fmadd_ps(number, number, squares[j]);
        }
    _mm256_storeu_ps(sums, _mm256_add_ps(squares[0], squares[1]));
    sum = ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
#endif
    return sum + (float)squared_table_error(t, x + i, n - i, by, inverse);
}

/* n numbers from the index at, and zeros up to a multiple of ROUGH, whose error is 0; how many these are. */
static inline count fetch_padded(const void *x, int dtype, count at, count n, float *to) {
    fetch(x, dtype, at, n, to);
    for (; n % ROUGH; n++) to[n] = 0;
    return n;
}

typedef float lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t lane_bits __attribute__((vector_size(32)));

#define CHOSEN(is_first, a, b) (lanes)(((is_first) & (lane_bits)(a)) | (~(is_first) & (lane_bits)(b)))

/* Extends the extremes of eight sets by n numbers, which are a multiple of ROUGH. */
static inline void lane_extremes(const float *x, count n, lanes *low, lanes *high) {
    lanes first = *low, last = *high;
    for (count i = 0; i < n; i += 8) {
        lanes some = *(const lanes *)(x + i);
        first = CHOSEN(some < first, some, first);
        last = CHOSEN(some > last, some, last);
    }
    *low = first, *high = last;
}

/* What candidates that reach from `first` to `last` clip of the extremes, as squares. */
static inline void clipped_squares(lanes low, lanes high, const float *first, const float *last, float *lost) {
    for (int c = 0; c < CANDIDATES; c += 8) {
        lanes left = *(const lanes *)(first + c), right = *(const lanes *)(last + c), sum = {0};
        for (int j = 0; j < 8; j++) {
            lanes below = left - low[j], above = high[j] - right;
            below = (lanes)((lane_bits)below & (below > 0));
            above = (lanes)((lane_bits)above & (above > 0));
            sum += below * below + above * above;
        }
        *(lanes *)(lost + c) = sum;
    }
}

/* How candidates are made of the extremes of a run: by a codebook, or by integers with the steps and zero points that torch
 * ops make of them. */
typedef struct {
    float ratios[CANDIDATES];
    int candidates, has_zero, kept, divides; /* `kept`: the dtype of scales; whether numbers are divided by them */
    float span, unit, smallest, lowest, highest;
    const codebook *table; /* null for integers */
} search;

typedef struct {
    float step[CANDIDATES], zero[CANDIDATES], first[CANDIDATES], last[CANDIDATES]; /* with a codebook `zero` is 1 / step */
} tried;

static inline void try_table(const search *s, float high, tried *t) {
    float left = s->table->values[0], right = s->table->values[15];
    left = left < 0 ? left : 0, right = right > 0 ? right : 0; /* zeros stand where a run has no more numbers */
    for (int c = 0; c < CANDIDATES; c++) {
        float by = high * s->ratios[c];
        t->step[c] = by;
        t->zero[c] = 1.0f / (by < TINY ? 1.0f : by);
        t->first[c] = left * by;
        t->last[c] = right * by;
    }
}

static inline void try_integers(const search *s, float low, float high, tried *t) {
    for (int c = 0; c < CANDIDATES; c++) {
        float range = high * s->ratios[c] - low * s->ratios[c], by = range / s->span;
        by = by < s->smallest ? s->smallest : by;
        t->step[c] = range > 0 ? by : 1.0f;
    }
    if (s->kept != FLOAT32)
        for (int c = 0; c < CANDIDATES; c++) t->step[c] = to_dtype(t->step[c], s->kept);
    for (int c = 0; c < CANDIDATES; c++) {
        float by = t->step[c] * s->unit, at = s->lowest - low * s->ratios[c] / by;
        at = at < s->lowest ? s->lowest : at;
        at = at > s->highest ? s->highest : at;
        at = s->has_zero ? (at + MAGIC) - MAGIC : 0;
        by = by == 0 ? 1.0f : by;
        t->step[c] = by;
        t->zero[c] = at;
        t->first[c] = (s->lowest - at) * by;
        t->last[c] = (s->highest - at) * by;
    }
}

/* `low` is null where the candidates have no zero point. */
static void search_runs(const search *s, const void *x, int dtype, count begin, count rows, count columns, count width, const float *low,
                        const float *high, uint8_t *best) {
    count before = begin * ((columns + width - 1) / width);
    low += low ? before : 0, high += before, best += before;
    float numbers[LONGEST], lost[CANDIDATES], rough[CANDIDATES];
    tried t;
#define EACH_PIECE(WORK)                                                                       \
    for (count at = start; at < end; at += LONGEST) {                                          \
        if (end - start > LONGEST || !n) {                                                     \
            n = least(LONGEST, end - at);                                                      \
            padded = fetch_padded(x, dtype, row * columns + at, n, numbers);                   \
        }                                                                                      \
        WORK;                                                                                  \
    }
    for (count row = begin; row < rows; row++) {
        for (count start = 0; start < columns; start += width, low += low != 0, high++, best++) {
            lanes least_of = {0}, most_of = {0};
            float found = 0, bound = float_of(0x7f800000);
            count end = least(start + width, columns), n = 0, padded;
            EACH_PIECE(lane_extremes(numbers, padded, &least_of, &most_of))
            if (s->table) try_table(s, *high, &t);
            else try_integers(s, low ? *low : 0, *high, &t);
            clipped_squares(least_of, most_of, t.first, t.last, lost);
            float reach = t.last[0] - t.first[0] + (s->table ? 0 : t.step[0]);
            float slack = (float)(end - start) * (reach * reach) * LAST_BITS;
            for (int c = 0; c < s->candidates; c++) {
                rough[c] = lost[c];
                if (lost[c] > bound) continue;
                rough[c] = 0;
                EACH_PIECE(rough[c] += s->table ? rough_table_error(s->table, numbers, n, t.step[c], t.zero[c])
                                                : rough_error(numbers, padded, t.step[c], t.zero[c], s->lowest, s->highest))
                float most = rough[c] > TINY_SQUARES ? rough[c] * (1 + 4 * SLACK) + slack : float_of(0x7f800000);
                bound = most < bound ? most : bound;
            }
            int close = 0;
            for (int c = s->candidates; c-- > 0;)
                if (!(rough[c] > bound)) *best = (uint8_t)c, close++;
            for (int c = *best, one = c; close > 1 && c < s->candidates; c++) {
                if (rough[c] > bound) continue;
                double error = 0;
                EACH_PIECE(error += s->table ? squared_table_error(s->table, numbers, n, t.step[c], t.zero[c])
                                             : squared_error(numbers, padded, t.step[c], t.zero[c], s->divides, s->lowest, s->highest))
                if (c == one || (float)error < found) *best = (uint8_t)c, found = (float)error;
            }
        }
    }
}

static void fit_affine(const void *x, int dtype, count begin, count rows, count columns, count width, const float *low, const float *high,
                       const float *ratios, int candidates, float span, float unit, float smallest, int kept, int divides,
                       int lowest, int highest, uint8_t *best) {
    search s = {{0}, candidates, low != 0, kept, divides, span, unit, smallest, (float)lowest, (float)highest, 0};
    for (int c = 0; c < CANDIDATES; c++) s.ratios[c] = ratios[c < candidates ? c : candidates - 1];
    search_runs(&s, x, dtype, begin, rows, columns, width, low, high, best);
}

static void fit_table(const void *x, int dtype, count begin, count rows, count columns, count width, const float *high, const float *ratios,
                      int candidates, const float *values, const float *edges, int size, uint8_t *best) {
    codebook t;
    search s = {{0}, candidates, .table = &t};
    for (int j = 0; j < 16; j++) t.values[j] = values[j < size ? j : size - 1];
    for (int j = 0; j < 15; j++) t.edges[j] = j < size - 1 ? edges[j] : float_of(0x7f800000);
    for (int c = 0; c < CANDIDATES; c++) s.ratios[c] = ratios[c < candidates ? c : candidates - 1];
    search_runs(&s, x, dtype, begin, rows, columns, width, 0, high, best);
}
