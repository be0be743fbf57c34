// Whether a module's weights are those that something was made of.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

using kernel_runtime::all_hold;
using kernel_runtime::Attribute;
using kernel_runtime::checked;
using kernel_runtime::number;
using kernel_runtime::Tensors;

class WeightGuard {
 public:
    // type: torch.Tensor. weights: all of a module, kept by the caller for as long as this lives.
    // steps: what has a `count` of optimizer steps, or None.
    WeightGuard(const nanobind::handle &type, const nanobind::sequence &weights,
                nanobind::object steps);

    // Whether these, the module's now, are those that were given, their numbers unchanged. Never
    // so with inference tensors, which have no version.
    bool unchanged(const nanobind::object &weights) const;
    // Whether they are those that were given, where they were and laid out as they were.
    bool in_place(const nanobind::object &weights) const;
    bool ask_for_gradient() const;

 private:
    struct Weight {
        PyObject *tensor;
        int64_t version;
        uintptr_t address;
        // as `Tensors::is_at` compares it, or else one by one
        bool is_plain;
        nanobind::object dtype, shape, strides;
        std::vector<int64_t> sizes;
    };

    int64_t count() const;

    Tensors tensors_;
    std::vector<Weight> weights_;
    nanobind::object steps_;
    int64_t count_ = 0;
    bool has_versions_ = true;
    Attribute dtype_, shape_, stride_;
};

}  // namespace quant_gru
