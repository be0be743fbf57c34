// Conversions between real values and codes of up to 16 bits. A warp processes one row of features.
#include "boundary/quantize.cuh"

struct Border {
    const float *real;  // (rows, features)
    float *values;      // (rows, features)
    void *codes;        // (rows, features)
    uint8_t *nan;       // (rows)
    int64_t kind, rows, features;
    int64_t zero;
    float scale, lo, hi;  // limits minus the zero point
};

extern "C" __global__ void __launch_bounds__(256) quantize(const __grid_constant__ Border b) {
    const int64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= b.rows) return;
    const int64_t start = row * b.features;
    const int lane = threadIdx.x % 32, features = (int)b.features;
    bool seen = false;
#pragma unroll 4
    for (int i = lane; i < features; i += 32) {
        const int code = quantized(b.real[start + i], b.scale, b.lo, b.hi, seen);
        write_code(b.codes, b.kind, start + i, code + b.zero);
    }
    seen = any_lane(seen);
    if (lane == 0) b.nan[row] = seen;
}

// Compute s * (q - z), which is exact. Rows flagged in `nan` become NaN.
extern "C" __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ Border b) {
    const int64_t row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= b.rows) return;
    const int64_t start = row * b.features;
    const int features = (int)b.features;
    const bool nan = b.nan && b.nan[row];
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < features; i += 32) {
        const int q = (int)(read_code(b.codes, b.kind, start + i) - b.zero);
        b.values[start + i] =
            nan ? __int_as_float(0x7fc00000) : Magic<float>::times((float)q, b.scale);
    }
}
