// The shortest way from a call in Python to a native stack.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "cpu/core/stack.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

class Quick {
 public:
    // weights: all of a module, kept by the caller for as long as this lives. steps: what has a
    // `count` of optimizer steps, or None. variable: of the environment, as it is now.
    // torch: Tensor, is_grad_enabled, get_num_threads. parts(shape) gives those of a Maker of
    // tensors of that shape.
    Quick(Stack *stack, const nanobind::sequence &weights, nanobind::object steps,
          const char *variable, nanobind::tuple torch, nanobind::object parts);

    // As QuantGRU.forward. None where something is not as it was, a gradient may be asked for or
    // the call is of another kind; NotImplemented where x or hx would be taken in another layout.
    nanobind::object run(const nanobind::object &weights, const nanobind::object &x,
                         const nanobind::object &hx, bool batch_first);

 private:
    // What makes the outputs of calls of one size.
    struct Makers {
        int64_t first = -1, second = -1;
        bool batch_first = false;
        Maker y, last;
    };

    bool wants_gradient(PyObject *x, PyObject *hx) const;
    Makers makers(const int64_t (&shape)[3], bool batch_first);

    Stack *stack_;
    Tensors tensors_;
    KeptWeights weights_;
    std::string variable_, setting_;
    nanobind::object is_grad_enabled_, get_num_threads_, parts_;
    Makers makers_;  // of the last call
};

}  // namespace quant_gru
