// Reading the scales and zero points of a row of codes as float32.
//
// kernels.cpp includes this in its own namespace.

template <int D> void copy_scales(const void* from, int64_t at, int64_t count, float* to) {
    int64_t g = 0;
    for (; g + LANES <= count; g += LANES) {
        const F v = get<D>(from, at + g);
        memcpy(to + g, &v, sizeof v);
    }
    if (g < count) {
        const F v = get<D>(from, at + g, count - g);
        memcpy(to + g, &v, (count - g) * 4);
    }
}

// What all integers are too large by; 0 where there are zero points.
inline float offset_of_all(const Layout& L) { return L.zero < 0 ? L.offset : 0; }

template <bool SIGN> void negated_zeros(const void* from, int64_t at, int64_t count, float offset, float* to) {
    const uint8_t* p = (const uint8_t*)from + at;
    int64_t g = 0;
    for (; g + LANES <= count; g += LANES) {
        const F v = -(__builtin_convertvector(SIGN ? signed_bytes(p + g) : bytes(p + g), F) + all(offset));
        memcpy(to + g, &v, sizeof v);
    }
    for (; g < count; g++) to[g] = -((SIGN ? (float)(int8_t)p[g] : (float)p[g]) + offset);
}

// G scales from `at`, and their zero points negated, as float32.
inline void scales_at(const Layout& L, const Parts& P, int64_t at, int64_t G, float* s, float* z) {
    const uint8_t* codes = (const uint8_t*)P.scale + at;
    switch (L.scale) {
        case FLOAT32: copy_scales<FLOAT32>(P.scale, at, G, s); break;
        case BFLOAT16: copy_scales<BFLOAT16>(P.scale, at, G, s); break;
        case FLOAT16: copy_scales<FLOAT16>(P.scale, at, G, s); break;
        case E8M0:
            for (int64_t g = 0; g < G; g++) {
                const uint32_t e = codes[g], bits = e == 255 ? 0x7fc00000 : e ? e << 23 : 0x00400000;
                memcpy(s + g, &bits, 4);
            }
            break;
        case FP8:
            for (int64_t g = 0; g < G; g += LANES) {
                if (g + LANES <= G) {
                    const F v = from_e4m3(codes + g);
                    memcpy(s + g, &v, sizeof v);
                    continue;
                }
                uint8_t rest[LANES] = {};
                memcpy(rest, codes + g, G - g);
                const F v = from_e4m3(rest);
                memcpy(s + g, &v, (G - g) * 4);
            }
            break;
        default: {
            const float offset = *(const float*)P.offset, *absmax = (const float*)P.extra + at / L.nested;
            for (int64_t g = 0, left = L.nested - at % L.nested; g < G; absmax++, left = L.nested)
                for (; g < G && left; g++, left--) {
                    const float product = L.dynamic[codes[g]] * *absmax;
                    s[g] = product + offset;
                }
        }
    }
    if (L.global_scale) {
        const float global = *(const float*)P.extra;
        for (int64_t g = 0; g < G; g++) s[g] = L.global_scale == 1 ? s[g] * global : s[g] / global;
    }
    for (int64_t g = 0; g < G; g++) s[g] = s[g] == s[g] ? s[g] : NAN;  // without payload, which rounding could overflow
    if (L.zero == SIGNED) negated_zeros<true>(P.zero, at, G, L.offset, z);
    else if (L.zero == UNSIGNED) negated_zeros<false>(P.zero, at, G, L.offset, z);
    else
        for (int64_t g = 0; g < G; g++) z[g] = -L.offset;
}

// The scales and negated zero points of row n.
inline void row_scales(const Layout& L, const Parts& P, int64_t n, float* s, float* z) {
    scales_at(L, P, (L.height == 1 ? n : n / L.height) * L.groups, L.groups, s, z);
}

// to[b] = the value of span b, where `each` spans share a value. Writes whole vectors.
inline void spread(const float* values, int64_t each, int64_t spans, float* to) {
    if (each == 1) { memcpy(to, values, spans * 4); return; }
    for (int64_t b = 0, end; b < spans; b = end, values++) {
        end = b + each < spans ? b + each : spans;
        const F v = all(*values);
        for (; b < end; b += LANES) memcpy(to + b, &v, sizeof v);
    }
}

// The size of a buffer for the scales of a row: Table reads 16 elements from any of its first entries.
inline int64_t buffer_size(const Layout& L) { return L.groups + (L.columns + BLOCK - 1) / BLOCK * 8 + 32; }
