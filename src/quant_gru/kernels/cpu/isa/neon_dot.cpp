// 64-bit Arm with the dot product extension, which has sdot for signed bytes.
#include <arm_neon.h>

#include <cstdint>

#include "cpu/core/training.hpp"

namespace quant_gru {
namespace neon_dot {
namespace {

#include "cpu/isa/rows.inl"

// --- the general kernel's products

constexpr int kDotRows = 4;

QG_ALONE void dot_pairs(const int16_t *w, const int16_t *a, int64_t a_stride, int rows, int pairs,
                        int32_t *out) {
    for (int row = 0; row < rows; ++row) {
        const int16_t *operand = a + row * a_stride;
        int32x4_t sum[4] = {vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)};
        for (int pair = 0; pair < pairs; ++pair) {
            for (int i = 0; i < 4; ++i) {
                // four channels; val[0] has the first and val[1] the second weight of each pair
                const int16x4x2_t weights = vld2_s16(w + pair * 32 + 8 * i);
                sum[i] = vmlal_n_s16(sum[i], weights.val[0], operand[2 * pair]);
                sum[i] = vmlal_n_s16(sum[i], weights.val[1], operand[2 * pair + 1]);
            }
        }
        for (int i = 0; i < 4; ++i) vst1q_s32(out + row * 16 + 4 * i, sum[i]);
    }
}

// --- the fused kernel's products

using OperandByte = int8_t;
constexpr int kGroup = 8, kDepth = 4, kMaxPlanes = 2, kShared = 8;
#include "cpu/isa/shared_bits.inl"

template <int P>
constexpr int kMaxRows = P == 1 ? 4 : 2;
// up to 24 accumulators of four units
constexpr int max_groups(int rows, int planes) {
    return (rows == 1 ? 4 : rows == 2 ? 2 : 1) / planes;
}

// 16 weights of `kStep` of the steps that share bytes.
template <int B, int kStep>
inline int8x16_t weights_at(const int8_t *w) {
    const int8x16_t weights = vld1q_s8(w);
    if constexpr (B == 8)
        return weights;
    else if constexpr (kStep == 0)
        return vshrq_n_s8(weights, 8 - B);
    else
        return vshrq_n_s8(vshlq_n_s8(weights, B * kStep), 8 - B);
}

// Not inline: the sums need all registers, and values of the caller would occupy some.
template <int G, int R, int P, int B>
__attribute__((noinline)) void dot(const Packed &p, int first, const int8_t *a, int64_t stride,
                                   int32_t *out) {
    int32x4_t sum[P][R][3 * G][2];
    const int32_t *bias = p.bias + first * 24;
#pragma GCC unroll 16
    for (int v = 0; v < 3 * G; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                sum[0][r][v][i] = vld1q_s32(bias + 8 * v + 4 * i);
                if (P == 2) sum[P - 1][r][v][i] = vdupq_n_s32(0);
            }
    const int8_t *w = p.w + first * p.group_stride;
    const int64_t group_stride = p.group_stride, plane = stride / P;
    auto take = [&](auto step) QG_LAMBDA {
        constexpr int kStep = decltype(step)::value;
        int8x16_t operand[P][R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int half = 0; half < P; ++half) {
                int32_t quad;
                __builtin_memcpy(&quad, a + 4 * kStep + r * stride + half * plane, 4);
                operand[half][r] = vreinterpretq_s8_s32(vdupq_n_s32(quad));
            }
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            // The barrier makes the compiler load weights where they are used: the registers do not
            // have room for the sums and all weights.
            asm volatile("" ::: "memory");
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                const int8x16_t weights =
                    weights_at<B, kStep>(w + (v / 3) * group_stride + (v % 3) * 32 + 16 * i);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                    for (int half = 0; half < P; ++half)
                        sum[half][r][v][i] =
                            vdotq_s32(sum[half][r][v][i], weights, operand[half][r]);
            }
        }
    };
    for (int left = p.steps; left > 0; left -= kSteps<B>, w += 96, a += 4 * kSteps<B>)
        each_step<kSteps<B>>(left, take);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v)
#pragma GCC unroll 2
            for (int i = 0; i < 2; ++i) {
                int32x4_t total = sum[0][r][v][i];
                if (P == 2) total = vaddq_s32(total, vshlq_n_s32(sum[P - 1][r][v][i], 8));
                vst1q_s32(out + (r * 3 * G + v) * 8 + 4 * i, total);
            }
}

template <int P>
constexpr int kTileRows = 0;
constexpr int kTileGroups = 0;

#include "cpu/isa/lanes.inl"

// --- the backward's products
// up to 24 accumulators of four units

constexpr int kPanelVectors = 1, kFloatRows = 6, kFeatures = 4;
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

// There is no multiplication benchmark for this instruction set.
inline int64_t multiply_only(int64_t) { return 0; }

}  // namespace

extern const Layout layout{kGroup, kDepth, kShared, Operand::s8, kFusedMultiplyAdd};

#include "cpu/isa/entries.inl"

}  // namespace neon_dot
}  // namespace quant_gru
