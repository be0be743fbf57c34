// The shortest way from a call in Python to a native stack: tensors are looked at through their
// attributes, so that nothing of torch is needed to build this.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <vector>

#include "stack.hpp"

namespace quant_gru {

class Quick {
 public:
    // weights: all of a module, kept by the caller for as long as this lives. steps: what has a
    // `count` of optimizer steps, or None. variable: of the environment, as it is now.
    // torch: Tensor, float32, empty_like, is_grad_enabled, get_num_threads. like(shape) gives what
    // empty_like makes a tensor of that shape of.
    Quick(Stack *stack, const nanobind::sequence &weights, nanobind::object steps,
          const char *variable, nanobind::tuple torch, nanobind::object like);

    // As QuantGRU.forward. None where something is not as it was, a gradient may be asked for, an
    // input is NaN or the call is of another kind; NotImplemented where x or hx would be taken in
    // another layout.
    nanobind::object run(const nanobind::object &weights, const nanobind::object &x,
                         const nanobind::object &hx, bool batch_first);

 private:
    struct Stamp {
        PyObject *tensor;
        int64_t version, address;
    };

    // Arguments of empty_like for calls of one size.
    struct Likes {
        int64_t first = -1, second = -1;
        bool batch_first = false;
        nanobind::object y, last;
    };

    bool holds(const nanobind::object &weights) const;
    bool wants_gradient(PyObject *x, PyObject *hx) const;
    // Whether it is float32 on the CPU, of three dimensions, which `shape` takes.
    bool is_plain(PyObject *tensor, int64_t (&shape)[3]) const;
    Likes likes(const int64_t (&shape)[3], bool batch_first);

    Stack *stack_;
    std::vector<Stamp> stamps_;
    nanobind::object steps_;
    int64_t count_ = 0;
    std::string variable_, setting_;
    nanobind::object tensor_, float32_, empty_like_, is_grad_enabled_, get_num_threads_, like_;
    Likes likes_;  // of the last call
};

}  // namespace quant_gru
