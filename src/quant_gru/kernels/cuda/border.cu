// Real values to codes and back, for codes of up to 16 bits; a warp takes one row of features.
#include "quantize.cuh"

struct Border {
    const float *real;  // (rows, features)
    float *values;      // (rows, features)
    void *codes;        // (rows, features)
    uint8_t *nan;       // (rows)
    int64_t kind, rows, features;
    int64_t zero;
    float scale, lo, hi;  // limits less the zero point
};

extern "C" __global__ void __launch_bounds__(256) quantize(const __grid_constant__ Border b) {
    const int64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= b.rows) return;
    const int64_t start = row * b.features;
    const int lane = threadIdx.x % 32, features = (int)b.features;
    bool seen = false;
#pragma unroll 4
    for (int i = lane; i < features; i += 32) {
        const int code = quantized(b.real[start + i], b.scale, b.lo, b.hi, seen);
        write_code(b.codes, b.kind, start + i, code + b.zero);
    }
    seen = any_lane(seen);
    if (lane == 0) b.nan[row] = seen;
}

// s * (q - z), exact; rows that are NaN become so.
extern "C" __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ Border b) {
    const int64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= b.rows) return;
    const int64_t start = row * b.features;
    const int features = (int)b.features;
    const bool nan = b.nan && b.nan[row];
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < features; i += 32) {
        const int q = (int)(read_code(b.codes, b.kind, start + i) - b.zero);
        b.values[start + i] =
            nan ? __int_as_float(0x7fc00000) : Magic<float>::times((float)q, b.scale);
    }
}

struct Mask {
    float *grad;         // (T * N, features), in place
    const float *real;   // [t * step + n * next + feature]
    int64_t step, next;  // in values
    int64_t rows, N, features;
    float scale, lo, hi;  // limits less the zero point
};

// 0 where a real value was clamped, or is NaN; NaN stays.
extern "C" __global__ void __launch_bounds__(256) clear(const __grid_constant__ Mask p) {
    const int row = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    if (row >= p.rows) return;
    const int N = (int)p.N, features = (int)p.features;
    const float *const from = p.real + row / N * p.step + row % N * p.next;
    float *const to = p.grad + (int64_t)row * features;
#pragma unroll 4
    for (int k = threadIdx.x % 32; k < features; k += 32) {
        // far beyond all limits nothing changes, and NaN becomes one of them
        const float y = Magic<float>::limit(divided(from[k], p.scale), -4e6f, 4e6f);
        const float rounded = plain(Magic<float>::plus(y, Magic<float>::number()));
        to[k] = Magic<float>::times(to[k], rounded >= p.lo && rounded <= p.hi ? 1.f : 0.f);
    }
}

// From the states of a layer to the codes that the next one takes in.
struct Carry {
    const void *codes[2];      // (rows, H) of each direction below
    void *to;                  // (rows, directions * H), or null
    float *grad;               // of `to` dequantized, in place, or null
    int64_t kind[2], zero[2];  // of the codes
    int64_t M[2], k[2];        // what brings them to the scale of the input
    int64_t rows, H, directions;
    int64_t to_kind, lo, hi, to_zero;  // limits less the zero point
};

// Codes; a gradient becomes 0 where they were clamped, NaN stays.
extern "C" __global__ void __launch_bounds__(256) carry(const __grid_constant__ Carry p) {
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.rows) return;
    const int H = (int)p.H, D = (int)p.directions;
    for (int d = 0; d < D; ++d) {
        const int64_t start = (row * D + d) * H;
        // stores could be to what is loaded: a batch of loads comes before them
        for (int first = threadIdx.x % 32; first < H; first += 4 * 32) {
            int ahead[4];
            float grads[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = first + 32 * j;
                if (i >= H) break;
                ahead[j] = (int)read_code(p.codes[d], p.kind[d], row * H + i);
                if (p.grad) grads[j] = p.grad[start + i];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int i = first + 32 * j;
                if (i >= H) break;
                const int64_t q = qg_round((ahead[j] - p.zero[d]) * p.M[d], (int)p.k[d]);
                const int64_t code = qg_clamp(q, p.lo, p.hi);
                if (p.to) write_code(p.to, p.to_kind, start + i, code + p.to_zero);
                if (p.grad)
                    p.grad[start + i] = Magic<float>::times(grads[j], code == q ? 1.f : 0.f);
            }
        }
    }
}

