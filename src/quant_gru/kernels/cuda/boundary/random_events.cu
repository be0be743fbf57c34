// Draws the random events that quant_gru/integer/random.py defines.
#include "c99/philox.h"

struct Events {
    const int64_t *seed;
    uint8_t *events;  // (A, B, C)
    int64_t A, B, C;
    int64_t chance;  // the probability times 2^32
    int64_t stream;
};

extern "C" __global__ void __launch_bounds__(128) events(const __grid_constant__ Events p) {
    const uint64_t seed = (uint64_t)*p.seed;
    for (int64_t row = blockIdx.x; row < p.A * p.B; row += gridDim.x) {
        const uint32_t a = (uint32_t)(row / p.B), b = (uint32_t)(row % p.B);
        for (int64_t c = threadIdx.x; c < p.C; c += blockDim.x) {
            const uint32_t word = qg_philox(a, b, (uint32_t)c, (uint32_t)p.stream, seed);
            p.events[row * p.C + c] = (int64_t)word < p.chance;
        }
    }
}
