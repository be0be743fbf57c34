#include "actnn/saving/native/model_tensors.hpp"

#include <utility>

namespace nb = nanobind;

namespace actnn {
namespace {

struct Words {
    nb::object children = checked(PyUnicode_InternFromString("_modules")),
               buffers = checked(PyUnicode_InternFromString("_buffers")),
               parameters = checked(PyUnicode_InternFromString("_parameters"));
};
const Words &words() {
    static const Words *const found = new Words;
    return *found;
}

// Calls visit(value) for the values of a dictionary of a module that are not None.
template <class Visit>
void for_each(const nb::object &module, const nb::object &name, const Visit &visit) {
    const nb::object attributes = checked(PyObject_GenericGetDict(module.ptr(), nullptr));
    PyObject *const dict = PyDict_GetItemWithError(attributes.ptr(), name.ptr());
    if (!dict && PyErr_Occurred()) throw nb::python_error();
    if (!dict || !PyDict_Check(dict)) return;
    Py_ssize_t position = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(dict, &position, &key, &value))
        if (value != Py_None) visit(nb::borrow(value));
}

}  // namespace

const nb::object &parameter_reason() {
    static const nb::object *const found = new nb::object(nb::str("parameter"));
    return *found;
}

const nb::object &buffer_reason() {
    static const nb::object *const found = new nb::object(nb::str("buffer"));
    return *found;
}

void ModelTensors::read(const nb::handle &model, const ModulePaths &paths) {
    const Torch &t = torch();
    std::vector<nb::object> modules{nb::borrow(model)};
    for (size_t i = 0; i < modules.size(); ++i) {
        const nb::object module = modules[i];
        for_each(module, words().children, [&](nb::object child) { modules.push_back(child); });
    }
    std::vector<Tensor> found;
    found.reserve(tensors_.size());
    // Parameters last: a tensor that is both counts as one.
    for (const bool is_parameter : {false, true})
        for (const nb::object &module : modules)
            for_each(module, is_parameter ? words().parameters : words().buffers,
                     [&](const nb::object &tensor) {
                         Description d;
                         if (t.is_plain(tensor.ptr()) && t.tensors.describe(tensor.ptr(), d))
                             found.push_back({tensor.ptr(), module.ptr(), is_parameter, d.address});
                     });
    if (found == tensors_) return;
    tensors_ = std::move(found);
    by_tensor_.clear();
    by_storage_.clear();
    for (const Tensor &each : tensors_) {
        const Owned owned{each.is_parameter ? parameter_reason() : buffer_reason(),
                          paths.path_of(each.module)};
        by_tensor_[each.tensor] = owned;
        const nb::object storage = t.storage.call(each.tensor);
        Storage &known = by_storage_[t.address_of(storage)];
        static_cast<Owned &>(known) = owned;
        if (!known.reference) known.reference = WeakStorage(storage);
    }
}

}  // namespace actnn
