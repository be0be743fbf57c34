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

// A warp: one channel.
inline void unpack_weights(const Weight &p, int64_t H, int block) {
    const int64_t channel = (int64_t)block * 8 + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (channel >= 3 * H) return;
    const int64_t unit = channel % H, place = reordered((int)(channel / H), unit, H);
    const float scale = divided(p.scales[channel], p.activation_scale);
    int64_t sum = 0, sizes = 0;
    for (int64_t k = lane; k < p.padded; k += 32) {
        int code = 0;
        if (k < p.K) {
            code = (int)read_code(p.codes, p.kind, channel * p.K + k);
            if (p.real) p.real[place * p.K + k] = operand((float)code * scale);
        }
        sum += code;
        sizes += code < 0 ? -code : code;
        if (p.planes == 1) {
            p.bytes[channel * p.padded + k] = (int8_t)code;
        } else {
            p.bytes[channel * p.padded + k] = (int8_t)(code >> 8);
            p.bytes[(3 * H + channel) * p.padded + k] = k < p.K ? (int8_t)((code & 255) - 128) : 0;
            if (channel == 0) p.bytes[6 * H * p.padded + k] = k < p.K;
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

// R transposed, in the order in which threads of the recurrence hold it; see back.cu.
struct Fragments {
    const void *codes;  // (3H, H)
    uint32_t *to;       // [rank][part][group][plane][step][tile][register][lane]
    int64_t kind, H;
    int64_t U, CL, MT, KS, KP, WP, groups, count;
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
        const int gate = (first + j) / (int)p.U, u = (first + j) % (int)p.U;
        const int64_t unit = rank * p.U + u;
        int code = 0;
        if (gate < 3 && unit < p.H && row < p.H)
            code = (int)read_code(p.codes, p.kind, (gate * p.H + unit) * p.H + row);
        const int low = ((code + 128) & 255) - 128;
        v[j] = (float)(p.WP == 1 ? code : plane ? code - low : low);
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
    const bool fours = K % 4 == 0;
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
        const float *const values =
            p.values ? p.values + row / p.N * p.step + row % p.N * p.next : nullptr;
        const int64_t chunk = row / all.chunk, first = chunk * all.chunk;
        const int64_t rows = all.rows - first < all.chunk ? all.rows - first : all.chunk;
        int8_t *const to = p.bytes + (first * p.planes + row - first) * padded;
        for (int k = 4 * lane; k < padded; k += 128) {
            int v[4];  // less the offset
            if (values) {
                bool nan = false;
                for (int i = 0; i < 4; ++i)
                    v[i] =
                        k + i < K ? quantized(values[k + i], p.scale, p.lo, p.hi, nan) - less : 0;
            } else if (!codes) {
                for (int i = 0; i < 4; ++i) v[i] = k + i < K ? -less : 0;
            } else if (fours && p.kind < 2 && k < K) {
                const uint32_t word = *(const uint32_t *)((const uint8_t *)codes + from * K + k);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int byte = (int)(word >> (8 * i) & 255);
                    v[i] = (p.kind ? byte : (int)(int8_t)byte) - (int)p.offset;
                }
            } else {
                for (int i = 0; i < 4; ++i)
                    v[i] = k + i < K ? (int)(read_code(codes, p.kind, from * K + k + i) - p.offset)
                                     : 0;
            }
            if (p.real) {
                Operand *const real = p.real + row * K + k;
#if OPERAND == 0
                if (fours && k < K) {
                    uint2 pairs;
                    pairs.x = bf16_pair((float)(v[0] + less), (float)(v[1] + less));
                    pairs.y = bf16_pair((float)(v[2] + less), (float)(v[3] + less));
                    *(uint2 *)real = pairs;
                } else
#endif
                    for (int i = 0; i < 4 && k + i < K; ++i)
                        real[i] = operand((float)(v[i] + less));
            }
            uint32_t low = 0, high = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                low |= (uint32_t)((k + i < K ? (v[i] & 255) - 128 : 0) & 255) << (8 * i);
                high |= (uint32_t)((p.planes == 1 ? v[i] : v[i] >> 8) & 255) << (8 * i);
            }
            *(uint32_t *)(to + k) = high;
            if (p.planes == 2) *(uint32_t *)(to + rows * padded + k) = low;
        }
    }
}

struct Operands {
    Weights weights;
    Taken taken;
    Fragments fragments[DIRS];
    int64_t of_weights, of_codes;  // blocks of a matrix and of an activation
};

extern "C" __global__ void __launch_bounds__(256) operands(const __grid_constant__ Operands p) {
    follow_previous();
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
