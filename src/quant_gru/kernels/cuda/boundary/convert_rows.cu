// Converts real values between a caller's layout and that of kernels, float32 (T, N, features). The
// caller's dtype or order of rows may differ, or its rows are packed. A warp converts one row.
#include <stdint.h>

#include "kernel_runtime/cuda/ptx.cuh"

struct Rows {
    const void *real;                      // [t * step + n * next + feature], or packed
    void *to;                              // [t * to_step + n * to_next + feature], or packed
    const int64_t *order;                  // (N), row n is row order[n] of `real`; or null
    const int64_t *packed;                 // (T + 1), start of each step's rows in `real`; or null
    const int64_t *to_packed;              // the same for `to`
    int64_t kind, to_kind;                 // 0 float32, 1 float16, 2 bfloat16, 3 float64
    int64_t step, next, to_step, to_next;  // in values
    int64_t T, N, features;
};

struct Conversions {
    Rows each[4];  // indexed by blockIdx.y
};

// Return the offset of row n of step t, or -1 if a packed sequence has no such row.
inline int64_t start_of(const int64_t *packed, int64_t step, int64_t next, int t, int64_t n) {
    if (!packed) return t * step + n * next;
    return n < packed[t + 1] - packed[t] ? (packed[t] + n) * next : -1;
}

inline double read(const void *from, int64_t kind, int64_t i) {
    if (kind == 0) return ((const float *)from)[i];
    if (kind == 1) return first_half(((const uint16_t *)from)[i]);
    if (kind == 2) return __int_as_float((uint32_t)((const uint16_t *)from)[i] << 16);
    return ((const double *)from)[i];
}

inline void write(void *to, int64_t kind, int64_t i, float value) {
    if (kind == 0)
        ((float *)to)[i] = value;
    else if (kind == 1)
        ((uint16_t *)to)[i] = (uint16_t)half_pair(value, 0.f);
    else if (kind == 2)
        ((uint16_t *)to)[i] = (uint16_t)bf16_pair(value, 0.f);
    else
        ((double *)to)[i] = value;
}

// Rows that are missing from a packed `real` become 0; rows missing from a packed `to` are skipped.
extern "C" __global__ void __launch_bounds__(256) convert(const __grid_constant__ Conversions all) {
    const Rows &p = all.each[blockIdx.y];
    const int64_t row = (int64_t)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= p.T * p.N) return;
    const int t = (int)(row / p.N), features = (int)p.features;
    const int64_t n = row % p.N;
    int64_t taken = n;
    if (p.order) {
        // the caller supplies the order; clamping prevents reads outside its rows
        taken = p.order[n];
        taken = taken < 0 ? 0 : taken < p.N ? taken : p.N - 1;
    }
    const int64_t from = start_of(p.packed, p.step, p.next, t, taken);
    const int64_t to = start_of(p.to_packed, p.to_step, p.to_next, t, n);
    if (to < 0) return;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < features; i += 32)
        write(p.to, p.to_kind, to + i, from < 0 ? 0.f : (float)read(p.real, p.kind, from + i));
}
