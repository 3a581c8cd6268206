// The functions that Python calls: products, rows, and the shortcuts past the rules of the ops.
//
// module.cpp includes this in its own namespace.

// (Layout, x, bias or None, *parts)
PyObject* enter_linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const Layout* L = count < 4 ? nullptr : layout_in(given[0]);
    if (!L) return refuse("linear(layout, x, bias, *parts)");
    return product(*L, given[1], given[2], given + 3, count - 3);
}

// (Layout, x, *parts)
PyObject* enter_gradient(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const Layout* L = count < 3 ? nullptr : layout_in(given[0]);
    if (!L) return refuse("gradient(layout, x, *parts)");
    return gradient(*L, given[1], given + 2, count - 2);
}

// (Layout, dtype as a number, index or None, start, stop, out or None, *parts)
PyObject* enter_decode(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const Layout* L = count < 7 ? nullptr : layout_in(given[0]);
    if (!L) return refuse("decode(layout, dtype, index, start, stop, out, *parts)");
    const int64_t dtype = PyLong_AsLongLong(given[1]), start = PyLong_AsLongLong(given[3]), stop = PyLong_AsLongLong(given[4]);
    if (PyErr_Occurred()) return nullptr;
    return some_rows(*L, dtype, given[2], start, stop, given[5], given + 6, count - 6);
}

// (Layout, dtype as a number, most, least): sets up to how many rows of inputs `linear` is the kernel to take, and from how
// many on it multiplies in blocks (0: never).
PyObject* set_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
    Layout* L = count == 4 ? layout_in(given[0]) : nullptr;
    if (!L) return refuse("set_rows(layout, dtype, most, least)");
    const int64_t dtype = PyLong_AsLongLong(given[1]), most = PyLong_AsLongLong(given[2]), least = PyLong_AsLongLong(given[3]);
    if (PyErr_Occurred()) return nullptr;
    if (dtype >= 0 && dtype < 3) L->least[dtype] = dtype == BFLOAT16 ? least : 0, L->most[dtype] = most;
    return none();
}

// The kernels' view of a Weight; L is null unless its layout is known, no graph is recorded of the Weight, `x` or `bias`, and
// no mode, transform or trace is active.
struct KnownWeight {
    Held dict, spec, dtype, layout;
    Layout* L = nullptr;
    PyObject* parts[SLOTS];
    Py_ssize_t count = 0;
    int number = -1;  // Dtype of the Weight

    KnownWeight(PyObject* weight, PyObject* x, PyObject* bias)
        : dict(nullptr), spec(nullptr), dtype(nullptr), layout(nullptr) {
        if ((torch.records_graphs() && any_requires_grad(weight, x, bias)) || is_observed()) return;
        dict.object = PyObject_GenericGetDict(weight, nullptr);
        if (!dict.object) PyErr_Clear();
        if (!dict.object) return;
        PyObject* found = PyDict_GetItem(dict.object, known.kernel_layout);
        if (!found || found == Py_None) return;
        layout.object = PyObject_GetAttr(found, known.native);
        L = layout.object ? layout_in(layout.object) : nullptr;
        if (!L) PyErr_Clear();  // its layout is not computed yet
        if (!L) return;
        PyObject* its = PyDict_GetItem(dict.object, known.spec);
        if (!its) { L = nullptr; return; }
        spec.object = again(its);
        dtype.object = PyObject_GetAttr(spec.object, known.dtype);
        if (!dtype.object) PyErr_Clear();
        for (int i = 0; i < 3; i++)
            if (dtype.object == known.dtypes[i]) number = i;
        PyObject* names = ((LayoutObject*)layout.object)->names;
        for (; count < SLOTS; count++) {
            PyObject* name = count < PyTuple_Size(names) ? PyTuple_GetItem(names, count) : nullptr;
            PyObject* part = name ? PyDict_GetItem(dict.object, name) : nullptr;
            if (!part) break;
            parts[count] = again(part);  // another thread may replace it meanwhile
        }
        if (number < 0) L = nullptr;
    }
    ~KnownWeight() { for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(parts[i]); }
};

PyObject* or_none(PyObject* made) {
    if (made != Py_NotImplemented) return made;
    Py_DECREF(made);
    return none();
}

// Both shortcuts take the arguments of `__torch_function__`, args and kwargs, and return None if the rule of the op must run.

// The number of arguments if none is given by name, else -1.
Py_ssize_t positional(PyObject* args, PyObject* names) {
    const Py_ssize_t count = PyTuple_Size(args), named = names == Py_None ? 0 : PyDict_Size(names);
    if (count < 0 || named < 0) PyErr_Clear();
    return named == 0 ? count : -1;
}

// ((x, Weight) or (x, Weight, bias or None), {})
PyObject* shortcut_linear(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const Py_ssize_t length = count == 2 ? positional(given[0], given[1]) : -1;
    if (length != 2 && length != 3) return none();
    PyObject *given_x = PyTuple_GetItem(given[0], 0), *bias = length == 3 ? PyTuple_GetItem(given[0], 2) : Py_None;
    const KnownWeight weight(PyTuple_GetItem(given[0], 1), given_x, bias);
    if (!weight.L || !weight.L->most[weight.number]) return none();
    Seen x;
    if (!x.look(cdata_of(given_x)) || dtype_of(x.dtype) != weight.number) return none();
    if (x.count / weight.L->columns > weight.L->most[weight.number]) return none();
    return or_none(product(*weight.L, given_x, bias, weight.parts, weight.count));
}

// ((index, Weight), options of F.embedding): except max_norm, the options concern gradients only; torch refuses bad ones.
PyObject* shortcut_gather(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 2 || positional(given[0], Py_None) != 2) return none();
    PyObject* max_norm = given[1] == Py_None ? nullptr : PyDict_GetItem(given[1], known.max_norm);
    if (max_norm && max_norm != Py_None) return none();
    PyObject* index = PyTuple_GetItem(given[0], 0);
    const KnownWeight weight(PyTuple_GetItem(given[0], 1), index, Py_None);
    if (!weight.L) return none();
    const Layout& L = *weight.L;
    PyObject* padding = given[1] == Py_None ? nullptr : PyDict_GetItem(given[1], known.padding_idx);
    if (padding && padding != Py_None) {
        const int64_t row = PyLong_AsLongLong(padding);  // -1 where it is no number
        if (row < 0) PyErr_Clear();
        if (row < 0 || row >= L.rows) return none();
    }
    return or_none(some_rows(L, weight.number, index, 0, 0, Py_None, weight.parts, weight.count));
}