// What follows serves whole calls: rows of the batch at steps, and NaN going along in time.

// Where codes of an input go: into their container, or in signed bytes for a product of bytes.
struct Target {
    void *codes;       // (T, N, features), where `planes` is 0
    int8_t *bytes;     // (planes, T, N, padded), otherwise
    uint8_t *nan;      // (N, nan_stride): whether the row is NaN at a step
    int64_t kind;      // of the codes
    int64_t planes;    // 0, 1 or, where x = 256 * first + second + 128, 2
    int64_t padded;    // features with padding
    int64_t x_offset;  // codes are kept less this in bytes
    int64_t T, N, features, nan_stride;
    uint32_t *counts;  // (stretches), of the projection that follows
    int64_t stretches;
};

// Nothing of the projection is there yet.
inline void clear_counts(const Target &o) {
    if (blockIdx.x) return;
    for (int i = threadIdx.x; i < (int)o.stretches; i += blockDim.x) o.counts[i] = 0;
}

inline void put(const Target &o, int64_t row, int k, int code) {
    if (!o.planes) {
        write_code(o.codes, o.kind, row * o.features + k, code);
        return;
    }
    const int v = code - (int)o.x_offset;
    int8_t *const to = o.bytes + row * o.padded + k;
    if (o.planes == 1) {
        *to = (int8_t)v;
    } else {
        *to = (int8_t)(v >> 8);
        to[o.T * o.N * o.padded] = (int8_t)((v & 255) - 128);
    }
}

// The row of a warp has its codes: their padding, and its NaN.
inline void finish_row(const Target &o, int row, int lane, bool nan) {
    if (o.planes)
        for (int k = (int)o.features + lane; k < o.padded; k += 32) put(o, row, k, (int)o.x_offset);
    const int t = row / (int)o.N, n = row % (int)o.N;
    if (lane == 0) o.nan[n * o.nan_stride + t] = nan;
}

