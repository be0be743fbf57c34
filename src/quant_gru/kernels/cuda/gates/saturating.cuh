// The gate arithmetic of one element at up to 8 bits, whose multipliers are powers of two. Codes
// are kept as shares u of 256: code = lo + 256 u, where u >= 0 costs nothing, since instructions of
// the hardware saturate to [0, 1]. What comes early of a sum is added up before what comes late.
// All sums are exact; saturating.py makes the numbers, and tells where they are.
#ifndef QUANT_GRU_SATURATED_CUH
#define QUANT_GRU_SATURATED_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

// 1.5 * 2^23 / 256, and 2^15: added to a number, they round it to a multiple of 1 / 256.
constexpr float kRounding = 49152.f, kIndex = 32768.f;
constexpr uint32_t kIndexBits = 0x47000000u;

// The limits of a rounded number: -(49152 + lo / 256), and (hi - lo) / 256.
struct Limits {
    float less, top;
};

// The sum before an activation: early and late term, less an even code that is not above the
// smallest, from which on the table has 257 entries.
struct Before {
    float early, late, offset;
};

struct Saturated {
    Limits Rh, rRh, old_contrib, new_contrib;
    Before z, r, g;
    float rest, rest_offset;       // of u of R h: what the reset gate is multiplied by
    float of_z, of_left;           // multipliers of update gate, and of one less it
    float h_old, h_new, h_offset;  // of the new state
};

// The share of a sum of products and its multiplier over 256.
inline float share_of(const Limits &limits, float v, float m) {
    const float rounded = __fmaf_rn(v, m, kRounding);
    return fminf(plus_saturated(rounded, limits.less), limits.top);
}

// The entry of a table, 257 floats; its place has kIndexBits taken off.
inline float entry_of(uint32_t table, float early, float late, float m) {
    const float sum = __fadd_rn(fma_saturated(late, m, early), kIndex);
    return load_float(table + 4u * (uint32_t)__float_as_int(sum));
}

// h' with the magic number of Magic<float> added, from codes of W x, shares of R h and the state.
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
