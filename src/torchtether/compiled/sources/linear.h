// Rows of codes times rows of inputs, with the vectors of any processor.
//
// kernels.cpp includes this in its own namespace.

// What a row of codes is multiplied with, a block of columns after the other. `stride` floats per row of x and block:
//     float32: PLANES vectors; fixed point: half as many of int16, then one float, what they are in units of
//     `sums` vectors of float32: the sums over the lanes of each group, which zero points are multiplied with
// Lane l of plane j holds column PLANES * l + j for 4-bit codes, because that is how they come out of their words,
// and column LANES * j + l for others.
struct Inputs {
    int64_t blocks, sums, stride;
    bool fixed;
    Array<float> data;

    const float* at(int64_t m, int64_t b) const { return data.data() + (m * blocks + b) * stride; }
    int64_t sums_at() const { return fixed ? BLOCK / 2 + LANES : BLOCK; }

    template <int D> void fill(const void* x, int64_t rows, int64_t row_stride, int64_t columns, bool nibbled) {
        for (int64_t m = 0; m < rows; m++)
            for (int64_t b = 0; b < blocks; b++) {
                float natural[BLOCK], placed[BLOCK], *to = data.data() + (m * blocks + b) * stride;
                const int64_t first = m * row_stride + b * BLOCK;
                F largest{};
                for (int64_t k = 0; k < BLOCK; k += LANES) {
                    const int64_t left = columns - b * BLOCK - k, count = left < 0 ? 0 : left < LANES ? left : LANES;
                    F v = count == LANES ? get<D>(x, first + k) : count ? get<D>(x, first + k, count) : F{};
                    memcpy(natural + k, &v, sizeof v);
                    largest = larger(largest, v);
                }
                if (fixed) fix(natural, largest, to);
                if (nibbled)
                    for (int64_t j = 0; j < PLANES; j++)
                        for (int64_t l = 0; l < LANES; l++) placed[j * LANES + l] = natural[l * PLANES + j];
                else memcpy(placed, natural, sizeof placed);
                if (!fixed) memcpy(to, placed, sizeof placed);
                else if (nibbled) place_words(natural, (int16_t*)to, true);
                else place_words(natural, (int16_t*)to, false);
                for (int64_t i = 0; i < sums; i++) {
                    F total{};
                    for (int64_t j = i * PLANES / sums; j < (i + 1) * PLANES / sums; j++)
                        total += load<F>(placed + j * LANES);
                    memcpy(to + sums_at() + i * LANES, &total, sizeof total);
                }
            }
    }

    // `natural` in whole units of to[BLOCK / 2]: a power of two, so that multiplying by it is exact. Values that are not
    // finite make the unit so, and with it every result.
    static void fix(float* natural, F largest, float* to) {
        const float most = largest_of(largest);
        int exponent = 0;
        if (!(most <= 3e38f)) { to[BLOCK / 2] = NAN; memset(natural, 0, BLOCK * 4); return; }
        if (most > 0) frexpf(most, &exponent);
        exponent = exponent < -100 ? -100 : exponent;  // most < 2**exponent
        const float unit = ldexpf(1.0f, exponent - 15), per = ldexpf(1.0f, 15 - exponent);
        to[BLOCK / 2] = unit;
        for (int64_t k = 0; k < BLOCK; k++) {
            const float r = rintf(natural[k] * per);
            natural[k] = r > 32767.0f ? 32767.0f : r;
        }
    }

    static void place_words(const float* natural, int16_t* to, bool nibbled) {
        if (!nibbled)
            for (int64_t k = 0; k < BLOCK; k++) to[k] = (int16_t)natural[k];
        else  // word i of plane j: column 4 * i + j
            for (int64_t j = 0; j < 4; j++)
                for (int64_t i = 0; i < BLOCK / 4; i++) to[j * (BLOCK / 4) + i] = (int16_t)natural[4 * i + j];
    }

    Inputs(const void* x, int dtype, int64_t rows, int64_t row_stride, int64_t columns, bool nibbled, bool fixed,
           int64_t sums)
        : blocks((columns + BLOCK - 1) / BLOCK), sums(sums), fixed(fixed) {
        stride = sums_at() + sums * LANES;
        data.resize(rows * blocks * stride);
        if (dtype == FLOAT32) fill<FLOAT32>(x, rows, row_stride, columns, nibbled);
        else if (dtype == BFLOAT16) fill<BFLOAT16>(x, rows, row_stride, columns, nibbled);
        else fill<FLOAT16>(x, rows, row_stride, columns, nibbled);
    }
};

