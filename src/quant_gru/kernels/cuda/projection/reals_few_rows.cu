// The input projection of few rows from real values, with 8-bit weights. A warp quantizes the
// features of a row and computes the three sums of a unit, with as few memory round trips as
// possible.
//
//   WIDE        whether sums need 64 bits
#include "boundary/quantize.cuh"

struct Few {
    const float *real;      // [t * step + n * next + feature]
    uint8_t *nan;           // (N, nan_stride): whether a row is NaN at a step
    void *Wx;               // [t][tile][group][16 * NB]
    const int8_t *weights;  // (3H, padded)
    int64_t step, next;     // in values
    int64_t N, C, H, padded, nan_stride;
    int64_t NB, tiles, groups, wide;
    Division division;
    Matrix W;       // bias, multipliers and limits
    int64_t fours;  // rows are aligned groups of four values
};

#if WIDE
typedef int64_t Total;
inline Total of_lane(Total v, int mask) { return shuffle_xor(v, mask); }
#else
typedef int Total;
inline Total of_lane(Total v, int mask) { return (int)shuffled((uint32_t)v, mask); }
#endif

constexpr int kFeatures = 8;  // per lane and iteration

inline void load_values(const Few &p, const float *from, int k, uint32_t (&bits)[kFeatures]) {
    if (p.fours) {
#pragma unroll
        for (int i = 0; i < kFeatures; i += 4) {
            uint4 v = {0, 0, 0, 0};
            if (k + i < p.C) v = *(const uint4 *)(from + k + i);
            bits[i] = v.x;
            bits[i + 1] = v.y;
            bits[i + 2] = v.z;
            bits[i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kFeatures; ++i) bits[i] = k + i < p.C ? float_bits(from[k + i]) : 0;
    }
}

extern "C" __global__ void __launch_bounds__(256) project_few(const __grid_constant__ Few p) {
    let_next_start();
    const int H = (int)p.H, padded = (int)p.padded, N = (int)p.N, lane = (int)threadIdx.x % 32;
    const int t = (int)blockIdx.x / N, row = (int)blockIdx.x % N;
    const int unit = (int)(blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32);
    if (unit >= H) return;
    const float *const from = p.real + t * p.step + row * p.next;
    int64_t bias[3];
    double m[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        bias[gate] = p.W.bias[gate * H + unit];
        m[gate] = p.W.m[gate * H + unit];
    }
    Total total[3] = {0, 0, 0};
    bool seen = false;
    for (int k = lane * kFeatures; k < padded; k += 32 * kFeatures) {
        uint32_t bits[kFeatures];
        uint2 weights[3];
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
            weights[gate] = *(const uint2 *)(p.weights + ((int64_t)gate * H + unit) * padded + k);
        load_values(p, from, k, bits);
        int sums[3] = {0, 0, 0};
#pragma unroll
        for (int i = 0; i < kFeatures; ++i) {
            const int v = quantized(bits_as_float(bits[i]), p.division, seen);
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                const uint32_t word = i < 4 ? weights[gate].x : weights[gate].y;
                sums[gate] += v * (int8_t)(word >> i % 4 * 8);
            }
        }
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) total[gate] += sums[gate];
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) total[gate] += of_lane(total[gate], mask);
    if (unit == 0) {
        const bool nan = any_lane(seen);
        if (lane == 0) p.nan[row * p.nan_stride + t] = nan;
    }
    if (lane) return;
    typedef Magic<double> R;
    const double lo = (double)p.W.lo + R::number(), hi = (double)p.W.hi + R::number();
    uint32_t codes[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        const double v = round_term((double)(total[gate] + bias[gate]), m[gate]);
        codes[gate] = (uint32_t)(R::integer(R::limit(v, lo, hi)) - (int)p.W.code_lo);
    }
    const int NB = (int)p.NB, u = unit % 16;
    const int64_t group = ((int64_t)t * p.tiles + row / NB) * p.groups + unit / 16;
    const int64_t at = group * 16 * NB + stored_at(NB, u % 8, u / 8, row % NB);
    if (p.wide) {
        uint2 word;
        word.x = codes[0] | codes[1] << 16;
        word.y = codes[2];
        ((uint2 *)p.Wx)[at] = word;
    } else {
        ((uint32_t *)p.Wx)[at] = codes[0] | codes[1] << 8 | codes[2] << 16;
    }
}
