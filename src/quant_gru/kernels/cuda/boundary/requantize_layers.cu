// Requantizes the states of a layer to the input codes of the next layer. A warp processes one row.
#include "boundary/quantized_rows.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

// Determine which rows of a layer's result are NaN. A NaN input makes its step and all steps that
// are processed later NaN. A NaN initial state or a nonfinite weight makes all steps NaN.
struct Flags {
    const uint8_t *nan;        // (N, stride), flags of the inputs
    const uint8_t *h0_nan[2];  // (N) per direction, or null
    const uint8_t *finite[2];  // whether all weights of a direction are finite
    int64_t T, stride;         // a multiple of 4
};

inline bool is_nan(const Flags &f, int direction, int t, int n, int lane) {
    const int from = direction ? t : 0, to = direction ? (int)f.T - 1 : t;
    const uint32_t *const words = (const uint32_t *)(f.nan + n * f.stride);
    uint32_t seen = 0;
    for (int i = from / 4 + lane; i <= to / 4; i += 32) {
        uint32_t word = words[i];
        const int before = from - 4 * i, after = 4 * i + 3 - to;
        if (before > 0) word &= 0xffffffffu << 8 * before;
        if (after > 0) word &= 0xffffffffu >> 8 * after;
        seen |= word;
    }
    return any_lane(seen != 0) || !*f.finite[direction] ||
           (f.h0_nan[direction] && f.h0_nan[direction][n]);
}

struct RequantizeLayers {
    Target to;
    Flags below;
    const void *codes[2];           // (T, N, H) per direction of the layer below
    int64_t kind[2], zero[2];       // of these codes
    int64_t M[2], k[2];             // rescale these codes to the input's scale: M / 2^k
    int64_t H, directions, lo, hi;  // H of the layer below; limits of the input minus its zero
    int64_t out_zero;
};

extern "C" __global__ void __launch_bounds__(256)
    requantize_layers(const __grid_constant__ RequantizeLayers p) {
    const int row = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    const int lane = threadIdx.x % 32, N = (int)p.to.N, H = (int)p.H;
    let_next_start();
    clear_counts(p.to);
    if (row >= p.to.T * N) return;
    bool nan = false;
    for (int d = 0; d < (int)p.directions; ++d) {
        const int64_t start = (int64_t)row * H;
        for (int first = lane; first < H; first += 4 * 32) {
            int ahead[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (first + 32 * j < H)
                    ahead[j] = (int)read_code(p.codes[d], p.kind[d], start + first + 32 * j);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int k = first + 32 * j;
                if (k >= H) break;
                const int64_t v = (ahead[j] - p.zero[d]) * p.M[d];
                const int64_t q = qg_clamp(qg_round_by(v, (int)p.k[d], QG_RULE, 24), p.lo, p.hi);
                put(p.to, row, d * H + k, (int)(q + p.out_zero));
            }
        }
        nan |= is_nan(p.below, d, row / N, row % N, lane);
    }
    finish_row(p.to, row, lane, nan);
}
