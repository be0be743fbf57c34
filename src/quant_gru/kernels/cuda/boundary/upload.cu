// Writes numbers of the host, which are arguments of the launch.
#include <stdint.h>

constexpr int kMost = 496;  // arguments have 4096 bytes

struct Upload {
    int64_t *to;
    int64_t count;
    int64_t numbers[kMost];
};

extern "C" __global__ void __launch_bounds__(512) upload(const __grid_constant__ Upload p) {
    if (threadIdx.x < p.count) p.to[threadIdx.x] = p.numbers[threadIdx.x];
}
