// Quantizes the input of a call, with any strides of steps and rows. A warp processes a few rows.
#include "boundary/quantize.cuh"
#include "boundary/quantized_rows.cuh"

struct QuantizeInput {
    Target to;
    const float *real;   // [t * step + n * next + feature]
    int64_t step, next;  // in values
    int64_t zero;
    float scale, lo, hi;  // limits minus the zero point
    Division division;    // the same for a division without branches, for `fours`
    int32_t fours;        // rows are aligned groups of four values, and codes are written as bytes
};

constexpr int kRowsOfWarp = 2;

// Quantize kRowsOfWarp rows, four features per lane. Lanes beyond the last row or the last features
// repeat the last one.
inline void take_fours(const QuantizeInput &p, int first) {
    constexpr int kAhead = 2;  // loads per lane and row that are issued at once
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

extern "C" __global__ void __launch_bounds__(256, 4)
    quantize_input(const __grid_constant__ QuantizeInput p) {
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
        // the stores may alias the loads, so a batch of loads is issued before them
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
