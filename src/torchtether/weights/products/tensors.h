// What torch says of a tensor, by the functions of its C interface (torch/csrc/inductor/aoti_torch/c/shim.h).
//
// binding.py gives their addresses to tether_bind. A handle is the address of what Python calls the `_cdata` of a tensor.
// Asked here, all that a kernel must know of a tensor costs less than one attribute does in Python; nobody else checks.

struct Torch {  // each returns 0 where it could answer
    int32_t (*dim)(const void*, int64_t*);
    int32_t (*sizes)(const void*, const int64_t**);
    int32_t (*strides)(const void*, const int64_t**);
    int32_t (*dtype)(const void*, int32_t*);
    int32_t (*device)(const void*, int32_t*);
    int32_t (*layout)(const void*, int32_t*);
    int32_t (*bytes)(const void*, int64_t*);  // of its storage
    int32_t (*offset)(const void*, int64_t*);
    int32_t (*data)(const void*, void**);
    bool (*records_graphs)();
};
Torch torch_says;

// ScalarType of torch, by the number it has always had
inline int64_t size_of(int32_t dtype) {
    switch (dtype) {
        case 0: case 1: case 23: case 24: case 44: return 1;  // uint8, int8, float8_e5m2, float8_e4m3fn, float8_e8m0fnu
        case 5: case 15: return 2;                            // float16, bfloat16
        case 3: case 6: return 4;                             // int32, float32
        case 4: return 8;                                     // int64
        default: return 0;
    }
}

// Dtype of what can be multiplied, and decoded to; -1 for all other.
inline int dtype_of(int32_t dtype) { return dtype == 6 ? FLOAT32 : dtype == 15 ? BFLOAT16 : dtype == 5 ? FLOAT16 : -1; }

struct Seen {
    int64_t dim, count;  // count: elements
    const int64_t *sizes, *strides;
    int32_t dtype;
    bool is_contiguous;
    void* at;

    // Whether it is a strided tensor of the CPU that has elements, all of them within memory that is there: FSDP frees
    // storages between uses, and `resize_` and `set_` change them under the tensors that they belong to.
    bool look(int64_t cdata) { return cdata && look_at(&cdata); }

    bool look_at(const void* handle) {
        int32_t device = -1, layout = -1;
        int64_t bytes = 0, offset = 0;
        if (torch_says.device(handle, &device) || device != 0) return false;
        if (torch_says.layout(handle, &layout) || layout != 0) return false;
        if (torch_says.dtype(handle, &dtype) || !size_of(dtype)) return false;
        if (torch_says.dim(handle, &dim) || torch_says.sizes(handle, &sizes)) return false;
        if (torch_says.strides(handle, &strides) || torch_says.bytes(handle, &bytes)) return false;
        if (torch_says.offset(handle, &offset) || torch_says.data(handle, &at) || !at) return false;
        int64_t extent = 1;
        count = 1, is_contiguous = true;
        for (int64_t d = dim; d-- > 0;) {
            is_contiguous = is_contiguous && (sizes[d] == 1 || strides[d] == count);
            count *= sizes[d], extent += (sizes[d] - 1) * strides[d];
        }
        return count > 0 && (offset + extent) * size_of(dtype) <= bytes;
    }
};

// The parts, in the order of their slots in the layout, checked to be those of the layout; `look(i, part)` looks at one.
template <class Look> inline bool look_at_parts(const Layout& L, intptr_t count, Parts& parts, Look look) {
    const void* at[5] = {};
    intptr_t used = 0;
    for (int i = 0; i < 5; i++) {
        if (L.types[i] < 0) continue;
        Seen part;
        if (used == count || !look(used++, part)) return false;
        if (part.dtype != L.types[i] || part.count != L.counts[i] || !part.is_contiguous) return false;
        at[i] = part.at;
    }
    parts = {at[0], at[1], at[2], at[3], at[4]};
    return used == count;
}
