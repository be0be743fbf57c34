#include "step.hpp"

namespace nb = nanobind;

namespace quant_gru {

Step::Step(const Sizes &sizes, const nb::sequence &weights, const nb::tuple &torch)
    : sizes_(sizes), tensors_(torch[0], sizes.device), current_device_(torch[1]) {
    for (nb::handle w : weights) {
        std::vector<int64_t> shape;
        for (nb::handle size : w.attr("shape")) shape.push_back(nb::cast<int64_t>(size));
        places_.push_back({w.ptr(), tensors_.address(w.ptr()), std::move(shape)});
    }
}

bool Step::holds(const nb::object &weights) const {
    const nb::object found = checked(PyObject_GetIter(weights.ptr()));
    size_t i = 0;
    while (PyObject *item = PyIter_Next(found.ptr())) {
        const nb::object w = nb::steal(item);
        if (i == places_.size()) return false;
        const Place &place = places_[i++];
        if (item != place.tensor || !tensors_.is_at(item, place.address, place.shape)) return false;
    }
    if (PyErr_Occurred()) throw nb::python_error();
    return i == places_.size();
}

bool Step::takes(const nb::object &weights, const nb::object &x, const nb::object &hx,
                 bool batch_first) const {
    View given, states;
    if (!tensors_.is_plain(x.ptr(), given) || given.shape[2] != sizes_.C ||
        !given.shape[batch_first])
        return false;
    if (!hx.is_none() &&
        (!tensors_.is_plain(hx.ptr(), states) || states.shape[0] != sizes_.states ||
         states.shape[1] != given.shape[!batch_first] || states.shape[2] != sizes_.H))
        return false;
    return holds(weights) && number(call(current_device_)) == sizes_.device;
}

}  // namespace quant_gru
