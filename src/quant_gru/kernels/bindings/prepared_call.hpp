// A whole call of a module, real values in and out, without a step of Python: what was checked and
// built once is kept with a guard that tells whether it still holds.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "bindings/cuda_call.hpp"
#include "bindings/weight_guard.hpp"
#include "cpu/core/stack.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

class PreparedCall {
 public:
    struct Sizes {
        int64_t device;  // get_device() of the tensors
        int64_t states, C, H;
    };
    // guard: of all weights of the module, kept by the caller for as long as this lives.
    // torch: Tensor, is_grad_enabled.
    PreparedCall(const Sizes &sizes, const WeightGuard &guard, const nanobind::tuple &torch);
    virtual ~PreparedCall() = default;

    // As QuantGRU.forward. lengths: None, or int64 (N,), contiguous on the device. packing: as
    // `Packing::of` takes it. None where a weight changed, a gradient may be asked for or the call
    // is of another kind; NotImplemented where the call has to be laid out or prepared first.
    nanobind::object run(const nanobind::object &weights, const nanobind::object &x,
                         const nanobind::object &hx, const nanobind::object &lengths,
                         bool batch_first, const nanobind::object &packing);

 protected:
    virtual nanobind::object start(const Call::Given &given) = 0;

    Sizes sizes_;
    Tensors tensors_;

 private:
    bool wants_gradient(PyObject *x, PyObject *hx) const;

    const WeightGuard &guard_;
    nanobind::object is_grad_enabled_;
};

// On the CPU: a native stack runs it, in float32.
class PreparedCallCPU : public PreparedCall {
 public:
    // variable: of the environment, as it is now. torch: of PreparedCall, then get_num_threads.
    // parts(shape) gives those of a Maker of tensors of that shape. is_real: whether results are to
    // be float32; calls have to be laid out otherwise.
    PreparedCallCPU(Stack *stack, const WeightGuard &guard, const char *variable,
                    const nanobind::tuple &torch, nanobind::object parts, bool is_real);

 protected:
    nanobind::object start(const Call::Given &given) override;

 private:
    // What makes the outputs of calls of one size.
    struct Makers {
        int64_t first = -1, second = -1;
        bool batch_first = false;
        Maker y, last;
    };

    Makers makers(const int64_t (&shape)[3], bool batch_first);

    Stack *stack_;
    std::string variable_, setting_;
    nanobind::object get_num_threads_, parts_;
    bool is_real_;
    Makers makers_;  // of the last call
};

// On a GPU: launches that were prepared for calls of a size run it.
class PreparedCallGPU : public PreparedCall {
 public:
    // torch: of PreparedCall, then what gives the current device and tells whether a graph is being
    // captured. most: bytes that are kept between calls.
    PreparedCallGPU(const Sizes &sizes, const WeightGuard &guard, const nanobind::tuple &torch,
                    int64_t most);

    // What calls have in common: T, N, the dtypes of x and of the states before the first step, -1
    // without those, and whether there are no lengths, lengths, or packed rows.
    using Key = std::tuple<int64_t, int64_t, int, int, int>;

    // A Call for all that have this in common.
    void add(const Key &key, nanobind::object call);

 protected:
    nanobind::object start(const Call::Given &given) override;

 private:
    nanobind::object current_device_, is_capturing_;
    std::map<Key, nanobind::object> calls_;
    Workspace workspace_;
};

}  // namespace quant_gru
