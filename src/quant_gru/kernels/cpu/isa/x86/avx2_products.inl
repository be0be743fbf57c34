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
constexpr int kDepth = 4, kMaxPlanes = 2;
// The registers have room for 9 to 12 accumulators, besides operands and a weight.
template <int P>
constexpr int kMaxRows = P == 1 ? 3 : 1;
constexpr int max_groups(int rows, int planes) {
    return (rows == 1 ? 4 : rows == 2 ? 2 : 1) / planes;
}
#else
using OperandByte = int16_t;
constexpr int kDepth = 2, kMaxPlanes = 1;
// The registers have room for 9 to 12 accumulators, besides operands, a weight and a product.
template <int P>
constexpr int kMaxRows = 3;
constexpr int max_groups(int rows, int) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif

inline __m256i broadcast_operand(const OperandByte *a) {
    int32_t few;
    __builtin_memcpy(&few, a, 4);
    return _mm256_set1_epi32(few);
}

inline __m256i weights_at(const int8_t *w, int v, int64_t group_stride) {
#if defined(QG_AVXVNNI)
    const int8_t *at = w + (v / 3) * group_stride + (v % 3) * 32;
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(at));
#else
    const int8_t *at = w + (v / 3) * group_stride + (v % 3) * 16;
    return _mm256_cvtepi8_epi16(_mm_load_si128(reinterpret_cast<const __m128i *>(at)));
#endif
}

// The same for weights that are already extended to words.
inline __m256i weights_at(const int16_t *w, int v, int64_t group_stride) {
    const int16_t *at = w + (v / 3) * group_stride + (v % 3) * 16;
    return _mm256_load_si256(reinterpret_cast<const __m256i *>(at));
}

inline void multiply_add(__m256i &sum, __m256i operand, __m256i weights) {
#if defined(QG_AVXVNNI)
    // With the intrinsic, the compiler copies accumulators in such loops.
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(operand), "x"(weights));
#else
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(operand, weights));
#endif
}

template <int G, int R, int P, class Weight>
inline void dot_weights(const Packed &p, const Weight *w, int first, const OperandByte *a,
                        int64_t stride, int32_t *out) {
    __m256i sum[P][R][3 * G];
    const int32_t *bias = p.bias + first * 24;
#pragma GCC unroll 16
    for (int v = 0; v < 3 * G; ++v)
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            sum[0][r][v] = _mm256_load_si256(reinterpret_cast<const __m256i *>(bias + 8 * v));
            if (P == 2) sum[P - 1][r][v] = _mm256_setzero_si256();
        }
    const int64_t group_stride = p.group_stride, plane = stride / P;
    w += first * group_stride;
    for (int step = 0; step < p.steps; ++step, w += 24 * kDepth, a += kDepth) {
        __m256i operand[P][R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
            for (int half = 0; half < P; ++half)
                operand[half][r] = broadcast_operand(a + r * stride + half * plane);
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            const __m256i weights = weights_at(w, v, group_stride);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                for (int half = 0; half < P; ++half)
                    multiply_add(sum[half][r][v], operand[half][r], weights);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < 3 * G; ++v) {
            __m256i total = sum[0][r][v];
            if (P == 2) total = _mm256_add_epi32(total, _mm256_slli_epi32(sum[P - 1][r][v], 8));
            _mm256_store_si256(reinterpret_cast<__m256i *>(out + (r * 3 * G + v) * 8), total);
        }
}

// Not inline: the loop needs all registers.
template <int G, int R, int P>
QG_ALONE void dot(const Packed &p, int first, const OperandByte *a, int64_t stride, int32_t *out) {
    dot_weights<G, R, P>(p, p.w, first, a, stride, out);
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

template <int R, int P, class Weight>
QG_ALONE void dot_few(const Packed &p, const Weight *w, int first, const OperandByte *a,
                      int64_t stride, int32_t *out) {
    dot_weights<1, R, P>(p, w, first, a, stride, out);
}

template <int P, class Weight>
inline void dot_rows_of_tile(int rows, const Packed &p, const Weight *w, int first,
                             const OperandByte *a, int64_t stride, int32_t *out) {
    static_assert(kMaxRows<1> == 3, "what is left are one or two rows");
    for (; rows >= 3; rows -= 3, a += 3 * stride, out += 3 * 24)
        dot_few<3, P>(p, w, first, a, stride, out);
    if (rows == 2) dot_few<2, P>(p, w, first, a, stride, out);
    if (rows == 1) dot_few<1, P>(p, w, first, a, stride, out);
}

template <int P>
inline void dot_tiles(int rows, int, const Packed &p, int first, const OperandByte *a,
                      int64_t stride, int32_t *out) {
#if !defined(QG_AVXVNNI)
    if (p.words) return dot_rows_of_tile<P>(rows, p, p.words, first, a, stride, out);
#endif
    dot_rows_of_tile<P>(rows, p, p.w, first, a, stride, out);
}
