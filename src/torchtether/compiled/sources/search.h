/* Scales that lose less than those of the whole range.  Part of encoders.c; schemes/search.py says what is done and why.
 *
 * Numbers are counted in parts of the largest of their run, as integers of 16 bits, and what codes stand for is an integer,
 * too: sums are exact, and their order makes no difference.
 */

#define PARTS 32767.0f
#define TRIED 4               /* the scale of the whole range, and smaller ones */
#define TINY_PEAK float_of(27u << 23) /* 2**-100: below it nothing is searched for */
#define LEVELS 8192.0f        /* 1 as a value of a codebook */
#define EDGES 16384.0f        /* 1 as an edge between two of them */
#define PIECE 256             /* numbers that are kept as parts; 16 times a power of two */
#define NARROW 64             /* numbers whose sums 32 bits hold in eight lanes, of a codebook */

typedef struct {
    const recipe *r;
    int is_table, tried; /* how many scales are; all of TRIED with integers */
    int shift, below, most; /* of the integers: bits of fraction of products, the zero point's distance, the top */
    int16_t factors[TRIED], levels[16], edges[16], third[8], fourth[8], even[8], odd[8]; /* as `add_values` asks for them */
} search;

/* The sums, over a run in parts x, of x * level and of level * level, under each of the scales. */
typedef int64_t level_sums[TRIED][2];

static inline int16_t to_int16(float x) { return (int16_t)((x < PARTS ? x : PARTS) + MAGIC - MAGIC); }

static search search_of(const recipe *r) {
    search s = {r, r->kind == NEAREST, 0, 14 - r->bits, 0, (int)(r->highest - r->lowest)};
    while (s.tried < TRIED && r->larger[s.tried] > 0) s.tried++;
    for (int j = 0; j < 16; j++) s.levels[j] = to_int16(r->levels[j] * LEVELS);
    for (int j = 0; j < 15; j++) s.edges[j] = to_int16(r->edges[j] * EDGES);
    for (int j = 0; j < 8; j++) s.third[j] = s.edges[2 * j + 1], s.fourth[j] = s.edges[2 * j];
    for (int j = 0; j < 8; j++) s.even[j] = s.levels[2 * j], s.odd[j] = s.levels[2 * j + 1];
    return s;
}

#ifdef FAST
INLINE __m256i to_16(__m256 a, __m256 b) { return _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)); }

INLINE __m256i eight_of(const int16_t *from) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)from)); }

