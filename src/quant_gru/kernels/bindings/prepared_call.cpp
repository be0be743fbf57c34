#include "bindings/prepared_call.hpp"

#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {
namespace {

constexpr size_t most_calls = 64;

PreparedCall::Sizes sizes_of(const Stack &stack) {
    const Layer &bottom = stack.layer(0, 0);
    const auto states = static_cast<int64_t>(stack.depth()) * stack.directions();
    return {-1, states, bottom.C(), bottom.H()};
}

}  // namespace

FormKey key_of(const Call::Given &given) {
    const int states = given.h0 ? static_cast<int>(given.h0_view.kind) : -1;
    const int rows = given.packing ? 2 : given.lengths ? 1 : 0;
    return {given.T(), given.N(), static_cast<int>(given.x_view.kind), states, rows};
}

PreparedCall::PreparedCall(const Sizes &sizes, const WeightGuard &guard, const nb::tuple &torch)
    : sizes_(sizes), tensors_(torch[0], sizes.device), guard_(guard), is_grad_enabled_(torch[1]) {}

bool PreparedCall::wants_gradient(const Call::Given &given) const {
    return is_grad_enabled() &&
           (tensors_.requires_grad(given.x) || (given.h0 && tensors_.requires_grad(given.h0)) ||
            guard_.ask_for_gradient());
}

bool PreparedCall::holds(const nb::object &weights, const Call::Given &given) const {
    return guard_.unchanged(weights) && !wants_gradient(given);
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
    return holds(weights, given) ? start(given) : nb::none();
}

bool PreparedCheck::holds(const nb::object &weights, const Call::Given &) const {
    const bool may_change =
        !guard_.has_versions() || (is_grad_enabled() && guard_.ask_for_gradient());
    return may_change && guard_.in_place(weights);
}

nb::object PreparedCheck::start(const Call::Given &given) {
    return nb::bool_(wants_gradient(given));
}

PreparedStepGPU::PreparedStepGPU(const PreparedCall::Sizes &sizes, const WeightGuard &guard,
                                 const nb::tuple &torch, const UpdateChanges &changes, int64_t most,
                                 nb::object fail)
    : PreparedCheck(sizes, guard, torch),
      changes_(changes),
      current_device_(torch[2]),
      is_capturing_(torch[3]),
      current_stream_(torch[4]),
      fail_(std::move(fail)),
      workspace_(most) {}

void PreparedStepGPU::add(const FormKey &key, bool differentiable, nb::object call,
                          nb::object split) {
    // Replaced objects are released last, because other threads may run then.
    decltype(calls_) before;
    if (calls_.size() >= most_calls) std::swap(calls_, before);
    Prepared made{std::move(call), std::move(split)};
    std::swap(calls_[{key, differentiable}], made);
}

void PreparedStepGPU::follow(Launches &update, uintptr_t stream, nb::object keep) {
    update_ = &update;
    stream_ = stream;
    seen_ = changes_.count;
    std::swap(keep_, keep);
}

nb::object PreparedStepGPU::start(const Call::Given &given) {
    const bool differentiable = wants_gradient(given);
    nb::object general = nb::bool_(differentiable);
    const auto found = calls_.find({key_of(given), differentiable});
    if (found == calls_.end() || number(call(current_device_)) != sizes_.device ||
        holds_true(call(is_capturing_)))
        return general;
    const auto stream = static_cast<uintptr_t>(number(call(current_stream_)));
    if (!follows(stream)) return general;
    // These references keep the objects alive if another thread replaces them.
    const Prepared made = found->second;
    const nb::object keep = keep_;
    Launches &update = *update_;
    const auto changes = static_cast<uintptr_t>(seen_);
    int status;
    {
        // A full launch queue may wait for a host function that needs the GIL.
        nb::gil_scoped_release release;
        status = update.start(stream, {changes});
    }
    if (status) {
        fail_(status);
        throw std::runtime_error("a launch failed");
    }
    const nb::object results = nb::cast<Call *>(made.call)->run(given, &workspace_);
    // The caller's run repeats the update.
    if (results.ptr() == Py_NotImplemented) return general;
    if (!differentiable) return results;
    const nb::tuple all = nb::cast<nb::tuple>(results);
    const nb::object codes =
        made.split.is_none() ? nb::object(nb::make_tuple(all[3])) : made.split(all[3]);
    return nb::make_tuple(all[0], all[1], all[2], codes);
}

PreparedCallCPU::PreparedCallCPU(CPUCalls &calls, const WeightGuard &guard, const nb::tuple &torch,
                                 const nb::object &dtype)
    : PreparedCall(sizes_of(calls.stack()), guard, torch),
      calls_(calls),
      results_(calls.makers().kind_of(dtype)) {}

nb::object PreparedCallCPU::start(const Call::Given &given) {
    if (!calls_.is_chosen()) return nb::none();
    return calls_.run(given, results_.value_or(given.x_view.kind), false);
}

PreparedStepCPU::PreparedStepCPU(CPUCalls &calls, const WeightGuard &guard, const nb::tuple &torch,
                                 const nb::object &dtype, nb::object update)
    : PreparedCheck(sizes_of(calls.stack()), guard, torch),
      calls_(calls),
      results_(calls.makers().kind_of(dtype)),
      update_(std::move(update)) {}

nb::object PreparedStepCPU::start(const Call::Given &given) {
    const bool differentiable = wants_gradient(given);
    if (given.lengths || !calls_.is_chosen()) return nb::bool_(differentiable);
    call(update_);
    nb::object found = calls_.run(given, results_.value_or(given.x_view.kind), differentiable);
    return found.ptr() == Py_NotImplemented ? nb::object(nb::bool_(differentiable)) : found;
}

PreparedCallGPU::PreparedCallGPU(const Sizes &sizes, const WeightGuard &guard,
                                 const nb::tuple &torch, int64_t most)
    : PreparedCall(sizes, guard, torch),
      current_device_(torch[2]),
      is_capturing_(torch[3]),
      workspace_(most) {}

void PreparedCallGPU::add(const FormKey &key, nb::object call) {
    // Replaced objects are released last, because other threads may run then.
    decltype(calls_) before;
    if (calls_.size() >= most_calls) std::swap(calls_, before);
    std::swap(calls_[key], call);
}

nb::object PreparedCallGPU::start(const Call::Given &given) {
    const auto found = calls_.find(key_of(given));
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
