// A whole call on a GPU, without Python code. A call allocates its tensors, writes their addresses
// to the arguments of its launches, and starts them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/cuda_steps.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

using kernel_runtime::all_hold;
using kernel_runtime::call;
using kernel_runtime::Float;
using kernel_runtime::holds_true;
using kernel_runtime::Maker;
using kernel_runtime::number;
using kernel_runtime::Tensors;
using kernel_runtime::View;

// The current stream. `functions`: the first returns it. The second makes it wait for the work of
// other streams; it is called when the stream differs from that of the previous call.
class CurrentStream {
 public:
    explicit CurrentStream(const nanobind::tuple &functions)
        : get_(functions[0]), follow_(functions[1]) {}
    uintptr_t operator()();

 private:
    nanobind::object get_, follow_;
    uintptr_t before_ = ~uintptr_t(0);
};

// A workspace that is kept between calls. A stream executes its calls in order, so calls of any
// size on one stream can share it.
class Workspace {
 public:
    // most: maximum size of a workspace that is kept, in bytes.
    explicit Workspace(int64_t most) : most_(most) {}
    // Returns a tensor of at least `size` bytes for a call on the stream, and its address. The
    // caller must keep it until the call has started, because another thread may replace it.
    nanobind::object take(int64_t size, uintptr_t stream, const Maker &make, const Tensors &tensors,
                          uintptr_t &address);
    // Frees the memory. Returns whether there was any.
    bool forget();
    // Locked while a call that uses it starts: launches of two calls must not interleave.
    std::mutex &mutex() { return mutex_; }

 private:
    int64_t most_, size_ = -1;
    uintptr_t stream_ = 0, address_ = 0;
    nanobind::object tensor_;
    std::mutex mutex_;
};

// The rows of a packed sequence, with values (rows, features). `layout` points to the lengths of N
// rows, then the start of the rows of each of T steps, then the end. An absent order is null.
struct Packing {
    int64_t T, N;
    uintptr_t layout, sorted, unsorted;

    // From None, or a tuple of these fields.
    static std::optional<Packing> of(const nanobind::object &packing, const Tensors &tensors);
};

// All calls of one size and form.
class Call {
 public:
    // Addresses of the arguments that describe x: its strides (step: between steps, next: between
    // rows), and an int32 that says whether four elements may be read at once, or 0.
    struct Input {
        uintptr_t step, next, fours;
    };
    // The tensors whose addresses the fields follow, in this order.
    enum { x, h0, lengths, y, last, nan, codes, space, sorted, unsorted, kinds };

    // steps: outlive this object; their functions get the workspace and None. features: of x.
    // bytes: of the workspace. makers: of y, of y with rows first or packed rows, last, and space;
    // also of nan and codes if the call keeps what a backward needs.
    Call(Steps &steps, const std::vector<Input> &inputs, int64_t features, int64_t bytes,
         std::vector<Maker> makers, const Tensors &tensors, const CurrentStream &stream);

    struct Given {
        PyObject *x, *h0, *lengths;  // null if absent
        View x_view, h0_view;
        bool rows_first;  // whether x and the output are (N, T, features)
        std::optional<Packing> packing;

        int64_t T() const { return packing ? packing->T : x_view.shape[rows_first]; }
        int64_t N() const { return packing ? packing->N : x_view.shape[!rows_first]; }
    };
    // Returns the output and the last states, then nan and codes if they are kept. Returns
    // NotImplemented if x or h0 has an unsupported layout. The current device must be that of the
    // tensors.
    nanobind::object run(const Given &given, Workspace *kept);
    const Tensors &tensors() const { return tensors_; }

 private:
    void move_input(uintptr_t address, int64_t step, int64_t next);

    Steps &steps_;
    std::vector<Input> inputs_;
    int64_t features_, bytes_;
    Tensors tensors_;
    std::vector<Maker> makers_;
    CurrentStream stream_;
    int64_t step_ = -1, next_ = -1;
    bool aligned_ = false;
};

}  // namespace quant_gru
