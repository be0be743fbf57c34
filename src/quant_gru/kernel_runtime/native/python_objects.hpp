// Fast access to Python objects from native code.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace kernel_runtime {

inline nanobind::object checked(PyObject *result) {
    if (!result) throw nanobind::python_error();
    return nanobind::steal(result);
}

// An attribute or method of a type, looked up once. It can be used for objects of this type, and of
// subclasses that do not override it.
class Attribute {
 public:
    Attribute(const nanobind::handle &type, const char *name)
        : found_(checked(PyObject_GetAttrString(type.ptr(), name))),
          get_(reinterpret_cast<descrgetfunc>(
              PyType_GetSlot(Py_TYPE(found_.ptr()), Py_tp_descr_get))) {}
    nanobind::object of(PyObject *o) const {
        return checked(get_(found_.ptr(), o, reinterpret_cast<PyObject *>(Py_TYPE(o))));
    }
    // Calls the method without arguments.
    nanobind::object call(PyObject *o) const {
        PyObject *arguments[1] = {o};
        return checked(PyObject_Vectorcall(found_.ptr(), arguments, 1, nullptr));
    }

 private:
    nanobind::object found_;
    descrgetfunc get_;
};

// Calls a function without arguments.
inline nanobind::object call(const nanobind::object &function) {
    return checked(PyObject_CallNoArgs(function.ptr()));
}

inline int64_t number(const nanobind::object &o) {
    const int64_t found = PyLong_AsLongLong(o.ptr());
    if (found == -1 && PyErr_Occurred()) throw nanobind::python_error();
    return found;
}

inline bool holds_true(const nanobind::object &o) { return o.ptr() == Py_True; }

// Whether there are exactly `count` items and holds(item, index) is true for all of them.
template <class Holds>
bool all_hold(const nanobind::object &items, size_t count, const Holds &holds) {
    const nanobind::object found = checked(PyObject_GetIter(items.ptr()));
    size_t i = 0;
    while (PyObject *next = PyIter_Next(found.ptr())) {
        const nanobind::object item = nanobind::steal(next);
        if (i == count || !holds(next, i)) return false;
        ++i;
    }
    if (PyErr_Occurred()) throw nanobind::python_error();
    return i == count;
}

// Copies the items of a tuple of integers.
inline void numbers(const nanobind::object &tuple, int64_t *to) {
    const Py_ssize_t count = PyTuple_Size(tuple.ptr());
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PyTuple_GetItem(tuple.ptr(), i);
        if (!item) throw nanobind::python_error();
        to[i] = number(nanobind::borrow(item));
    }
}

}  // namespace kernel_runtime
