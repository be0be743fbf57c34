// A prepared backward of a whole GRU. A call allocates the gradients, updates the addresses in the
// arguments of its launches, and starts its steps.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/cuda_call.hpp"

namespace quant_gru {

class GPUBackward {
 public:
    // The expected layout of a tensor with two or three dimensions. The shape is empty if the
    // tensor must be absent. Tensors of packed rows have two dimensions and any number of rows.
    struct Layout {
        std::vector<int64_t> shape, strides;
        Float kind;
    };
    // Indices of the tensors of a call. From `outs` on: the codes of the states of each cell, then
    // the gradients.
    enum { space, x, h0, lengths, nan, grad_y, grad_last, sorted, unsorted, outs };
    struct Sizes {
        int64_t device;  // get_device() of the tensors
        int64_t space;   // bytes of workspace
        int64_t most;    // maximum size of a workspace that is kept between calls, in bytes
        int64_t cells;   // layers times directions
        bool is_packed;
        int64_t T, N;
    };

    // steps: outlive this object; their functions get the workspace and a list of the gradients.
    // layouts: of x, h0, the gradient of the output and the gradient of the last states.
    // makers: of the workspace, then of the gradients; None for a gradient that is not wanted. The
    // maker of packed rows receives their number.
    // torch: Tensor, a function that returns the current device, the functions of a CurrentStream,
    // and a function that returns whether a graph is being captured.
    GPUBackward(Steps &steps, const Sizes &sizes, std::vector<Layout> layouts,
                const std::vector<nanobind::object> &makers, const nanobind::tuple &torch);

    // The tensors of a call; None for those that are absent.
    struct Given {
        const nanobind::object &x, &h0, &outs, &nan, &grad_y, &grad_last, &packing;
    };
    // Returns a list of all gradients, None for those that are not wanted. Returns None if a tensor
    // does not have the expected layout, or the current device is not that of the tensors.
    nanobind::object run(const Given &given);

    // Frees the workspace that is kept for the next call. Returns whether there was one.
    bool forget() { return workspace_.forget(); }

 private:
    bool find(const Given &given, std::vector<uintptr_t> &at, int64_t &rows) const;
    bool lies(const nanobind::object &tensor, const Layout &layout, View &found) const;
    bool follows(const nanobind::object &tensor, uintptr_t &address) const;
    nanobind::object memory(uintptr_t stream, uintptr_t &address);

    Steps &steps_;
    Sizes sizes_;
    Tensors tensors_;
    std::vector<Layout> layouts_;
    std::vector<std::optional<Maker>> makers_;
    nanobind::object current_device_;
    CurrentStream stream_;
    nanobind::object is_capturing_;
    Workspace workspace_;
};

}  // namespace quant_gru
