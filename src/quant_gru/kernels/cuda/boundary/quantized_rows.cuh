// Where codes of an input go in whole calls: rows of the batch at steps, and NaN going along in
// time.
#ifndef QUANT_GRU_TARGET_CUH
#define QUANT_GRU_TARGET_CUH

#include "gates/arithmetic.cuh"

// Into their container, or in signed bytes for a product of bytes.
struct Target {
    void *codes;       // (T, N, features), where `planes` is 0
    int8_t *bytes;     // (planes, T, N, padded), otherwise
    uint8_t *nan;      // (N, nan_stride): whether the row is NaN at a step
    int64_t kind;      // of the codes
    int64_t planes;    // 0, 1 or, where x = 256 * first + second + 128, 2
    int64_t padded;    // features with padding
    int64_t x_offset;  // codes are kept less this in bytes
    int64_t T, N, features, nan_stride;
    uint32_t *counts;  // (stretches), of the projection that follows
    int64_t stretches;
};

// Nothing of the projection is there yet.
inline void clear_counts(const Target &o) {
    if (blockIdx.x) return;
    for (int i = threadIdx.x; i < (int)o.stretches; i += blockDim.x) o.counts[i] = 0;
}

inline void put(const Target &o, int64_t row, int k, int code) {
    if (!o.planes) {
        write_code(o.codes, o.kind, row * o.features + k, code);
        return;
    }
    const int v = code - (int)o.x_offset;
    int8_t *const to = o.bytes + row * o.padded + k;
    if (o.planes == 1) {
        *to = (int8_t)v;
    } else {
        *to = (int8_t)(v >> 8);
        to[o.T * o.N * o.padded] = (int8_t)((v & 255) - 128);
    }
}

// The row of a warp has its codes: their padding, and its NaN.
inline void finish_row(const Target &o, int row, int lane, bool nan) {
    if (o.planes)
        for (int k = (int)o.features + lane; k < o.padded; k += 32) put(o, row, k, (int)o.x_offset);
    const int t = row / (int)o.N, n = row % (int)o.N;
    if (lane == 0) o.nan[n * o.nan_stride + t] = nan;
}

#endif
