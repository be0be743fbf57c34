// For every processor: plain C++.
#include <cstdint>

namespace {

constexpr int kDotRows = 4;

// out[row][channel] = sum over pairs of w[pair][channel][2] . a[row][pair][2], in int32.
inline void dot(const int16_t *w, const int16_t *a, int64_t a_stride, int rows, int pairs,
                int32_t *out) {
    for (int row = 0; row < rows; ++row) {
        int32_t sum[16] = {0};
        const int16_t *operand = a + row * a_stride;
        for (int pair = 0; pair < pairs; ++pair) {
            const int32_t a0 = operand[2 * pair], a1 = operand[2 * pair + 1];
            const int16_t *weights = w + pair * 32;
            for (int c = 0; c < 16; ++c) sum[c] += weights[2 * c] * a0 + weights[2 * c + 1] * a1;
        }
        for (int c = 0; c < 16; ++c) out[row * 16 + c] = sum[c];
    }
}

}  // namespace

#define QG_NAMESPACE portable
#include "kernel.inl"
