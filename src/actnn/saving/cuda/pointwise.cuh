// What the pointwise kernels share: arguments, and 8 elements per thread.
//
// Macros: REAL, the dtype (0 float32, 1 float16, 2 bfloat16); ALIGNED, whether all tensors begin at
// a multiple of 16 bytes.
#pragma once

#include <stdint.h>

#include "kernel_runtime/cuda/ptx.cuh"

#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2

constexpr int kEach = 8, kThreads = 256;
constexpr int kWords = REAL == FLOAT32 ? 8 : 4;  // 32-bit words of 8 elements

struct Pointwise {
    const void *x;
    void *y;  // may be x
    uint8_t *bits;
    const int64_t *seed;
    int64_t n, tensor;
    float low, high, slope;
};

inline int64_t first_element() { return ((int64_t)blockIdx.x * kThreads + threadIdx.x) * kEach; }

inline float element(const void *x, int64_t at) {
    if (REAL == FLOAT32) return ((const float *)x)[at];
    const uint32_t word = ((const uint16_t *)x)[at];
    return REAL == FLOAT16 ? first_half(word) : bits_as_float(word << 16);
}

inline void set_element(void *y, int64_t at, float v) {
    if (REAL == FLOAT32)
        ((float *)y)[at] = v;
    else
        ((uint16_t *)y)[at] = (uint16_t)(REAL == FLOAT16 ? half_pair(v, v) : bf16_pair(v, v));
}

// Calls change(index in 0..7, number) for the elements of this thread and stores the results,
// unless y is null. Returns false if the thread has no elements.
template <class Change>
inline bool for_each(const Pointwise &p, const Change &change) {
    const int64_t first = first_element();
    if (first >= p.n) return false;
    if (!ALIGNED || first + kEach > p.n) {
        for (int i = 0; i < kEach && first + i < p.n; ++i) {
            const float v = change(i, element(p.x, first + i));
            if (p.y) set_element(p.y, first + i, v);
        }
        return true;
    }
    constexpr int kBytes = REAL == FLOAT32 ? 4 : 2;
    uint32_t words[kWords];
    const uint4 *from = (const uint4 *)((const char *)p.x + first * kBytes);
    for (int k = 0; k < kWords / 4; ++k) {
        const uint4 v = from[k];
        words[4 * k] = v.x, words[4 * k + 1] = v.y, words[4 * k + 2] = v.z, words[4 * k + 3] = v.w;
    }
    for (int k = 0; k < kWords; ++k) {
        const uint32_t word = words[k];
        if (REAL == FLOAT32) {
            words[k] = float_bits(change(k, bits_as_float(word)));
        } else if (REAL == FLOAT16) {
            const float a = change(2 * k, first_half(word));
            words[k] = half_pair(a, change(2 * k + 1, second_half(word)));
        } else {
            const float a = change(2 * k, bits_as_float(word << 16));
            words[k] = bf16_pair(a, change(2 * k + 1, bits_as_float(word & 0xFFFF0000u)));
        }
    }
    if (!p.y) return true;
    uint4 *to = (uint4 *)((char *)p.y + first * kBytes);
    for (int k = 0; k < kWords / 4; ++k)
        to[k] = {words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]};
    return true;
}
