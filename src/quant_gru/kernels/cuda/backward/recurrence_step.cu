// One step of the recurrence of gradients, for weights that do not fit registers. It follows the
// GEMM of the step that was processed before.
//
// Macro       Values        Meaning
// OPERAND     0, 1, 2       operands of GEMMs: bfloat16, float, double
// HALF        0, 1          local derivatives are stored in half precision
// DIRS        1, 2          directions per launch (direction fusion)
#include "backward/backward.cuh"

struct Numbers {
    const float *product;            // (N, H): gradients of R h of the preceding launch, times R
    const Derivatives *derivatives;  // (T, N, H)
    const float *grad_out;           // (T, N, H), strided
    const float *grad_last;          // (N, H), or null for zeros
    const float *nan;                // (N): 0 or NaN, which is added to grad_last; or null
    const int64_t *lengths;          // (N) or null
    float *d;                        // (T, N, H)
    float *dh;                       // (N, H): the part without a GEMM; at the end, the gradient
    Operand *dRh;                    // (T, N, 3H), times scale
    int64_t N, H;
    int64_t t;        // this step, or -1 after the last
    int64_t started;  // whether this is not the first step
    int64_t stride_t, stride_n, stride_h;
    float scale;
};

extern "C" __global__ void __launch_bounds__(256) back_step(const __grid_constant__ Numbers p) {
    const int64_t n = blockIdx.x, unit = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    if (unit >= p.H) return;
    const int64_t at = n * p.H + unit;
    float d;
    if (p.started)
        d = p.dh[at] + p.product[at];
    else
        d = (p.grad_last ? p.grad_last[at] : 0.f) + (p.nan ? p.nan[n] : 0.f);
    if (p.t < 0) {
        p.dh[at] = d;
        return;
    }
    if (!p.lengths || p.t < p.lengths[n])
        d += p.grad_out[p.t * p.stride_t + n * p.stride_n + unit * p.stride_h];
    const int64_t place = p.t * p.N * p.H + at;
    const Derivatives s = p.derivatives[place];
    p.d[place] = d;
    p.dh[at] = derivative(s, 0) * d;
    Operand *const to = p.dRh + (p.t * p.N + n) * 3 * p.H;
    for (int gate = 0; gate < 3; ++gate)
        to[reordered(gate, unit, p.H)] = operand(derivative(s, 1 + gate) * d * p.scale);
}
