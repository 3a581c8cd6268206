// The module's use of Python: only the limited API, so that one build serves all versions from 3.11 on.
#pragma once

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

// Objects of Python and torch that `bind` receives by these names.
#define OBJECTS(X)                                                                                                     \
    X(tensor) X(parameter)                     /* classes */                                                           \
    X(empty)                                   /* empty(shape, stride, dtype) */                                       \
    X(float32) X(bfloat16) X(float16)          /* dtypes */                                                            \
    X(modes) X(level) X(casts) X(traces)       /* functions that report modes, transforms, autocast and traces */      \
    X(forward_ad)                              /* a module with `_current_level` */                                    \
    X(any_requires_grad)                       /* a function of tensors and None */

struct Known {
#define FIELD(name) PyObject* name;
    OBJECTS(FIELD)
#undef FIELD
    PyObject* dtypes[3];  // by Dtype
    // names of attributes and arguments
    PyObject *cdata, *is_neg, *current_level, *kernel_layout, *native, *spec, *dtype, *max_norm, *padding_idx;
    PyObject *zero, *minus_one;
};
inline Known known;

struct Held {  // an owned reference
    PyObject* object;
    explicit Held(PyObject* given) : object(given) {}
    Held(const Held&) = delete;
    ~Held() { Py_XDECREF(object); }
    PyObject* release() { PyObject* given = object; object = nullptr; return given; }
};

inline PyObject* again(PyObject* object) { Py_INCREF(object); return object; }
inline PyObject* none() { return again(Py_None); }

// Runs work() without the GIL, if there is so much of it that releasing the GIL pays.
template <class Work> inline auto aside(bool is_much, Work work) {
    struct Aside {
        PyThreadState* state;
        ~Aside() { if (state) PyEval_RestoreThread(state); }  // also after std::bad_alloc
    } aside{is_much ? PyEval_SaveThread() : nullptr};
    return work();
}

inline void* address_of(PyObject* number) { return PyLong_AsVoidPtr(number); }

// The `_cdata` of a plain tensor or Parameter; 0 for other objects, also subclasses, whose values need not be their memory.
inline int64_t cdata_of(PyObject* object) {
    const Held type(PyObject_Type(object));
    if (type.object != known.tensor && type.object != known.parameter) return 0;
    const Held number(PyObject_GetAttr(object, known.cdata));
    const int64_t cdata = number.object ? (int64_t)address_of(number.object) : 0;
    if (!cdata) PyErr_Clear();
    return cdata;
}

// Whether it is such a tensor, and its values are those in memory: no negation is pending.
inline bool is_as_it_lies(PyObject* object, int64_t* cdata) {
    *cdata = cdata_of(object);
    if (!*cdata) return false;
    const Held answer(PyObject_CallMethodObjArgs(object, known.is_neg, nullptr));
    if (!answer.object) PyErr_Clear();
    return answer.object == Py_False;
}

// `is_observed` of torch_private/observers.py, or autocast, which casts arguments of products.
inline bool is_observed() {
    const struct { PyObject *asked, *answer; } questions[] = {
        {known.modes, known.zero}, {known.level, Py_None}, {known.casts, Py_False}, {known.traces, Py_False}};
    for (const auto& question : questions) {
        const Held answer(PyObject_CallFunctionObjArgs(question.asked, nullptr));
        if (!answer.object) PyErr_Clear();
        if (answer.object != question.answer) return true;
    }
    const Held level(PyObject_GetAttr(known.forward_ad, known.current_level));
    if (!level.object) PyErr_Clear();
    return level.object != known.minus_one;
}

inline bool any_requires_grad(PyObject* weight, PyObject* x, PyObject* bias) {
    const Held answer(PyObject_CallFunctionObjArgs(known.any_requires_grad, weight, x, bias, nullptr));
    if (!answer.object) PyErr_Clear();
    return answer.object != Py_False;
}

// A new tensor (*sizes, last) of `dtype`; null, with Python's error set, if memory cannot be allocated.
inline PyObject* new_tensor(const int64_t* sizes, int64_t dim, int64_t last, int dtype) {
    const Held shape(PyTuple_New(dim + 1)), stride(PyTuple_New(dim + 1));
    if (!shape.object || !stride.object) return nullptr;
    int64_t step = 1;
    for (int64_t d = dim; d >= 0; d--) {
        const int64_t size = d == dim ? last : sizes[d];
        PyTuple_SetItem(shape.object, d, PyLong_FromLongLong(size));
        PyTuple_SetItem(stride.object, d, PyLong_FromLongLong(step));
        step *= size;
    }
    return PyObject_CallFunctionObjArgs(known.empty, shape.object, stride.object, known.dtypes[dtype], nullptr);
}

// Keeps the objects of the dict `given`. False, with Python's error set, if its names are not just those above.
inline bool keep_objects(PyObject* given) {
    Py_ssize_t count = 0;
#define KEEP(name)                                                              \
    count++;                                                                    \
    known.name = PyDict_GetItemString(given, #name);                            \
    if (!known.name) {                                                          \
        PyErr_SetString(PyExc_KeyError, "bind: it is not given '" #name "'");    \
        return false;                                                           \
    }                                                                           \
    Py_INCREF(known.name);
    OBJECTS(KEEP)
#undef KEEP
    if (PyDict_Size(given) != count) {
        PyErr_SetString(PyExc_KeyError, "bind: it is given objects that it does not know");
        return false;
    }
    known.dtypes[0] = known.float32, known.dtypes[1] = known.bfloat16, known.dtypes[2] = known.float16;
    known.cdata = PyUnicode_InternFromString("_cdata"), known.is_neg = PyUnicode_InternFromString("is_neg");
    known.current_level = PyUnicode_InternFromString("_current_level");
    known.kernel_layout = PyUnicode_InternFromString("_kernel_layout");
    known.native = PyUnicode_InternFromString("native"), known.spec = PyUnicode_InternFromString("_spec");
    known.dtype = PyUnicode_InternFromString("dtype"), known.max_norm = PyUnicode_InternFromString("max_norm");
    known.padding_idx = PyUnicode_InternFromString("padding_idx");
    known.zero = PyLong_FromLong(0), known.minus_one = PyLong_FromLong(-1);
    return true;
}
