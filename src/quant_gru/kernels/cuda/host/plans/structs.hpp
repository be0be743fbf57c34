// The structs that kernels take as arguments, with the fields of the CUDA sources.
#pragma once

#include <cstdint>

#include "kernel_runtime/native/launch.hpp"

namespace quant_gru::cuda {

using kernel_runtime::cuda::Address;

struct SequenceC {
    Address x, h0, out, last, lengths, workspace;
    int64_t x_kind, h_kind, T, N, C, H, reverse;
    Address held;
};

struct MatrixC {
    Address codes, bias, M, k, m;
    int64_t kind, bias_shift, zero, lo, hi, code_lo;
};

struct TableC {
    Address direct, bounds, coefficients;
    int64_t entries, pre_lo, pre_zero, segments, degree, shift, last, segment_shift, lo, hi;
    double scale;
    Address lines;
    int64_t line_origin, line_count, least;
};

template <class Real>
struct SumC {
    Real m[2], lo, hi;
    int64_t M[2], k, low, high, in_words;
};

template <class Real>
struct CellC {
    SumC<Real> z_pre, r_pre, rRh, g_pre, old_contrib, new_contrib, h, zoneout;
    TableC z, r, g;
    Real one, Rh_lo, Rh_hi, Wx_offset;
    int64_t h_zero, h_offset, one_integer;
};

struct LimitsC {
    float less, top;
};

struct BeforeC {
    float early, late, offset;
};

struct SaturatedC {
    LimitsC Rh, rRh, old_contrib, new_contrib;
    BeforeC z, r, g;
    float rest, rest_offset, of_z, of_left, h_old, h_new, h_offset;
};

struct DivisionC {
    float scale, inverse, least, most;
    int32_t exact;
};

struct RealBoundaryC {
    Address h0, values, last, last_nan, h0_nan, nan, finite;
    int64_t next, stride;
    float scale, lo, hi;
};

// recurrence/persistent.cu takes one or two of them.
template <class Real>
struct RecurrentC {
    SequenceC s;
    Address weights, Wx, bias, m, exact_float;
    CellC<Real> cell;
    RealBoundaryC boundary;
    SaturatedC saturated;
    Address counts;
};

// recurrence/wide_integers.cu takes two of them.
struct GenericC {
    SequenceC s;
    MatrixC W, R;
    CellC<double> cell;
};

// projection/int_mm.cu
struct ProjectC {
    SequenceC s;
    MatrixC W;
    Address folded, product, bytes, Wx;
    int64_t planes_x, planes_W, columns, padded_C, x_offset, NB, tiles, groups, wide;
};

// recurrence/per_step.cu
template <class Real>
struct StepC {
    SequenceC s;
    Address m, folded, product, bytes, Wx;
    int64_t planes_h, planes_R, columns, padded_H, groups, wide, t, before;
    CellC<Real> cell;
};

// projection/epilogue.cuh
struct ProjectedC {
    Address weights, folded, m, folded_bytes, m_float, exact_float, Wx;
    int64_t T, N, H, padded, NB, tiles, groups, wide, lo, hi, code_lo;
};

// projection/codes_tiled.cu
struct ProjectBytesC {
    Address bytes;
    ProjectedC to;
};

// projection/codes_weight_stationary.cu
struct ProjectPassingC {
    Address bytes;
    ProjectedC to;
    int64_t share;
    Address counts;
    int64_t stretch;
};

// projection/reals_tiled.cu and reals_wgmma.cu
struct ProjectRealsC {
    ProjectedC to;
    Address real, nan;
    int64_t step, next, C, nan_stride, parts, zero;
    DivisionC division;
    int64_t fours;
};

// projection/reals_few_rows.cu
struct ProjectFewC {
    Address real, nan, Wx, weights;
    int64_t step, next, N, C, H, padded, nan_stride, NB, tiles, groups, wide;
    DivisionC division;
    MatrixC W;
    int64_t fours;
};

struct TargetC {
    Address codes, bytes, nan;
    int64_t kind, planes, padded, x_offset, T, N, features, nan_stride;
    Address counts;
    int64_t stretches;
};

// boundary/quantize_input.cu
struct QuantizeInputC {
    TargetC to;
    Address real;
    int64_t step, next, zero;
    float scale, lo, hi;
    DivisionC division;
    int32_t fours;
};

struct FlagsC {
    Address nan, h0_nan[2], finite[2];
    int64_t T, stride;
};

// boundary/requantize_layers.cu
struct RequantizeLayersC {
    TargetC to;
    FlagsC below;
    Address codes[2];
    int64_t kind[2], zero[2], M[2], k[2], H, directions, lo, hi, out_zero;
};

// boundary/convert_rows.cu
struct RowsC {
    Address real, to, order, packed, to_packed;
    int64_t kind, to_kind, step, next, to_step, to_next, T, N, features;
};

struct ConversionsC {
    RowsC each[4];
};

// boundary/quantize_dequantize.cu
struct BorderC {
    Address real, values, codes, nan;
    int64_t kind, rows, features, zero;
    float scale, lo, hi;
};

// boundary/clamp_mask.cu
struct MaskC {
    Address grad, real, added;
    int64_t step, next, rows, N, features;
    float scale, lo, hi;
};

// boundary/requantize_training.cu
struct RequantizeCodesC {
    Address codes[2], to, grad, added;
    int64_t kind[2], zero[2], M[2], k[2], rows, H, directions, to_kind, lo, hi, to_zero;
};

static_assert(sizeof(SequenceC) == 112 && sizeof(MatrixC) == 88 && sizeof(TableC) == 144);
static_assert(sizeof(SumC<float>) == 64 && sizeof(SumC<double>) == 80);
static_assert(2 * sizeof(RecurrentC<double>) <= 4096, "the most bytes of arguments");

}  // namespace quant_gru::cuda
