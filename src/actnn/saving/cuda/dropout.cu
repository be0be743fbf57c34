// y = x / (1 - p) for the elements that a counter-based generator keeps, else 0. The same seed
// keeps the same elements, so that the gradient needs no mask.
//
// `low` is p, `slope` is 1 / (1 - p).
#include "actnn/saving/cuda/pointwise.cuh"
#include "kernel_runtime/c99/philox.h"

extern "C" __global__ void __launch_bounds__(kThreads)
    dropout(const __grid_constant__ Pointwise p) {
    const int64_t first = first_element();
    if (first >= p.n) return;
    const uint64_t seed = (uint64_t)*p.seed, block = (uint64_t)first / kEach;
    uint32_t words[kEach];
    for (int part = 0; part < 2; ++part) {
        uint32_t a = (uint32_t)block, b = (uint32_t)(block >> 32), c = part, d = 0;
        uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
        PHILOX4X32(a, b, c, d, key0, key1, 7)
        words[4 * part] = a, words[4 * part + 1] = b;
        words[4 * part + 2] = c, words[4 * part + 3] = d;
    }
    for_each(p, [&](int i, float v) {
        const float u = (float)(words[i] >> 8) * 0x1p-24f;
        return u < p.low ? 0.f : v * p.slope;
    });
}
