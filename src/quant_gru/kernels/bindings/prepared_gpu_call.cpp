#include "bindings/prepared_gpu_call.hpp"

#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

constexpr size_t most_calls = 64;

}  // namespace

QuickGPU::QuickGPU(const Sizes &sizes, const nb::sequence &weights, nb::object steps,
                   nb::tuple torch, int64_t most)
    : sizes_(sizes),
      tensors_(torch[0], sizes.device),
      weights_(tensors_, weights, std::move(steps)),
      is_grad_enabled_(torch[1]),
      current_device_(torch[2]),
      is_capturing_(torch[3]),
      workspace_(most) {}

void QuickGPU::add(int64_t T, int64_t N, bool with_h0, nb::object call) {
    // what is replaced is released last: other threads may come in then
    decltype(calls_) before;
    if (calls_.size() >= most_calls) std::swap(calls_, before);
    std::swap(calls_[{T, N, with_h0}], call);
}

bool QuickGPU::wants_gradient(PyObject *x, PyObject *hx) const {
    return holds_true(call(is_grad_enabled_)) &&
           (tensors_.requires_grad(x) || (hx && tensors_.requires_grad(hx)) ||
            weights_.ask_for_gradient(tensors_));
}

nb::object QuickGPU::run(const nb::object &weights, const nb::object &x, const nb::object &hx,
                         bool batch_first) {
    Call::Given given{x.ptr(), nullptr, nullptr, {}, {}, batch_first};
    PyObject *const h0 = hx.is_none() ? nullptr : hx.ptr();
    given.h0 = h0;
    if (!tensors_.is_plain(x.ptr(), given.x_view)) return nb::none();
    const auto &shape = given.x_view.shape;
    const int64_t T = shape[batch_first], N = shape[!batch_first];
    if (shape[2] != sizes_.C || !T || !N) return nb::none();
    if (h0) {
        const auto &states = given.h0_view.shape;
        if (!tensors_.is_plain(h0, given.h0_view) || states[0] != sizes_.states || states[1] != N ||
            states[2] != sizes_.H)
            return nb::none();
    }
    if (!weights_.hold(tensors_, weights) || wants_gradient(x.ptr(), h0)) return nb::none();
    const auto found = calls_.find({T, N, h0 != nullptr});
    if (found == calls_.end()) return nb::borrow(Py_NotImplemented);
    // another thread may let go of it while this one waits
    const nb::object kept = found->second;
    if (number(call(current_device_)) != sizes_.device || holds_true(call(is_capturing_)))
        return nb::borrow(Py_NotImplemented);
    return nb::cast<Call *>(kept)->run(given, &workspace_);
}

}  // namespace quant_gru
