// Requantizes the states of a layer to the input codes of the next layer, for codes of up to 16
// bits, or masks their gradient. A warp processes one row.
#include "gates/arithmetic.cuh"

struct RequantizeCodes {
    const void *codes[2];      // (rows, H) per direction of the layer below
    void *to;                  // (rows, directions * H), or null
    float *grad;               // gradient of the dequantized `to`, in place, or null
    const float *added;        // like grad, added after masking; or null
    int64_t kind[2], zero[2];  // of the codes
    int64_t M[2], k[2];        // rescale the codes to the input's scale: M / 2^k
    int64_t rows, H, directions;
    int64_t to_kind, lo, hi, to_zero;  // limits minus the zero point
};

// Write the codes, and set the gradient to 0 where they were clamped. A NaN gradient stays NaN.
extern "C" __global__ void __launch_bounds__(256)
    requantize_codes(const __grid_constant__ RequantizeCodes p) {
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const int H = (int)p.H, D = (int)p.directions;
    for (int d = 0; d < D; ++d) {
        const int64_t start = (row * D + d) * H;
        // the stores may alias the loads, so a batch of loads is issued before them
        for (int first = threadIdx.x % 32; first < H; first += 4 * 32) {
            int ahead[4];
            float grads[4], added[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = first + 32 * j;
                if (i >= H) break;
                ahead[j] = (int)read_code(p.codes[d], p.kind[d], row * H + i);
                if (p.grad) grads[j] = p.grad[start + i];
                if (p.added) added[j] = p.added[start + i];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = first + 32 * j;
                if (i >= H) break;
                const int64_t v = (ahead[j] - p.zero[d]) * p.M[d];
                const int64_t q = qg_round_by(v, (int)p.k[d], QG_RULE, 24);
                const int64_t code = qg_clamp(q, p.lo, p.hi);
                if (p.to) write_code(p.to, p.to_kind, start + i, code + p.to_zero);
                if (p.grad) {
                    const float kept = Magic<float>::times(grads[j], code == q ? 1.f : 0.f);
                    p.grad[start + i] = p.added ? Magic<float>::plus(added[j], kept) : kept;
                }
            }
        }
    }
}
