// Objects of Python as native code looks at them: through their attributes, so that nothing of
// torch is needed to build this.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace quant_gru {

// Made once: the lookup of an attribute by an interned name is mostly a comparison of addresses.
struct Names {
    PyObject *dtype = PyUnicode_InternFromString("dtype");
    PyObject *is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject *is_cuda = PyUnicode_InternFromString("is_cuda");
    PyObject *shape = PyUnicode_InternFromString("shape");
    PyObject *version = PyUnicode_InternFromString("_version");
    PyObject *requires_grad = PyUnicode_InternFromString("requires_grad");
    PyObject *count = PyUnicode_InternFromString("count");
    PyObject *data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *stride = PyUnicode_InternFromString("stride");
    PyObject *is_neg = PyUnicode_InternFromString("is_neg");
    PyObject *is_contiguous = PyUnicode_InternFromString("is_contiguous");
    PyObject *get_device = PyUnicode_InternFromString("get_device");
};

inline const Names &names() {
    static const Names found;
    return found;
}

inline nanobind::object checked(PyObject *result) {
    if (!result) throw nanobind::python_error();
    return nanobind::steal(result);
}

inline nanobind::object get(PyObject *o, PyObject *name) {
    return checked(PyObject_GetAttr(o, name));
}

// A method without arguments.
inline nanobind::object call(PyObject *o, PyObject *name) {
    PyObject *arguments[1] = {o};
    return checked(PyObject_VectorcallMethod(name, arguments, 1, nullptr));
}

// A function without arguments.
inline nanobind::object call(const nanobind::object &function) {
    return checked(PyObject_CallNoArgs(function.ptr()));
}

inline int64_t number(const nanobind::object &o) {
    const int64_t found = PyLong_AsLongLong(o.ptr());
    if (found == -1 && PyErr_Occurred()) throw nanobind::python_error();
    return found;
}

inline bool holds_true(const nanobind::object &o) { return o.ptr() == Py_True; }

// Items of a tuple of integers.
template <int n>
void numbers(const nanobind::object &tuple, int64_t (&to)[n]) {
    for (int i = 0; i < n; ++i) {
        PyObject *item = PyTuple_GetItem(tuple.ptr(), i);
        if (!item) throw nanobind::python_error();
        to[i] = number(nanobind::borrow(item));
    }
}

inline int64_t address(PyObject *tensor) { return number(call(tensor, names().data_ptr)); }

}  // namespace quant_gru
