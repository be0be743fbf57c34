// A whole call of a module, from real values to real values, without Python code. Checks and plans
// of the first call are kept. A guard tells whether they are still valid.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/cpu_calls.hpp"
#include "bindings/cuda_call.hpp"
#include "bindings/weight_guard.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

// The form of a call: T, N, the dtype of x, the dtype of the initial states or -1 without them,
// and 0 without lengths, 1 with lengths, 2 with packed rows.
using FormKey = std::tuple<int64_t, int64_t, int, int, int>;
FormKey key_of(const Call::Given &given);

class PreparedCall {
 public:
    struct Sizes {
        int64_t device;  // get_device() of the tensors
        int64_t states, C, H;
    };
    // guard: of all weights of the module; the caller keeps it alive longer than this object.
    // torch: Tensor, is_grad_enabled.
    PreparedCall(const Sizes &sizes, const WeightGuard &guard, const nanobind::tuple &torch);
    virtual ~PreparedCall() = default;

    // Runs a call like QuantGRU.forward. lengths: None, or int64 (N,), contiguous on the device.
    // packing: the argument of `Packing::of`. Returns None if a weight changed, if a gradient may
    // be needed, or if the arguments are not supported. Returns NotImplemented if the caller must
    // first change layouts or dtypes, or prepare the call.
    nanobind::object run(const nanobind::object &weights, const nanobind::object &x,
                         const nanobind::object &hx, const nanobind::object &lengths,
                         bool batch_first, const nanobind::object &packing);

 protected:
    // Whether the current weights allow a call.
    virtual bool holds(const nanobind::object &weights, const Call::Given &given) const;
    virtual nanobind::object start(const Call::Given &given) = 0;
    bool is_grad_enabled() const { return holds_true(call(is_grad_enabled_)); }
    bool wants_gradient(const Call::Given &given) const;

    Sizes sizes_;
    Tensors tensors_;

    const WeightGuard &guard_;

 private:
    nanobind::object is_grad_enabled_;
};

// Checks of calls that read the current weights, which no guard can watch. It runs nothing: `run`
// returns whether the caller's run must be differentiable.
class PreparedCheck : public PreparedCall {
 public:
    using PreparedCall::PreparedCall;

 protected:
    bool holds(const nanobind::object &weights, const Call::Given &given) const override;
    nanobind::object start(const Call::Given &given) override;
};

// Counts changes of what prepared updates write, and of the arguments of their launches.
struct UpdateChanges {
    int64_t count = 0;
};

// Steps of training on a GPU: launches update the numbers that follow the weights, then a prepared
// call runs. `run` returns what PreparedCheck returns if the caller has to run the step.
class PreparedStepGPU : public PreparedCheck {
 public:
    // torch: as for PreparedCallGPU, then a function that returns the current stream.
    PreparedStepGPU(const PreparedCall::Sizes &sizes, const WeightGuard &guard,
                    const nanobind::tuple &torch, const UpdateChanges &changes, int64_t most,
                    nanobind::object fail);

    // Adds the Call for steps of this form, which keeps what a backward needs if `differentiable`.
    // split(codes) -> the codes of each cell; None if they are those of one cell.
    void add(const FormKey &key, bool differentiable, nanobind::object call,
             nanobind::object split);
    // Sets the launches of an update. They are used on this stream, until something changes.
    void follow(Launches &update, uintptr_t stream, nanobind::object keep);
    // Whether the launches of the update are still those that the parts need on this stream.
    bool follows(uintptr_t stream) const {
        return update_ && changes_.count == seen_ && stream == stream_;
    }

 protected:
    // Returns the results of the call, with a list of codes of each cell.
    nanobind::object start(const Call::Given &given) override;

 private:
    struct Prepared {
        nanobind::object call, split;
    };
    const UpdateChanges &changes_;
    nanobind::object current_device_, is_capturing_, current_stream_, fail_, keep_;
    std::map<std::pair<FormKey, bool>, Prepared> calls_;
    Workspace workspace_;
    Launches *update_ = nullptr;
    uintptr_t stream_ = 0;
    int64_t seen_ = 0;
};

// Calls on the CPU.
class PreparedCallCPU : public PreparedCall {
 public:
    // torch: the functions of PreparedCall. dtype: of the results; None for that of the input.
    // Calls return None after another executor was chosen.
    PreparedCallCPU(CPUCalls &calls, const WeightGuard &guard, const nanobind::tuple &torch,
                    const nanobind::object &dtype);

 protected:
    nanobind::object start(const Call::Given &given) override;

 private:
    CPUCalls &calls_;
    std::optional<Float> results_;
};

// Calls on the CPU that read the current weights. `run` returns what PreparedCheck returns if the
// caller has to run the call.
class PreparedStepCPU : public PreparedCheck {
 public:
    // torch, dtype: as for PreparedCallCPU. update() rewrites the numbers that follow the weights.
    PreparedStepCPU(CPUCalls &calls, const WeightGuard &guard, const nanobind::tuple &torch,
                    const nanobind::object &dtype, nanobind::object update);

 protected:
    // Returns output and last states; for a differentiable call also what a backward needs.
    nanobind::object start(const Call::Given &given) override;

 private:
    CPUCalls &calls_;
    std::optional<Float> results_;
    nanobind::object update_;
};

// Calls on a GPU: prepared launches for each size run them.
class PreparedCallGPU : public PreparedCall {
 public:
    // torch: the functions of PreparedCall, then functions that return the current device and
    // whether a graph is being captured. most: maximum size of a workspace that is kept between
    // calls, in bytes.
    PreparedCallGPU(const Sizes &sizes, const WeightGuard &guard, const nanobind::tuple &torch,
                    int64_t most);

    // Adds the Call for all calls of this form.
    void add(const FormKey &key, nanobind::object call);

 protected:
    nanobind::object start(const Call::Given &given) override;

 private:
    nanobind::object current_device_, is_capturing_;
    std::map<FormKey, nanobind::object> calls_;
    Workspace workspace_;
};

}  // namespace quant_gru
