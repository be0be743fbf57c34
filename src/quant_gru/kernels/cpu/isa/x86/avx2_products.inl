// Products of AVX2 and AVX-VNNI. Included by avx2.inl, inside its namespace.

// --- the general kernel's products

constexpr int kDotRows = 4;

inline __m256i broadcast_pair(const int16_t *a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return _mm256_set1_epi32(pair);
}

template <int kCount>
inline void dot_rows(const int16_t *w, const int16_t *a, int64_t a_stride, int pairs,
                     int32_t *out) {
    __m256i low[kCount], high[kCount];
    for (int row = 0; row < kCount; ++row) low[row] = high[row] = _mm256_setzero_si256();
    for (int pair = 0; pair < pairs; ++pair) {
        const __m256i *weights = reinterpret_cast<const __m256i *>(w + pair * 32);
        const __m256i w0 = _mm256_loadu_si256(weights), w1 = _mm256_loadu_si256(weights + 1);
#pragma GCC unroll 4
        for (int row = 0; row < kCount; ++row) {
            const __m256i operand = broadcast_pair(a + row * a_stride + 2 * pair);
            low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(w0, operand));
            high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(w1, operand));
        }
    }
    for (int row = 0; row < kCount; ++row) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + row * 16), low[row]);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + row * 16 + 8), high[row]);
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

constexpr int kGroup = 8;
#if defined(QG_AVXVNNI)
using OperandByte = uint8_t;
constexpr int kDepth = 4, kMaxPlanes = 2, kShared = 8;
// The registers have room for 9 to 12 accumulators, besides operands and a weight.
template <int P>
constexpr int kMaxRows = P == 1 ? 3 : 1;
constexpr int max_groups(int rows, int planes) {
    return (rows == 1 ? 4 : rows == 2 ? 2 : 1) / planes;
}
#else
using OperandByte = int16_t;
constexpr int kDepth = 2, kMaxPlanes = 1, kShared = 16;
// The registers have room for 9 to 12 accumulators, besides operands, a weight and a product.
template <int P>
constexpr int kMaxRows = 3;
constexpr int max_groups(int rows, int) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

#include "cpu/isa/shared_bits.inl"

inline __m256i broadcast_operand(const OperandByte *a) {
    int32_t few;
    __builtin_memcpy(&few, a, 4);
    return _mm256_set1_epi32(few);
}

constexpr int kWords = 16;  // instead of B, for weights that are extended to words

// The bytes that eight units of a step, or of the steps that share elements, take.
template <int B>
constexpr int kVectorBytes = kShared == 16 && B == 8 ? 16 : 32;

// Weights of `kStep` of the steps that share elements; with VNNI times 2^(8 - B).
template <int B, int kStep>
inline __m256i weights_at(const int8_t *w, int v, int64_t group_stride) {
    const int8_t *at = w + (v / 3) * group_stride + (v % 3) * kVectorBytes<B>;
    if constexpr (kVectorBytes<B> == 16)
        return _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(at)));
    const __m256i weights = _mm256_load_si256(reinterpret_cast<const __m256i *>(at));
    if constexpr (B >= 8) return weights;
    const __m256i moved = kStep ? _mm256_slli_epi16(weights, B * kStep) : weights;
#if defined(QG_AVXVNNI)
    return _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(256 - (256 >> B))));
#else
    return _mm256_srai_epi16(moved, 16 - B);
#endif
}

inline void multiply_add(__m256i &sum, __m256i operand, __m256i weights) {
#if defined(QG_AVXVNNI)
    // With the intrinsic, the compiler copies accumulators in such loops.
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(operand), "x"(weights));
#else
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(operand, weights));
#endif
}

