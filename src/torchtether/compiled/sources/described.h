// Structs that Python fills field by field, by name: Layout and Recipe as classes of the module.
#pragma once

#include <cstring>

#include "python.h"

struct Described {  // a field
    const char* name;
    size_t offset;
    char letter;  // q int64, i int32, f float32, B uint8
    Py_ssize_t count;  // 1: a number; more: a sequence of at most so many, filled up with zeros
};

constexpr char letter_of(const int64_t*) { return 'q'; }
constexpr char letter_of(const int32_t*) { return 'i'; }
constexpr char letter_of(const float*) { return 'f'; }
constexpr char letter_of(const uint8_t*) { return 'B'; }
template <class T, size_t N> constexpr char letter_of(const T (*)[N]) { return letter_of((const T*)nullptr); }
template <class T> constexpr Py_ssize_t count_of(const T*) { return 1; }
template <class T, size_t N> constexpr Py_ssize_t count_of(const T (*)[N]) { return N; }

#define DESCRIBED(S, name) \
    {#name, offsetof(S, name), letter_of((decltype(S::name)*)nullptr), count_of((decltype(S::name)*)nullptr)}

inline bool put_number(const Described& field, char* to, Py_ssize_t i, PyObject* number) {
    if (field.letter == 'f') {
        ((float*)to)[i] = (float)PyFloat_AsDouble(number);
    } else {
        const long long value = PyLong_AsLongLong(number);
        if (field.letter == 'q') ((int64_t*)to)[i] = value;
        else if (field.letter == 'i') ((int32_t*)to)[i] = (int32_t)value;
        else ((uint8_t*)to)[i] = (uint8_t)value;
    }
    return !PyErr_Occurred();
}

// Sets every field of the struct at `base` from the dict `given`. False, with Python's error set, if a field is missing or
// unknown.
template <size_t N> bool fill(const Described (&fields)[N], void* base, PyObject* given) {
    const Py_ssize_t size = given ? PyDict_Size(given) : 0;
    for (const Described& field : fields) {
        PyObject* value = given ? PyDict_GetItemString(given, field.name) : nullptr;
        char* to = (char*)base + field.offset;
        if (!value) {
            PyErr_Format(PyExc_TypeError, "%s: it is not given. All fields are", field.name);
            return false;
        }
        if (field.count == 1) {
            if (!put_number(field, to, 0, value)) return false;
            continue;
        }
        const Py_ssize_t count = PySequence_Size(value);
        if (count < 0 || count > field.count) {
            if (count >= 0) PyErr_Format(PyExc_TypeError, "%s: %zd values, of %zd", field.name, count, field.count);
            return false;
        }
        for (Py_ssize_t i = 0; i < count; i++) {
            const Held item(PySequence_GetItem(value, i));
            if (!item.object || !put_number(field, to, i, item.object)) return false;
        }
    }
    if (size != (Py_ssize_t)N) {
        PyErr_Format(PyExc_TypeError, "%zd fields are given, of %zd", size, (Py_ssize_t)N);
        return false;
    }
    return true;
}
