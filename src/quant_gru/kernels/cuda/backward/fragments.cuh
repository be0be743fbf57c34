// R transposed, in the order in which threads of the recurrence hold it.
#ifndef QUANT_GRU_FRAGMENTS_CUH
#define QUANT_GRU_FRAGMENTS_CUH

#include "backward/backward.cuh"

// See recurrence.cu. With scales, as recurrence_grid.cu multiplies it: in PyTorch's order, over the
// activation's scale.
struct Fragments {
    const void *codes;    // (3H, H)
    const float *scales;  // (3H), or null
    uint32_t *to;         // [rank][part][group][plane][step][tile][register][lane]
    int64_t kind, H;
    int64_t U, CL, MT, KS, KP, WP, groups, count;  // U is a multiple of 8
    float activation_scale;
};

// A warp: the tiles of a step. In them a thread has four channels, one after the other.
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
