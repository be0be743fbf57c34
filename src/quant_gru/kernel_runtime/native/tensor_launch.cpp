#include "kernel_runtime/native/tensor_launch.hpp"

#include <stdexcept>

namespace nb = nanobind;

namespace kernel_runtime {

void TensorLaunch::start(const nb::args &values) {
    const auto count = static_cast<size_t>(PyTuple_Size(values.ptr()));
    if (count != fields_.size() || count > kMost)
        throw std::invalid_argument("one value for each argument");
    uint64_t to[kMost];
    for (size_t i = 0; i < count; ++i)
        to[i] = tensors_.argument(PyTuple_GetItem(values.ptr(), static_cast<Py_ssize_t>(i)));
    const auto stream = static_cast<uintptr_t>(number(call(stream_)));
    int status;
    {
        // A full launch queue may wait for a host function that needs the GIL.
        nb::gil_scoped_release release;
        const std::lock_guard<std::mutex> lock(mutex_);
        for (size_t i = 0; i < count; ++i) *fields_[i] = to[i];
        status = launches_.start(stream);
    }
    if (status) {
        fail_(status);
        throw std::runtime_error("a launch failed");
    }
}

}  // namespace kernel_runtime
