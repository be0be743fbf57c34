// Detects changes of the weights of a module, for objects that depend on them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/content_sample.hpp"
#include "bindings/content_watch.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

using kernel_runtime::all_hold;
using kernel_runtime::checked;
using kernel_runtime::number;
using kernel_runtime::Tensors;

class WeightGuard {
 public:
    // type: torch.Tensor. weights: all weights of a module; the caller keeps them alive longer than
    // the guard. steps: an object with a `count` of optimizer steps, or None.
    WeightGuard(const nanobind::handle &type, const nanobind::sequence &weights,
                nanobind::object steps);

    // Whether the current weights are the same tensors with unchanged layouts and values. Always
    // false for inference tensors, which have no version. On a CPU, samples of the contents are
    // compared, too. With a watch, false after it has found a change.
    bool unchanged(const nanobind::object &weights) const;
    // Whether the current weights are the same tensors with unchanged addresses and layouts.
    bool in_place(const nanobind::object &weights) const;
    // Whether `unchanged` found other contents of a weight that has the same version still, which
    // earlier calls may have missed.
    bool found_silent_write() const;
    // Watches the contents of weights on a GPU.
    void watch(std::unique_ptr<ContentWatch> watch) { watch_ = std::move(watch); }
    // Starts a look of the watch, if there is one and a look is due. Never called during capture.
    void look() const {
        if (watch_) watch_->look();
    }
    // Whether all weights have versions: inference tensors have none.
    bool has_versions() const { return has_versions_; }
    // Whether any weight requires a gradient.
    bool ask_for_gradient() const;

 private:
    struct Weight {
        PyObject *tensor;
        int64_t version;
        kernel_runtime::Place place;
        ContentSample content;
    };

    int64_t count() const;

    Tensors tensors_;
    std::vector<Weight> weights_;
    nanobind::object steps_;
    int64_t count_ = 0;
    bool has_versions_ = true;
    std::unique_ptr<ContentWatch> watch_;
    mutable bool found_by_watch_ = false;
};

}  // namespace quant_gru
