// Ops of torch's dispatcher, by the functions of its stable C interface (torch/csrc/stable/c/shim.h).
//
// An op takes its arguments from a stack of words, and leaves its result there. Tensors, lists and strings are handles that
// the op owns, and so are the items of a list; an optional argument is the address of such a handle, which the op owns, too,
// or null.
//
// module.cpp includes this in its own namespace.

constexpr uint64_t OF_TORCH = 2ull << 56 | 13ull << 48;  // the torch version of these conventions

inline void drop_tensor(uint64_t handle) { torch.drop_tensor((void*)handle); }
inline void drop_text(uint64_t handle) { torch.drop_text((void*)handle); }
inline void drop_optional_tensor(uint64_t given) {
    if (!given) return;
    drop_tensor(*(uint64_t*)given);
    torch.drop_optional((uint64_t*)given);
}

inline std::string text_of(uint64_t handle) {
    const char* start = nullptr;
    size_t length = 0;
    if (torch.text((void*)handle, &start) || torch.text_length((void*)handle, &length)) return {};
    return {start, length};
}

inline std::vector<uint64_t> items_of(uint64_t list) {
    size_t length = 0;
    if (torch.list_length((void*)list, &length)) length = 0;
    std::vector<uint64_t> items(length);
    for (size_t i = 0; i < length; i++)
        if (torch.item((void*)list, i, &items[i])) return {};
    return items;
}

// A new contiguous CPU tensor with the dtype and shape of `x`, except for its last size; 0 if it cannot be allocated.
inline uint64_t empty_as(const Seen& x, int64_t last) {
    std::vector<int64_t> sizes(x.sizes, x.sizes + x.dim), strides(x.dim);
    sizes.back() = last;
    int64_t step = 1;
    for (int64_t d = x.dim; d-- > 0; step *= sizes[d]) strides[d] = step;
    void* made = nullptr;
    return torch.empty(x.dim, sizes.data(), strides.data(), x.dtype, 0, -1, &made) ? 0 : (uint64_t)made;
}

// Calls another op with the same arguments, which that op then owns.
inline void pass_on(const char* op, uint64_t* stack) {
    if (torch.call(op, "", stack, OF_TORCH)) throw std::runtime_error(torch.what());
}

inline bool implement(const char* op, void (*kernel)(uint64_t*, uint64_t, uint64_t)) {
    void* library = nullptr;  // kept until the process ends
    if (torch.library("torchtether", "CPU", __FILE__, __LINE__, &library)) return false;
    return torch.implement(library, op, kernel, OF_TORCH) == 0;
}
