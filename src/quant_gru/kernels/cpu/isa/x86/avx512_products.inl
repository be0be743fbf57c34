// Products of AVX-512 with VNNI. Included by avx512.inl, inside its namespace.

// --- the general kernel's products

constexpr int kDotRows = 8;

inline __m512i broadcast_pair(const int16_t *a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return _mm512_set1_epi32(pair);
}

template <int kCount>
inline void dot_rows(const int16_t *w, const int16_t *a, int64_t a_stride, int pairs,
                     int32_t *out) {
    // With few rows, four independent chains per row hide the latency.
    constexpr int kChains = kCount < 4 ? 4 : 1;
    __m512i sum[kCount][kChains];
    for (int row = 0; row < kCount; ++row)
        for (int chain = 0; chain < kChains; ++chain) sum[row][chain] = _mm512_setzero_si512();
    int pair = 0;
    for (; pair + kChains <= pairs; pair += kChains)
#pragma GCC unroll 8
        for (int chain = 0; chain < kChains; ++chain) {
            const __m512i weights = _mm512_loadu_si512(w + (pair + chain) * 32);
#pragma GCC unroll 8
            for (int row = 0; row < kCount; ++row)
                sum[row][chain] =
                    _mm512_dpwssd_epi32(sum[row][chain], weights,
                                        broadcast_pair(a + row * a_stride + 2 * (pair + chain)));
        }
    for (; pair < pairs; ++pair) {
        const __m512i weights = _mm512_loadu_si512(w + pair * 32);
        for (int row = 0; row < kCount; ++row)
            sum[row][0] = _mm512_dpwssd_epi32(sum[row][0], weights,
                                              broadcast_pair(a + row * a_stride + 2 * pair));
    }
    for (int row = 0; row < kCount; ++row) {
        __m512i total = sum[row][0];
        for (int chain = 1; chain < kChains; ++chain)
            total = _mm512_add_epi32(total, sum[row][chain]);
        _mm512_storeu_si512(out + row * 16, total);
    }
}

template <int kCount = kDotRows>
QG_ALONE void dot_pairs(const int16_t *w, const int16_t *a, int64_t a_stride, int rows, int pairs,
                        int32_t *out) {
    if constexpr (kCount > 1) {
        if (rows < kCount) return dot_pairs<kCount - 1>(w, a, a_stride, rows, pairs, out);
    }
    dot_rows<kCount>(w, a, a_stride, pairs, out);
}

// --- the fused kernel's products

using OperandByte = uint8_t;
constexpr int kGroup = 16, kDepth = 4, kMaxPlanes = 2;
#if defined(QG_AMX)
constexpr int kShared = 0;  // tiles multiply bytes
#else
constexpr int kShared = 8;
#endif
#include "cpu/isa/shared_bits.inl"

template <int P>
constexpr int kMaxRows = 4;
// 12 accumulators hide the latency of one row; the registers have room for 24
constexpr int max_groups(int rows, int planes) { return (rows == 1 ? 4 : 2) / planes; }

inline __m512i broadcast_quad(const uint8_t *a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    return _mm512_set1_epi32(quad);
}

inline const __m512i &weights_of(const int8_t *w, int v, int64_t group_stride) {
    return *reinterpret_cast<const __m512i *>(w + (v / 3) * group_stride + (v % 3) * 64);
}

// Weights of `kStep` of the steps that share bytes, times 2^(8 - B).
template <int B, int kStep>
inline __m512i weights_at(const int8_t *w, int v, int64_t group_stride) {
    const __m512i weights = _mm512_load_si512(&weights_of(w, v, group_stride));
    if constexpr (B == 8) return weights;
    const __m512i moved = kStep ? _mm512_slli_epi16(weights, B * kStep) : weights;
    return _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(256 - (256 >> B))));
}

// Not inline: among the other values of a step, compilers would leave accumulators in memory.
template <int G, int R, int P, int B>
QG_ALONE void dot(const Packed &p, int first, const uint8_t *a, int64_t stride, int32_t *out) {
    __m512i sum[P][R][3 * G];
    const int32_t *bias = p.bias + first * 48;
#pragma GCC unroll 16
    for (int v = 0; v < 3 * G; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            sum[0][r][v] = B == 8 ? _mm512_load_si512(bias + 16 * v) : _mm512_setzero_si512();
            if (P == 2) sum[P - 1][r][v] = _mm512_setzero_si512();
        }
    const int8_t *w = p.w + first * p.group_stride;
    const int64_t group_stride = p.group_stride, plane = stride / P;
    auto take = [&, &sum = sum](auto step) QG_LAMBDA {
        constexpr int kStep = decltype(step)::value;
        const uint8_t *const at = a + 4 * kStep;
        // One plane: operands stay in registers and weights are streamed. Two planes: the reverse.
        __m512i operand[R], weights[P == 2 ? 3 * G : 1];
        if (P == 2)
#pragma GCC unroll 16
            for (int v = 0; v < 3 * G; ++v)
                weights[P == 2 ? v : 0] = weights_at<B, kStep>(w, v, group_stride);
#pragma GCC unroll 2
        for (int half = 0; half < P; ++half) {
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) operand[r] = broadcast_quad(at + r * stride + half * plane);
#pragma GCC unroll 16
            for (int v = 0; v < 3 * G; ++v) {
                if (P == 1 && (R > 1 || B < 8))
                    weights[0] = weights_at<B, kStep>(w, v, group_stride);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
                    // With the intrinsic, the compiler copies accumulators in such loops.
                    if constexpr (R == 1 && P == 1 && B == 8)
                        __asm__("vpdpbusd %2, %1, %0"
                                : "+v"(sum[half][r][v])
                                : "v"(operand[r]), "m"(weights_of(w, v, group_stride)));
                    else
                        __asm__("vpdpbusd %2, %1, %0"
                                : "+v"(sum[half][r][v])
                                : "v"(operand[r]), "v"(weights[P == 2 ? v : 0]));
            }
        }
    };
    for (int left = p.steps; left > 0; left -= kSteps<B>, w += 192, a += 4 * kSteps<B>)
        each_step<kSteps<B>>(left, take);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            __m512i total = sum[0][r][v], high = sum[P - 1][r][v];
            if (B < 8) {
                total = _mm512_add_epi32(_mm512_srai_epi32(total, 8 - B),
                                         _mm512_load_si512(bias + 16 * v));
                high = _mm512_srai_epi32(high, 8 - B);
            }
            if (P == 2) total = _mm512_add_epi32(total, _mm512_slli_epi32(high, 8));
            _mm512_store_si512(out + (r * 3 * G + v) * 16, total);
        }
}
