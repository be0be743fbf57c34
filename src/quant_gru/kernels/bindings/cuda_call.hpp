// A whole call on a GPU: its tensors are made, the arguments of its launches follow them, and the
// launches start, all without a step of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "kernel_runtime/native/launch_list.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

using kernel_runtime::all_hold;
using kernel_runtime::call;
using kernel_runtime::Fields;
using kernel_runtime::Float;
using kernel_runtime::holds_true;
using kernel_runtime::Launches;
using kernel_runtime::Maker;
using kernel_runtime::number;
using kernel_runtime::Tensors;
using kernel_runtime::View;

// The current stream. `functions`: one that gives it, and one that has it wait for what others have
// made, called where it is not that of the call before.
class CurrentStream {
 public:
    explicit CurrentStream(const nanobind::tuple &functions)
        : get_(functions[0]), follow_(functions[1]) {}
    uintptr_t operator()();

 private:
    nanobind::object get_, follow_;
    uintptr_t before_ = ~uintptr_t(0);
};

// Memory of calls, kept from one to the next. Work of one stream is done in turn, so its calls may
// share it, those of other sizes included.
class Workspace {
 public:
    // The most bytes that are kept.
    explicit Workspace(int64_t most) : most_(most) {}
    // A tensor of at least so many bytes for a call on the stream, and its address. The caller
    // holds it until the call has started: another thread may put another one in its place.
    nanobind::object take(int64_t size, uintptr_t stream, const Maker &make, const Tensors &tensors,
                          uintptr_t &address);
    // Give the memory back; whether there was some.
    bool forget();
    // Held while a call that has it starts: launches of two calls must not mix.
    std::mutex &mutex() { return mutex_; }

 private:
    int64_t most_, size_ = -1;
    uintptr_t stream_ = 0, address_ = 0;
    nanobind::object tensor_;
    std::mutex mutex_;
};

// The rows of a packed sequence: its values are (rows, features). The layout has the lengths of N
// rows and then where the rows of each of T steps start. An order that is absent is null.
struct Packing {
    int64_t T, N;
    uintptr_t layout, sorted, unsorted;

    // From None, or a tuple of all that.
    static std::optional<Packing> of(const nanobind::object &packing, const Tensors &tensors);
};

// All calls of one size and form. Objects of Python are touched under the interpreter's lock alone,
// arguments of launches under `mutex_` and without it.
class Call {
 public:
    // Strides that arguments hold, and the width of their flag for elements that are read in fours,
    // 0 where there is none.
    struct Input {
        uintptr_t step, next, fours;
        int width;
        bool may;
    };
    struct Sizes {
        int64_t T, N, C, space, codes;
    };
    // What follows an address, in this order.
    enum { x, h0, lengths, y, last, nan, codes, space, sorted, unsorted, kinds };

    // makers: of y, of y with rows first or for some packed rows, last, space, space with codes,
    // and where what a backward needs is kept: nan, codes. fail: raises the error of a status.
    // keep: what holds the launches, their arguments and the fields.
    Call(Launches &launches, const std::vector<Fields *> &fields, const std::vector<Input> &inputs,
         const Sizes &sizes, std::vector<Maker> makers, const Tensors &tensors,
         const CurrentStream &stream, nanobind::object fail, nanobind::object keep);

    struct Given {
        PyObject *x, *h0, *lengths;  // those that are absent: null
        View x_view, h0_view;
        bool rows_first;  // of x, and of the output
        std::optional<Packing> packing;

        int64_t T() const { return packing ? packing->T : x_view.shape[rows_first]; }
        int64_t N() const { return packing ? packing->N : x_view.shape[!rows_first]; }
    };
    // Output and last states, then NaN and codes where they are kept. NotImplemented where x or h0
    // would be taken in another layout. The current device has to be that of the tensors.
    nanobind::object run(const Given &given, Workspace *kept);
    const Tensors &tensors() const { return tensors_; }

 private:
    void move_input(uintptr_t address, int64_t step, int64_t next);

    Launches &launches_;
    std::vector<Fields *> fields_;
    std::vector<Input> inputs_;
    Sizes sizes_;
    Tensors tensors_;
    std::vector<Maker> makers_;
    CurrentStream stream_;
    nanobind::object fail_, keep_;
    int64_t step_ = -1, next_ = -1;
    bool aligned_ = false;
    std::mutex mutex_;
};

}  // namespace quant_gru
