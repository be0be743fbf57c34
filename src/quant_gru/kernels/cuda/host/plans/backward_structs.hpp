// The structs that kernels of a backward take as arguments, with the fields of the CUDA sources.
#pragma once

#include <cstdint>

#include "cuda/host/plans/structs.hpp"

namespace quant_gru::cuda {

// backward/operands.cu
struct WeightOperandC {
    Address codes, scales, bias, M, k, bytes, channels, real;
    int64_t kind, K, padded, planes, offset, zero, max_abs, activation_planes;
    float activation_scale;
};

struct CodeOperandC {
    Address codes, before, values, bytes, real;
    int64_t kind, K, padded, planes, offset, zero, N, states, reverse, step, next;
    float scale, lo, hi;
};

struct TransposedC {
    Address codes, scales, to;
    int64_t kind, H, U, CL, MT, KS, KP, WP, groups, count;
    float activation_scale;
};

// `kDirections` is 1 or 2; each has W and R, and codes of x and of the states.
template <int kDirections>
struct OperandsC {
    WeightOperandC weights[2 * kDirections];
    int64_t H;
    CodeOperandC codes[2 * kDirections];
    int64_t rows, chunk;
    TransposedC transposed[kDirections];
    int64_t of_weights, of_codes;
};

template <class Real>
struct GateScalesC {
    float s_z, s_r, s_g, s_h, s_Rh;
    CellC<Real> cell;
};

// backward/local_derivatives.cu takes one or two of them.
struct SumsC {
    Address product, channels;
    int64_t columns, planes, weight_planes;
    double lo, hi;
    float low, high;
};

template <class Real>
struct DerivativesC {
    SumsC W, R;
    Address out, h0, lengths, held, of_R, of_W;
    int64_t h_kind, T, N, H, reverse, first, rows;
    GateScalesC<Real> gates;
};

// backward/local_derivatives_bytes.cu takes one or two of them.
struct BytesC {
    Address weights, channels, rows;
    int64_t padded;
    double lo, hi;
    float low, high;
};

template <class Real>
struct DerivativesOfBytesC {
    BytesC W, R;
    Address lengths, held, of_R, of_W;
    int64_t N, H, rows, share, h_less;
    GateScalesC<Real> gates;
};

// backward/recurrence.cu takes one or two of them.
struct BackC {
    Address weights, derivatives, scales, grad_out, grad_last, nan, lengths, d, dh0;
    int64_t T, N, H, reverse, stride_t, stride_n, stride_h;
};

// backward/recurrence_step.cu
struct BackStepC {
    Address product, derivatives, grad_out, grad_last, nan, lengths, d, dh0, dRh;
    int64_t N, H, t, started, stride_t, stride_n, stride_h;
    float scale;
};

// backward/recurrence_grid.cu
struct BackGridC {
    Address weights, derivatives, grad_out, grad_last, nan, lengths, d, dh0, dRh;
    int64_t T, N, H, reverse, stride_t, stride_n, stride_h;
    float scale;
};

// backward/projection_gradients.cu takes one or two of them.
struct OuterC {
    Address d, of_R, of_W, dWx, dRh, partial, bw, br;
    int64_t rows, H, chunk, chunks;
    float scale_x, scale_h;
};

static_assert(sizeof(WeightOperandC) == 136 && sizeof(CodeOperandC) == 144);
static_assert(sizeof(OperandsC<2>) <= 4096 && 2 * sizeof(DerivativesC<double>) <= 4096,
              "the most bytes of arguments");

}  // namespace quant_gru::cuda
