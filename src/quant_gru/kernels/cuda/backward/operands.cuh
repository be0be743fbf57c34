// Operands of the backward: codes of activations, as bytes and as GEMM operands without their zero
// point, and R transposed.
#ifndef QUANT_GRU_OPERANDS_CUH
#define QUANT_GRU_OPERANDS_CUH

#include "backward/backward.cuh"
#include "boundary/quantize.cuh"

// The codes of an activation, and where to write them as bytes and without their zero point.
struct Codes {
    const void *codes;    // (rows, K): codes of x, or of the states after each step
    const void *before;   // (N, K): codes of the initial states, or null for zeros
    const float *values;  // [row / N * step + row % N * next + k]: values to quantize; or null
    int8_t *bytes;        // chunks of rows, each (planes, rows of the chunk, padded)
    Operand *real;        // (rows, K), or null
    int64_t kind, K, padded, planes, offset, zero;
    int64_t N, states, reverse;
    int64_t step, next;   // strides of `values`
    float scale, lo, hi;  // quantizer of `values`; limits minus the zero point
};
struct Taken {
    Codes c[2 * DIRS];
    int64_t rows, chunk;
};

// The codes that a row reads, in `codes` or, for the first step of states, in `before`.
struct Place {
    const void *codes;  // or null
    int64_t row;
};

inline Place place_of(const Taken &all, const Codes &p, int64_t row) {
    if (!p.states) return {p.codes, row};
    const int64_t from = p.reverse ? row + p.N : row - p.N;
    if (from >= 0 && from < all.rows) return {p.codes, from};
    return {p.before, p.reverse ? from - all.rows : from + p.N};
}

// The address of a row's first bytes, and the distance to its second bytes.
struct Bytes {
    int8_t *to;
    int64_t second;
};

inline Bytes bytes_of(const Taken &all, const Codes &p, int64_t row) {
    if (p.planes == 1) return {p.bytes + row * p.padded, 0};
    const int64_t chunk = (uint32_t)row / (uint32_t)all.chunk, first = chunk * all.chunk;
    const int64_t rows = all.rows - first < all.chunk ? all.rows - first : all.chunk;
    return {p.bytes + (2 * first + row - first) * p.padded, rows * p.padded};
}

inline uint32_t low_bytes(int a, int b, int c, int d) {
    return interleave(interleave((uint32_t)a, (uint32_t)c, 0),
                      interleave((uint32_t)b, (uint32_t)d, 0), 0);
}

// Convert an integer of less than 23 bits. A conversion instruction would take four times as long.
inline float as_float(int v) { return bits_as_float((uint32_t)(0x4B400000 + v)) - 12582912.f; }

