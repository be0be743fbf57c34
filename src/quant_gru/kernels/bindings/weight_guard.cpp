#include "bindings/weight_guard.hpp"

#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

// Returns get_device() of the weights; all are on one device.
int64_t device_of(const nb::sequence &weights) {
    for (nb::handle w : weights) return nb::cast<int64_t>(w.attr("get_device")());
    return -1;
}

}  // namespace

WeightGuard::WeightGuard(const nb::handle &type, const nb::sequence &weights, nb::object steps)
    : tensors_(type, device_of(weights)), steps_(std::move(steps)) {
    for (nb::handle w : weights) {
        const bool has_version = !nb::cast<bool>(w.attr("is_inference")());
        has_versions_ = has_versions_ && has_version;
        kernel_runtime::Place place = tensors_.place(w.ptr());
        const bool readable = tensors_.device() < 0 && tensors_.is_contiguous(w.ptr());
        const void *content = readable ? reinterpret_cast<const void *>(place.address) : nullptr;
        weights_.push_back({w.ptr(),
                            has_version ? tensors_.version(w.ptr()) : 0,
                            std::move(place),
                            {content, readable ? nb::cast<size_t>(w.attr("nbytes")) : 0}});
    }
    if (!steps_.is_none()) count_ = count();
}

int64_t WeightGuard::count() const {
    static PyObject *const name = PyUnicode_InternFromString("count");
    return number(checked(PyObject_GetAttr(steps_.ptr(), name)));
}

bool WeightGuard::unchanged(const nb::object &weights) const {
    if (!has_versions_ || (!steps_.is_none() && count() != count_)) return false;
    const bool hold = all_hold(weights, weights_.size(), [&](PyObject *w, size_t i) {
        const Weight &weight = weights_[i];
        return w == weight.tensor && tensors_.version(w) == weight.version &&
               tensors_.is_at(w, weight.place) && weight.content.unchanged();
    });
    if (!hold || !watch_ || !watch_->found()) return hold;
    found_by_watch_ = true;
    return false;
}

bool WeightGuard::found_silent_write() const {
    for (const Weight &weight : weights_) {
        const bool changed = !weight.content.is_whole() && weight.content.changed();
        if (changed && tensors_.version(weight.tensor) == weight.version) return true;
    }
    return found_by_watch_;
}

bool WeightGuard::in_place(const nb::object &weights) const {
    return all_hold(weights, weights_.size(), [&](PyObject *w, size_t i) {
        const Weight &weight = weights_[i];
        return w == weight.tensor && tensors_.is_at(w, weight.place);
    });
}

bool WeightGuard::ask_for_gradient() const {
    for (const Weight &weight : weights_)
        if (tensors_.requires_grad(weight.tensor)) return true;
    return false;
}

}  // namespace quant_gru
