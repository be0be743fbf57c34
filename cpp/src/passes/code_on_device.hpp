// Passes over codes in memory of a GPU. A library without CUDA takes all memory for memory of the
// host.
#pragma once

#include <memory>

#include "passes/code_layer.hpp"
#include "passes/on_device.hpp"

namespace quant_gru {

// A forward pass; `before` is the state before the first step, and `after` (T, N, H) the states
// after each one.
template <class T>
struct CodeForward {
    int64_t steps;
    bool in_place;  // after may be before
    CodeArguments<T> arguments;
    const T *x, *before;
    T *after;
    const T *mask;
};

// A backward pass: the arguments of CodeBackwardPass::Run or, with is_step, Iterate.
template <class T>
struct CodeBackward {
    int64_t steps;
    bool is_step;
    CodeArguments<T> arguments;
    const T *x_t, *h;
    const float *dh_new;
    float *dx, *dW, *dR, *dbx, *dbr, *dh;
    const T *mask;
};

// The index of the GPU that holds all arrays, or kHost. Weights, scales and zero points may be
// elsewhere. Throws ArgumentError if another array is.
template <class T>
int device_of(const CodeForward<T> &call);
template <class T>
int device_of(const CodeBackward<T> &call);

// Enqueues passes to a stream. If weights are in memory of a GPU, calls first wait for the stream
// and copy them to the host. All functions throw ArgumentError and DeviceError.
template <class T>
class CodeOnDevice {
 public:
    // blas: does products of gradients; null for a handle of its own.
    CodeOnDevice(cublasHandle_t blas, cudaStream_t stream);
    ~CodeOnDevice();

    void forward(int device, const PassSizes &sizes, const CodeForward<T> &call);
    void backward(int device, const PassSizes &sizes, const CodeBackward<T> &call);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quant_gru
