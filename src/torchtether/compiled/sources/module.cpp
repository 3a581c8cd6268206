// The extension module torchtether.compiled._native: the Python functions of all compiled code.
//
// room.py imports it, and binds it to the torch of the process. Products and rows of Weights check every size, stride,
// dtype and address of their arguments (tensors.h, calls.h); the loops of the encoders rely on the checks in loops.py.

#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>
#if WITH_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "described.h"
#include "layout.h"
extern "C" {
#include "encoders.h"
}

decltype(parallel_for) parallel_for;
decltype(count_threads) count_threads;

// -- levels: what the compiler may use of the processor -----------------------------------------------------------------

#define KINDS_OF(X, level) X(level, INT8) X(level, UINT8) X(level, E4M3) X(level, E5M2) X(level, TABLE4) X(level, INT4) \
    X(level, STREAM)
#define DECLARE(level, kind) extern const Kernels kernels_##level##_##kind;
#define POINT(level, kind) &kernels_##level##_##kind,

KINDS_OF(DECLARE, portable)
extern "C" const encoders encoders_portable;
#if WITH_AVX2
KINDS_OF(DECLARE, avx2)
KINDS_OF(DECLARE, avx512)
extern "C" const encoders encoders_avx2;
#endif

namespace {

struct Level {
    const char* name;
    decltype(&block_linear) blocks;  // null without the instructions for them, as is `gradient`
    decltype(&block_gradient) gradient;
    const encoders* loops;
    const Kernels* kernels[KINDS];
};
const Level LEVELS[] = {
#if WITH_AVX2
#if WITH_TILES
    {"avx512_amx", tile_linear, tile_gradient, &encoders_avx2, {KINDS_OF(POINT, avx512)}},
#endif
    {"avx512_bf16", block_linear, block_gradient, &encoders_avx2, {KINDS_OF(POINT, avx512)}},
    {"avx512_vnni", nullptr, nullptr, &encoders_avx2, {KINDS_OF(POINT, avx512)}},
    {"avx2", nullptr, nullptr, &encoders_avx2, {KINDS_OF(POINT, avx2)}},
#endif
    {"portable", nullptr, nullptr, &encoders_portable, {KINDS_OF(POINT, portable)}},
};
const Level* level = nullptr;

#if WITH_TILES
// Whether the processor has AMX for bfloat16 and bytes, and Linux lets this process use it, for which one has to ask.
bool has_tiles() {
    uint32_t a, b, c, d;
    const uint32_t units = 1u << 22 | 1u << 24 | 1u << 25;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & units) != units) return false;
    constexpr int ASK = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, ASK, TILES) == 0;
}
#endif

// Whether the processor supports a level, and torch's `capability` allows it.
bool suits(const Level& one, const char* capability) {
    if (!strcmp(one.name, "portable")) return true;
    const bool is_wide = strcmp(one.name, "avx2") != 0;
    if (strcmp(capability, "AVX512") && (is_wide || strcmp(capability, "AVX2"))) return false;
#if WITH_AVX2
    if (is_wide && !__builtin_cpu_supports("avx512vnni")) return false;
    if (one.blocks && !__builtin_cpu_supports("avx512bf16")) return false;
#endif
#if WITH_TILES
    if (one.blocks == tile_linear && !has_tiles()) return false;
#endif
    return true;
}

inline const Kernels* kernels_of(const Layout& L) { return level->kernels[L.kind]; }

PyObject* refuse(const char* what) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, what);
    return nullptr;
}

// -- classes of the module ------------------------------------------------------------------------------------------------

