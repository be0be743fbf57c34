// What the backward multiplies: weights and codes as bytes for the integer products that are made
// again, as operands of the gradients' products, and R transposed as fragments. One launch makes
// all; nothing of it waits for the rest.
#include "backward.cuh"
#include "quantize.cuh"

// One weight and the activation that it multiplies.
struct Weight {
    const void *codes;     // (3H, K)
    const float *scales;   // (3H)
    const int64_t *bias;   // (3H), in accumulator units
    const int64_t *M, *k;  // (3H)
    int8_t *bytes;         // (columns, padded K): rows of first bytes, of second ones, of ones
    Channel *channels;     // (3H)
    Operand *real;         // (3H, K), PyTorch's order, over the activation's scale; or null
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

// Four codes at once, where rows of K codes of 8 or 16 bits are made of aligned fours.
inline bool in_fours(const void *codes, int64_t kind, int64_t K) {
    return codes && kind <= 2 && K % 4 == 0 && (uintptr_t)codes % 8 == 0;
}
inline uint2 four_of(const void *codes, int64_t kind, int64_t at) {
    uint2 found;
    if (kind == 2) return *(const uint2 *)((const int16_t *)codes + at);
    found.x = *(const uint32_t *)((const uint8_t *)codes + at);
    return found;
}
inline int code_in(const uint2 &four, int64_t kind, int i) {
    if (kind == 2) return (int)(int16_t)((i & 2 ? four.y : four.x) >> (16 * (i & 1)));
    const int byte = (int)(four.x >> (8 * i) & 255);
    return kind ? byte : (int)(int8_t)byte;
}

// Codes k to k + 3 of a row of K as operands.
inline void put_operands(Operand *to, const float (&v)[4], int k, int K) {
#if OPERAND == 0
    if (K % 4 == 0) {
        uint2 pairs;
        pairs.x = bf16_pair(v[0], v[1]);
        pairs.y = bf16_pair(v[2], v[3]);
        if (k < K) *(uint2 *)to = pairs;
        return;
    }
#endif
    for (int i = 0; i < 4 && k + i < K; ++i) to[i] = operand(v[i]);
}

// Stores could be to what is loaded: so many loads of a thread come before them.
constexpr int kAhead = 4;

// A warp: one channel, four codes a thread.
inline void unpack_weights(const Weight &p, int64_t H, int block) {
    const int64_t channel = (int64_t)block * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, K = (int)p.K, padded = (int)p.padded;
    if (channel >= 3 * H) return;
    const int64_t unit = channel % H, place = reordered((int)(channel / H), unit, H);
    const float scale = divided(p.scales[channel], p.activation_scale);
    int8_t *const bytes = p.bytes + channel * padded;
    int64_t sum = 0, sizes = 0;
    const auto put = [&](int k, const int (&v)[4]) {
        uint32_t high = 0, low = 0, ones = 0;
        float real[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum += v[i];
            sizes += v[i] < 0 ? -v[i] : v[i];
            real[i] = (float)v[i] * scale;
            high |= (uint32_t)((p.planes == 1 ? v[i] : v[i] >> 8) & 255) << (8 * i);
            low |= (uint32_t)((k + i < K ? (v[i] & 255) - 128 : 0) & 255) << (8 * i);
            ones |= (uint32_t)(k + i < K) << (8 * i);
        }
        if (p.real) put_operands(p.real + place * K + k, real, k, K);
        *(uint32_t *)(bytes + k) = high;
        if (p.planes == 2) {
            *(uint32_t *)(bytes + 3 * H * padded + k) = low;
            if (channel == 0) *(uint32_t *)(bytes + 6 * H * padded + k) = ones;
        }
    };
    if (in_fours(p.codes, p.kind, K)) {
        for (int start = 4 * lane; start < padded; start += 128 * kAhead) {
            uint2 ahead[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j)
                if (start + 128 * j < K)
                    ahead[j] = four_of(p.codes, p.kind, channel * K + start + 128 * j);
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
                const int k = start + 128 * j;
                if (k >= padded) break;
                int v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) v[i] = k < K ? code_in(ahead[j], p.kind, i) : 0;
                put(k, v);
            }
        }
    } else {
#pragma unroll 1
        for (int k = 4 * lane; k < padded; k += 128) {
            int v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                v[i] = k + i < K ? (int)read_code(p.codes, p.kind, channel * K + k + i) : 0;
            put(k, v);
        }
    }
    sum = all_lanes(sum);
    sizes = all_lanes(sizes);
    if (lane) return;
    const int64_t bias = p.bias[channel];
    Channel c;
    c.folded = bias + (p.offset - p.zero + (p.activation_planes == 2 ? 128 : 0)) * sum;
    // 2^-k by its bits, exact as M * 2^-k is
    c.m = (double)p.M[channel] * bits_as_double((1023 - p.k[channel]) << 52);
    c.m_float = (float)c.m;
    const int64_t reach = sizes * p.max_abs + (bias < 0 ? -bias : bias);
    c.exact = reach < 1 << 24 && (c.m == 0 || (c.m > 1e-20 && c.m < 1e20));
    p.channels[channel] = c;
}

