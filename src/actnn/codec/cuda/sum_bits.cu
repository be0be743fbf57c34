// Bits of rows, clamped to what codes can have, and their inclusive sums. One block.
// Macro LONG: 1 for int64, 0 for int32.
#include <stdint.h>

#include "kernel_runtime/cuda/ptx.cuh"

constexpr int kThreads = 256;

struct Sums {
    const void *given;
    int64_t *bits, *ends;
    int64_t rows;
};

inline int64_t bits_of(const Sums &p, int64_t row) {
    const int64_t bits = LONG ? ((const int64_t *)p.given)[row] : ((const int32_t *)p.given)[row];
    return bits < 1 ? 1 : bits > 8 ? 8 : bits;
}

extern "C" __global__ void __launch_bounds__(kThreads) sum_bits(const __grid_constant__ Sums p) {
    SHARED_MEMORY(memory);
    int64_t *const sums = (int64_t *)memory;
    const int me = (int)threadIdx.x;
    // neighbouring rows belong to a thread
    const int64_t each = (p.rows + kThreads - 1) / kThreads, first = me * each;
    const int64_t last = first + each < p.rows ? first + each : p.rows;
    int64_t sum = 0;
    for (int64_t row = first; row < last; ++row) sum += bits_of(p, row);
    sums[me] = sum;
    __syncthreads();
    for (int distance = 1; distance < kThreads; distance *= 2) {
        const int64_t before = me < distance ? 0 : sums[me - distance];
        __syncthreads();
        sums[me] += before;
        __syncthreads();
    }
    int64_t end = sums[me] - sum;
    for (int64_t row = first; row < last; ++row) {
        const int64_t bits = bits_of(p, row);
        end += bits;
        p.bits[row] = bits;
        p.ends[row] = end;
    }
}