const Described LAYOUT[] = {
    DESCRIBED(Layout, kind), DESCRIBED(Layout, rows), DESCRIBED(Layout, columns), DESCRIBED(Layout, row_bytes),
    DESCRIBED(Layout, group), DESCRIBED(Layout, groups), DESCRIBED(Layout, height), DESCRIBED(Layout, nested),
    DESCRIBED(Layout, scale), DESCRIBED(Layout, zero), DESCRIBED(Layout, global_scale), DESCRIBED(Layout, activations),
    DESCRIBED(Layout, offset), DESCRIBED(Layout, unit), DESCRIBED(Layout, table), DESCRIBED(Layout, dynamic),
    DESCRIBED(Layout, counts), DESCRIBED(Layout, types), DESCRIBED(Layout, most), DESCRIBED(Layout, least),
    DESCRIBED(Layout, bits), DESCRIBED(Layout, source), DESCRIBED(Layout, family), DESCRIBED(Layout, arithmetic),
    DESCRIBED(Layout, is_flat), DESCRIBED(Layout, is_whole), DESCRIBED(Layout, step), DESCRIBED(Layout, levels),
    DESCRIBED(Layout, whole),
};
const Described RECIPE[] = {
    DESCRIBED(recipe, kind), DESCRIBED(recipe, dtype), DESCRIBED(recipe, columns), DESCRIBED(recipe, width),
    DESCRIBED(recipe, stride), DESCRIBED(recipe, span), DESCRIBED(recipe, unit), DESCRIBED(recipe, lowest),
    DESCRIBED(recipe, highest), DESCRIBED(recipe, is_symmetric), DESCRIBED(recipe, offset), DESCRIBED(recipe, zero_offset),
    DESCRIBED(recipe, bits), DESCRIBED(recipe, mantissa), DESCRIBED(recipe, bias), DESCRIBED(recipe, scales),
    DESCRIBED(recipe, top), DESCRIBED(recipe, whole), DESCRIBED(recipe, edges), DESCRIBED(recipe, order), DESCRIBED(recipe, is_ordered), DESCRIBED(recipe, is_searched), DESCRIBED(recipe, kept),
    DESCRIBED(recipe, smallest), DESCRIBED(recipe, levels), DESCRIBED(recipe, larger),
};

struct LayoutObject {
    PyObject_HEAD
    Layout layout;
    PyObject* names;  // the attributes of a Weight that hold the parts, in the order of their slots
};
struct RecipeObject {
    PyObject_HEAD
    recipe made;
};
PyTypeObject *layout_type, *recipe_type;

// Layout(names, **fields)
PyObject* new_layout(PyTypeObject* type, PyObject* args, PyObject* fields) {
    PyObject* names = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : nullptr;
    if (!names || !PyTuple_Check(names)) return refuse("Layout(names, **fields)");
    Held made(PyType_GenericAlloc(type, 0));
    if (!made.object) return nullptr;
    LayoutObject* object = (LayoutObject*)made.object;
    object->names = again(names);
    if (!fill(LAYOUT, &object->layout, fields)) return nullptr;
    if (object->layout.kind < 0 || object->layout.kind >= KINDS) return refuse("Layout: a kind of codes that is not known");
    return made.release();
}

// Recipe(**fields)
PyObject* new_recipe(PyTypeObject* type, PyObject*, PyObject* fields) {
    Held made(PyType_GenericAlloc(type, 0));
    if (!made.object || !fill(RECIPE, &((RecipeObject*)made.object)->made, fields)) return nullptr;
    return made.release();
}

