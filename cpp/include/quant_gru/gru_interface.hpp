// A GRU as forward and backward passes over raw pointers, with the arguments of Haste.
//
// W, R, bx and br have gates in the order z, r, h (update, reset, candidate), in columns: W is
// (C, 3H). T steps, N sequences, C inputs, H units. Sequences are (T, N, ..), contiguous.
//
//     z = sigmoid(W_z x + bx_z + R_z h + br_z)      r likewise
//     g = tanh(W_g x + bx_g + r * (R_g h + br_g))   h' = z * h + (1 - z) * g
//
// In a library with -DQUANT_GRU_CUDA=ON, arrays may be in memory of a GPU, all of them or none. The
// driver tells which. The call is then enqueued to the stream, and may also throw DeviceError
// (quant_gru/cuda.hpp). The first call opens libraries and compiles kernels, so it must not be
// captured into a CUDA graph; later calls may be.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#include "quant_gru/export.h"

// The handles of CUDA, declared as its headers do. Passes over memory of the host ignore them.
struct cublasContext;
typedef struct cublasContext *cublasHandle_t;
struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace quant_gru {

// The forward pass of float and double; int8_t and int16_t follow below. Objects are not
// thread-safe; different objects are independent.
template <class T, class AccumT = std::conditional_t<std::is_floating_point_v<T>, T, int32_t>>
class QUANT_GRU_API ForwardPass {
 public:
    // training: whether a backward pass follows. `zoneout_mask` is used only then, and
    // `zoneout_prob` only otherwise. blas_handle: for matrix products on a GPU; null for a handle
    // of the pass. Throws ArgumentError if a size is not positive.
    ForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                const cublasHandle_t &blas_handle = nullptr, const cudaStream_t &stream = nullptr);
    ~ForwardPass();
    ForwardPass(const ForwardPass &) = delete;
    ForwardPass &operator=(const ForwardPass &) = delete;

    // At most so many threads; 0, the default, for one per processor. Results do not depend on it.
    void set_threads(int threads);

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
    struct QUANT_GRU_HIDDEN State;
    std::unique_ptr<State> state_;
};

// The operators of the arguments `scale` and `zero_point`, in their order. With T = int8_t
// (int16_t) all operators and weights have 8 (16) bits; z_out and r_out are unsigned, the others
// signed.
enum class CodeOperator : int {
    x,
    h,
    Wx,
    Rh,
    z_pre,
    z_out,
    r_pre,
    r_out,
    g_pre,
    g_out,
    rRh,
    old_contrib,
    new_contrib
};
constexpr int kCodeOperators = 13;
// Entries of `scale`: the 13 operators; then each column of W, R, bx and br, 3H entries each.
constexpr int64_t code_scales(int64_t hidden_size) { return kCodeOperators + 12 * hidden_size; }

// The forward pass over codes: real value = scale * (code - zero_point). It computes the codes of
// the Python package, bit for bit. The state at every step is a code of output.h.
template <class T>
class QUANT_GRU_API CodeForwardPass {
 public:
    // training: as in ForwardPass. Throws ArgumentError if a size is not positive.
    CodeForwardPass(bool training, int batch_size, int input_size, int hidden_size,
                    const cublasHandle_t &blas_handle = nullptr,
                    const cudaStream_t &stream = nullptr);
    ~CodeForwardPass();
    CodeForwardPass(const CodeForwardPass &) = delete;
    CodeForwardPass &operator=(const CodeForwardPass &) = delete;

    // At most so many threads; 0, the default, for one per processor. Results do not depend on it.
    void set_threads(int threads);

    // Arguments as in ForwardPass. W, R, bx and br are codes with zero point 0. x and h are codes
    // of input.x and output.h. v, tmp_Wx and tmp_Rh are not used and may be null.
    // scale: code_scales(H) entries; 0 for rRh, old_contrib or new_contrib means that the product
    // is not rounded. If all are powers of two, the plan is that of scale_kind 'pot', otherwise
    // that of 'free'. zero_point: 13 entries, integers. Tables are exact.
    // Weights that equal those of the last call are not read again. Throws ArgumentError.
    // On a GPU, weights, scales and zero points may be on the host; if they are not, the call waits
    // for the stream and copies them, so it cannot be captured. Nor can the first call of another
    // number of steps, which allocates memory.
    void Run(int steps, const T *W, const T *R, const int32_t *bx, const int32_t *br, const T *x,
             T *h, T *v, int32_t *tmp_Wx, int32_t *tmp_Rh, float zoneout_prob,
             const T *zoneout_mask, const float *scale, const float *zero_point);
    void Iterate(const T *W, const T *R, const int32_t *bx, const int32_t *br, const T *x,
                 const T *h, T *h_out, T *v, int32_t *tmp_Wx, int32_t *tmp_Rh, float zoneout_prob,
                 const T *zoneout_mask, const float *scale, const float *zero_point);

 private:
    struct QUANT_GRU_HIDDEN State;
    std::unique_ptr<State> state_;
};

