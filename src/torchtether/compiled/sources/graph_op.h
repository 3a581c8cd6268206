// The op torchtether::linear in compiled graphs, without Python.
//
// module.cpp includes this in its own namespace.

struct Remembered {
    const Layout* L;             // of an object that is kept until the process ends
    size_t parts;                // how many parts the op takes
    std::vector<int64_t> order;  // the indices of those that the kernels take
};
std::unordered_map<std::string, Remembered> remembered;  // by the argument `weight` of the op
std::shared_mutex remembering;

// torchtether::linear(Tensor x, Tensor? bias, Tensor[] parts, str weight) -> Tensor
void linear_in_graph(uint64_t* stack, uint64_t, uint64_t) {
    const Remembered* found = nullptr;
    {
        std::shared_lock<std::shared_mutex> lock(remembering);
        const auto at = remembered.find(text_of(stack[3]));
        if (at != remembered.end()) found = &at->second;  // entries are never removed
    }
    const std::vector<uint64_t> parts = items_of(stack[2]);
    uint64_t made = 0, taken[SLOTS];
    if (found && parts.size() == found->parts) {
        const intptr_t count = found->order.size();
        for (intptr_t i = 0; i < count; i++) taken[i] = parts[found->order[i]];
        const void* bias = stack[1] ? (const void*)*(const uint64_t*)stack[1] : nullptr;
        made = product_of_handles(*found->L, (const void*)stack[0], bias, taken, count);
    }
    if (!made) return pass_on("torchtether::any_linear", stack);
    drop_tensor(stack[0]), drop_optional_tensor(stack[1]), drop_text(stack[3]);
    for (const uint64_t part : parts) drop_tensor(part);
    torch.drop_list((void*)stack[2]);
    stack[0] = made;
}

// (weight, Layout, number of parts of the op, indices of those that the kernels take): from now on the op runs calls with
// this argument `weight` without Python.
PyObject* remember(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const Layout* L = count == 4 ? layout_in(given[1]) : nullptr;
    if (!L) return PyErr_Occurred() ? nullptr : refuse("remember(weight, layout, parts, order)");
    const Held bytes(PyUnicode_AsUTF8String(given[0]));
    char* text = nullptr;
    if (!bytes.object || PyBytes_AsStringAndSize(bytes.object, &text, nullptr)) return nullptr;
    Remembered made{L, (size_t)PyLong_AsLongLong(given[2]), {}};
    const Py_ssize_t length = PySequence_Size(given[3]);
    for (Py_ssize_t i = 0; i < length; i++) {
        const Held number(PySequence_GetItem(given[3], i));
        made.order.push_back(number.object ? PyLong_AsLongLong(number.object) : -1);
    }
    if (PyErr_Occurred()) return nullptr;
    for (const int64_t i : made.order)
        if (i < 0 || i >= (int64_t)made.parts || length > SLOTS) return refuse("remember: an order of parts that are not there");
    std::unique_lock<std::shared_mutex> lock(remembering);
    if (remembered.emplace(text, std::move(made)).second) Py_INCREF(given[1]);
    return none();
}