// The dot products, lane by lane, of N vectors (of PLANES, from `first`) of one block of codes with M rows of x.
template <int C, int M, bool X, int N> inline void dot(const uint8_t* codes, const float* const* x, const Table& table,
                                                       int64_t first, F* out) {
#if FIXED_POINT
    if (X) {
        I total[M];
        for (int m = 0; m < M; m++) total[m] = I{};
#pragma GCC unroll 4
        for (int64_t i = 0; i < N / 2; i++) {
            const int64_t j = first / 2 + i;
            const W w = C == INT4 ? (W)((load<W>(codes) >> (4 * (int)j)) & 15) : words<C == INT8>(codes + j * LANES * 2);
            for (int m = 0; m < M; m++) total[m] += multiply_pairs(w, load<W>(x[m] + j * LANES));
        }
        for (int m = 0; m < M; m++) out[m] = __builtin_convertvector(total[m], F);
        return;
    }
#endif
    for (int m = 0; m < M; m++) out[m] = F{};
#if FIXED_POINT
    if (C == E4M3) {  // two vectors at a time, in units of 2**8
#pragma GCC unroll 4
        for (int64_t j = first; j < first + N; j += 2) {
            F w[2];
            small_e4m3(codes + j * LANES, w);
            for (int m = 0; m < M; m++) {
                out[m] = fma(w[0], load<F>(x[m] + j * LANES), out[m]);
                out[m] = fma(w[1], load<F>(x[m] + (j + 1) * LANES), out[m]);
            }
        }
        for (int m = 0; m < M; m++) out[m] *= 256.0f;
        return;
    }
#endif
#pragma GCC unroll 8
    for (int64_t i = 0; i < N; i++) {
        const int64_t j = first + i;
        F w;
        if (C == TABLE4) w = table(load<I>(codes) >> (4 * (int)j));
        else if (C == INT4) w = __builtin_convertvector((load<I>(codes) >> (4 * (int)j)) & 15, F);
        else w = values<C>(codes + j * LANES);
        for (int m = 0; m < M; m++) out[m] = fma(w, load<F>(x[m] + j * LANES), out[m]);
    }
}

template <int C, int M, bool X, bool Z> void row(const Layout& L, const uint8_t* codes, const float* s, const float* z,
                                                 const Table& table, const Inputs& in, int64_t from, float* y) {
    constexpr bool nibbled = C == TABLE4 || C == INT4;
    constexpr int64_t bytes = nibbled ? BLOCK / 2 : BLOCK;
    const int64_t wide = L.group >= L.columns ? in.blocks : L.group / BLOCK;  // blocks under one scale; 0: less than one
    const int64_t per = wide ? 1 : BLOCK / L.group;                           // scales over one block
    I spread;  // 4-bit: the scale of each lane, where there are several in a block
    for (int l = 0; l < LANES; l++) spread[l] = wide ? 0 : (int)(l * PLANES / L.group);
    F total[M], part[M];
    for (int m = 0; m < M; m++) total[m] = F{};
    int64_t left = wide;
    for (int64_t b = 0; b < in.blocks; b++) {
        const float* x[M];
        F unit[M];
        for (int m = 0; m < M; m++) {
            x[m] = in.at(from + m, b);
            if (X) unit[m] = all(x[m][BLOCK / 2]);
        }
        const uint8_t* at = codes + b * bytes;
        uint8_t rest[bytes];
        if (L.row_bytes - b * bytes < bytes) {
            memset(rest, 0, bytes);
            memcpy(rest, at, L.row_bytes - b * bytes);
            at = rest;
        }
        const int64_t parts = nibbled ? 1 : per;  // at most 4: groups of bytes are 32 columns or more
        for (int64_t i = 0; i < parts; i++) {
            F scale = all(*s), zero = all(*z);
            if (nibbled && !wide) {
                scale = Table(s)(spread);
                if (Z) zero = Table(z)(spread);
            }
            if (nibbled || parts == 1) dot<C, M, X, 8>(at, x, table, 0, part);
            else if (parts == 2) dot<C, M, X, 4>(at, x, table, i * 4, part);
            else dot<C, M, X, 2>(at, x, table, i * 2, part);
            for (int m = 0; m < M; m++) {
                if (Z) part[m] = fma(zero, load<F>(x[m] + in.sums_at() + i * LANES), part[m]);
                total[m] = fma(X ? scale * unit[m] : scale, part[m], total[m]);
            }
            if (!wide) s += nibbled ? per : 1, z += nibbled ? per : 1;
        }
        if (wide && --left == 0) left = wide, s++, z++;
    }
    for (int m = 0; m < M; m++) y[m] = sum(total[m]) * L.unit;
}

template <int D> void put_one(float y, const void* bias, int64_t n, void* out, int64_t at) {
    if (bias) y += get<D>(bias, n, 1)[0];
    put<D>(all(y), out, at, 1);
}

template <int C, bool X, bool Z> void linear(const Layout& L, const Parts& P, const void* x, int64_t rows,
                                             int64_t stride, int dtype, const void* bias, void* out) {
    constexpr bool nibbled = C == TABLE4 || C == INT4;
    const int64_t per = L.group >= BLOCK || L.group >= L.columns ? 1 : BLOCK / L.group;
    const Inputs in(x, dtype, rows, stride, L.columns, nibbled, X, !Z ? 0 : nibbled ? 1 : per);
    const int64_t each = buffer_size(L);
    const Table table(L.table);
    const auto make = [&] { return Buffer(2 * each); };
    over(L.rows, rows * L.rows * L.columns > 65536, make, [&](Buffer& buffer, int64_t n) {
        float *s = buffer.data(), *z = s + each, y[4];
        row_scales(L, P, n, s, z);
        const uint8_t* codes = (const uint8_t*)P.codes + n * L.row_bytes;
        for (int64_t m = 0, some; m < rows; m += some) {
            some = rows - m >= 4 ? 4 : rows - m >= 2 ? 2 : 1;
            if (some == 4) row<C, 4, X, Z>(L, codes, s, z, table, in, m, y);
            else if (some == 2) row<C, 2, X, Z>(L, codes, s, z, table, in, m, y);
            else row<C, 1, X, Z>(L, codes, s, z, table, in, m, y);
            for (int64_t i = 0; i < some; i++) {
                const int64_t at = (m + i) * L.rows + n;
                if (dtype == FLOAT32) put_one<FLOAT32>(y[i], bias, n, out, at);
                else if (dtype == BFLOAT16) put_one<BFLOAT16>(y[i], bias, n, out, at);
                else put_one<FLOAT16>(y[i], bias, n, out, at);
            }
        }
    });
}
