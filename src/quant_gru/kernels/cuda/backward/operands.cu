// Prepares the operands of the backward in one launch: weights and codes as bytes for the
// recomputed integer GEMMs, and as operands of the gradients' GEMMs, and R transposed as fragments.
// The parts are independent of each other.
//
// Macro       Values        Meaning
// OPERAND     0, 1, 2       operands of GEMMs: bfloat16, float, double
// HALF        0, 1          local derivatives are stored in half precision
// DIRS        1, 2          directions per launch (direction fusion)
#include "backward/operands.cuh"

// One weight and the activation that it multiplies.
struct Weight {
    const void *codes;     // (3H, K)
    const float *scales;   // (3H)
    const int64_t *bias;   // (3H), in accumulator units
    const int64_t *M, *k;  // (3H)
    int8_t *bytes;         // (columns, padded K): rows of first bytes, of second bytes, of ones
    Channel *channels;     // (3H)
    Operand *real;         // (3H, K), PyTorch's order, divided by the activation's scale; or null
    int64_t kind, K, padded, planes;
    int64_t offset, zero, max_abs;  // of the activation
    int64_t activation_planes;
    float activation_scale;
};
struct Weights {
    Weight w[2 * DIRS];  // W and R of each direction
    int64_t H;
};

inline int64_t all_lanes(int64_t v) {
    for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}

// The sums of a channel's codes and of their absolute values.
struct Sums {
    int64_t codes, sizes;
};

// The stores may alias the loads, so a batch of loads is issued before them.
inline Sums unpack_fours(const Weight &p, int64_t channel, int64_t place, float scale, int lane) {
    const int K = (int)p.K, padded = (int)p.padded;
    const int8_t *const from = (const int8_t *)p.codes + channel * K;
    int8_t *const bytes = p.bytes + channel * padded;
    int sum = 0, sizes = 0;
    for (int start = 4 * lane; start < padded; start += 4 * 128) {
        uint32_t ahead[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            ahead[j] = start + 128 * j < K ? *(const uint32_t *)(from + start + 128 * j) : 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int k = start + 128 * j;
            if (k >= padded) break;
            int v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                v[i] = (int8_t)(ahead[j] >> 8 * i);
                sum += v[i];
                sizes += v[i] < 0 ? -v[i] : v[i];
            }
            *(uint32_t *)(bytes + k) = ahead[j];
            if (!p.real || k >= K) continue;
            Operand *const real = p.real + place * K + k;
#if OPERAND == 0
            Words<8> pairs;
            pairs.of[0] = bf16_pair((float)v[0] * scale, (float)v[1] * scale);
            pairs.of[1] = bf16_pair((float)v[2] * scale, (float)v[3] * scale);
            *(Words<8> *)real = pairs;
#else
#pragma unroll
            for (int i = 0; i < 4; ++i) real[i] = operand((float)v[i] * scale);
#endif
        }
    }
    return {sum, sizes};
}

inline Sums unpack_each(const Weight &p, int64_t H, int64_t channel, int64_t place, float scale,
                        int lane) {
    Sums sums = {0, 0};
    for (int start = lane; start < p.padded; start += 4 * 32) {
        int ahead[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int k = start + 32 * j;
            ahead[j] = k < p.K ? (int)read_code(p.codes, p.kind, channel * p.K + k) : 0;
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int k = start + 32 * j, code = ahead[j];
            if (k >= p.padded) break;
            if (p.real && k < p.K) p.real[place * p.K + k] = operand((float)code * scale);
            sums.codes += code;
            sums.sizes += code < 0 ? -code : code;
            if (p.planes == 1) {
                p.bytes[channel * p.padded + k] = (int8_t)code;
                continue;
            }
            p.bytes[channel * p.padded + k] = (int8_t)(code >> 8);
            p.bytes[(3 * H + channel) * p.padded + k] = k < p.K ? (int8_t)((code & 255) - 128) : 0;
            if (channel == 0) p.bytes[6 * H * p.padded + k] = k < p.K;
        }
    }
    return sums;
}

// Unpack weights. A warp processes one channel.
inline void unpack_weights(const Weight &p, int64_t H, int block) {
    const int64_t channel = (int64_t)block * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (channel >= 3 * H) return;
    const int64_t bias = p.bias[channel], M = p.M[channel], shift = p.k[channel];
    const int64_t place = reordered((int)(channel / H), channel % H, H);
    const float scale = divided(p.scales[channel], p.activation_scale);
    const bool fours = p.kind == 0 && p.planes == 1 && p.K % 4 == 0 && (uint64_t)p.codes % 4 == 0;
    const Sums sums = fours ? unpack_fours(p, channel, place, scale, lane)
                            : unpack_each(p, H, channel, place, scale, lane);
    const int64_t sum = all_lanes(sums.codes), sizes = all_lanes(sums.sizes);
    if (lane) return;
    Channel c;
    c.folded = bias + (p.offset - p.zero + (p.activation_planes == 2 ? 128 : 0)) * sum;
    // build 2^-k from its bits; M * 2^-k is exact
    c.m = (double)M * bits_as_double((1023 - shift) << 52);
    c.m_float = (float)c.m;
    const int64_t reach = sizes * p.max_abs + (bias < 0 ? -bias : bias);
    c.exact = reach < 1 << 24 && (c.m == 0 || (c.m > 1e-20 && c.m < 1e20));
    p.channels[channel] = c;
}

struct Operands {
    Weights weights;
    Taken taken;
    Fragments fragments[DIRS];
    int64_t of_weights, of_codes;  // blocks per weight matrix and per activation
};

// Blocks with the longest work come first.
extern "C" __global__ void __launch_bounds__(256) operands(const __grid_constant__ Operands p) {
    int block = (int)blockIdx.x;
    const int of_weights = (int)p.of_weights, of_codes = (int)p.of_codes;
    if (block < 2 * DIRS * of_weights) {
        unpack_weights(p.weights.w[block / of_weights], p.weights.H, block % of_weights);
        return;
    }
    block -= 2 * DIRS * of_weights;
    const int of_fragments = ((int)gridDim.x - 2 * DIRS * (of_weights + of_codes)) / DIRS;
    if (block < DIRS * of_fragments) {
        transpose(p.fragments[block / of_fragments], block % of_fragments);
        return;
    }
    block -= DIRS * of_fragments;
    unpack_codes(p.taken, p.taken.c[block / of_codes], block % of_codes, of_codes);
}