// The forward pass over codes of 8 bits.
template <>
class ForwardPass<int8_t, int32_t> : public CodeForwardPass<int8_t> {
    using CodeForwardPass::CodeForwardPass;
};
// The forward pass over codes of 16 bits.
template <>
class ForwardPass<int16_t, int32_t> : public CodeForwardPass<int16_t> {
    using CodeForwardPass::CodeForwardPass;
};

// The gradients of a ForwardPass in training; int8_t and int16_t follow below.
template <class T>
class QUANT_GRU_API BackwardPass {
 public:
    // Throws ArgumentError if a size is not positive.
    BackwardPass(int batch_size, int input_size, int hidden_size,
                 const cublasHandle_t &blas_handle = nullptr, const cudaStream_t &stream = nullptr);
    ~BackwardPass();
    BackwardPass(const BackwardPass &) = delete;
    BackwardPass &operator=(const BackwardPass &) = delete;

    // At most so many threads; 0, the default, for one per processor. Results do not depend on it.
    void set_threads(int threads);

    // One step, from the last to the first. W_t (3H, C) and R_t (3H, H) are the transposed weights,
    // x_t (C, N) and h_t (H, N) the transposed input and state before the step. dh_new (N, H) is
    // the gradient of this step's output. dh (N, H), zeros before the last step, is read and
    // written; it ends as the gradient of the initial state. dx (N, C) is written; dW (C, 3H), dR
    // (H, 3H), dbx and dbr (3H) are added to. dp and dq (N, 3H) are work space. bx and br may be
    // null.
    void Iterate(const T *W_t, const T *R_t, const T *bx, const T *br, const T *x_t, const T *h_t,
                 const T *v, const T *dh_new, T *dx, T *dW, T *dR, T *dbx, T *dbr, T *dh, T *dp,
                 T *dq, const T *zoneout_mask);

    // All steps: x_t (C, T, N), h and dh_new (T + 1, N, H), v (T, N, 4H), dx (T, N, C), dp and dq
    // (T, N, 3H), zoneout_mask (T, N, H). dh_new[0], of the initial state, is not read.
    void Run(int steps, const T *W_t, const T *R_t, const T *bx, const T *br, const T *x_t,
             const T *h, const T *v, const T *dh_new, T *dx, T *dW, T *dR, T *dbx, T *dbr, T *dh,
             T *dp, T *dq, const T *zoneout_mask);

 private:
    struct QUANT_GRU_HIDDEN State;
    std::unique_ptr<State> state_;
};

// The gradients of a CodeForwardPass in training: those of the Python package on the same device,
// bit for bit; on a GPU with precision 'fp32'. They are straight-through: gradients of the real
// values behind the codes, 0 where the forward clamped a code.
template <class T>
class QUANT_GRU_API CodeBackwardPass {
 public:
    // Throws ArgumentError if a size is not positive.
    CodeBackwardPass(int batch_size, int input_size, int hidden_size,
                     const cublasHandle_t &blas_handle = nullptr,
                     const cudaStream_t &stream = nullptr);
    ~CodeBackwardPass();
    CodeBackwardPass(const CodeBackwardPass &) = delete;
    CodeBackwardPass &operator=(const CodeBackwardPass &) = delete;

    // At most so many threads; 0, the default, for one per processor. Results do not depend on it.
    void set_threads(int threads);
    // Arguments as in BackwardPass. W_t, R_t, bx, br, x_t, h, zoneout_mask, scale and zero_point
    // are those of the forward pass, W, R and x transposed. Gradients are those of real values: of
    // weights and biases, not of their codes. v, dp and dq are not used and may be null. On a GPU,
    // the rules of CodeForwardPass::Run apply. Throws ArgumentError.
    void Run(int steps, const T *W_t, const T *R_t, const int32_t *bx, const int32_t *br,
             const T *x_t, const T *h, const T *v, const float *dh_new, float *dx, float *dW,
             float *dR, float *dbx, float *dbr, float *dh, float *dp, float *dq,
             const T *zoneout_mask, const float *scale, const float *zero_point);
    void Iterate(const T *W_t, const T *R_t, const int32_t *bx, const int32_t *br, const T *x_t,
                 const T *h_t, const T *v, const float *dh_new, float *dx, float *dW, float *dR,
                 float *dbx, float *dbr, float *dh, float *dp, float *dq, const T *zoneout_mask,
                 const float *scale, const float *zero_point);

 private:
    struct QUANT_GRU_HIDDEN State;
    std::unique_ptr<State> state_;
};

// The gradients of ForwardPass<int8_t, int32_t>.
template <>
class BackwardPass<int8_t> : public CodeBackwardPass<int8_t> {
    using CodeBackwardPass::CodeBackwardPass;
};
// The gradients of ForwardPass<int16_t, int32_t>.
template <>
class BackwardPass<int16_t> : public CodeBackwardPass<int16_t> {
    using CodeBackwardPass::CodeBackwardPass;
};

}  // namespace quant_gru
