#include "bindings/prepared_step.hpp"

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
    return all_hold(weights, places_.size(), [&](PyObject *w, size_t i) {
        const Place &place = places_[i];
        return w == place.tensor && tensors_.is_at(w, place.address, place.shape);
    });
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