// R transposed, in the order in which threads of the recurrence hold it; see back.cu. With scales,
// as back_grid.cu multiplies it: in PyTorch's order, over the activation's scale.
struct Fragments {
    const void *codes;    // (3H, H)
    const float *scales;  // (3H), or null
    uint32_t *to;         // [rank][part][group][plane][step][tile][register][lane]
    int64_t kind, H;
    int64_t U, CL, MT, KS, KP, WP, groups, count;
    float activation_scale;
};

inline void transpose(const Fragments &p, int block) {
    int i = block * (int)blockDim.x + (int)threadIdx.x;
    if (i >= (int)p.count) return;
    uint32_t *const to = p.to + i;
    const auto next = [&](int64_t size) {
        const int found = i % (int)size;
        i /= (int)size;
        return found;
    };
    const int lane = next(32), reg = next(4), m = next(p.MT), step = next(p.KP / 16 / p.KS);
    const int plane = next(p.WP), group = next(p.groups), part = next(p.KS), rank = i;
    const int row = (group * (int)p.MT + m) * 16 + lane / 4 + 8 * (reg & 1);
    const int first =
        part * (int)(p.KP / p.KS) + step / 2 * 32 + lane % 4 * 8 + step % 2 * 4 + (reg >> 1) * 2;
    float v[2];
    for (int j = 0; j < 2; ++j) {
        int gate = (first + j) / (int)p.U;
        const int u = (first + j) % (int)p.U;
        const int64_t unit = rank * p.U + u;
        const bool there = gate < 3 && unit < p.H && row < p.H;
        if (p.scales && gate < 2) gate = 1 - gate;
        const int64_t channel = gate * p.H + unit;
        const int code = there ? (int)read_code(p.codes, p.kind, channel * p.H + row) : 0;
        const int low = ((code + 128) & 255) - 128;
        v[j] = (float)(p.WP == 1 ? code : plane ? code - low : low);
        if (there && p.scales) v[j] *= divided(p.scales[channel], p.activation_scale);
    }
    *to = bf16_pair(v[0], v[1]);
}

// Codes of an activation: as bytes, and less their zero point.
struct Codes {
    const void *codes;    // (rows, K): a plan's codes; of states, those after each step
    const void *before;   // (N, K): of states, those before the first step, or null for zeros
    const float *values;  // [row / N * step + row % N * next + k]: what is quantized; or null
    int8_t *bytes;        // a chunk of rows after the other, (planes, rows of it, padded)
    Operand *real;        // (rows, K), or null
    int64_t kind, K, padded, planes, offset, zero;
    int64_t N, states, reverse;
    int64_t step, next;   // of values
    float scale, lo, hi;  // of values; limits less the zero point
};
struct Taken {
    Codes c[2 * DIRS];
    int64_t rows, chunk;
};

