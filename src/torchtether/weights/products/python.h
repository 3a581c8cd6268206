// What the entries use of Python, declared here: functions of its stable interface alone, whose headers need not be there.
//
// binding.py gives the addresses of all of it to tether_bind. A call through ctypes costs four times as much.

struct Object;  // PyObject

struct Python {
    Object* (*get)(Object*, Object*);                 // PyObject_GetAttr
    Object* (*ask)(Object*, Object*, ...);            // PyObject_CallMethodObjArgs
    Object* (*call)(Object*, ...);                    // PyObject_CallFunctionObjArgs
    Object* (*type)(Object*);                         // PyObject_Type
    void (*keep)(Object*);                            // Py_IncRef
    void (*drop)(Object*);                            // Py_DecRef
    void* (*address)(Object*);                        // PyLong_AsVoidPtr
    long long (*number)(Object*);                     // PyLong_AsLongLong
    Object* (*of_number)(long long);                  // PyLong_FromLongLong
    Object* (*tuple)(intptr_t);                       // PyTuple_New
    int (*put)(Object*, intptr_t, Object*);           // PyTuple_SetItem
    void* (*leave)();                                 // PyEval_SaveThread
    void (*enter)(void*);                             // PyEval_RestoreThread
    void (*forget)();                                 // PyErr_Clear
    void (*raise)(Object*, const char*);              // PyErr_SetString
    Object* (*generic_dict)(Object*, void*);          // PyObject_GenericGetDict
    Object* (*item)(Object*, Object*);                // PyDict_GetItem, not ours
    Object* (*field)(Object*, intptr_t);              // PyTuple_GetItem, not ours
    intptr_t (*length)(Object*);                      // PyTuple_Size
    intptr_t (*size)(Object*);                        // PyDict_Size
    Object *tensor, *parameter;                       // classes
    Object *cdata, *is_neg;                           // names of attributes
    Object* empty;                                    // empty(shape, stride, dtype)
    Object* dtypes[3];                                // by Dtype
    Object *none, *not_implemented, *no, *index_error, *memory_error;
    Object* layout;                                   // the class
    Object *kernel_layout, *spec, *dtype;             // names of attributes
    Object *max_norm, *padding_idx;                   // names of arguments
    Object *modes, *level, *casts, *traces;           // functions that say who looks on
    Object *forward_ad, *current_level;               // a module, and the name of its attribute
    Object* any_requires_grad;                        // a function of tensors and None
    Object *zero, *minus_one;

    Object* dict(Object* object) const { return generic_dict(object, nullptr); }
};
Python python;

struct Method {  // PyMethodDef
    const char* name;
    Object* (*function)(Object*, Object* const*, intptr_t);
    int flags;
    const char* doc;
};
constexpr int METH_FASTCALL = 0x80;

struct Held {  // a reference of our own
    Object* object;
    explicit Held(Object* given) : object(given) {}
    Held(const Held&) = delete;
    ~Held() { if (object) python.drop(object); }
    Object* release() { Object* given = object; object = nullptr; return given; }
};

inline Object* again(Object* object) { python.keep(object); return object; }

// The work of others goes on meanwhile, where there is enough of ours to be worth the change.
template <class Work> inline void aside(bool is_much, Work work) {
    if (!is_much) return work();
    struct Aside {
        void* state = python.leave();
        ~Aside() { python.enter(state); }  // also where there is no memory
    } aside;
    work();
}

// The `_cdata` of a tensor, 0 of what is none: subclasses know better than their memory what they are.
inline int64_t cdata_of(Object* object) {
    const Held type(python.type(object));
    if (type.object != python.tensor && type.object != python.parameter) return 0;
    const Held number(python.get(object, python.cdata));
    const int64_t cdata = number.object ? (int64_t)python.address(number.object) : 0;
    if (!cdata) python.forget();
    return cdata;
}

// Whether it is such a tensor, and reads as it lies in memory.
inline bool is_as_it_lies(Object* object, int64_t* cdata) {
    *cdata = cdata_of(object);
    if (!*cdata) return false;
    const Held answer(python.ask(object, python.is_neg, nullptr));
    if (!answer.object) python.forget();
    return answer.object == python.no;
}

// `is_observed` of torch_private/observers.py.
inline bool is_observed() {
    const struct { Object *asked, *answer; } questions[] = {
        {python.modes, python.zero}, {python.level, python.none}, {python.casts, python.no}, {python.traces, python.no}};
    for (const auto& question : questions) {
        const Held answer(python.call(question.asked, nullptr));
        if (!answer.object) python.forget();
        if (answer.object != question.answer) return true;
    }
    const Held level(python.get(python.forward_ad, python.current_level));
    if (!level.object) python.forget();
    return level.object != python.minus_one;
}

inline bool any_requires_grad(Object* weight, Object* x, Object* bias) {
    const Held answer(python.call(python.any_requires_grad, weight, x, bias, nullptr));
    if (!answer.object) python.forget();
    return answer.object != python.no;
}

// A new tensor (*sizes, last) of `dtype`; null, with Python's error set, where there is no memory.
inline Object* new_tensor(const int64_t* sizes, int64_t dim, int64_t last, int dtype) {
    const Held shape(python.tuple(dim + 1)), stride(python.tuple(dim + 1));
    if (!shape.object || !stride.object) return nullptr;
    int64_t step = 1;
    for (int64_t d = dim; d >= 0; d--) {
        const int64_t size = d == dim ? last : sizes[d];
        python.put(shape.object, d, python.of_number(size));
        python.put(stride.object, d, python.of_number(step));
        step *= size;
    }
    return python.call(python.empty, shape.object, stride.object, python.dtypes[dtype], nullptr);
}
