// Calls of a native stack on the CPU, and their backwards: tensors in, tensors out.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "bindings/cuda_call.hpp"
#include "cpu/training/stack_backward.hpp"

namespace quant_gru {

// The value of an environment variable; empty if it is not set.
class Setting {
 public:
    explicit Setting(const char *variable);
    // Whether the variable still has the value that it had when this object was made.
    bool holds() const;

 private:
    std::string variable_, value_;
};

// Makes tensors on the CPU.
class TensorMakers {
 public:
    // dtypes: of real values in the order of Float, then of codes in the order of Container.
    // maker(shape, dtype=, strides=) returns the argument of a Maker; strides are None for
    // contiguous tensors.
    TensorMakers(const nanobind::tuple &dtypes, nanobind::object maker)
        : dtypes_(dtypes), maker_(std::move(maker)) {}

    Maker real(Float kind, const std::vector<int64_t> &shape, bool rows_first = false) {
        return of(static_cast<size_t>(kind), shape, rows_first);
    }
    Maker codes(Container kind, const std::vector<int64_t> &shape) {
        return of(4 + static_cast<size_t>(kind), shape, false);
    }
    // The kind of real values that a dtype names.
    std::optional<Float> kind_of(const nanobind::object &dtype) const;

 private:
    Maker of(size_t dtype, const std::vector<int64_t> &shape, bool rows_first);

    nanobind::tuple dtypes_;
    nanobind::object maker_;
    std::map<std::vector<int64_t>, Maker> kept_;  // by shape, dtype and order
};

class CPUCalls {
 public:
    // variable: an environment variable that selects the executor.
    // torch: Tensor and get_num_threads.
    CPUCalls(Stack &stack, const char *variable, const nanobind::tuple &torch,
             const nanobind::tuple &dtypes, nanobind::object maker);

    // Whether the variable still has the value that it had when this object was made.
    bool is_chosen() const { return setting_.holds(); }

    // Runs a call. Returns output, laid out as the input, and last states; if it keeps what a
    // backward needs, also a tensor that tells NaN rows, and a list of codes. Returns
    // NotImplemented for tensors that the caller must first resolve.
    nanobind::object run(const Call::Given &given, Float results, bool keeps);

    // The same for tensors. lengths: None, or int64 (N,), contiguous.
    nanobind::object run_tensors(const nanobind::object &x, const nanobind::object &h0,
                                 const nanobind::object &lengths, const nanobind::object &packing,
                                 const nanobind::object &dtype, bool keeps);

    Stack &stack() const { return stack_; }
    const Tensors &tensors() const { return tensors_; }
    TensorMakers &makers() { return makers_; }
    int threads() const { return static_cast<int>(number(call(get_num_threads_))); }
    int64_t cells() const { return static_cast<int64_t>(stack_.depth()) * stack_.directions(); }

 private:
    Stack &stack_;
    Setting setting_;
    Tensors tensors_;
    nanobind::object get_num_threads_;
    TensorMakers makers_;
};

class CPUBackward {
 public:
    // bias: whether the weights of a cell include biases. keep: owns the memory of `weights`.
    CPUBackward(CPUCalls &calls, std::vector<CellWeights> weights, nanobind::object keep)
        : calls_(calls), weights_(std::move(weights)), keep_(std::move(keep)) {}

    struct Given {
        const nanobind::object &x, &h0, &outs, &nan, &grad_y, &grad_last;
        const nanobind::tuple &wanted;
        const nanobind::object &packing, &dtype;
    };
    // Returns the gradients of x and h0 and of W, R and, with biases, bw and br of each cell; None
    // for those that are not wanted. Returns None for tensors that it does not support, and if
    // another executor was chosen.
    nanobind::object run(const Given &given);

 private:
    CPUCalls &calls_;
    std::vector<CellWeights> weights_;
    nanobind::object keep_;
};

}  // namespace quant_gru
