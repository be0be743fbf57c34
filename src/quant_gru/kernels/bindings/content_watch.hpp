// Detects writes to weights on a GPU that no version records, some calls later and without waiting.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "bindings/cuda_steps.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace quant_gru {

// Launches, called looks, compare the weights with their former contents. The result of a look is a
// flag in host memory, which later calls read.
class ContentWatch {
 public:
    // looks: Steps that set `found` to `mark` if the weights have changed. Their fields take the
    // index of the part that a look compares, below `parts`. stream: returns the current stream.
    ContentWatch(nanobind::object looks, uintptr_t found, int32_t mark, uintptr_t parts,
                 nanobind::object stream)
        : looks_(std::move(looks)),
          found_(reinterpret_cast<const volatile int32_t *>(found)),
          mark_(mark),
          parts_(parts),
          stream_(std::move(stream)) {}

    // Whether a look has found a change.
    bool found() const { return *found_ == mark_; }

    // Starts a look on the current stream, if it is due after the call that has just started.
    void look() {
        const uint64_t call = calls_++;
        if (call >= kFirst && call % kEvery) return;
        const uintptr_t part = started_++ % parts_;
        const auto stream =
            static_cast<uintptr_t>(kernel_runtime::number(kernel_runtime::call(stream_)));
        nanobind::cast<Steps &>(looks_).start(stream, {part}, nanobind::make_tuple(), nullptr,
                                              [] {});
    }

 private:
    // Loops that write weights between any two calls are found by looks after the first calls.
    // Later looks are rare: a launch takes 2 us of the host.
    static constexpr uint64_t kFirst = 8, kEvery = 16;

    nanobind::object looks_;
    const volatile int32_t *found_;
    int32_t mark_;
    uintptr_t parts_;
    nanobind::object stream_;
    uint64_t calls_ = 0, started_ = 0;
};

}  // namespace quant_gru
