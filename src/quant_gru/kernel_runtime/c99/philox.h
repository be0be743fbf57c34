/* Philox4x32 in C99, shared by CPU and CUDA.
   Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */
#ifndef KERNEL_RUNTIME_PHILOX_H
#define KERNEL_RUNTIME_PHILOX_H

#include <stdint.h>

/* The whole product of two words; a definition before this one may compute it in another way. */
#ifndef PHILOX_PRODUCT
#define PHILOX_PRODUCT(a, b) ((uint64_t)(a) * b)
#endif

/* Replaces the counter in the uint32_t variables a, b, c and d by four random words. `key0` and
   `key1` are variables, too, and change. A macro, so that no compiler puts them into memory. */
#define PHILOX4X32(a, b, c, d, key0, key1, rounds)                                               \
    for (int round = 0; round < (rounds); ++round) {                                             \
        const uint64_t p0 = PHILOX_PRODUCT(0xD2511F53u, a), p1 = PHILOX_PRODUCT(0xCD9E8D57u, c); \
        a = (uint32_t)(p1 >> 32) ^ b ^ key0;                                                     \
        b = (uint32_t)p1;                                                                        \
        c = (uint32_t)(p0 >> 32) ^ d ^ key1;                                                     \
        d = (uint32_t)p0;                                                                        \
        key0 += 0x9E3779B9u;                                                                     \
        key1 += 0xBB67AE85u;                                                                     \
    }

#endif
