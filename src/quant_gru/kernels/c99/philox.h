/* Random words as quant_gru/integer/random.py defines them. The CPU and CUDA share this file. */
#ifndef QUANT_GRU_PHILOX_H
#define QUANT_GRU_PHILOX_H

#include "kernel_runtime/c99/philox.h"

/* First word of the output for the counter (a, b, c, stream) and the key `seed`. */
static inline uint32_t qg_philox(uint32_t a, uint32_t b, uint32_t c, uint32_t stream,
                                 uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    PHILOX4X32(a, b, c, stream, key0, key1, 10)
    return a;
}

#endif
