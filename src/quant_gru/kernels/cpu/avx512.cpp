// AVX-512 with VNNI: vpdpwssd, 32 products of 16 bits an instruction.
#include <immintrin.h>

#include <cstdint>

namespace {

constexpr int kDotRows = 8;

inline __m512i broadcast_pair(const int16_t *a) {
    int32_t pair;
    __builtin_memcpy(&pair, a, 4);
    return _mm512_set1_epi32(pair);
}

template <int kCount>
inline void dot_rows(const int16_t *w, const int16_t *a, int64_t a_stride, int pairs,
                     int32_t *out) {
    // four chains per row where there are few rows, to cover the latency
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
        case 4:
            dot_rows<4>(w, a, a_stride, pairs, out);
            break;
        case 5:
            dot_rows<5>(w, a, a_stride, pairs, out);
            break;
        case 6:
            dot_rows<6>(w, a, a_stride, pairs, out);
            break;
        case 7:
            dot_rows<7>(w, a, a_stride, pairs, out);
            break;
        default:
            dot_rows<8>(w, a, a_stride, pairs, out);
            break;
    }
}

}  // namespace

#define QG_NAMESPACE avx512
#include "kernel.inl"
