/* Parameters of a group and codes of its elements, shared by CPU and CUDA.
   docs/actnn_codec.md and codec/reference.py define them. */
#ifndef ACTNN_GROUP_H
#define ACTNN_GROUP_H

#include <stdint.h>
#ifndef __CUDACC__
#include <math.h>
#include <string.h>
#endif

#include "kernel_runtime/c99/philox.h"

/* Rounds of Philox. */
#define ACTNN_ROUNDS 7
/* 2^-100, and the largest number of bfloat16. */
#define ACTNN_LEAST_STEP 0x1p-100f
#define ACTNN_LARGEST 0x1.FEp127f
#define ACTNN_NAN_PARAMETERS 0x7FC0u
/* 2^23 as a word: adding an integer below 2^23 to the word adds it to the number. */
#define ACTNN_MAGIC 0x4B000000u

#ifdef __CUDACC__
static inline float actnn_number(uint32_t word) { return __uint_as_float(word); }
static inline uint32_t actnn_word(float number) { return __float_as_uint(number); }
#else
static inline float actnn_number(uint32_t word) {
    float number;
    memcpy(&number, &word, 4);
    return number;
}

static inline uint32_t actnn_word(float number) {
    uint32_t word;
    memcpy(&word, &number, 4);
    return word;
}
#endif

/* scale is the reciprocal of the step times 2^(bits of a code's fraction). */
typedef struct {
    float base, step, scale;
    int finite;
} ActnnGroup;

/* Bits of a code's fraction. */
static inline int actnn_fraction(int bits) { return bits < 8 ? 16 : 15; }

/* The group of elements from `low` to `high`; both are NaN if an element is NaN. */
static inline ActnnGroup actnn_group(float low, float high, int bits) {
    const float most = (float)((1 << bits) - 1);
    ActnnGroup group;
    const uint32_t word = actnn_word(low + 0.f); /* -0 becomes 0 */
    const uint32_t down = (word >> 31) && (word & 0xFFFFu) ? 0x10000u : 0u;
    group.base = actnn_number((word & 0xFFFF0000u) + down);
    const float span = high - group.base;
    group.step = actnn_number((actnn_word(span / most) + 0xFFFFu) & 0xFFFF0000u);
    group.step = group.step > ACTNN_LEAST_STEP ? group.step : ACTNN_LEAST_STEP;
    group.finite = span <= 0x1.FFFFFEp127f && group.base + most * group.step <= ACTNN_LARGEST;
    float inverse = 1.f / group.step;
    /* rounded towards 0 */
    if (fmaf(inverse, group.step, -1.f) > 0.f) inverse = actnn_number(actnn_word(inverse) - 1);
    const int constant = !(group.finite && span > 0.f);
    group.step = constant ? 0.f : group.step;
    group.scale = constant ? 0.f : inverse * (float)(1 << actnn_fraction(bits));
    group.base = group.finite ? group.base : 0.f;
    return group;
}

/* Base and step in bfloat16, the base in the low half. */
static inline uint32_t actnn_parameters(ActnnGroup group) {
    return group.finite ? actnn_word(group.base) >> 16 | actnn_word(group.step)
                        : ACTNN_NAN_PARAMETERS;
}

/* ACTNN_MAGIC + the code * 2^fraction + its fraction. `noise` is 2^23 + the noise. In a group that
   is not finite, x must be 0. */
static inline uint32_t actnn_code_word(float x, ActnnGroup group, float noise) {
    return actnn_word(fmaf(x - group.base, group.scale, noise));
}

#endif
