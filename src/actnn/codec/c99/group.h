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

#define ACTNN_MARK 0x80000000u
#define ACTNN_INFINITY 0x7F800000u

/* scale is the reciprocal of the step times 2^(bits of a code's fraction). Of a marked group, the
   first and the last code are the bounds of the tensor. */
typedef struct {
    float base, step, scale;
    int finite, marked;
} ActnnGroup;

/* Bits of a code's fraction. */
static inline int actnn_fraction(int bits) { return bits < 8 ? 16 : 15; }

/* The group of elements from `low` to `high`, whose codes have the range `most`. */
static inline ActnnGroup actnn_group_with(float low, float high, int bits, float most) {
    ActnnGroup group;
    group.marked = 0;
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

/* The group of elements from `low` to `high`; both are NaN if an element is NaN. */
static inline ActnnGroup actnn_group(float low, float high, int bits) {
    return actnn_group_with(low, high, bits, (float)((1 << bits) - 1));
}

/* A group with elements at the bounds of its tensor, without NaN. The others are from `low` to
   `high`; low > high says that there are none. */
static inline ActnnGroup actnn_marked_group(float low, float high, int bits) {
    const int none = low > high;
    ActnnGroup group = actnn_group_with(none ? 0.f : low, none ? 0.f : high, bits,
                                        bits == 1 ? 1.f : (float)((1 << bits) - 3));
    if (bits == 1 && !none) { /* no code is left for them */
        group.base = group.step = group.scale = 0.f;
        group.finite = 0;
    }
    group.marked = group.finite;
    return group;
}

/* Base and step in bfloat16, the base in the low half. */
static inline uint32_t actnn_parameters(ActnnGroup group) {
    return group.finite ? actnn_word(group.base) >> 16 | actnn_word(group.step) |
                              (group.marked ? ACTNN_MARK : 0)
                        : ACTNN_NAN_PARAMETERS;
}

/* A double as a float; NaN if it is finite and the float is not. */
static inline float actnn_narrow(double x) {
    const float v = (float)x;
    const int wide = (actnn_word(v) & ~ACTNN_MARK) == ACTNN_INFINITY && x - x == 0;
    return wide ? actnn_number(0x7FC00000u) : v;
}

/* ACTNN_MAGIC + the code * 2^fraction + its fraction. `noise` is 2^23 + the noise. In a group that
   is not finite, x must be 0. */
static inline uint32_t actnn_code_word(float x, ActnnGroup group, float noise) {
    return actnn_word(fmaf(x - group.base, group.scale, noise));
}

/* The code of an element of a marked group. */
static inline uint32_t actnn_marked_code(float x, ActnnGroup group, float noise, int bits,
                                         float lowest, float highest) {
    const uint32_t last = (1u << bits) - 1;
    if (x <= lowest) return 0;
    if (x >= highest) return last;
    return ((actnn_code_word(x, group, noise) - ACTNN_MAGIC) >> actnn_fraction(bits)) + 1;
}

#endif
