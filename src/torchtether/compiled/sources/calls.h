// Checked products and rows of a Weight whose parts, inputs and outputs are Python objects or handles of torch.
//
// module.cpp includes this in its own namespace.

// Each returns None, with nothing computed, if it does not support the call, and NotImplemented if it would support it with
// a contiguous input.

// x (..., L.columns) times the transposed weight, plus bias if there is one; all of one dtype.
struct Product {
    Seen x, bias{};  // without a bias, `at` is null
    Parts parts;
    int dtype;
    int64_t rows, stride;
    bool is_much, is_in_blocks;
    std::vector<char> own;  // a bias is a parameter, and another thread may give it other memory meanwhile

    enum Fit { NOT, IF_CONTIGUOUS, FITS };

    Fit fit(const Layout& L) {
        dtype = dtype_of(x.dtype);
        if (dtype < 0 || x.dim == 0 || x.sizes[x.dim - 1] != L.columns) return NOT;
        if (L.activations > 1) return NOT;
        if (bias.at && (bias.dtype != x.dtype || bias.dim != 1 || bias.count != L.rows || !bias.is_contiguous)) return NOT;
        const bool in_rows = x.dim == 2 && (x.strides[1] == 1 || L.columns == 1);
        if (!in_rows && !x.is_contiguous) return IF_CONTIGUOUS;
        rows = x.count / L.columns, stride = in_rows ? x.strides[0] : L.columns;
        is_in_blocks = level->blocks && L.least[dtype] && rows >= L.least[dtype];
        if (L.activations && !is_in_blocks && !kernels_of(L)->rounds_inputs(L, dtype)) return NOT;
        is_much = rows * L.rows * L.columns > 65536;
        if (is_much && bias.at) {
            own.assign((const char*)bias.at, (const char*)bias.at + bias.count * size_of(bias.dtype));
            bias.at = own.data();
        }
        return FITS;
    }

    void into(const Layout& L, void* out) const {
        if (is_in_blocks) level->blocks(L, parts, *kernels_of(L), x.at, rows, stride, bias.at, out);
        else kernels_of(L)->linear(L, parts, x.at, rows, stride, dtype, bias.at, out);
    }
};

// Returns work(), a new reference; if memory cannot be allocated null, with Python's error set.
template <class Work> PyObject* or_memory_error(Work work) {
    try {
        return work();
    } catch (const std::exception&) {
        PyErr_SetString(PyExc_MemoryError, "out of memory: a product or decoding found no room for what it works with");
        return nullptr;
    }
}

// Returns a product as a new tensor (..., L.rows); `given_bias` may be None.
PyObject* try_product(const Layout& L, PyObject* given_x, PyObject* given_bias, PyObject* const* given, Py_ssize_t count) {
    Product made;
    Seen seen, &bias = made.bias;
    int64_t cdata, bias_cdata = 0;
    const auto look = [&](Py_ssize_t i, Seen& part) { return part.look(cdata_of(given[i])); };
    if (!is_as_it_lies(given_x, &cdata) || !made.x.look(cdata) || !look_at_parts(L, count, made.parts, look))
        return none();
    if (given_bias != Py_None && (!is_as_it_lies(given_bias, &bias_cdata) || !bias.look(bias_cdata))) return none();
    const auto fit = made.fit(L);
    if (fit != Product::FITS) return again(fit == Product::NOT ? Py_None : Py_NotImplemented);
    Held out(new_tensor(made.x.sizes, made.x.dim - 1, L.rows, made.dtype));
    if (!out.object) return nullptr;
    if (!made.x.stays(cdata) || (bias_cdata && !made.is_much && !bias.stays(bias_cdata))) return none();
    if (!seen.look(cdata_of(out.object))) return none();
    aside(made.is_much, [&] { made.into(L, seen.at); });
    return out.release();
}

