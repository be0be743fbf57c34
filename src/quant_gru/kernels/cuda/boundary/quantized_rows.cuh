// The destination of a layer's input codes in whole calls: codes by step and row, and NaN flags
// with steps contiguous.
#ifndef QUANT_GRU_TARGET_CUH
#define QUANT_GRU_TARGET_CUH

#include "gates/arithmetic.cuh"

// Codes are stored in their container, or as signed bytes for an int8 GEMM.
struct Target {
    void *codes;       // (T, N, features), if `planes` is 0
    int8_t *bytes;     // (planes, T, N, padded), otherwise
    uint8_t *nan;      // (N, nan_stride): whether a row is NaN at a step
    int64_t kind;      // of the codes
    int64_t planes;    // 0, 1, or 2 with x = 256 * first + second + 128
    int64_t padded;    // features with padding
    int64_t x_offset;  // subtracted from codes that are stored as bytes
    int64_t T, N, features, nan_stride;
    uint32_t *counts;  // (stretches), counters of the projection that follows
    int64_t stretches;
};

// Reset the counters by which the projection announces its results.
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

// Write the padding and the NaN flag of a row whose codes a warp has written.
inline void finish_row(const Target &o, int row, int lane, bool nan) {
    if (o.planes)
        for (int k = (int)o.features + lane; k < o.padded; k += 32) put(o, row, k, (int)o.x_offset);
    const int t = row / (int)o.N, n = row % (int)o.N;
    if (lane == 0) o.nan[n * o.nan_stride + t] = nan;
}

#endif
