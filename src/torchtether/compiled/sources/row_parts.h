// The numbers of each group of a row of a stream of codes, as float32:
//     value = ((level + before) * scale) * unit + after
// with a level for each code. A summand that a scheme lacks is -0.0, which changes no number, not even -0.0.
//
// stream.cpp includes this in its own namespace.

inline F without_payload(F v) { return v == v ? v : all(NAN); }  // a payload could overflow where numbers are rounded

template <int A, int D> void copy_rounded(const void* from, int64_t at, int64_t count, float* to) {
    for (int64_t g = 0; g < count; g += LANES) {
        const F v = g + LANES <= count ? get<D>(from, at + g) : get<D>(from, at + g, count - g);
        const F r = rounded_to<A>(without_payload(v));
        memcpy(to + g, &r, sizeof r);
    }
}

template <int A> void copy_rounded(int dtype, const void* from, int64_t at, int64_t count, float* to) {
    if (dtype == FLOAT32) copy_rounded<A, FLOAT32>(from, at, count, to);
    else if (dtype == BFLOAT16) copy_rounded<A, BFLOAT16>(from, at, count, to);
    else copy_rounded<A, FLOAT16>(from, at, count, to);
}

// to[g] = sign * wide[g / ratio] * narrow[g]; writes whole vectors
template <bool SIGN> void nested_scales(const void* wide, const uint8_t* narrow, int64_t ratio, int64_t count, float sign,
                                        float* to) {
    const auto scaled = [&](const uint8_t* from, F by, int64_t g) {
        const F v = by * __builtin_convertvector(SIGN ? signed_bytes(from) : bytes(from), F);
        memcpy(to + g, &v, sizeof v);
    };
    const int64_t whole = ratio % LANES ? 0 : count / ratio;
    float several[LANES];
    for (int64_t i = 0, g = 0; i < whole; i += LANES) {
        const int64_t some = whole - i < LANES ? whole - i : LANES;
        const F v = without_payload(all(sign) * get<FLOAT16>(wide, i, some));
        memcpy(several, &v, sizeof v);
        if (ratio == LANES)
            for (int64_t j = 0; j < some; j++, g += LANES) scaled(narrow + g, all(several[j]), g);
        else
            for (int64_t j = 0; j < some; j++)
                for (const int64_t end = g + ratio; g < end; g += LANES) scaled(narrow + g, all(several[j]), g);
    }
    for (int64_t i = whole, g = whole * ratio; g < count; i++) {
        const int64_t end = g + ratio < count ? g + ratio : count;
        const F by = all(without_payload(all(sign) * get<FLOAT16>(wide, i, 1))[0]);
        for (; g < end; g += LANES) {
            uint8_t rest[LANES] = {};
            for (int64_t j = 0; j < LANES && g + j < count; j++) rest[j] = narrow[g + j];
            scaled(rest, by, g);
        }
        g = end;
    }
}

// Where the codes and the groups of row n begin.
struct RowAt {
    int64_t octet, skip;          // index of the first run of 8 codes; its codes before the row
    int64_t group, groups, lead;  // index of the first group; number of groups; columns of the first

    RowAt(const Layout& L, int64_t n) {
        if (!L.is_flat) {
            octet = skip = 0, group = (L.height == 1 ? n : n / L.height) * L.groups, groups = L.groups, lead = L.group;
            return;
        }
        const int64_t first = n * L.columns, last = first + L.columns - 1;
        octet = first / 8, skip = first % 8, group = first / L.group, groups = last / L.group - group + 1;
        lead = L.group - first % L.group;
    }
};

struct RowParts {
    float *scale, *before, *after;

    static int64_t stride(const Layout& L) { return L.groups + 1 + 2 * LANES; }
    static int64_t size(const Layout& L) { return 3 * stride(L); }

    RowParts(const Layout& L, float* buffer) : scale(buffer), before(scale + stride(L)), after(before + stride(L)) {}

    // A buffer of `count` floats with defaults for the numbers that the family of L lacks; `fill` writes the others.
    static Buffer buffer(const Layout& L, int64_t count) {
        Buffer made(count);
        const RowParts parts(L, made.data());
        for (int64_t g = 0; g < stride(L); g++) parts.before[g] = -L.offset, parts.after[g] = -0.0f;
        return made;
    }

    template <int A> void fill_biased(const Layout& L, const Parts& P, const RowAt& at) {
        copy_rounded<A>(L.scale, P.scale, at.group, at.groups, scale);
        copy_rounded<A>(L.scale, P.zero, at.group, at.groups, L.family == BIASED ? after : before);
    }

    void fill(const Layout& L, const Parts& P, int64_t n, const RowAt& at) {
        if (L.family == BIASED || L.family == BIASED_FIRST) {
            if (L.arithmetic == FLOAT32) fill_biased<FLOAT32>(L, P, at);
            else if (L.arithmetic == BFLOAT16) fill_biased<BFLOAT16>(L, P, at);
            else fill_biased<FLOAT16>(L, P, at);
        } else if (L.family == SUPER_BLOCKS) {
            const int64_t supers = n * ((L.groups + L.nested - 1) / L.nested);
            const uint16_t *wide = (const uint16_t*)P.extra + supers, *lowest = (const uint16_t*)P.offset + supers;
            const uint8_t *narrow = (const uint8_t*)P.scale + at.group, *low = (const uint8_t*)P.zero + at.group;
            if (!P.scale) copy_rounded<FLOAT32, FLOAT16>(wide, 0, at.groups, scale);
            else if (!P.zero) nested_scales<true>(wide, narrow, L.nested, at.groups, 1, scale);
            else {
                nested_scales<false>(wide, narrow, L.nested, at.groups, 1, scale);
                nested_scales<false>(lowest, low, L.nested, at.groups, -1, after);
            }
        } else scales_at(L, P, at.group, at.groups, scale, before);
    }
};