// Returns x (M, L.rows) of bfloat16 times the weight, not transposed, as a new tensor (M, L.columns).
PyObject* try_gradient(const Layout& L, PyObject* given_x, PyObject* const* given, Py_ssize_t count) {
    Seen x, seen;
    Parts parts;
    int64_t cdata;
    const auto look = [&](Py_ssize_t i, Seen& part) { return part.look(cdata_of(given[i])); };
    if (!level->gradient || !is_as_it_lies(given_x, &cdata) || !x.look(cdata)) return none();
    if (!look_at_parts(L, count, parts, look)) return none();
    if (dtype_of(x.dtype) != BFLOAT16 || x.dim != 2 || x.sizes[1] != L.rows || !L.rows) return none();
    if (x.strides[1] != 1 && L.rows != 1) return again(Py_NotImplemented);
    Held out(new_tensor(x.sizes, 1, L.columns, BFLOAT16));
    if (!out.object) return nullptr;
    if (!x.stays(cdata) || !seen.look(cdata_of(out.object))) return none();
    aside(true, [&] { level->gradient(L, parts, *kernels_of(L), x.at, x.sizes[0], x.strides[0], seen.at); });
    return out.release();
}

// Returns the rows from `start` to `stop`, or those in `given_index` (int64 or int32, of any rank) if it is not None. They are
// written to `given_out`, which may be larger, if it is not None.
PyObject* try_some_rows(const Layout& L, int64_t dtype, PyObject* given_index, int64_t start, int64_t stop, PyObject* given_out,
                      PyObject* const* given, Py_ssize_t count) {
    Rows rows = {nullptr, false, start, 0, L.columns};
    Parts parts;
    Seen index, seen;
    int64_t cdata;
    const auto look = [&](Py_ssize_t i, Seen& part) { return part.look(cdata_of(given[i])); };
    if (dtype < 0 || dtype > 2 || !look_at_parts(L, count, parts, look)) return none();
    if (given_index != Py_None) {
        if (!is_as_it_lies(given_index, &cdata) || !index.look(cdata)) return none();
        if (index.dtype != 4 && index.dtype != 3) return none();
        if (!index.is_contiguous) return again(Py_NotImplemented);
        rows = {index.at, index.dtype == 3, 0, index.count, L.columns};
    } else {
        if (start < 0 || stop <= start || stop > L.rows) return none();
        rows.count = stop - start;
    }
    Held out(given_out != Py_None ? again(given_out)
             : rows.index ? new_tensor(index.sizes, index.dim, L.columns, dtype)
                          : new_tensor(&rows.count, 1, L.columns, dtype));
    if (!out.object) return nullptr;
    if (rows.index && !index.stays(cdata)) return none();
    for (int64_t i = 0; rows.index && i < rows.count; i++)
        if (rows[i] < 0 || rows[i] >= L.rows) {
            PyErr_SetString(PyExc_IndexError, "index out of range in self");
            return nullptr;
        }
    if (!seen.look(cdata_of(out.object)) || !seen.is_contiguous) return none();
    if (dtype_of(seen.dtype) != dtype || seen.count < rows.count * L.columns) return none();
    aside(rows.count * L.columns > 65536, [&] { kernels_of(L)->decode(L, parts, rows, dtype, seen.at); });
    return out.release();
}

PyObject* product(const Layout& L, PyObject* x, PyObject* bias, PyObject* const* given, Py_ssize_t count) {
    return or_memory_error([&] { return try_product(L, x, bias, given, count); });
}

PyObject* gradient(const Layout& L, PyObject* x, PyObject* const* given, Py_ssize_t count) {
    return or_memory_error([&] { return try_gradient(L, x, given, count); });
}

PyObject* some_rows(const Layout& L, int64_t dtype, PyObject* index, int64_t start, int64_t stop, PyObject* out,
                  PyObject* const* given, Py_ssize_t count) {
    return or_memory_error([&] { return try_some_rows(L, dtype, index, start, stop, out, given, count); });
}

// The product of handles as a handle; 0 if the call is not supported, or memory cannot be allocated. It needs no GIL.
uint64_t product_of_handles(const Layout& L, const void* x, const void* bias, const uint64_t* given, Py_ssize_t count) {
    Product made;
    const auto look = [&](Py_ssize_t i, Seen& part) { return part.look_at((const void*)given[i]); };
    if (!made.x.look_at(x) || (bias && !made.bias.look_at(bias))) return 0;
    if (!look_at_parts(L, count, made.parts, look)) return 0;
    uint64_t out = 0;
    try {
        if (made.fit(L) != Product::FITS || made.rows > L.most[made.dtype]) return 0;
        Seen seen;
        out = empty_as(made.x, L.rows);
        if (out && seen.look_at((const void*)out)) {
            made.into(L, seen.at);
            return out;
        }
    } catch (const std::exception&) {
    }
    if (out) torch.drop_tensor((void*)out);
    return 0;
}
