// Float passes over memory of a GPU. A library without CUDA takes all memory for memory of the
// host.
#pragma once

#include <memory>

#include "passes/arguments.hpp"
#include "passes/equations.hpp"
#include "passes/sizes.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {

constexpr int kHost = -1;

// The index of the GPU that holds all arrays, or kHost. Throws ArgumentError if some are elsewhere.
template <class T>
int device_of(const ForwardArguments<T> &arguments);
template <class T>
int device_of(const BackwardArguments<T> &arguments);

// Enqueues passes to a stream. All functions throw DeviceError.
template <class T>
class OnDevice {
 public:
    // blas: does all matrix products; null for a handle of its own.
    OnDevice(cublasHandle_t blas, cudaStream_t stream);
    ~OnDevice();

    void forward(int device, const PassSizes &sizes, Zoneout zoneout,
                 const ForwardArguments<T> &arguments);
    void backward(int device, const PassSizes &sizes, const BackwardArguments<T> &arguments);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quant_gru
