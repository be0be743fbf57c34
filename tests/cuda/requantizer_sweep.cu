// Every accumulator of 32 bits with a multiplier that is a power of two, rounded by every rule:
// the primitives of fixed_point.h and, but for QG_DOUBLE, the rounding of floating-point kernels,
// against other formulas. A thread takes 4096 accumulators.
//
// Macro    Values   Meaning
// QG_RULE  0 to 4   the rule, see fixed_point.h
#include "gates/saturating.cuh"

struct Sweep {
    int64_t *differing;  // of each thread; added to
    int64_t bits;        // p: the multiplier is 2^(p - 1)
    int64_t shift;       // k
    int64_t lo, hi;
};

// v / 2^k by the formulas of hardware, from the bit below the result on.
inline int64_t expected(int64_t v, int k, int bits) {
    if (QG_RULE == QG_FLOOR) return v >= 0 ? v >> k : -((-v + ((int64_t)1 << k) - 1) >> k);
    if (QG_RULE == QG_HALF_UP) return ((v >> (k - 1)) + 1) >> 1;
    if (QG_RULE == QG_HALF_AWAY) {
        const int64_t size = (((v < 0 ? -v : v) >> (k - 1)) + 1) >> 1;
        return v < 0 ? -size : size;
    }
    const int64_t mask = ((int64_t)1 << k) - 1, size = v < 0 ? -v : v, rest = size & mask;
    const int64_t half = (int64_t)1 << (k - 1);
    const int64_t even = (size >> k) + (rest > half || (rest == half && (size >> k & 1)));
    return v < 0 ? -even : even;
}

// The same for two steps: a doubling high multiply of 31 bits, and a shift that compares the rest
// with a threshold.
inline int64_t in_two_steps(int64_t accumulator, int k, int bits) {
    const int exponent = bits - k, left = exponent > 0 ? exponent : 0, right = left - exponent;
    const int64_t product = (accumulator << left) * ((int64_t)1 << 30);
    const int64_t high = (product + ((int64_t)1 << 30)) >> 31;
    if (!right) return high;
    const int64_t mask = ((int64_t)1 << right) - 1;
    return (high >> right) + ((high & mask) > (mask >> 1) + (high < 0));
}

// The code of a product, and of a sum that is exact.
template <class Real>
inline int differing_from(int64_t code, Real accumulator, Real m, Real lo, Real hi) {
    typedef Magic<Real> R;
    const auto is = [&](Real v) {
        return R::integer(R::limit(v, lo + R::number(), hi + R::number())) == (int)code;
    };
    return !is(round_term(accumulator, m)) + !is(round_sum(accumulator * m)) +
           !is(round_signed(-accumulator, -m));
}

// The same for the fractions of saturating.cuh, for codes of 8 bits.
inline int fraction_differs(int64_t code, float accumulator, float m, int lo, int hi) {
    Limits limits;
    limits.less = -(kRounding + lo / 256.f);
    limits.top = (hi - lo) / 256.f;
    return share_of(limits, accumulator, m / 256) * 256 + lo != (float)code;
}

extern "C" __global__ void __launch_bounds__(256) sweep(const __grid_constant__ Sweep p) {
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const int k = (int)p.shift, bits = (int)p.bits;
    int64_t differing = 0;
    for (int i = 0; i < 4096; ++i) {
        // neighbours are read by neighbours
        const int64_t accumulator = ((int64_t)i << 20) + thread - ((int64_t)1 << 31);
        const int64_t v = accumulator << (bits - 1);
        const int64_t wanted =
            QG_RULE == QG_DOUBLE ? in_two_steps(accumulator, k, bits) : expected(v, k, bits);
        const int64_t code = qg_clamp(wanted, p.lo, p.hi);
        const qg_wide wide = qg_wide_times(qg_wide_of(accumulator), (uint32_t)1 << (bits - 1));
        differing += qg_clamp(qg_round_by(v, k, QG_RULE, bits), p.lo, p.hi) != code;
        differing += qg_clamp(qg_wide_round_by(wide, k, QG_RULE, bits), p.lo, p.hi) != code;
        if (QG_RULE == QG_DOUBLE) continue;
        const double m = bits_as_double((int64_t)(1023 + bits - 1 - k) << 52);
        const double lo = (double)p.lo, hi = (double)p.hi;
        differing += differing_from(code, (double)accumulator, m, lo, hi);
        if (accumulator <= -(1 << 24) || accumulator >= 1 << 24) continue;
        const float single = (float)accumulator, m_float = (float)m;
        differing += differing_from(code, single, m_float, (float)lo, (float)hi);
        if (p.hi - p.lo < 256)
            differing += fraction_differs(code, single, m_float, (int)p.lo, (int)p.hi);
    }
    p.differing[thread] += differing;
}
