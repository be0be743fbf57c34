// Backwards of a GRU that differ in addresses alone: gradients are made, the arguments of launches
// follow what is given, and the launches start, all without a step of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "bindings/cuda_call.hpp"

namespace quant_gru {

class Repeated {
 public:
    // How tensors lie; one that has to be absent has none.
    struct Layout {
        std::vector<int64_t> shape, strides;
    };
    // What follows an address, in the order of the fields that `launches` moves; gradients from
    // grad_x to grad_br.
    enum {
        space,
        x,
        h0,
        out,
        nan,
        grad_out,
        grad_last,
        dh0,
        grad_x,
        grad_W,
        grad_R,
        grad_bw,
        grad_br
    };
    static constexpr int kinds = grad_br + 1, gradients = kinds - grad_x;

    struct Sizes {
        int64_t device;      // get_device() of the tensors
        int64_t space, dh0;  // bytes of memory, and where the gradient of h0 goes in it
        int64_t most;        // bytes that are kept between calls
        uintptr_t zero;      // stands for the gradient of the output
    };

    // layouts: of x, of the gradient of the output, of that of the last states. makers: of the
    // memory, then of gradients; None where one is not wanted. torch: Tensor, what gives the
    // current device, the functions of a CurrentStream, and what tells whether a graph is being
    // captured.
    // fail: raises the error of a status. keep: what holds the launches and what they read.
    Repeated(Launches &launches, const Sizes &sizes, std::vector<Layout> layouts,
             const std::vector<nanobind::object> &makers, const nanobind::tuple &torch,
             nanobind::object fail, nanobind::object keep);

    // The gradients, or None where something lies in another way, or on another device than the
    // current one. h0: codes, or None.
    nanobind::object run(const nanobind::object &x, const nanobind::object &h0,
                         const nanobind::object &out, const nanobind::object &nan,
                         const nanobind::object &grad_out, const nanobind::object &grad_last);

    // Give memory back that waits for the next call; whether there was some.
    bool forget() { return workspace_.forget(); }

 private:
    bool lies(const nanobind::object &tensor, const Layout &layout, uintptr_t &address) const;
    nanobind::object memory(uintptr_t stream, uintptr_t &address);

    Launches &launches_;
    Sizes sizes_;
    Tensors tensors_;
    std::vector<Layout> layouts_;
    std::vector<std::optional<Maker>> makers_;
    nanobind::object current_device_;
    CurrentStream stream_;
    nanobind::object is_capturing_, fail_, keep_;
    Workspace workspace_;
};

}  // namespace quant_gru
