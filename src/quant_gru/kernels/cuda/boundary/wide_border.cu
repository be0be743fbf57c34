// Conversions around recurrence/wide_integers.cu: codes of up to 32 bits, and NaN. A warp processes
// one row.
//
// Macro          Values   Meaning
// QG_RULE        0 to 4   the rule of rounding between layers, see fixed_point.h
// QG_INPUT_RULE  0 to 3   the rule for real values
#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

struct Quantize {
    const float *real;       // [t * step + n * next + feature], or null for zeros
    void *codes;             // (T, N, features)
    uint8_t *nan;            // (N, stride): whether a row is NaN at a step
    const int64_t *lengths;  // (N), or null; NaN beyond the length does not count
    int64_t step, next, T, N, features, stride;
    int64_t kind, zero;
    double lo, hi;  // limits minus the zero point
    float scale;
};

// A real value within limits, rounded. Adding 0.5 to a float32 value changes no result in double.
inline int64_t rounded(double y) {
    typedef Magic<double> D;
    if (QG_INPUT_RULE == QG_HALF_EVEN) return (int64_t)plain(D::plus(y, D::number()));
    const bool away = QG_INPUT_RULE == QG_HALF_AWAY && y < 0;
    const double moved = D::plus(y, QG_INPUT_RULE == QG_FLOOR ? 0. : away ? -0.5 : 0.5);
    const int64_t whole = (int64_t)moved;  // towards zero
    return whole - (!away && (double)whole > moved);
}

extern "C" __global__ void __launch_bounds__(256)
    quantize_wide(const __grid_constant__ Quantize p) {
    typedef Magic<double> D;
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.T * p.N) return;
    const int64_t t = row / p.N, n = row % p.N;
    const float *const from = p.real + (p.real ? t * p.step + n * p.next : 0);
    bool seen = false;
    for (int64_t i = threadIdx.x % 32; i < p.features; i += 32) {
        const float y = p.real ? divided(from[i], p.scale) : 0.f;
        const bool nan = y != y;
        seen |= nan;
        // clamping before rounding gives the same result, since the limits are integers
        const double inside = D::limit(nan ? 0. : (double)y, p.lo, p.hi);
        write_code(p.codes, p.kind, row * p.features + i, rounded(inside) + p.zero);
    }
    seen = any_lane(seen);
    if (threadIdx.x % 32 == 0) p.nan[n * p.stride + t] = seen && !(p.lengths && t >= p.lengths[n]);
}

// NaN rows of the results of a layer: from a NaN step on in the order of a direction, or from the
// first step with a NaN state. A thread follows one sequence.
struct Spread {
    const uint8_t *nan;        // (N, stride), of the inputs
    const uint8_t *before[2];  // (N) per direction, of the states before the first step
    uint8_t *out[2];           // (N, stride) per direction
    uint8_t *last[2];          // (N) per direction, of the states after the last step
    uint8_t *all;              // (N, stride): of any direction, the next layer's input
    const int64_t *lengths;    // (N), or null
    int64_t T, N, stride, directions;
};

extern "C" __global__ void __launch_bounds__(256) spread_nan(const __grid_constant__ Spread p) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= p.N) return;
    for (int64_t i = 0; i < p.T; ++i) p.all[n * p.stride + i] = 0;
    for (int64_t d = 0; d < p.directions; ++d) {
        bool nan = p.before[d][n];
        for (int64_t i = 0; i < p.T; ++i) {
            const int64_t t = d ? p.T - 1 - i : i, at = n * p.stride + t;
            nan |= p.nan[at] != 0;
            p.out[d][at] = nan;
            if (nan && !(p.lengths && t >= p.lengths[n])) p.all[at] = 1;
        }
        p.last[d][n] = nan;
    }
}

// Requantizes the states of a layer to the input codes of the next layer.
struct Requantize {
    const void *codes[2];  // (rows, H) per direction of the layer below
    void *to;              // (rows, directions * H)
    int64_t kind[2], zero[2], M[2], k[2];
    int64_t rows, H, directions, to_kind, lo, hi, out_zero;  // limits minus the zero point
};

extern "C" __global__ void __launch_bounds__(256)
    requantize_wide(const __grid_constant__ Requantize p) {
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    for (int64_t d = 0; d < p.directions; ++d)
        for (int64_t i = threadIdx.x % 32; i < p.H; i += 32) {
            // codes have up to 32 bits and multipliers 24
            const int64_t v =
                (read_code(p.codes[d], p.kind[d], row * p.H + i) - p.zero[d]) * p.M[d];
            // the multipliers of these sums have 24 bits
            const int64_t q = qg_clamp(qg_round_by(v, (int)p.k[d], QG_RULE, 24), p.lo, p.hi);
            write_code(p.to, p.to_kind, (row * p.directions + d) * p.H + i, q + p.out_zero);
        }
}

struct Dequantize {
    const void *codes;   // (T, N, features)
    float *real;         // [t * step + n * next + feature]
    const uint8_t *nan;  // (N, stride)
    int64_t step, next, T, N, features, stride, kind, zero;
    float scale;
};

extern "C" __global__ void __launch_bounds__(256)
    dequantize_wide(const __grid_constant__ Dequantize p) {
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.T * p.N) return;
    const int64_t t = row / p.N, n = row % p.N;
    float *const to = p.real + t * p.step + n * p.next;
    const bool nan = p.nan[n * p.stride + t] != 0;
    for (int64_t i = threadIdx.x % 32; i < p.features; i += 32) {
        const int64_t v = read_code(p.codes, p.kind, row * p.features + i) - p.zero;
        to[i] = nan ? __int_as_float(0x7fc00000) : Magic<float>::times((float)v, p.scale);
    }
}
