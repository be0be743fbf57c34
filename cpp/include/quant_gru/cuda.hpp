// Frozen GRUs on NVIDIA GPUs: the codes of the CPU and of the Python package, from and to memory of
// the GPU. All functions exist in every build of the library; without -DQUANT_GRU_CUDA=ON they
// throw DeviceError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "quant_gru/export.h"
#include "quant_gru/model.hpp"

namespace quant_gru::cuda {

struct Network;

// The driver, NVRTC or a GPU is missing or fails. The message is
// "Expected <thing> to be <rule>, got <value>".
class QUANT_GRU_API DeviceError : public std::runtime_error {
 public:
    using std::runtime_error::runtime_error;
};

// Optional arguments of Call::run. All addresses are those of memory that the GPU can read.
struct RunOptions {
    void *stream = nullptr;            // a CUstream or cudaStream_t; null for the default stream
    const float *h0 = nullptr;         // (num_layers * D, N, H); null for zeros
    float *h_n = nullptr;              // receives the last states, may be h0; null if not needed
    const int64_t *lengths = nullptr;  // (N), steps of each sequence, 1..T; null if all have T
};

// A call with T steps of N sequences: its launches and its workspace.
class QUANT_GRU_API Call {
 public:
    Call(Call &&) noexcept;
    Call &operator=(Call &&) noexcept;
    ~Call();  // waits for runs that have not ended; not while a stream is captured

    // Starts the call on a stream and returns. x: (T, N, C); y: (T, N, D * H). With
    // shape().batch_first x: (N, T, C); y: (N, T, D * H). Steps beyond the length of a sequence
    // are 0 in y. A row that NaN reaches becomes NaN. y must not overlap x.
    //
    // It only launches kernels. It allocates nothing and waits for nothing, so a stream that is
    // captured into a CUDA graph may run it. Runs share the workspace: each must have ended before
    // the next one starts, which runs on one stream ensure. Calls of one model are independent.
    // Lengths are not checked. Throws ArgumentError if x or y is null, and DeviceError.
    void run(const float *x, float *y, const RunOptions &options = {}) const;

    // One line per launch: kernel, grid and macros.
    std::string description() const;

    struct QUANT_GRU_HIDDEN State;

 private:
    friend class Model;
    explicit Call(std::unique_ptr<State> state);
    std::unique_ptr<State> state_;
};

// A model on a GPU. Copies share its memory. All functions may run in several threads at once.
class QUANT_GRU_API Model {
 public:
    // Reads a file of FrozenQuantGRU.save, or its bytes, to the GPU of an index. Throws FileError
    // and DeviceError.
    static Model load(const std::string &path, int device = 0);
    static Model load(const void *bytes, size_t size, int device);

    const Shape &shape() const;

    // Compiles and loads the kernels of a call, and allocates its workspace. Kernels that this
    // machine has not compiled before take some seconds. Must not be called while any stream of
    // the GPU is captured. Throws ArgumentError if T or N is less than 1, or if the environment
    // variable QUANT_GRU_CUDA_SHAPE names no layout of this GPU; or DeviceError.
    Call prepare(int64_t T, int64_t N) const;

 private:
    explicit Model(std::shared_ptr<Network> network);
    std::shared_ptr<Network> network_;
};

}  // namespace quant_gru::cuda
