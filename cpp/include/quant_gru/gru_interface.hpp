// A GRU as forward and backward passes over raw pointers of the host, with the arguments of Haste.
//
// W, R, bx and br have gates in the order z, r, h (update, reset, candidate), in columns: W is
// (C, 3H). T steps, N sequences, C inputs, H units. Sequences are (T, N, ..), contiguous.
//
//     z = sigmoid(W_z x + bx_z + R_z h + br_z)      r likewise
//     g = tanh(W_g x + bx_g + r * (R_g h + br_g))   h' = z * h + (1 - z) * g
#pragma once

#include <cstdint>
#include <memory>

#include "quant_gru/export.h"

// The handles of CUDA, declared as its headers do. Passes over host pointers ignore them.
struct cublasContext;
typedef struct cublasContext *cublasHandle_t;
struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace quant_gru {

// The forward pass of float and double. Objects are not thread-safe; different objects are
// independent.
template <class T, class AccumT = T>
class QUANT_GRU_API ForwardPass {
 public:
    // training: whether a backward pass follows. `v` is then written and `zoneout_mask` is used.
    // Throws std::invalid_argument if a size is not positive.
    ForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                const cublasHandle_t &blas_handle = nullptr,
                const cudaStream_t &stream = nullptr);
    ~ForwardPass();
    ForwardPass(const ForwardPass &) = delete;
    ForwardPass &operator=(const ForwardPass &) = delete;

    // One step: x (N, C) and h (N, H) give h_out (N, H), which may be h. v (N, 4H) receives z, r, g
    // and R_g h + br_g; it may be null without training. tmp_Wx and tmp_Rh (N, 3H) are work space.
    // zoneout_mask (N, H), 1 where a unit takes its new value and 0 where it keeps its old one, or
    // null. Without training, zoneout_prob is the share of the old value that remains.
    void Iterate(const T *W, const T *R, const T *bx, const T *br, const T *x, const T *h, T *h_out,
                 T *v, T *tmp_Wx, T *tmp_Rh, float zoneout_prob, const T *zoneout_mask);

    // All steps: x (T, N, C), h (T + 1, N, H) with the initial state in h[0], v (T, N, 4H), tmp_Wx
    // (T, N, 3H), tmp_Rh (N, 3H), zoneout_mask (T, N, H).
    void Run(int steps, const T *W, const T *R, const T *bx, const T *br, const T *x, T *h, T *v,
             T *tmp_Wx, T *tmp_Rh, float zoneout_prob, const T *zoneout_mask);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

// The gradients of a ForwardPass in training.
template <class T>
class QUANT_GRU_API BackwardPass {
 public:
    // Throws std::invalid_argument if a size is not positive.
    BackwardPass(int batch_size, int input_size, int hidden_size,
                 const cublasHandle_t &blas_handle = nullptr,
                 const cudaStream_t &stream = nullptr);
    ~BackwardPass();
    BackwardPass(const BackwardPass &) = delete;
    BackwardPass &operator=(const BackwardPass &) = delete;

    // One step, from the last to the first. W_t (3H, C) and R_t (3H, H) are the transposed weights,
    // x_t (C, N) and h_t (H, N) the transposed input and state before the step. dh_new (N, H) is the
    // gradient of this step's output. dh (N, H), zeros before the last step, is read and written; it
    // ends as the gradient of the initial state. dx (N, C) is written; dW (C, 3H), dR (H, 3H), dbx
    // and dbr (3H) are added to. dp and dq (N, 3H) are work space. bx and br may be null.
    void Iterate(const T *W_t, const T *R_t, const T *bx, const T *br, const T *x_t, const T *h_t,
                 const T *v, const T *dh_new, T *dx, T *dW, T *dR, T *dbx, T *dbr, T *dh, T *dp,
                 T *dq, const T *zoneout_mask);

    // All steps: x_t (C, T, N), h and dh_new (T + 1, N, H), v (T, N, 4H), dx (T, N, C), dp and dq
    // (T, N, 3H), zoneout_mask (T, N, H). dh_new[0], of the initial state, is not read.
    void Run(int steps, const T *W_t, const T *R_t, const T *bx, const T *br, const T *x_t,
             const T *h, const T *v, const T *dh_new, T *dx, T *dW, T *dR, T *dbx, T *dbr, T *dh,
             T *dp, T *dq, const T *zoneout_mask);

 private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace quant_gru