// A warp: a row, four codes a thread.
inline void unpack_codes(const Taken &all, const Codes &p, int block, int blocks) {
    const int lane = threadIdx.x % 32, K = (int)p.K, padded = (int)p.padded;
    const int less = (int)(p.offset - p.zero);
    const bool short_rows = all.rows <= 0x7fffffff;
    for (int64_t row = (int64_t)block * 8 + threadIdx.x / 32; row < all.rows;
         row += (int64_t)blocks * 8) {
        int64_t from = row;
        const void *codes = p.codes;
        if (p.states) {
            from = p.reverse ? row + p.N : row - p.N;
            if (from < 0 || from >= all.rows) {
                codes = p.before;
                from = p.reverse ? from - all.rows : from + p.N;
            }
        }
        const float *values = nullptr;
        if (p.values) {
            const int64_t t = short_rows ? (int64_t)((uint32_t)row / (uint32_t)p.N) : row / p.N;
            values = p.values + t * p.step + (row - t * p.N) * p.next;
        }
        const int64_t chunk = all.chunk < all.rows ? row / all.chunk : 0, first = chunk * all.chunk;
        const int64_t rows = all.rows - first < all.chunk ? all.rows - first : all.chunk;
        int8_t *const to = p.bytes + (first * p.planes + row - first) * padded;
        const auto put = [&](int k, const int (&v)[4]) {
            if (p.real) {
                float real[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) real[i] = (float)(v[i] + less);
                put_operands(p.real + row * K + k, real, k, K);
            }
            uint32_t low = 0, high = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low |= (uint32_t)((k + i < K ? (v[i] & 255) - 128 : 0) & 255) << (8 * i);
                high |= (uint32_t)((p.planes == 1 ? v[i] : v[i] >> 8) & 255) << (8 * i);
            }
            *(uint32_t *)(to + k) = high;
            if (p.planes == 2) *(uint32_t *)(to + rows * padded + k) = low;
        };
        bool nan = false;
        if (values && K % 4 == 0 && (uintptr_t)values % 16 == 0) {
            for (int start = 4 * lane; start < padded; start += 128 * kAhead) {
                uint4 ahead[kAhead];
#pragma unroll
                for (int j = 0; j < kAhead; ++j)
                    if (start + 128 * j < K) ahead[j] = *(const uint4 *)(values + start + 128 * j);
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    const int k = start + 128 * j;
                    if (k >= padded) break;
                    const uint32_t bits[4] = {ahead[j].x, ahead[j].y, ahead[j].z, ahead[j].w};
                    int v[4];  // less the offset
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        v[i] = k < K ? quantized(bits_as_float(bits[i]), p.scale, p.lo, p.hi, nan) -
                                           less
                                     : 0;
                    put(k, v);
                }
            }
        } else if (!values && in_fours(codes, p.kind, K)) {
            for (int start = 4 * lane; start < padded; start += 128 * kAhead) {
                uint2 ahead[kAhead];
#pragma unroll
                for (int j = 0; j < kAhead; ++j)
                    if (start + 128 * j < K)
                        ahead[j] = four_of(codes, p.kind, from * K + start + 128 * j);
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    const int k = start + 128 * j;
                    if (k >= padded) break;
                    int v[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        v[i] = k < K ? code_in(ahead[j], p.kind, i) - (int)p.offset : 0;
                    put(k, v);
                }
            }
        } else {
#pragma unroll 1
            for (int k = 4 * lane; k < padded; k += 128) {
                int v[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (k + i >= K)
                        v[i] = 0;
                    else if (values)
                        v[i] = quantized(values[k + i], p.scale, p.lo, p.hi, nan) - less;
                    else if (!codes)
                        v[i] = -less;
                    else
                        v[i] = (int)(read_code(codes, p.kind, from * K + k + i) - p.offset);
                }
                put(k, v);
            }
        }
    }
}

struct Operands {
    Weights weights;
    Taken taken;
    Fragments fragments[DIRS];
    int64_t of_weights, of_codes;  // blocks of a matrix and of an activation
};

extern "C" __global__ void __launch_bounds__(256, 3) operands(const __grid_constant__ Operands p) {
    int block = (int)blockIdx.x;
    const int of_weights = (int)p.of_weights, of_codes = (int)p.of_codes;
    if (block < 2 * DIRS * of_weights) {
        unpack_weights(p.weights.w[block / of_weights], p.weights.H, block % of_weights);
        return;
    }
    block -= 2 * DIRS * of_weights;
    if (block < 2 * DIRS * of_codes) {
        unpack_codes(p.taken, p.taken.c[block / of_codes], block % of_codes, of_codes);
        return;
    }
    block -= 2 * DIRS * of_codes;
    const int of_fragments = ((int)gridDim.x - 2 * DIRS * (of_weights + of_codes)) / DIRS;
    transpose(p.fragments[block / of_fragments], block % of_fragments);
}
