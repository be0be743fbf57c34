// The forward pass over codes in memory of a GPU. A library without CUDA takes all memory for
// memory of the host.
#pragma once

#include <memory>

#include "passes/code_layer.hpp"
#include "passes/on_device.hpp"

namespace quant_gru {

// A pass of several steps; `before` is the state before the first one, and `after` (T, N, H) the
// states after each one.
template <class T>
struct CodeCall {
    int64_t steps;
    CodeArguments<T> arguments;
    const T *x, *before;
    T *after;
    const T *mask;
};

// The index of the GPU that holds x and the states, or kHost. Weights, scales and zero points may
// be elsewhere. Throws ArgumentError if x or a state is.
template <class T>
int device_of(const CodeCall<T> &call);

template <class T>
class CodeOnDevice {
 public:
    explicit CodeOnDevice(cudaStream_t stream);
    ~CodeOnDevice();

    // Enqueues a pass without a mask to the stream. If weights are in memory of a GPU, it first
    // waits for the stream and copies them to the host. Throws ArgumentError and DeviceError.
    void forward(int device, const PassSizes &sizes, const CodeCall<T> &call);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quant_gru
