#include "bindings/prepared_call.hpp"

#include <cstdlib>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

constexpr size_t most_calls = 64;

std::string setting(const std::string &variable) {
    const char *found = std::getenv(variable.c_str());
    return found ? found : "";
}

bool is_set_to(const std::string &variable, const std::string &value) {
    const char *found = std::getenv(variable.c_str());
    return found ? value == found : value.empty();
}

PreparedCall::Sizes sizes_of(const Stack &stack) {
    const Layer &bottom = stack.layer(0, 0);
    const auto states = static_cast<int64_t>(stack.depth()) * stack.directions();
    return {-1, states, bottom.C(), bottom.H()};
}

}  // namespace

PreparedCall::PreparedCall(const Sizes &sizes, const WeightGuard &guard, const nb::tuple &torch)
    : sizes_(sizes), tensors_(torch[0], sizes.device), guard_(guard), is_grad_enabled_(torch[1]) {}

bool PreparedCall::wants_gradient(PyObject *x, PyObject *hx) const {
    return holds_true(call(is_grad_enabled_)) &&
           (tensors_.requires_grad(x) || (hx && tensors_.requires_grad(hx)) ||
            guard_.ask_for_gradient());
}

nb::object PreparedCall::run(const nb::object &weights, const nb::object &x, const nb::object &hx,
                             const nb::object &lengths, bool batch_first,
                             const nb::object &packing) {
    const bool is_packed = !packing.is_none();
    Call::Given given{x.ptr(), nullptr, nullptr, {}, {}, batch_first && !is_packed, {}};
    if (!hx.is_none()) given.h0 = hx.ptr();
    if (!lengths.is_none()) given.lengths = lengths.ptr();
    if (!tensors_.is_plain(given.x, given.x_view, is_packed ? 2 : 3)) return nb::none();
    given.packing = Packing::of(packing, tensors_);
    if (given.x_view.shape[2] != sizes_.C || !given.T() || !given.N()) return nb::none();
    if (given.h0) {
        const auto &states = given.h0_view.shape;
        if (!tensors_.is_plain(given.h0, given.h0_view) || states[0] != sizes_.states ||
            states[1] != given.N() || states[2] != sizes_.H)
            return nb::none();
    }
    if (!guard_.unchanged(weights) || wants_gradient(given.x, given.h0)) return nb::none();
    return start(given);
}

PreparedCallCPU::PreparedCallCPU(Stack *stack, const WeightGuard &guard, const char *variable,
                                 const nb::tuple &torch, nb::object parts, bool is_real)
    : PreparedCall(sizes_of(*stack), guard, torch),
      stack_(stack),
      variable_(variable),
      setting_(setting(variable)),
      get_num_threads_(torch[2]),
      parts_(std::move(parts)),
      is_real_(is_real) {}

PreparedCallCPU::Makers PreparedCallCPU::makers(const int64_t (&shape)[3], bool batch_first) {
    if (shape[0] == makers_.first && shape[1] == makers_.second &&
        batch_first == makers_.batch_first)
        return makers_;
    auto maker = [&](int64_t a, int64_t b, int64_t c) {
        const auto parts = nb::cast<nb::tuple>(parts_(nb::make_tuple(a, b, c)));
        return Maker(parts[0], nb::cast<nb::tuple>(parts[1]));
    };
    Makers made;
    made.first = shape[0];
    made.second = shape[1];
    made.batch_first = batch_first;
    made.y = maker(shape[0], shape[1], stack_->directions() * sizes_.H);
    made.last = maker(sizes_.states, shape[batch_first ? 0 : 1], sizes_.H);
    // Replaced as a whole, because other threads may run whenever an object is released.
    Makers before = made;
    std::swap(makers_, before);
    return made;
}

nb::object PreparedCallCPU::start(const Call::Given &given) {
    const View &x = given.x_view;
    const bool batch_first = given.rows_first;
    const int64_t T = given.T(), N = given.N();
    const int64_t width = stack_->directions() * sizes_.H;
    if (!is_set_to(variable_, setting_)) return nb::none();
    if (given.packing || !is_real_ || x.kind != Float::float32 ||
        (given.h0 && given.h0_view.kind != Float::float32))
        return nb::borrow(Py_NotImplemented);
    if ((x.strides[2] != 1 && sizes_.C != 1) || tensors_.is_neg(given.x) ||
        (given.h0 && (!given.h0_view.is_contiguous() || tensors_.is_neg(given.h0))))
        return nb::borrow(Py_NotImplemented);

    const Makers makers = this->makers(x.shape, batch_first);
    const nb::object y = makers.y(), last = makers.last();
    Stack::Call job;
    job.x = reinterpret_cast<const float *>(x.address);
    job.x_step = x.strides[batch_first];
    job.x_row = x.strides[!batch_first];
    job.h0 = given.h0 ? reinterpret_cast<const float *>(given.h0_view.address) : nullptr;
    job.y = reinterpret_cast<float *>(tensors_.address(y.ptr()));
    job.y_step = (batch_first ? 1 : N) * width;
    job.y_row = (batch_first ? T : 1) * width;
    job.last = reinterpret_cast<float *>(tensors_.address(last.ptr()));
    if (given.lengths)
        job.lengths = reinterpret_cast<const int64_t *>(tensors_.address(given.lengths));
    job.T = T;
    job.N = N;
    job.threads = static_cast<int>(number(call(get_num_threads_)));
    {
        nb::gil_scoped_release release;
        stack_->run(job);
    }
    return nb::make_tuple(y, last);
}

PreparedCallGPU::PreparedCallGPU(const Sizes &sizes, const WeightGuard &guard,
                                 const nb::tuple &torch, int64_t most)
    : PreparedCall(sizes, guard, torch),
      current_device_(torch[2]),
      is_capturing_(torch[3]),
      workspace_(most) {}

void PreparedCallGPU::add(const Key &key, nb::object call) {
    // Replaced objects are released last, because other threads may run then.
    decltype(calls_) before;
    if (calls_.size() >= most_calls) std::swap(calls_, before);
    std::swap(calls_[key], call);
}

nb::object PreparedCallGPU::start(const Call::Given &given) {
    const int states = given.h0 ? static_cast<int>(given.h0_view.kind) : -1;
    const int rows = given.packing ? 2 : given.lengths ? 1 : 0;
    const auto found =
        calls_.find({given.T(), given.N(), static_cast<int>(given.x_view.kind), states, rows});
    if (found == calls_.end()) return nb::borrow(Py_NotImplemented);
    // This reference keeps the call alive if another thread replaces it.
    const nb::object kept = found->second;
    if (number(call(current_device_)) != sizes_.device || holds_true(call(is_capturing_)))
        return nb::borrow(Py_NotImplemented);
    nb::object results = nb::cast<Call *>(kept)->run(given, &workspace_);
    if (results.ptr() != Py_NotImplemented) guard_.look();
    return results;
}

}  // namespace quant_gru
