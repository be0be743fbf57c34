/* Philox4x32-10 in C99, as defined in quant_gru/integer/random.py. The CPU and CUDA share it. */
#ifndef QUANT_GRU_PHILOX_H
#define QUANT_GRU_PHILOX_H

#include <stdint.h>

/* First word of the output for the counter (a, b, c, stream) and the key `seed`. */
static inline uint32_t qg_philox(uint32_t a, uint32_t b, uint32_t c, uint32_t stream,
                                 uint64_t seed) {
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < 10; ++i) {
        const uint64_t p0 = (uint64_t)0xD2511F53u * a, p1 = (uint64_t)0xCD9E8D57u * c;
        a = (uint32_t)(p1 >> 32) ^ b ^ key0;
        b = (uint32_t)p1;
        c = (uint32_t)(p0 >> 32) ^ stream ^ key1;
        stream = (uint32_t)p0;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return a;
}

#endif