void drop_object(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (type == layout_type) Py_XDECREF(((LayoutObject*)object)->names);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

template <class T> PyTypeObject* add_class(PyObject* module, const char* name, newfunc make) {
    PyType_Slot slots[] = {{Py_tp_new, (void*)make}, {Py_tp_dealloc, (void*)drop_object}, {0, nullptr}};
    PyType_Spec spec = {name, sizeof(T), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* type = PyType_FromSpec(&spec);
    if (!type || PyModule_AddObjectRef(module, strrchr(name, '.') + 1, type)) return nullptr;
    return (PyTypeObject*)type;
}

// The Layout of a LayoutObject; null for other objects, with no error set.
Layout* layout_in(PyObject* object) { return Py_TYPE(object) == layout_type ? &((LayoutObject*)object)->layout : nullptr; }

#include "tensors.h"
#include "threads.h"
#include "dispatcher.h"
#include "calls.h"
#include "entries.h"
#include "graph_op.h"

// -- loops over rows ------------------------------------------------------------------------------------------------------

inline void from(PyObject* given, int64_t* to) { *to = PyLong_AsLongLong(given); }
inline void from(PyObject* given, int* to) { *to = (int)PyLong_AsLong(given); }
inline void from(PyObject* given, float* to) { *to = (float)PyFloat_AsDouble(given); }
template <class T> void from(PyObject* given, T** to) { *to = given == Py_None ? nullptr : (T*)PyLong_AsVoidPtr(given); }
inline void from(PyObject* given, const recipe** to) {
    *to = Py_TYPE(given) == recipe_type ? &((RecipeObject*)given)->made : nullptr;
    if (!*to) PyErr_SetString(PyExc_TypeError, "the first argument is no Recipe");
}

// Calls function(*given) without the GIL in several threads, each with some of the rows: the third and the fourth argument
// are their range. Arguments are integers, floats, addresses (None for null) and a Recipe.
template <class... A, size_t... I>
PyObject* share_rows(void (*function)(A...), PyObject* const* given, std::index_sequence<I...>) {
    std::tuple<A...> arguments;
    (from(given[I], &std::get<I>(arguments)), ...);
    if (PyErr_Occurred()) return nullptr;
    const int64_t rows = std::get<3>(arguments), columns = std::get<4>(arguments);
    aside(true, [&] {
        in_threads(rows, columns < 16384 ? 16384 / columns : 1, rows * columns > 65536, [&](Shares& shares) {
            auto mine = arguments;
            while (shares.take(&std::get<2>(mine), &std::get<3>(mine))) function(std::get<I>(mine)...);
        });
    });
    return none();
}

template <class... A> PyObject* check_shared(void (*function)(A...), PyObject* const* given, Py_ssize_t count) {
    if (count != sizeof...(A)) return refuse("a loop over rows is given another number of arguments than it takes");
    return or_memory_error([&] { return share_rows(function, given, std::index_sequence_for<A...>()); });
}

template <auto member> PyObject* shared_loop(PyObject*, PyObject* const* given, Py_ssize_t count) {
    return check_shared(level->loops->*member, given, count);
}

// encode(recipe, x, rows, scale, zero, codes), in several threads.
PyObject* encode_rows(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const recipe* r = nullptr;
    const char* x = nullptr;
    int64_t rows = 0;
    char* scale = nullptr;
    uint8_t *zero = nullptr, *codes = nullptr;
    if (count != 6) return refuse("encode(recipe, x, rows, scale, zero, codes)");
    from(given[0], &r), from(given[1], &x), from(given[2], &rows), from(given[3], &scale), from(given[4], &zero), from(given[5], &codes);
    if (PyErr_Occurred()) return nullptr;
    return or_memory_error([&] {
        std::atomic<bool> is_done{true};
        const int64_t groups = (r->columns + r->width - 1) / r->width, row = r->columns * (r->dtype ? 2 : 4);
        const int64_t scales = groups * (r->scales ? 1 : 4);
        aside(true, [&] {
            const int64_t step = r->columns < 16384 ? 16384 / r->columns : 1;
            in_threads(rows, step, rows * r->columns > (r->is_searched ? 1 << 16 : 1 << 18), [&](Shares& shares) {
                for (int64_t i, end; shares.take(&i, &end);) {
                    uint8_t* zeros = zero ? zero + i * groups : nullptr;
                    if (!level->loops->encode(r, x + i * row, end - i, scale + i * scales, zeros, codes + i * r->stride)) is_done = false;
                }
            });
        });
        return PyLong_FromLong(is_done);
    });
}

// encode_file(recipe, file, at, rows, room, nbytes, scale, zero, codes)
PyObject* encode_file(PyObject*, PyObject* const* given, Py_ssize_t count) {
    const recipe* r = nullptr;
    int file = 0;
    int64_t at = 0, rows = 0, nbytes = 0;
    void *room = nullptr, *scale = nullptr;
    uint8_t *zero = nullptr, *codes = nullptr;
    if (count != 9) return refuse("encode_file(recipe, file, at, rows, room, nbytes, scale, zero, codes)");
    from(given[0], &r), from(given[1], &file), from(given[2], &at), from(given[3], &rows), from(given[4], &room);
    from(given[5], &nbytes), from(given[6], &scale), from(given[7], &zero), from(given[8], &codes);
    if (PyErr_Occurred()) return nullptr;
    const auto run = [&] { return level->loops->encode_file(r, file, at, rows, room, nbytes, scale, zero, codes); };
    return PyLong_FromLong(aside(true, run));
}

#include "checksum.h"
#include "readers.h"

// -- the module -------------------------------------------------------------------------------------------------------------

// (name of torch's loaded library; a dict of OBJECTS; the `_cdata` and the address of a float32 tensor (2, 3), 4 bytes into
// its storage; the vector capability that torch uses): returns the name of the level. ImportError if this torch does not
// behave as expected. No other function may be called before.
PyObject* bind(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 5) return refuse("bind(library, objects, cdata, address, capability)");
    const Held library(PyUnicode_AsUTF8String(given[0])), vectors(PyUnicode_AsUTF8String(given[4]));
    char *name = nullptr, *capability = nullptr;
    if (!library.object || PyBytes_AsStringAndSize(library.object, &name, nullptr)) return nullptr;
    if (!vectors.object || PyBytes_AsStringAndSize(vectors.object, &capability, nullptr)) return nullptr;
    const char* missing = find_torch(name);
    if (*missing) return PyErr_Format(PyExc_ImportError, "torch does not have %s", missing);
    if (!PyDict_Check(given[1]) || !keep_objects(given[1])) return refuse("bind: objects are no dict");
    const int64_t cdata = (int64_t)address_of(given[2]);
    const void* at = address_of(given[3]);
    if (PyErr_Occurred()) return nullptr;
    Seen seen;
    int64_t offset = 0, bytes = 0;
    bool is_so = seen.look(cdata) && !torch.offset(&cdata, &offset) && !torch.bytes(&cdata, &bytes);
    is_so = is_so && seen.dim == 2 && seen.sizes[0] == 2 && seen.sizes[1] == 3 && seen.strides[0] == 3;
    is_so = is_so && seen.strides[1] == 1 && seen.dtype == 6 && seen.at == at && offset == 1 && bytes == 28;
    if (!is_so) return PyErr_Format(PyExc_ImportError, "torch says of a tensor what it is not");
    for (const Level& one : LEVELS) {
        level = &one;
        if (suits(one, capability)) break;
    }
    static bool is_served = false;
    if (!is_served && !implement("linear", linear_in_graph))
        return PyErr_Format(PyExc_ImportError, "torch takes no kernel for torchtether::linear");
    is_served = true;
    parallel_for = torch.parallel_for, count_threads = torch.count_threads;
    return PyUnicode_FromString(level->name);
}

#define TEXT_OF(word) #word
#define TEXT(word) TEXT_OF(word)
#define METHOD(name, function) {name, (PyCFunction)(void*)(function), METH_FASTCALL, nullptr}
#define SHARED(name) METHOD(#name, shared_loop<&encoders::name>)
PyMethodDef METHODS[] = {
    METHOD("bind", bind),
    METHOD("linear", enter_linear),
    METHOD("decode", enter_decode),
    METHOD("gradient", enter_gradient),
    METHOD("set_rows", set_rows),
    METHOD("shortcut_linear", shortcut_linear),
    METHOD("shortcut_gather", shortcut_gather),
    METHOD("remember", remember),
    SHARED(magnitudes),
    SHARED(extremes),
    SHARED(encode_under),
    SHARED(fit_scales),
    SHARED(encode_biased),
    SHARED(fit_biased),
    METHOD("encode", encode_rows),
    METHOD("encode_file", encode_file),
    SHARED(decode_affine),
    SHARED(decode_table),
    METHOD("fold_crc32", fold_crc32),
    METHOD("open_readers", open_readers),
    METHOD("start_read", start_read),
    METHOD("finish_read", finish_read),
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    Held module(PyModule_Create(&MODULE));
    if (!module.object) return nullptr;
    layout_type = add_class<LayoutObject>(module.object, "torchtether.compiled._native.Layout", new_layout);
    recipe_type = add_class<RecipeObject>(module.object, "torchtether.compiled._native.Recipe", new_recipe);
    if (PyModule_AddStringConstant(module.object, "SOURCES", TEXT(SOURCES))) return nullptr;  // compared by room.py
    return layout_type && recipe_type ? module.release() : nullptr;
}
