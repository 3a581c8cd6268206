// Queries about tensors, by the functions of torch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h, and
// torch/csrc/stable/c/shim.h). `find_torch` looks them up by name in the library that the process has loaded.
//
// module.cpp includes this in its own namespace.

// Each function that returns int32_t returns 0 on success.
#define OF_TORCH(X)                                                                                                       \
    X(dim, "aoti_torch_get_dim", int32_t, (const void*, int64_t*))                                                        \
    X(sizes, "aoti_torch_get_sizes", int32_t, (const void*, const int64_t**))                                             \
    X(strides, "aoti_torch_get_strides", int32_t, (const void*, const int64_t**))                                         \
    X(dtype, "aoti_torch_get_dtype", int32_t, (const void*, int32_t*))                                                    \
    X(device, "aoti_torch_get_device_type", int32_t, (const void*, int32_t*))                                             \
    X(layout, "aoti_torch_get_layout", int32_t, (const void*, int32_t*))                                                  \
    X(bytes, "aoti_torch_get_storage_size", int32_t, (const void*, int64_t*))                                             \
    X(offset, "aoti_torch_get_storage_offset", int32_t, (const void*, int64_t*))                                          \
    X(data, "aoti_torch_get_data_ptr", int32_t, (const void*, void**))                                                    \
    X(records_graphs, "aoti_torch_grad_mode_is_enabled", bool, ())                                                        \
    X(count_threads, "torch_get_num_threads", int32_t, (uint32_t*))                                                       \
    X(parallel_for, "torch_parallel_for", int32_t, (int64_t, int64_t, int64_t, void (*)(int64_t, int64_t, void*), void*)) \
    X(library, "aoti_torch_library_init_impl", int32_t, (const char*, const char*, const char*, uint32_t, void**))        \
    X(implement, "torch_library_impl", int32_t, (void*, const char*, void (*)(uint64_t*, uint64_t, uint64_t), uint64_t))  \
    X(call, "torch_call_dispatcher", int32_t, (const char*, const char*, uint64_t*, uint64_t))                            \
    X(list_length, "torch_list_size", int32_t, (void*, size_t*))                                                          \
    X(item, "torch_list_get_item", int32_t, (void*, size_t, uint64_t*))                                                   \
    X(drop_list, "torch_delete_list", int32_t, (void*))                                                                   \
    X(text_length, "torch_string_length", int32_t, (void*, size_t*))                                                      \
    X(text, "torch_string_c_str", int32_t, (void*, const char**))                                                         \
    X(drop_text, "torch_delete_string", int32_t, (void*))                                                                 \
    X(drop_optional, "torch_delete_stable_ivalue", int32_t, (uint64_t*))                                                  \
    X(drop_tensor, "aoti_torch_delete_tensor_object", int32_t, (void*))                                                   \
    X(empty, "aoti_torch_empty_strided", int32_t,                                                                         \
      (int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**))                                       \
    X(what, "torch_exception_get_what_without_backtrace", const char*, ())

struct Torch {
#define FIELD(name, symbol, result, arguments) result(*name) arguments;
    OF_TORCH(FIELD)
#undef FIELD
};
Torch torch;

// Returns "" if all are found, else the name of one that is not.
const char* find_torch(const char* library) {
    void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
    if (!loaded) return library;
#define FIND(name, symbol, result, arguments)                \
    torch.name = (result(*) arguments)dlsym(loaded, symbol); \
    if (!torch.name) return symbol;
    OF_TORCH(FIND)
#undef FIND
    return "";
}

// The size of an element of torch's ScalarType, by its number, which is stable; 0 for other types.
inline int64_t size_of(int32_t dtype) {
    switch (dtype) {
        case 0: case 1: case 23: case 24: case 44: return 1;  // uint8, int8, float8_e5m2, float8_e4m3fn, float8_e8m0fnu
        case 5: case 15: return 2;                            // float16, bfloat16
        case 3: case 6: return 4;                             // int32, float32
        case 4: return 8;                                     // int64
        default: return 0;
    }
}

// The Dtype of a ScalarType that products and decoding support; -1 for all others.
inline int dtype_of(int32_t dtype) { return dtype == 6 ? FLOAT32 : dtype == 15 ? BFLOAT16 : dtype == 5 ? FLOAT16 : -1; }

// The facts about a tensor that a kernel needs. A handle is the address of the number that Python calls `_cdata`. All these
// queries cost less than one attribute does in Python. There is no other check.
struct Seen {
    int64_t dim, count;  // count: elements
    const int64_t *sizes, *strides;
    int32_t dtype;
    bool is_contiguous;
    void* at;

    // Whether it is a strided CPU tensor with elements, all of them within its storage: FSDP frees storages between uses,
    // and `resize_` and `set_` change storages under other tensors.
    bool look(int64_t cdata) { return cdata && look_at(&cdata); }

    bool look_at(const void* handle) {
        int32_t device = -1, layout = -1;
        int64_t bytes = 0, offset = 0;
        if (torch.device(handle, &device) || device != 0) return false;
        if (torch.layout(handle, &layout) || layout != 0) return false;
        if (torch.dtype(handle, &dtype) || !size_of(dtype)) return false;
        if (torch.dim(handle, &dim) || torch.sizes(handle, &sizes)) return false;
        if (torch.strides(handle, &strides) || torch.bytes(handle, &bytes)) return false;
        if (torch.offset(handle, &offset) || torch.data(handle, &at) || !at) return false;
        int64_t extent = 1;
        count = 1, is_contiguous = true;
        for (int64_t d = dim; d-- > 0;) {
            is_contiguous = is_contiguous && (sizes[d] == 1 || strides[d] == count);
            count *= sizes[d], extent += (sizes[d] - 1) * strides[d];
        }
        return count > 0 && (offset + extent) * size_of(dtype) <= bytes;
    }

    // Whether its memory is where it was: other threads may give it other memory while a result is allocated.
    bool stays(int64_t cdata) const {
        void* now = nullptr;
        return !torch.data(&cdata, &now) && now == at;
    }
};

// Whether every column of an ORDERED layout names an existing group.
inline bool names_groups(const Layout& L, const Parts& parts) {
    const int32_t* named = (const int32_t*)parts.extra;
    int32_t low = 0, high = 0;
    for (int64_t k = 0; L.family == ORDERED && k < L.columns; k++) {
        low = named[k] < low ? named[k] : low;
        high = named[k] > high ? named[k] : high;
    }
    return low >= 0 && high < L.groups;
}

// Reads the parts, in the order of their slots, and checks them against the layout; `look(i, part)` reads one.
template <class Look> inline bool look_at_parts(const Layout& L, intptr_t count, Parts& parts, Look look) {
    const void* at[SLOTS] = {};
    intptr_t used = 0;
    for (int i = 0; i < SLOTS; i++) {
        if (L.types[i] < 0) continue;
        Seen part;
        if (used == count || !look(used++, part)) return false;
        if (part.dtype != L.types[i] || part.count != L.counts[i] || !part.is_contiguous) return false;
        at[i] = part.at;
    }
    parts = {at[0], at[1], at[2], at[3], at[4]};
    return used == count && names_groups(L, parts);
}