/* Adds the sums of eight lanes each to both of `to`. */
INLINE void add_lanes(__m256i a, __m256i b, int64_t *to) {
#define WIDE(v) _mm256_add_epi64(_mm256_cvtepi32_epi64(_mm256_castsi256_si128(v)), _mm256_cvtepi32_epi64(_mm256_extracti128_si256(v, 1)))
    __m256i x = WIDE(a), y = WIDE(b);
    x = _mm256_add_epi64(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
    __m128i sum = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storeu_si128((__m128i *)to, _mm_add_epi64(sum, _mm_loadu_si128((const __m128i *)to)));
}
#endif

/* Parts of n numbers, a multiple of 16, and with integers the sums under the scale of the whole range; the squares of all. */
static int64_t to_parts(const search *s, const float *restrict x, count n, float parts, float inverse, float zero,
                        int16_t *restrict to, level_sums sums) {
    int64_t squares = 0;
    int low = (int)s->r->lowest, high = (int)s->r->highest;
#ifdef FAST
    const __m256 by = _mm256_set1_ps(parts), over = _mm256_set1_ps(inverse), shift = _mm256_set1_ps(zero);
    const __m256i first = _mm256_set1_epi16((short)low), last = _mm256_set1_epi16((short)high), it = _mm256_cvtps_epi32(shift);
    const __m256i zeros = _mm256_packs_epi32(it, it);
    __m256i square = _mm256_setzero_si256(), product = square, norm = square;
    for (count i = 0; i < n; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        __m256i part = to_16(_mm256_mul_ps(a, by), _mm256_mul_ps(b, by)), pairs = _mm256_madd_epi16(part, part);
        _mm256_storeu_si256((__m256i *)(to + i), part); /* in another order, which makes no difference */
        square = _mm256_add_epi64(square, _mm256_srli_epi64(pairs, 32));
        square = _mm256_add_epi64(square, _mm256_blend_epi32(pairs, _mm256_setzero_si256(), 0xaa));
        if (s->is_table) continue;
        a = _mm256_add_ps(_mm256_mul_ps(a, over), shift), b = _mm256_add_ps(_mm256_mul_ps(b, over), shift);
        __m256i level = _mm256_sub_epi16(_mm256_min_epi16(_mm256_max_epi16(to_16(a, b), first), last), zeros);
        product = _mm256_add_epi32(product, _mm256_madd_epi16(level, part));
        norm = _mm256_add_epi32(norm, _mm256_madd_epi16(level, level));
    }
    add_lanes(product, norm, sums[0]);
    int64_t each[4];
    _mm256_storeu_si256((__m256i *)each, square);
    squares = (each[0] + each[1]) + (each[2] + each[3]);
#else
    for (count i = 0; i < n; i++) {
        int part = (int)(x[i] * parts + MAGIC - MAGIC);
        float code = x[i] * inverse + zero;
        code = code < low ? low : code;
        code = (code > high ? high : code) + MAGIC - MAGIC;
        to[i] = (int16_t)part;
        squares += part * part;
        if (s->is_table) continue;
        sums[0][0] += part * (int)(code - zero);
        sums[0][1] += (int)(code - zero) * (int)(code - zero);
    }
#endif
    return squares;
}

/* Adds the sums of n parts, a multiple of 16, as integers under all scales but the first. */
static void add_integers(const search *s, const int16_t *restrict x, count n, level_sums sums) {
    int offset = (s->below << s->shift) + (1 << (s->shift - 1));
#ifdef FAST
    const __m256i start = _mm256_set1_epi16((short)offset), low = _mm256_setzero_si256();
    const __m256i high = _mm256_set1_epi16((short)s->most), below = _mm256_set1_epi16((short)s->below);
    const __m128i shift = _mm_cvtsi32_si128(s->shift);
    __m256i factors[TRIED], products[TRIED], norms[TRIED];
    for (int c = 1; c < TRIED; c++) factors[c] = _mm256_set1_epi16(s->factors[c]), products[c] = norms[c] = low;
    for (count i = 0; i < n; i += 16) {
        __m256i part = _mm256_loadu_si256((const __m256i *)(x + i));
#pragma GCC unroll 4
        for (int c = 1; c < TRIED; c++) {
            __m256i code = _mm256_sra_epi16(_mm256_adds_epi16(_mm256_mulhrs_epi16(part, factors[c]), start), shift);
            code = _mm256_sub_epi16(_mm256_min_epi16(_mm256_max_epi16(code, low), high), below);
            products[c] = _mm256_add_epi32(products[c], _mm256_madd_epi16(code, part));
            norms[c] = _mm256_add_epi32(norms[c], _mm256_madd_epi16(code, code));
        }
    }
    for (int c = 1; c < TRIED; c++) add_lanes(products[c], norms[c], sums[c]);
#else
    for (int c = 1; c < TRIED; c++) {
        int32_t product = 0, norm = 0; /* at most PIECE times 255 times PARTS */
        for (count i = 0; i < n; i++) {
            int code = (((x[i] * s->factors[c] + 16384) >> 15) + offset) >> s->shift;
            code = code < 0 ? 0 : code;
            code = (code > s->most ? s->most : code) - s->below;
            product += code * x[i];
            norm += code * code;
        }
        sums[c][0] += product, sums[c][1] += norm;
    }
#endif
}

/* The same as values of a codebook: at most NARROW parts. */
static void add_values(const search *s, const int16_t *restrict x, count n, level_sums sums) {
#ifdef FAST
    /* by pairs of bytes, of which the bits are those of the thresholds found so far */
    const int16_t *e = s->edges;
    const __m256i half = _mm256_set1_epi16(e[7]), first = _mm256_set1_epi16(e[3]), last = _mm256_set1_epi16(e[11]);
    const __m256i third = eight_of(s->third), fourth = eight_of(s->fourth), even = eight_of(s->even), odd = eight_of(s->odd);
    const __m256i bytes = _mm256_set1_epi16(0x0100), four = _mm256_set1_epi16(0x0808), two = _mm256_set1_epi16(0x0404);
    const __m256i one = _mm256_set1_epi16(0x0202);
    for (int c = 0; c < s->tried; c++) {
        __m256i factor = _mm256_set1_epi16(s->factors[c]), product = _mm256_setzero_si256(), norm = product;
        for (count i = 0; i < n; i += 16) {
            __m256i part = _mm256_loadu_si256((const __m256i *)(x + i)), y = _mm256_mulhrs_epi16(part, factor);
            __m256i above = _mm256_cmpgt_epi16(y, half), at = _mm256_or_si256(bytes, _mm256_and_si256(above, four));
            above = _mm256_cmpgt_epi16(y, _mm256_blendv_epi8(first, last, above));
            at = _mm256_or_si256(at, _mm256_and_si256(above, two));
            above = _mm256_cmpgt_epi16(y, _mm256_shuffle_epi8(third, at));
            at = _mm256_or_si256(at, _mm256_and_si256(above, one));
            above = _mm256_cmpgt_epi16(y, _mm256_shuffle_epi8(fourth, at));
            y = _mm256_blendv_epi8(_mm256_shuffle_epi8(even, at), _mm256_shuffle_epi8(odd, at), above);
            product = _mm256_add_epi32(product, _mm256_madd_epi16(y, part));
            norm = _mm256_add_epi32(norm, _mm256_madd_epi16(y, y));
        }
        add_lanes(product, norm, sums[c]);
    }
#else
    for (int c = 0; c < s->tried; c++)
        for (count i = 0; i < n; i++) {
            int y = (x[i] * s->factors[c] + 16384) >> 15, code = 0;
            for (int j = 0; j < 15; j++) code += y > s->edges[j];
            sums[c][0] += s->levels[code] * x[i];
            sums[c][1] += s->levels[code] * s->levels[code];
        }
#endif
}

/* The sums of n numbers, and their squares. */
static int64_t sums_of(search *s, const void *x, count n, float parts, float inverse, float zero, level_sums sums) {
    int dtype = s->r->dtype;
    int64_t squares = 0;
    s->below = (int)(zero - s->r->lowest);
    for (count at = 0; at < n; at += PIECE) {
        float numbers[PIECE];
        int16_t some[PIECE];
        count m = least(PIECE, n - at), padded = (m + 15) / 16 * 16;
        const float *from = numbers;
        if (dtype == FLOAT32 && m == padded) from = (const float *)x + at;
        else fetch(behind(x, dtype, at), dtype, 0, m, numbers);
        for (count i = m; i < padded; i++) numbers[i] = 0;
        squares += to_parts(s, from, padded, parts, inverse, zero, some, sums);
        if (!s->is_table) add_integers(s, some, padded, sums);
        else
            for (count i = 0; i < padded; i += NARROW) add_values(s, some + i, least(NARROW, padded - i), sums);
    }
    if (s->is_table && n % 16) { /* of zeros that are none of the numbers */
        int64_t level = s->levels[0];
        for (int j = 0; j < 15; j++) level = 0 > s->edges[j] ? s->levels[j + 1] : level;
        for (int c = 0; c < s->tried; c++) sums[c][1] -= (16 - n % 16) * level * level;
    }
    return squares;
}

/* Runs of n numbers in all: scales under which the sums of squared errors are less than under `scale`, those of their ranges,
 * by more than rounding could pretend, or those; given their largest magnitudes and zero points. At most RUNS. */
static void search_runs(const recipe *r, const void *x, count n, const float *peaks, const float *zero, float *scale) {
    search s = search_of(r);
    count runs = (n + r->width - 1) / r->width;
    float step[RUNS], parts[RUNS], factors[TRIED][RUNS], found[RUNS];
    double squares[RUNS], product[TRIED][RUNS], norm[TRIED][RUNS], size[RUNS];
    float power = s.is_table ? 65536.0f : (float)(1 << (15 + s.shift)), slack = s.is_table ? 160.0f : 1.6f;
    for (count i = 0; i < runs; i++) {
        step[i] = scale[i] * r->unit;
        parts[i] = PARTS / peaks[i];
        found[i] = power / (step[i] * parts[i]);
    }
    for (int c = 0; c < TRIED; c++)
        for (count i = 0; i < runs; i++) factors[c][i] = found[i] * r->larger[c];
    for (count i = 0; i < runs; i++) {
        level_sums sums = {{0}};
        count m = least(r->width, n - i * r->width);
        int is_worth = peaks[i] >= TINY_PEAK && step[i] > 0; /* else all are 0, and nothing changes */
        for (int c = 0; c < TRIED; c++) s.factors[c] = to_int16(factors[c][i]);
        size[i] = (double)m;
        squares[i] = is_worth ? (double)sums_of(&s, behind(x, r->dtype, i * r->width), m, parts[i], 1.0f / step[i], zero[i], sums) : 0;
        for (int c = 0; c < TRIED; c++) product[c][i] = (double)sums[c][0], norm[c][i] = (double)sums[c][1];
    }
    double best_product[RUNS], best_norm[RUNS];
    for (count i = 0; i < runs; i++) {
        double most = 0, p = 0, q = 1; /* what the best scale takes off the squares, and its sums */
        for (int c = 0; c < TRIED; c++) {
            double gain = product[c][i] * product[c][i] / (norm[c][i] > 0 ? norm[c][i] : 1);
            int is_more = gain > most;
            most = is_more ? gain : most, p = is_more ? product[c][i] : p, q = is_more ? norm[c][i] : q;
        }
        best_product[i] = p, best_norm[i] = q;
        float least_one = 0.5f * scale[i], one = (float)(p / (q * (double)parts[i])) / r->unit;
        one = one > least_one ? one : least_one;
        one = s.is_table && one > scale[i] ? scale[i] : one;
        found[i] = one > r->smallest ? one : r->smallest;
    }
    if (r->kept != FLOAT32)
        for (count i = 0; i < runs; i++) found[i] = to_dtype(found[i], r->kept);
    for (count i = 0; i < runs; i++) {
        double own = (double)step[i] * (double)parts[i], by = (double)(found[i] * r->unit) * (double)parts[i];
        double before = squares[i] - own * (2 * product[0][i] - own * norm[0][i]);
        double after = squares[i] - by * (2 * best_product[i] - by * best_norm[i]), sure = slack * size[i];
        double least_gain = sure + 2 * sqrt(sure * (after < 0 ? 0 : after));
        scale[i] = before - after > least_gain ? found[i] : scale[i];
    }
}

/* The same of rows. */
static void fit_scales(const recipe *r, const void *x, count begin, count rows, count columns, const float *peaks, const float *zero,
                       float *scale) {
    static const float zeros[RUNS];
    count before = begin * ((columns + r->width - 1) / r->width);
    scale += before, peaks += before, zero += zero ? before : 0;
    for (count row = begin; row < rows; row++)
        for (count start = 0; start < columns; start += RUNS * r->width) {
            count n = least(RUNS * r->width, columns - start), runs = (n + r->width - 1) / r->width;
            search_runs(r, behind(x, r->dtype, row * columns + start), n, peaks, zero ? zero : zeros, scale);
            scale += runs, peaks += runs, zero += zero ? runs : 0;
        }
}