template <int G, int R, int P, int B>
inline void dot_weights(const Packed &p, int first, const OperandByte *a, int64_t stride,
                        int32_t *out) {
    constexpr bool kScaled = kShared == 8 && B < 8;
    __m256i sum[P][R][3 * G];
    const auto *bias = reinterpret_cast<const __m256i *>(p.bias + first * 24);
#pragma GCC unroll 16
    for (int v = 0; v < 3 * G; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            sum[0][r][v] = kScaled ? _mm256_setzero_si256() : _mm256_load_si256(bias + v);
            if (P == 2) sum[P - 1][r][v] = _mm256_setzero_si256();
        }
    const int64_t group_stride = B == kWords ? 2 * p.word_stride : p.group_stride;
    const int64_t plane = stride / P;
    const int8_t *w = B == kWords ? reinterpret_cast<const int8_t *>(p.words) : p.w;
    w += first * group_stride;
    auto take = [&](auto step) QG_LAMBDA {
        constexpr int kStep = decltype(step)::value;
        __m256i operand[P][R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int half = 0; half < P; ++half)
                operand[half][r] =
                    broadcast_operand(a + kStep * kDepth + r * stride + half * plane);
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            const __m256i weights = weights_at<B, kStep>(w, v, group_stride);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int half = 0; half < P; ++half)
                    multiply_add(sum[half][r][v], operand[half][r], weights);
        }
    };
    for (int left = p.steps; left > 0;
         left -= kSteps<B>, w += 3 * kVectorBytes<B>, a += kSteps<B> * kDepth)
        each_step<kSteps<B>>(left, take);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            __m256i total = sum[0][r][v], high = sum[P - 1][r][v];
            if (kScaled) {
                total = _mm256_add_epi32(_mm256_srai_epi32(total, kScaled ? 8 - B : 0),
                                         _mm256_load_si256(bias + v));
                high = _mm256_srai_epi32(high, kScaled ? 8 - B : 0);
            }
            if (P == 2) total = _mm256_add_epi32(total, _mm256_slli_epi32(high, 8));
            _mm256_store_si256(reinterpret_cast<__m256i *>(out + (r * 3 * G + v) * 8), total);
        }
}

// Not inline: the loop needs all registers.
template <int G, int R, int P, int B>
QG_ALONE void dot(const Packed &p, int first, const OperandByte *a, int64_t stride, int32_t *out) {
    dot_weights<G, R, P, B>(p, first, a, stride, out);
}

// Benchmark: runs `loops` rounds of multiplications only. Returns the multiply-accumulates.
inline int64_t multiply_only(int64_t loops) {
    __m256i sum[12];
    __m256i operand = _mm256_set1_epi8(1);
#pragma GCC unroll 12
    for (int i = 0; i < 12; ++i) sum[i] = _mm256_setzero_si256();
    for (int64_t loop = 0; loop < loops; ++loop) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; ++i) {
            // The barriers keep the compiler from reusing or removing products.
            __asm__ volatile("" : "+x"(operand));
            multiply_add(sum[i], operand, operand);
            __asm__ volatile("" : "+x"(sum[i]));
        }
    }
    return loops * 12 * 8 * kDepth;
}

// So many rows share the weights of a group while these are in the nearest cache. The rows then go
// through their gates together.
template <int P>
constexpr int kTileRows = P == 1 ? 36 : 0;
constexpr int kTileGroups = 1;

template <int P, int B>
inline void dot_rows_of_tile(int rows, const Packed &p, int first, const OperandByte *a,
                             int64_t stride, int32_t *out) {
    static_assert(kMaxRows<1> == 3, "what is left are one or two rows");
    for (; rows >= 3; rows -= 3, a += 3 * stride, out += 3 * 24)
        dot<1, 3, P, B>(p, first, a, stride, out);
    if (rows == 2) dot<1, 2, P, B>(p, first, a, stride, out);
    if (rows == 1) dot<1, 1, P, B>(p, first, a, stride, out);
}

template <int P>
inline void dot_tiles(int rows, int, const Packed &p, int first, const OperandByte *a,
                      int64_t stride, int32_t *out) {
#if !defined(QG_AVXVNNI)
    if (p.words) return dot_rows_of_tile<P, kWords>(rows, p, first, a, stride, out);
#endif
    if (p.bits == 4) return dot_rows_of_tile<P, 4>(rows, p, first, a, stride, out);
    if (p.bits == 2) return dot_rows_of_tile<P, 2>(rows, p, first, a, stride, out);
    if (p.bits == 1) return dot_rows_of_tile<P, 1>(rows, p, first, a, stride, out);
    dot_rows_of_tile<P, 8>(rows, p, first, a, stride, out);
}
