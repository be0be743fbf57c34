// For every processor. On x86-64, which always has SSE2, products use pmaddwd.
#include <cstdint>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/core/training.hpp"

namespace quant_gru {
namespace portable {
namespace {

#include "cpu/isa/rows.inl"

// --- the general kernel's products

constexpr int kDotRows = 4;

// out[row][channel] = sum over pairs of w[pair][channel][2] . a[row][pair][2], in int32.
QG_ALONE void dot_pairs(const int16_t *w, const int16_t *a, int64_t a_stride, int rows, int pairs,
                        int32_t *out) {
    for (int row = 0; row < rows; ++row) {
        const int16_t *operand = a + row * a_stride;
#if defined(__SSE2__)
        __m128i sum[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(),
                          _mm_setzero_si128()};
        for (int pair = 0; pair < pairs; ++pair) {
            int32_t both;
            __builtin_memcpy(&both, operand + 2 * pair, 4);
            const __m128i *weights = reinterpret_cast<const __m128i *>(w + pair * 32);
            for (int i = 0; i < 4; ++i)
                sum[i] = _mm_add_epi32(
                    sum[i], _mm_madd_epi16(_mm_loadu_si128(weights + i), _mm_set1_epi32(both)));
        }
        for (int i = 0; i < 4; ++i)
            _mm_storeu_si128(reinterpret_cast<__m128i *>(out + row * 16) + i, sum[i]);
#else
        int32_t sum[16] = {0};
        for (int pair = 0; pair < pairs; ++pair) {
            const int32_t a0 = operand[2 * pair], a1 = operand[2 * pair + 1];
            const int16_t *weights = w + pair * 32;
            for (int c = 0; c < 16; ++c) sum[c] += weights[2 * c] * a0 + weights[2 * c + 1] * a1;
        }
        for (int c = 0; c < 16; ++c) out[row * 16 + c] = sum[c];
#endif
    }
}

// --- the fused kernel's products

using OperandByte = int16_t;
constexpr int kGroup = 8, kMaxPlanes = 1, kShared = 16;
#include "cpu/isa/shared_bits.inl"

template <int P>
constexpr int kMaxRows = 2;

#if defined(__SSE2__)

constexpr int kDepth = 2;
constexpr int max_groups(int rows, int) { return rows == 1 ? 2 : 1; }

template <int G, int R, int P, int B>
inline void dot(const Packed &p, int first, const int16_t *a, int64_t stride, int32_t *out) {
    __m128i sum[R][3 * G][2];
    const __m128i *bias = reinterpret_cast<const __m128i *>(p.bias + first * 24);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 3 * G; ++v)
            for (int i = 0; i < 2; ++i) sum[r][v][i] = _mm_load_si128(bias + 2 * v + i);
    const int8_t *w = p.w + first * p.group_stride;
    constexpr int kBytes = B < 8 ? 32 : 16;  // of eight units
    auto take = [&](auto step) QG_LAMBDA {
        constexpr int kStep = decltype(step)::value;
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            const auto *at =
                reinterpret_cast<const __m128i *>(w + (v / 3) * p.group_stride + (v % 3) * kBytes);
            __m128i low = _mm_load_si128(at), high;
            if constexpr (B == 8) {
                high = _mm_srai_epi16(_mm_unpackhi_epi8(low, low), 8);
                low = _mm_srai_epi16(_mm_unpacklo_epi8(low, low), 8);
            } else {
                low = _mm_srai_epi16(_mm_slli_epi16(low, B * kStep), 16 - B);
                high = _mm_srai_epi16(_mm_slli_epi16(_mm_load_si128(at + 1), B * kStep), 16 - B);
            }
#pragma GCC unroll 2
            for (int r = 0; r < R; ++r) {
                int32_t pair;
                __builtin_memcpy(&pair, a + 2 * kStep + r * stride, 4);
                const __m128i operand = _mm_set1_epi32(pair);
                sum[r][v][0] = _mm_add_epi32(sum[r][v][0], _mm_madd_epi16(low, operand));
                sum[r][v][1] = _mm_add_epi32(sum[r][v][1], _mm_madd_epi16(high, operand));
            }
        }
    };
    for (int left = p.steps; left > 0; left -= kSteps<B>, w += 3 * kBytes, a += 2 * kSteps<B>)
        each_step<kSteps<B>>(left, take);
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < 3 * G; ++v)
            for (int i = 0; i < 2; ++i)
                _mm_store_si128(reinterpret_cast<__m128i *>(out + (r * 3 * G + v) * 8) + i,
                                sum[r][v][i]);
}

#else

constexpr int kDepth = 1;
constexpr int max_groups(int, int) { return 1; }

template <int G, int R, int P, int B>
inline void dot(const Packed &p, int first, const int16_t *a, int64_t stride, int32_t *out) {
    // Unsigned, so that partial sums may wrap around modulo 2^32.
    uint32_t sum[R][24];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 24; ++c) sum[r][c] = static_cast<uint32_t>(p.bias[first * 24 + c]);
    const int8_t *w = p.w + first * p.group_stride;
    auto take = [&](auto step) QG_LAMBDA {
        constexpr int kStep = decltype(step)::value;
        int16_t weights[24];
        if constexpr (B == 8) {
            for (int c = 0; c < 24; ++c) weights[c] = w[c];
        } else {
            uint16_t shared[24];
            __builtin_memcpy(shared, w, sizeof shared);
            for (int c = 0; c < 24; ++c) {
                const auto high = static_cast<uint16_t>(shared[c] << (B * kStep));
                weights[c] = static_cast<int16_t>(static_cast<int16_t>(high) >> (16 - B));
            }
        }
        for (int r = 0; r < R; ++r) {
            const int16_t operand = a[r * stride + kStep];
            for (int c = 0; c < 24; ++c)
                sum[r][c] += static_cast<uint32_t>(static_cast<int32_t>(weights[c]) * operand);
        }
    };
    for (int left = p.steps; left > 0; left -= kSteps<B>, w += B < 8 ? 48 : 24, a += kSteps<B>)
        each_step<kSteps<B>>(left, take);
    __builtin_memcpy(out, sum, sizeof sum);
}

#endif

template <int P>
constexpr int kTileRows = 0;
constexpr int kTileGroups = 0;

#include "cpu/isa/lanes.inl"

// --- the backward's products
// Few accumulators: SSE2 has 16 registers, each with four units.

constexpr int kPanelVectors = 1, kFloatRows = 4, kFeatures = 2;
constexpr int panels_at_once(int rows) { return rows == 1 ? 3 : 1; }

// There is no multiplication benchmark for this instruction set.
inline int64_t multiply_only(int64_t) { return 0; }

}  // namespace

extern const Layout layout{kGroup, kDepth, kShared, Operand::s16, kFusedMultiplyAdd};

#include "cpu/isa/entries.inl"

}  // namespace portable
}  // namespace quant_gru