// Which rows of a layer's result are NaN: inputs are from the first NaN on, in order of
// processing; states before the first step and weights make all steps so.
struct Flags {
    const uint8_t *nan;        // (N, stride), of the inputs
    const uint8_t *h0_nan[2];  // (N) of each direction, or null
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

struct Take {
    Target to;
    const float *real;   // [t * step + n * next + feature]
    int64_t step, next;  // in values
    int64_t zero;
    float scale, lo, hi;  // limits less the zero point
    Division division;    // the same without a branch, for `fours`
    int32_t fours;        // rows are made of aligned groups of four values, and codes go to bytes
};

constexpr int kRowsOfWarp = 2;

// Four features of a row to a lane; beyond the last row and the last features lanes take what is
// last.
inline void take_fours(const Take &p, int first) {
    constexpr int kAhead = 2;  // times 32 groups of features of each row
    const Target &o = p.to;
    const bool single = o.planes == 1;
    const int lane = threadIdx.x % 32, N = (int)o.N, rows = (int)o.T * N;
    const int groups = (int)o.features / 4, all = (int)o.padded / 4;
    const int64_t plane = (int64_t)rows * o.padded;
    const int zero = (int)(p.zero - o.x_offset);
    const float *from[kRowsOfWarp];
    int flags[kRowsOfWarp], stored[kRowsOfWarp];
    bool seen[kRowsOfWarp];
    int t = first / N, n = first - t * N;
#pragma unroll
    for (int row = 0; row < kRowsOfWarp; ++row) {
        from[row] = p.real + t * p.step + n * p.next;
        flags[row] = n * (int)o.nan_stride + t;
        stored[row] = t * N + n;
        seen[row] = false;
        if (stored[row] + 1 < rows && ++n == N) {
            n = 0;
            ++t;
        }
    }
    for (int start = lane; start - lane < groups; start += 32 * kAhead) {
        uint32_t bits[kAhead * kRowsOfWarp][4];
#pragma unroll
        for (int j = 0; j < kAhead; ++j) {
            const int group = start + 32 * j < groups ? start + 32 * j : groups - 1;
#pragma unroll
            for (int row = 0; row < kRowsOfWarp; ++row) {
                uint32_t (&to)[4] = bits[j * kRowsOfWarp + row];
                const uint4 v = *(const uint4 *)(from[row] + 4 * group);
                to[0] = v.x;
                to[1] = v.y;
                to[2] = v.z;
                to[3] = v.w;
            }
        }
        if (__builtin_expect(may_have_nan(bits), 0)) {
#pragma unroll
            for (int i = 0; i < kAhead * kRowsOfWarp; ++i)
                if (without_nan(bits[i])) seen[i % kRowsOfWarp] = true;
        }
        const auto put = [&](int i, const uint32_t (&raw)[4]) {
            const int group = start + 32 * (i / kRowsOfWarp);
            if (group >= groups) return;
            int8_t *const to = o.bytes + stored[i % kRowsOfWarp] * o.padded + 4 * group;
            uint32_t one[1], two[2];
            if (single) {
                in_bytes(raw, zero, one);
                *(uint32_t *)to = one[0];
            } else {
                in_bytes(raw, zero, two);
                *(uint32_t *)to = two[0];
                *(uint32_t *)(to + plane) = two[1];
            }
        };
        all_codes(p.division, bits, put);
    }
#pragma unroll
    for (int row = 0; row < kRowsOfWarp; ++row) {
        const int group = groups + lane;
        int8_t *const to = o.bytes + stored[row] * o.padded + 4 * group;
        if (group < all) {
            *(uint32_t *)to = 0;
            if (!single) *(uint32_t *)(to + plane) = 0x80808080u;
        }
        const bool nan = any_lane(seen[row]);
        if (lane == 0) o.nan[flags[row]] = nan;
    }
}

// Codes of real values, in any order of rows.
extern "C" __global__ void __launch_bounds__(256, 4) take(const __grid_constant__ Take p) {
    const int warp = (int)(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    const int lane = threadIdx.x % 32, N = (int)p.to.N, features = (int)p.to.features;
    const int first = warp * kRowsOfWarp, rows = (int)p.to.T * N, zero = (int)p.zero;
    let_next_start();
    clear_counts(p.to);
    if (first >= rows) return;
    if (p.fours) {
        take_fours(p, first);
        return;
    }
    for (int row = first; row < first + kRowsOfWarp && row < rows; ++row) {
        const float *const from = p.real + row / N * p.step + row % N * p.next;
        bool seen = false;
        // stores could be to what is loaded: a batch of loads comes before them
        for (int start = lane; start < features; start += 4 * 32) {
            float ahead[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (start + 32 * j < features) ahead[j] = from[start + 32 * j];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (start + 32 * j >= features) break;
                put(p.to, row, start + 32 * j,
                    quantized(ahead[j], p.scale, p.lo, p.hi, seen) + zero);
            }
        }
        finish_row(p.to, row, lane, any_lane(seen));
    }
}

struct Between {
    Target to;
    Flags below;
    const void *codes[2];           // (T, N, H) of each direction below
    int64_t kind[2], zero[2];       // of these codes
    int64_t M[2], k[2];             // what brings them to the scale of the input
    int64_t H, directions, lo, hi;  // units below; limits of the codes less the zero point
    int64_t out_zero;
};

// Codes of a layer's input, from the states of the layer below.
extern "C" __global__ void __launch_bounds__(256) between(const __grid_constant__ Between p) {
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
                const int64_t q = qg_clamp(qg_round(v, (int)p.k[d]), p.lo, p.hi);
                put(p.to, row, d * H + k, (int)(q + p.out_zero));
            }
        }
        nan |= is_nan(p.below, d, row / N, row % N, lane);
    }
    finish_row(p.to, row, lane, nan);
}
