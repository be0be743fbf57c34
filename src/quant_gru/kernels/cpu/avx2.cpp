// AVX2 and FMA: vpmaddwd on sign-extended weights (vpmaddubsw would saturate).
#include <immintrin.h>

#include <cstdint>

namespace {

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

inline void dot(const int16_t *w, const int16_t *a, int64_t a_stride, int rows, int pairs,
                int32_t *out) {
    switch (rows) {
        case 1:
            dot_rows<1>(w, a, a_stride, pairs, out);
            break;
        case 2:
            dot_rows<2>(w, a, a_stride, pairs, out);
            break;
        case 3:
            dot_rows<3>(w, a, a_stride, pairs, out);
            break;
        default:
            dot_rows<4>(w, a, a_stride, pairs, out);
            break;
    }
}

}  // namespace

#define QG_NAMESPACE avx2
#include "kernel.inl"
