// The functions that Python calls.
//
// cpu.cpp includes this in its own namespace.

Entries own = {product, some_rows, nullptr};

Layout* layout_at(Object* address) {
    Layout* L = (Layout*)python.address(address);
    L->entries = &own;
    return L;
}

// (address of the Layout, x, bias or None, *parts)
Object* enter_linear(Object*, Object* const* given, intptr_t count) {
    if (count < 4) return again(python.none);
    return product(*layout_at(given[0]), given[1], given[2], given + 3, count - 3);
}

// (address of the Layout, dtype as a number, index or None, start, stop, out or None, *parts)
Object* enter_decode(Object*, Object* const* given, intptr_t count) {
    if (count < 7) return again(python.none);
    const int64_t start = python.number(given[3]), stop = python.number(given[4]);
    return some_rows(*layout_at(given[0]), python.number(given[1]), given[2], start, stop, given[5], given + 6, count - 6);
}

// A Weight whose kernels are known, while no graph is recorded of it or of `x` or `bias`, and nothing looks on.
struct Known {
    Held dict, spec, dtype;
    Layout* L = nullptr;
    Object* parts[5];
    intptr_t count = 0;
    int number = -1;  // Dtype of the Weight

    Known(Object* weight, Object* x, Object* bias) : dict(nullptr), spec(nullptr), dtype(nullptr) {
        if ((torch_says.records_graphs() && any_requires_grad(weight, x, bias)) || is_observed()) return;
        dict.object = python.dict(weight);
        if (!dict.object) python.forget();
        if (!dict.object) return;
        Object* layout = python.item(dict.object, python.kernel_layout);
        if (!layout) return;
        const Held type(python.type(layout));
        if (type.object != python.layout) return;
        spec.object = again(python.item(dict.object, python.spec));
        if (!spec.object) return;
        dtype.object = python.get(spec.object, python.dtype);
        for (int i = 0; i < 3; i++)
            if (dtype.object == python.dtypes[i]) number = i;
        L = (Layout*)python.address(python.field(layout, 0));
        Object* names = python.field(layout, 1);
        for (; count < 5; count++) {
            Object* name = count < python.length(names) ? python.field(names, count) : nullptr;
            Object* part = name ? python.item(dict.object, name) : nullptr;
            if (!part) break;
            parts[count] = again(part);  // another thread may replace it meanwhile
        }
        if (number < 0) L = nullptr;
    }
    ~Known() { for (intptr_t i = 0; i < count; i++) python.drop(parts[i]); }
};

Object* or_none(Object* made) {
    if (made != python.not_implemented) return made;
    python.drop(made);
    return again(python.none);
}

// Both take what `__torch_function__` is given, the arguments and their names, and give None where it takes more thought.

// How many arguments there are, none of them by name; -1 if that is not so.
intptr_t positional(Object* args, Object* names) {
    const intptr_t count = python.length(args), named = names == python.none ? 0 : python.size(names);
    if (count < 0 || named < 0) python.forget();
    return named == 0 ? count : -1;
}

// ((x, Weight) or (x, Weight, bias or None), {})
Object* shortcut_linear(Object*, Object* const* given, intptr_t count) {
    const intptr_t length = count == 2 ? positional(given[0], given[1]) : -1;
    if (length != 2 && length != 3) return again(python.none);
    Object *given_x = python.field(given[0], 0), *bias = length == 3 ? python.field(given[0], 2) : python.none;
    const Known known(python.field(given[0], 1), given_x, bias);
    if (!known.L || !known.L->entries || !known.L->most[known.number]) return again(python.none);
    Seen x;
    if (!x.look(cdata_of(given_x)) || dtype_of(x.dtype) != known.number) return again(python.none);
    if (x.count / known.L->columns > known.L->most[known.number]) return again(python.none);
    return or_none(known.L->entries->linear(*known.L, given_x, bias, known.parts, known.count));
}

// ((index, Weight), options of F.embedding): but for max_norm they say something of gradients only; what they must not say
// is for torch to refuse.
Object* shortcut_gather(Object*, Object* const* given, intptr_t count) {
    if (count != 2 || positional(given[0], python.none) != 2) return again(python.none);
    Object* max_norm = given[1] == python.none ? nullptr : python.item(given[1], python.max_norm);
    if (max_norm && max_norm != python.none) return again(python.none);
    Object* index = python.field(given[0], 0);
    const Known known(python.field(given[0], 1), index, python.none);
    if (!known.L || !known.L->entries) return again(python.none);
    const Layout& L = *known.L;
    Object* padding = given[1] == python.none ? nullptr : python.item(given[1], python.padding_idx);
    if (padding && padding != python.none) {
        const int64_t row = python.number(padding);  // -1 where it is no number
        if (row < 0) python.forget();
        if (row < 0 || row >= L.rows) return again(python.none);
    }
    return or_none(L.entries->decode(L, known.number, index, 0, 0, python.none, known.parts, known.count));
}