// Unpack V codes of a row at once. A code has kSize bytes; kSize 4 means real values. The stores
// may alias the loads, so a batch of loads is issued before them.
template <int kSize, int V>
inline void unpack_groups(const Taken &all, const Codes &p, int block, int blocks) {
    typedef Words<kSize * V> Group;
    constexpr int kAhead = kSize == 1 ? 4 : 2;
    const int K = (int)p.K;
    const uint32_t across = (uint32_t)p.padded / V, count = (uint32_t)all.rows * across;
    const uint32_t threads = (uint32_t)blocks * blockDim.x;
    const int less = (int)(p.offset - p.zero);
    const uint32_t flip = p.kind == 0 ? 0x80808080u : 0;
    const int origin = (int)p.offset + (p.kind == 0 ? 128 : 0);
    for (uint32_t start = block * blockDim.x + threadIdx.x; start < count;
         start += kAhead * threads) {
        Group ahead[kAhead];
        bool there[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const uint32_t i = start + j * threads, row = i / across;
            const int k = (int)(i - row * across) * V;
            there[j] = i < count && k < K;
            if (!there[j]) continue;
            if (kSize == 4) {
                const uint32_t N = (uint32_t)p.N, t = row / N;
                ahead[j] = *(const Group *)(p.values + t * p.step + (row - t * N) * p.next + k);
            } else {
                const Place from = place_of(all, p, row);
                there[j] = from.codes;
                if (from.codes)
                    ahead[j] =
                        *(const Group *)((const uint8_t *)from.codes + (from.row * K + k) * kSize);
            }
        }
        // the code exists for one group: the others move into the first group's registers
#pragma unroll 1
        for (int j = 0; j < kAhead; ++j) {
            const uint32_t i = start + j * threads, row = i / across;
            const int k = (int)(i - row * across) * V;
            if (i >= count) break;
            int v[V];  // codes minus the offset
            bool nan = false;
#pragma unroll
            for (int e = 0; e < V; ++e) {
                if (!there[0])
                    v[e] = k < K ? -less : 0;
                else if (kSize == 4)
                    v[e] = quantized(bits_as_float(ahead[0].of[e * kSize / 4]), p.scale, p.lo, p.hi,
                                     nan) -
                           less;
                else if (kSize == 2)
                    v[e] = (int16_t)(ahead[0].of[e * kSize / 4] >> 16 * (e % 2)) - (int)p.offset;
                else
                    v[e] = (int)((ahead[0].of[e / 4] ^ flip) >> 8 * (e % 4) & 255) - origin;
            }
            if (p.real && k < K) {
                Operand *const real = p.real + (int64_t)row * K + k;
#if OPERAND == 0
                Words<2 * V> pairs;
#pragma unroll
                for (int e = 0; e < V; e += 2)
                    pairs.of[e / 2] = bf16_pair(as_float(v[e] + less), as_float(v[e + 1] + less));
                *(Words<2 * V> *)real = pairs;
#else
#pragma unroll
                for (int e = 0; e < V; ++e) real[e] = operand(as_float(v[e] + less));
#endif
            }
            const Bytes bytes = bytes_of(all, p, row);
            Words<V> low, high;
#pragma unroll
            for (int e = 0; e < V; e += 4) {
                const int *const of = v + e;
                low.of[e / 4] = low_bytes(of[0], of[1], of[2], of[3]);
                high.of[e / 4] = low_bytes(of[0] >> 8, of[1] >> 8, of[2] >> 8, of[3] >> 8);
            }
            if (p.planes == 1) {
                *(Words<V> *)(bytes.to + k) = low;
            } else {
                *(Words<V> *)(bytes.to + k) = high;
#pragma unroll
                for (int w = 0; w < V / 4; ++w) low.of[w] = k < K ? low.of[w] ^ 0x80808080u : 0;
                *(Words<V> *)(bytes.to + bytes.second + k) = low;
            }
#pragma unroll
            for (int other = 1; other < kAhead; ++other) {
                ahead[other - 1] = ahead[other];
                there[other - 1] = there[other];
            }
        }
    }
}

// Unpack one code per thread and one row per warp.
inline void unpack_rows(const Taken &all, const Codes &p, int block, int blocks) {
    const int lane = threadIdx.x % 32, K = (int)p.K, padded = (int)p.padded;
    const int less = (int)(p.offset - p.zero);
    for (int64_t row = (int64_t)block * 8 + threadIdx.x / 32; row < all.rows;
         row += (int64_t)blocks * 8) {
        const Place from = place_of(all, p, row);
        const float *const values =
            p.values ? p.values + row / p.N * p.step + row % p.N * p.next : nullptr;
        const Bytes bytes = bytes_of(all, p, row);
        for (int start = lane; start < padded; start += 4 * 32) {
            int ahead[4];  // codes minus the offset; NaN becomes the zero point
            bool nan = false;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int k = start + 32 * j;
                ahead[j] = k >= K   ? 0
                           : values ? quantized(values[k], p.scale, p.lo, p.hi, nan) - less
                           : from.codes
                               ? (int)(read_code(from.codes, p.kind, from.row * K + k) - p.offset)
                               : -less;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int k = start + 32 * j, v = ahead[j];
                if (k >= padded) break;
                if (p.real && k < K) p.real[row * K + k] = operand((float)(v + less));
                bytes.to[k] = (int8_t)(p.planes == 1 ? v : v >> 8);
                if (p.planes == 2)
                    bytes.to[bytes.second + k] = k < K ? (int8_t)((v & 255) - 128) : 0;
            }
        }
    }
}

