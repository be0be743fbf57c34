// The gate arithmetic of one element with codes of at most 8 bits and power-of-two multipliers.
// A code is represented by the fraction u: code = lo + 256 u. The clamp u >= 0 is free, since
// hardware instructions saturate to [0, 1]. Terms that are known early are added before late ones.
// All sums are exact; host/plans/saturating.cpp computes the constants, and tells for which plans.
#ifndef QUANT_GRU_SATURATED_CUH
#define QUANT_GRU_SATURATED_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

// 1.5 * 2^23 / 256, and 2^15: adding either rounds a number to a multiple of 1 / 256.
constexpr float kRounding = 49152.f, kIndex = 32768.f;
constexpr uint32_t kIndexBits = 0x47000000u;

// The limits of a rounded number: less = -(49152 + lo / 256), top = (hi - lo) / 256.
struct Limits {
    float less, top;
};

// The sum before an activation: the multipliers of the early and late terms, and an offset. The
// offset subtracts the first code of the table: an even code, at most the smallest code of the sum.
// The table has 257 entries.
struct Before {
    float early, late, offset;
};

struct Saturated {
    Limits Rh, rRh, old_contrib, new_contrib;
    Before z, r, g;
    float rest, rest_offset;       // map the fraction of R h to the factor of the reset gate
    float of_z, of_left;           // multipliers of the update gate z, and of 1 - z
    float h_old, h_new, h_offset;  // multipliers and offset of the new state's sum
};

// Return the fraction of v * m, where m is the multiplier divided by 256.
inline float share_of(const Limits &limits, float v, float m) {
    const float rounded = __fmaf_rn(v, m, kRounding);
    return fminf(plus_saturated(rounded, limits.less), limits.top);
}

// Return an entry of a table of 257 floats. `table` is its address minus 4 * kIndexBits.
inline float entry_of(uint32_t table, float early, float late, float m) {
    const float sum = __fadd_rn(fma_saturated(late, m, early), kIndex);
    return load_float(table + 4u * (uint32_t)__float_as_int(sum));
}

// Return h' plus the magic number of Magic<float>. Wx_* and h are zero-point-free codes, Rh_* are
// fractions.
inline float next_state(const Cell<float> &c, const Saturated &n, uint32_t z_table,
                        uint32_t r_table, uint32_t g_table, float Wx_z, float Wx_r, float Wx_g,
                        float Rh_z, float Rh_r, float Rh_g, float h) {
    const float r_early = __fmaf_rn(Wx_r, n.r.early, n.r.offset);
    const float z_early = __fmaf_rn(Wx_z, n.z.early, n.z.offset);
    const float g_early = __fmaf_rn(Wx_g, n.g.early, n.g.offset);
    const float factor = __fmaf_rn(Rh_g, n.rest, n.rest_offset);
    const float r = entry_of(r_table, r_early, Rh_r, n.r.late);
    const float z = entry_of(z_table, z_early, Rh_z, n.z.late);
#if QG_RRH
    const float g = entry_of(g_table, g_early, share_of(n.rRh, r, factor), n.g.late);
#else
    const float g = entry_of(g_table, g_early, r, factor);
#endif
    const float left = __fmul_rn(__fadd_rn(c.one, -z), n.of_left), kept = __fmul_rn(z, n.of_z);
#if QG_OLD
    const float old = __fmaf_rn(share_of(n.old_contrib, kept, h), n.h_old, n.h_offset);
#else
    const float old = __fmaf_rn(kept, h, n.h_offset);
#endif
#if QG_NEW
    const float total = __fmaf_rn(share_of(n.new_contrib, left, g), n.h_new, old);
#else
    const float total = __fmaf_rn(left, g, old);
#endif
    return clamped(c.h, __fadd_rn(total, Magic<float>::number()));
}

#endif
