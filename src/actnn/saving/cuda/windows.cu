// Positions in the input of a max pool, and positions in the window in one byte.
//
// Tensors are (outer, output positions, inner) in memory: inner is 1, or the channels if they are
// last. Sizes of missing dimensions are 1.
#include <stdint.h>

constexpr int kThreads = 256;

struct Windows {
    int64_t *indices;
    uint8_t *offsets;
    int64_t n, inner;
    int32_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
};

struct Starts {
    int64_t d, h, w;

    Starts(const Windows &p, int64_t i) {
        const int64_t positions = (int64_t)p.out[0] * p.out[1] * p.out[2];
        const int64_t position = i / p.inner % positions;
        w = position % p.out[2] * p.stride[2] - p.padding[2];
        h = position / p.out[2] % p.out[1] * p.stride[1] - p.padding[1];
        d = position / p.out[2] / p.out[1] * p.stride[0] - p.padding[0];
    }
};

inline int64_t element_index() { return (int64_t)blockIdx.x * kThreads + threadIdx.x; }

extern "C" __global__ void __launch_bounds__(kThreads)
    window_offsets(const __grid_constant__ Windows p) {
    const int64_t i = element_index();
    if (i >= p.n) return;
    const Starts start(p, i);
    const int64_t index = p.indices[i], row = index / p.in[2];
    const int64_t w = (index % p.in[2] - start.w) / p.dilation[2];
    const int64_t h = (row % p.in[1] - start.h) / p.dilation[1];
    const int64_t d = (row / p.in[1] - start.d) / p.dilation[0];
    p.offsets[i] = (uint8_t)((d * p.kernel[1] + h) * p.kernel[2] + w);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    window_indices(const __grid_constant__ Windows p) {
    const int64_t i = element_index();
    if (i >= p.n) return;
    const Starts start(p, i);
    const int offset = p.offsets[i];
    const int64_t w = offset % p.kernel[2] * p.dilation[2] + start.w;
    const int64_t h = offset / p.kernel[2] % p.kernel[1] * p.dilation[1] + start.h;
    const int64_t d = offset / p.kernel[2] / p.kernel[1] * p.dilation[0] + start.d;
    p.indices[i] = (d * p.in[1] + h) * p.in[2] + w;
}
