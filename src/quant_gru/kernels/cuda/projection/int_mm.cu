// The input projection by a GEMM of torch, or by a warp per unit. Results are codes minus the
// smallest code, as bytes or 16-bit words. The codes of an element's three gates are adjacent, and
// elements are in the order in which the recurrent kernel reads them.
#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

struct Numbers {
    Sequence s;
    Matrix W;                // codes (3H, C), int8 or int16
    const int64_t *folded;   // (3H), bias with zero points folded in, for the int8 GEMM
    const int32_t *product;  // (planes of x * T * N, columns)
    int8_t *bytes;           // (planes of x, T * N, padded C)
    void *Wx;
    int64_t planes_x, planes_W, columns, padded_C;
    int64_t x_offset;  // subtracted from codes of x before they are split into bytes
    int64_t NB, tiles, groups, wide;
};

// Write codes of x as signed bytes: one plane, or two with x = 256 * first + second + 128.
extern "C" __global__ void __launch_bounds__(256) split(const __grid_constant__ Numbers p) {
    const int64_t rows = p.s.T * p.s.N, row = blockIdx.x;
    for (int64_t k = threadIdx.x; k < p.padded_C; k += blockDim.x) {
        int v = 0;
        if (k < p.s.C) v = (int)(read_code(p.s.x, p.s.x_kind, row * p.s.C + k) - p.x_offset);
        if (p.planes_x == 1) {
            p.bytes[row * p.padded_C + k] = (int8_t)v;
        } else {
            p.bytes[row * p.padded_C + k] = (int8_t)(v >> 8);
            p.bytes[(rows + row) * p.padded_C + k] = (int8_t)((v & 255) - 128);
        }
    }
}

inline int requantized(const Numbers &p, int64_t total, int64_t channel) {
    typedef Magic<double> R;
    const double lo = (double)p.W.lo + R::number(), hi = (double)p.W.hi + R::number();
    const double v = round_term((double)total, p.W.m[channel]);
    return R::integer(R::limit(v, lo, hi)) - (int)p.W.code_lo;
}

inline void store(const Numbers &p, int64_t at, const int *codes) {
    if (p.wide) {
        uint2 word;
        word.x = (uint32_t)codes[0] | (uint32_t)codes[1] << 16;
        word.y = (uint32_t)codes[2];
        ((uint2 *)p.Wx)[at] = word;
    } else {
        ((uint32_t *)p.Wx)[at] =
            (uint32_t)codes[0] | (uint32_t)codes[1] << 8 | (uint32_t)codes[2] << 16;
    }
}

// W y for a plane y of x. A 16-bit weight is 256 * first + second + 128.
inline int64_t of_plane(const Numbers &p, int64_t row, int64_t channel) {
    const int32_t *v = p.product + row * p.columns;
    if (p.planes_W == 1) return v[channel];
    return 256 * (int64_t)v[channel] + v[3 * p.s.H + channel] + 128 * (int64_t)v[6 * p.s.H];
}

// Requantize the GEMM's result. A block processes one step of a tile.
extern "C" __global__ void __launch_bounds__(256) finish(const __grid_constant__ Numbers p) {
    let_next_start();
    const int NB = (int)p.NB, log_NB = NB == 8 ? 3 : NB >> 1, count = (int)p.groups * 16 * NB;
    const int tiles = (int)p.tiles, H = (int)p.s.H;
    const int t = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int64_t rows = p.s.T * p.s.N;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const int group = i >> (4 + log_NB), place = i & (16 * NB - 1);
        const int lane8 = place >> (1 + log_NB), rest = place & (2 * NB - 1);
        const int row8 = NB == 8 ? rest & 1 : rest >> log_NB;
        const int n = NB == 8 ? rest >> 1 : rest & (NB - 1);
        const int unit = group * 16 + 8 * row8 + lane8, row = tile * NB + n;
        if (unit >= H || row >= p.s.N) continue;
        const int64_t at = (int64_t)t * p.s.N + row;
        int codes[3];
        for (int gate = 0; gate < 3; ++gate) {
            const int channel = gate * H + unit;
            int64_t total = of_plane(p, at, channel);
            if (p.planes_x == 2) total = 256 * total + of_plane(p, rows + at, channel);
            codes[gate] = requantized(p, total + p.folded[channel], channel);
        }
        store(p, (int64_t)blockIdx.x * count + i, codes);
    }
}

// Project few rows. A warp computes the three sums of one unit.
extern "C" __global__ void __launch_bounds__(256) project(const __grid_constant__ Numbers p) {
    let_next_start();
    const int64_t H = p.s.H, C = p.s.C, at = blockIdx.x;
    const int64_t t = at / p.s.N, row = at % p.s.N;
    const int lane = threadIdx.x % 32;
    const int64_t unit = (int64_t)blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32;
    if (unit >= H) return;
    int64_t total[3] = {0, 0, 0};
    for (int64_t k = lane; k < C; k += 32) {
        const int64_t v = read_code(p.s.x, p.s.x_kind, at * C + k) - p.W.zero;
        for (int gate = 0; gate < 3; ++gate)
            total[gate] += v * read_code(p.W.codes, p.W.kind, (gate * H + unit) * C + k);
    }
    int codes[3];
    for (int gate = 0; gate < 3; ++gate) {
        for (int mask = 16; mask; mask >>= 1) total[gate] += shuffle_xor(total[gate], mask);
        const int64_t channel = gate * H + unit;
        codes[gate] = requantized(p, total[gate] + p.W.bias[channel], channel);
    }
    if (lane) return;
    const int NB = (int)p.NB, u = (int)(unit % 16);
    const int64_t tile = row / NB;
    const int64_t group = (t * p.tiles + tile) * p.groups + unit / 16;
    store(p, group * 16 * NB + stored_at(NB, u % 8, u / 8, (int)(row % NB)), codes);
}
