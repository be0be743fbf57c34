// Arguments of the persistent recurrence. Macros as in persistent.cu.
#ifndef QUANT_GRU_PERSISTENT_ARGUMENTS_CUH
#define QUANT_GRU_PERSISTENT_ARGUMENTS_CUH

#include "gates/saturating.cuh"
#include "recurrence/real_values.cuh"

struct Numbers {
    Sequence s;
    const uint32_t *weights;  // fragments, [plane][group][block of 64][half][gate][register][lane]
    const Stored *Wx;         // [t][tile][group][16 * NB]
    const double *bias;       // (3, UP): bias and zero point, in accumulator units
    const double *m;          // (3, UP): M / 2^k
    const int32_t *exact_float;  // [KS - 1]: whether float holds all accumulators and multipliers
    Cell<Real> cell;
    RealBoundary boundary;
    Saturated saturated;
    const uint32_t *counts;  // (time chunks): finished rows of the projection, over all groups
};
struct Pair {
    Numbers d[DIRS];
};

// Returns a code of the state before the first step. Its container has OUT bytes.
inline int given_code(const Sequence &s, int64_t at) {
    const Code code = ((const Code *)s.h0)[at];
    if (OUT == 1) return s.h_kind == 0 ? (int)(int8_t)code : (int)code;
    return OUT == 2 ? (int)(int16_t)code : (int)code;
}

inline Real unpacked(const Stored &w, int gate, Real offset) {
#if WX == 1
    return (Real)(byte_as_float(w, gate) - (8388608.f + (float)offset));
#else
    const uint32_t word = gate == 2 ? w.y : w.x;
    return (Real)(half_as_float(word, gate == 1 ? 2 : 0) - (8388608.f + (float)offset));
#endif
}

#endif
