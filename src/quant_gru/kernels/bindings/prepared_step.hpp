// Steps of training like the one before: whether a call is one.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

class Step {
 public:
    struct Sizes {
        int64_t device;  // get_device() of its tensors
        int64_t states, C, H;
    };
    // weights: all of a module, contiguous float32, kept by the caller for as long as this lives.
    // torch: Tensor, and what gives the current device.
    Step(const Sizes &sizes, const nanobind::sequence &weights, const nanobind::tuple &torch);

    // Whether the weights are those that were given, where they were and as they were.
    bool holds(const nanobind::object &weights) const;
    // Whether they are, and x is float32 (T, N, C), (N, T, C) if batch_first, hx is float32
    // (states, N, H) or None, and their device is the current one.
    bool takes(const nanobind::object &weights, const nanobind::object &x,
               const nanobind::object &hx, bool batch_first) const;

 private:
    struct Place {
        PyObject *tensor;
        uintptr_t address;
        std::vector<int64_t> shape;
    };

    Sizes sizes_;
    Tensors tensors_;
    std::vector<Place> places_;
    nanobind::object current_device_;
};

}  // namespace quant_gru
