// Backwards of a whole GRU that differ in addresses alone: gradients are made, the arguments of
// launches follow what is given, and the launches start, all without a step of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/cuda_call.hpp"

namespace quant_gru {

class GPUBackward {
 public:
    // How a tensor of two or three dimensions lies; one that has to be absent has no shape. Those
    // of packed rows have two, and any number of rows.
    struct Layout {
        std::vector<int64_t> shape, strides;
        Float kind;
    };
    // The tensors of a call, by number: these, then codes of the states of each cell, then
    // gradients.
    enum { space, x, h0, lengths, nan, grad_y, grad_last, sorted, unsorted, outs };
    // An address: so many bytes from the start of a tensor.
    struct Place {
        int64_t tensor, offset;
    };
    struct Sizes {
        int64_t device;  // get_device() of the tensors
        int64_t space;   // bytes of memory
        int64_t most;    // bytes that are kept between calls
        int64_t cells;   // layers times directions
        bool has_lengths, is_packed;
        int64_t T, N;
    };

    // places: of the fields that `launches` moves, in their order. layouts: of x, h0, the gradient
    // of the output and that of the last states. makers: of the memory, then of gradients; None
    // where one is not wanted; that of packed rows takes their number. torch: Tensor, what gives
    // the current device, the functions of a CurrentStream, and what tells whether a graph is being
    // captured. fail: raises the error of a status. keep: what holds the launches and what they
    // read.
    GPUBackward(Launches &launches, const Sizes &sizes, std::vector<Place> places,
                std::vector<Layout> layouts, const std::vector<nanobind::object> &makers,
                const nanobind::tuple &torch, nanobind::object fail, nanobind::object keep);

    // The tensors that were given, None for those that are absent.
    struct Given {
        const nanobind::object &x, &h0, &lengths, &outs, &nan, &grad_y, &grad_last, &packing;
    };
    // A list of all gradients, None for those that are not wanted; or None where something lies in
    // another way, or on another device than the current one.
    nanobind::object run(const Given &given);

    // Give memory back that waits for the next call; whether there was some.
    bool forget() { return workspace_.forget(); }

 private:
    bool find(const Given &given, std::vector<uintptr_t> &at, int64_t &rows) const;
    bool lies(const nanobind::object &tensor, const Layout &layout, View &found) const;
    bool follows(const nanobind::object &tensor, uintptr_t &address) const;
    nanobind::object memory(uintptr_t stream, uintptr_t &address);

    Launches &launches_;
    Sizes sizes_;
    std::vector<Place> places_;
    Tensors tensors_;
    std::vector<Layout> layouts_;
    std::vector<std::optional<Maker>> makers_;
    nanobind::object current_device_;
    CurrentStream stream_;
    nanobind::object is_capturing_, fail_, keep_;
    Workspace workspace_;
};

}  // namespace quant_gru
