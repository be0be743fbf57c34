// A launch whose arguments are tensors and numbers that differ between calls.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <mutex>
#include <vector>

#include "kernel_runtime/native/launch_list.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace kernel_runtime {

class TensorLaunch {
 public:
    // fields: addresses of the arguments of 8 bytes, in the order of `start`. stream: returns the
    // current stream. fail: called with the status of a launch that failed; raises. keep: owns the
    // launches and the memory of the arguments.
    TensorLaunch(Launches &launches, const std::vector<uintptr_t> &fields, const Tensors &tensors,
                 nanobind::object stream, nanobind::object fail, nanobind::object keep)
        : launches_(launches),
          tensors_(tensors),
          stream_(std::move(stream)),
          fail_(std::move(fail)),
          keep_(std::move(keep)) {
        for (const uintptr_t each : fields) fields_.push_back(reinterpret_cast<uint64_t *>(each));
    }
    // Sets the arguments, see Tensors::argument, and starts the launch on the current stream.
    void start(const nanobind::args &values);

 private:
    static constexpr size_t kMost = 16;

    Launches &launches_;
    Tensors tensors_;
    std::vector<uint64_t *> fields_;
    nanobind::object stream_, fail_, keep_;
    std::mutex mutex_;
};

}  // namespace kernel_runtime