inline void unpack_codes(const Taken &all, const Codes &p, int block, int blocks) {
    const int size = p.values ? 4 : p.kind < 2 ? 1 : p.kind == 2 ? 2 : 0;
    const int V = p.K % 8 == 0 ? 8 : 4;
    // the low bits give the alignment of all groups
    const uint64_t addresses = p.values ? (uint64_t)p.values | 4 * p.step | 4 * p.next
                                        : (uint64_t)p.codes | (uint64_t)p.before;
    const int group = size * V < 16 ? size * V : 16;
    if (!size || p.K % V || addresses % group || all.rows * (p.padded / V) >= 1 << 30)
        unpack_rows(all, p, block, blocks);
    else if (size == 4)
        V == 8 ? unpack_groups<4, 8>(all, p, block, blocks)
               : unpack_groups<4, 4>(all, p, block, blocks);
    else if (size == 2)
        V == 8 ? unpack_groups<2, 8>(all, p, block, blocks)
               : unpack_groups<2, 4>(all, p, block, blocks);
    else
        V == 8 ? unpack_groups<1, 8>(all, p, block, blocks)
               : unpack_groups<1, 4>(all, p, block, blocks);
}

// R transposed, in the order in which threads of recurrence.cu hold it. With scales, R is in the
// form that recurrence_grid.cu multiplies: in PyTorch's order, divided by the activation's scale.
struct Fragments {
    const void *codes;    // (3H, H)
    const float *scales;  // (3H), or null
    uint32_t *to;         // [rank][part][group][plane][step][tile][register][lane]
    int64_t kind, H;
    int64_t U, CL, MT, KS, KP, WP, groups, count;  // U is a multiple of 8
    float activation_scale;
};

// A warp transposes the tiles of a step. A thread has four consecutive channels of each tile.
template <bool kBytes>
inline void transpose_tiles(const Fragments &p, int block) {
    const int lane = threadIdx.x % 32, H = (int)p.H, MT = (int)p.MT;
    int i = block * 8 + (int)threadIdx.x / 32;
    if ((int64_t)i * MT * 128 >= p.count) return;
    uint32_t *const to = p.to + (int64_t)i * MT * 128 + lane;
    const auto next = [&](int64_t size) {
        const int found = i % (int)size;
        i /= (int)size;
        return found;
    };
    const int step = next(p.KP / 16 / p.KS), plane = next(p.WP);
    const int group = next(p.groups), part = next(p.KS), rank = i;
    const int first = part * (int)(p.KP / p.KS) + step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
    int gate = first / (int)p.U;
    const int unit = rank * (int)p.U + first % (int)p.U;
    const int units = gate < 3 ? H - unit : 0;
    if (p.scales && gate < 2) gate = 1 - gate;
    const int64_t channel = (int64_t)gate * H + unit;
    float scale[4];
#pragma unroll
    for (int c = 0; c < 4; ++c)
        scale[c] = p.scales && c < units ? divided(p.scales[channel + c], p.activation_scale) : 1.f;
    for (int m = 0; m < MT; ++m) {
        const int row = (group * MT + m) * 16 + lane / 4;
        int code[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int64_t at = (channel + c) * H + row + 8 * half;
                code[half][c] = c >= units || row + 8 * half >= H ? 0
                                : kBytes ? ((const int8_t *)p.codes)[at]
                                         : (int)read_code(p.codes, p.kind, at);
            }
#pragma unroll
        for (int reg = 0; reg < 4; ++reg) {
            float v[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int c = (reg >> 1) * 2 + j, whole = code[reg & 1][c];
                const int low = ((whole + 128) & 255) - 128;
                v[j] = (float)(p.WP == 1 ? whole : plane ? whole - low : low) * scale[c];
            }
            to[(m * 4 + reg) * 32] = bf16_pair(v[0], v[1]);
        }
    }
}

inline void transpose(const Fragments &p, int block) {
    p.kind == 0 ? transpose_tiles<true>(p, block) : transpose_tiles<false>(p, block);
}

#endif
