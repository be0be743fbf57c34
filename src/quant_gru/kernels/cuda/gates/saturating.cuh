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
// With rules that round a tie in one direction, it adds half of a code. The table has 257 entries.
struct Before {
    float early, late, offset;
};

struct Saturated {
    Limits Rh, rRh, old_contrib, new_contrib;
    Before z, r, g;
    float rest, rest_offset;  // map the fraction of R h to the factor of the reset gate
    float of_z, of_left;      // multipliers of the update gate z, and of 1 - z; see `more_than`
    float h_old, h_new, h_offset;  // multipliers and offset of the new state's sum
};

// Return the fraction of a rounded number, to which `kRounding` was added.
inline float share_of(const Limits &limits, float rounded) {
    return fminf(plus_saturated(rounded, limits.less), limits.top);
}

// Return the fraction of v * m, where m is the multiplier divided by 256, and 1/512 half of a code.
inline float share_of(const Limits &limits, float v, float m) {
    typedef Magic<float> R;
    if (QG_RULE == QG_HALF_EVEN) return share_of(limits, R::fma(v, m, kRounding));
    if (QG_RULE == QG_FLOOR) return share_of(limits, R::fma_down(v, m, kRounding));
    const float size = QG_RULE == QG_HALF_AWAY ? R::size(v) : v;
    const float rounded = R::plus_down(R::fma_down(size, m, 1 / 512.f), kRounding);
    if (QG_RULE == QG_HALF_UP) return share_of(limits, rounded);
    const float code = R::with_sign(R::plus(rounded, -kRounding), v);
    return fminf(plus_saturated(code, R::plus(limits.less, kRounding)), limits.top);
}

// What a factor of two codes' product is to QG_HALF_AWAY: it moves ties away from zero, and other
// products of less than 2^17 units by less than a unit. Rounding of the factor is less than that.
inline float more_than(float factor) {
    return QG_RULE == QG_HALF_AWAY ? __fmul_rn(factor, 1 + 1.f / 262144) : factor;
}

// The same for a product of two codes, one of which is `more_than` it is.
inline float share_of_codes(const Limits &limits, float a, float b) {
    if (QG_RULE != QG_HALF_AWAY) return share_of(limits, a, b);
    return share_of(limits, Magic<float>::fma(a, b, kRounding));
}

// Return an entry of a table of 257 floats. `table` is its address minus 4 * kIndexBits.
inline float entry_of(const Table &of, uint32_t table, float early, float late, float m) {
    typedef Magic<float> R;
    const float fraction = fma_saturated(late, m, early);
    float sum;
    if (QG_RULE == QG_HALF_EVEN) {
        sum = R::plus(fraction, kIndex);
    } else if (QG_RULE == QG_HALF_AWAY) {
        // A tie of a negative sum goes down. The largest number below 1 makes a multiple of 1 / 256
        // less, keeps 0, and keeps other numbers above the multiple below them.
        const float zero = (float)(2 * ((int)of.pre_zero - (int)of.pre_lo) + 1) / 512;
        const bool below = fraction < (zero < 1.f ? zero : 1.f);
        sum = R::fma_down(fraction, __int_as_float(below ? 0x3F7FFFFF : 0x3F800000), kIndex);
    } else {
        sum = R::plus_down(fraction, kIndex);
    }
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
    const float r = entry_of(c.r, r_table, r_early, Rh_r, n.r.late);
    const float z = entry_of(c.z, z_table, z_early, Rh_z, n.z.late);
#if QG_RRH
    const float g =
        entry_of(c.g, g_table, g_early, share_of_codes(n.rRh, r, more_than(factor)), n.g.late);
#else
    const float g = entry_of(c.g, g_table, g_early, r, factor);
#endif
    const float left = __fmul_rn(__fadd_rn(c.one, -z), n.of_left), kept = __fmul_rn(z, n.of_z);
#if QG_OLD
    const float old = __fmaf_rn(share_of_codes(n.old_contrib, kept, h), n.h_old, n.h_offset);
#else
    const float old = __fmaf_rn(kept, h, n.h_offset);
#endif
#if QG_NEW
    const float total = __fmaf_rn(share_of_codes(n.new_contrib, left, g), n.h_new, old);
#else
    const float total = __fmaf_rn(left, g, old);
#endif
    typedef Magic<float> R;
    // A sum below 2^23 units is less than a unit from what the number above 1 makes of it. With
    // QG_HALF_UP, `h_offset` adds the half.
    if (QG_RULE == QG_HALF_AWAY)
        return clamped(c.h, R::fma(total, __int_as_float(0x3F800001), R::number()));
    if (QG_RULE == QG_HALF_UP) return clamped(c.h, R::plus_down(total, R::number()));
    return clamped(c.h, round_sum(total));
}

#endif
