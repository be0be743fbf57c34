#include "bindings/quiet.hpp"

#include <utility>

#include "kernel_runtime/native/python_objects.hpp"

namespace nb = nanobind;

namespace quant_gru {
namespace {

std::vector<nb::object> items(const nb::tuple &tuple) {
    std::vector<nb::object> found;
    for (nb::handle each : tuple) found.push_back(nb::borrow(each));
    return found;
}

// A borrowed value, or null.
PyObject *value(const nb::object &dictionary, const nb::object &name) {
    PyObject *found = PyDict_GetItemWithError(dictionary.ptr(), name.ptr());
    if (!found && PyErr_Occurred()) throw nb::python_error();
    return found;
}

bool is_empty(PyObject *dictionary) { return PyDict_Size(dictionary) == 0; }

}  // namespace

Quiet::Quiet(nb::tuple false_names, nb::tuple empty_names, nb::tuple absent_names,
             nb::str true_name, nb::tuple hooks, nb::dict compiler, nb::tuple counts,
             nb::tuple states)
    : false_names_(items(false_names)),
      empty_names_(items(empty_names)),
      absent_names_(items(absent_names)),
      hooks_(items(hooks)),
      counts_(items(counts)),
      states_(items(states)),
      true_name_(std::move(true_name)),
      compiler_(std::move(compiler)),
      flag_(nb::steal(PyUnicode_InternFromString("_is_compiling_flag"))) {}

bool Quiet::is(const nb::dict &attributes) const {
    if (value(attributes, true_name_) != Py_True) return false;
    for (const nb::object &name : false_names_)
        if (value(attributes, name) != Py_False) return false;
    for (const nb::object &name : empty_names_) {
        PyObject *found = value(attributes, name);
        if (!found || !PyDict_Check(found) || !is_empty(found)) return false;
    }
    for (const nb::object &name : absent_names_) {
        PyObject *found = value(attributes, name);
        if (found && found != Py_None) return false;
    }
    for (const nb::object &each : hooks_)
        if (!is_empty(each.ptr())) return false;
    if (value(compiler_, flag_) != Py_False) return false;
    for (const nb::object &each : counts_)
        if (number(call(each)) != 0) return false;
    for (const nb::object &each : states_)
        if (!call(each).is_none()) return false;
    return true;
}

}  // namespace quant_gru
