// The shortest way from a call in Python to launches on a GPU, as kernels/cpu/quick.hpp is to a
// native stack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "bindings/cuda_call.hpp"

namespace quant_gru {

class QuickGPU {
 public:
    struct Sizes {
        int64_t device;  // get_device() of its tensors
        int64_t states, C, H;
    };
    // weights: all of a module, kept by the caller for as long as this lives. steps: what has a
    // `count` of optimizer steps, or None. torch: Tensor, is_grad_enabled, and what gives the
    // current device and tells whether a graph is being captured. most: bytes that are kept between
    // calls.
    QuickGPU(const Sizes &sizes, const nanobind::sequence &weights, nanobind::object steps,
             nanobind::tuple torch, int64_t most);

    // A Call for all of a size, with states before the first step or without.
    void add(int64_t T, int64_t N, bool with_h0, nanobind::object call);

    // As QuantGRU.forward. None where something is not as it was, a gradient may be asked for or
    // the call is of another kind; NotImplemented where the size is new, tensors would be taken in
    // another layout, another device is the current one, or a graph is being captured.
    nanobind::object run(const nanobind::object &weights, const nanobind::object &x,
                         const nanobind::object &hx, bool batch_first);

 private:
    bool wants_gradient(PyObject *x, PyObject *hx) const;

    Sizes sizes_;
    Tensors tensors_;
    KeptWeights weights_;
    nanobind::object is_grad_enabled_, current_device_, is_capturing_;
    std::map<std::tuple<int64_t, int64_t, bool>, nanobind::object> calls_;
    Workspace workspace_;
};

}  // namespace quant_gru
