// The roundings that kernels use instead of integers, made callable. Numbers come and go as double.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(PTX_ON_HOST)

#include "../cuda/intrinsics.hpp"

struct Place {
    unsigned x, y;
} threadIdx, blockDim;

#include "gates/arithmetic.cuh"

template <class Real>
Sum<Real> sum_of(const double *m, double lo, double hi) {
    Sum<Real> s = {};
    for (int i = 0; i < 2; ++i) s.m[i] = (Real)m[i];
    s.lo = Magic<Real>::number() + (Real)lo;
    s.hi = Magic<Real>::number() + (Real)hi;
    return s;
}

template <class Real>
void run(int form, long n, const double *a, const double *b, const double *m, double lo, double hi,
         double *out) {
    const Sum<Real> s = sum_of<Real>(m, lo, hi);
    for (long i = 0; i < n; ++i) {
        const Real v = (Real)a[i], w = (Real)b[i];
        const Real sum = form == 0   ? weighted(s, v)
                         : form == 1 ? weighted_product(s, v, w)
                                     : weighted(s, v, w);
        out[i] = Magic<Real>::integer(sum) == (int32_t)plain(sum) ? plain(sum) : NAN;
    }
}

#else

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/core/plan.hpp"

namespace quant_gru {
namespace {
constexpr float kRound = 12582912.f;
using OperandByte = int16_t;
#include "cpu/isa/rules.inl"
// This file uses rules.inl.
#include "cpu/isa/gates.inl"
#include "cpu/isa/lanes.inl"
}  // namespace
}  // namespace quant_gru

#include "cpu/core/pack_weights.cpp"

using namespace quant_gru;

template <class Real>
void run(int form, long n, const double *a, const double *b, const double *m, double lo, double hi,
         double *out) {
    typedef std::conditional_t<sizeof(Real) == 4, Floats, Doubles> V;
    Sum sum;
    sum.m[0] = m[0];
    sum.m[1] = m[1];
    sum.lo = (int64_t)lo;
    sum.hi = (int64_t)hi;
    const OneTerm<V> one(sum);
    const TwoTerms<V> two(sum);
    const Scaled<V> scaled(m[1], lo, hi);
    for (long i = 0; i < n; i += V::n) {
        Real from[2][V::n], to[V::n];
        for (int j = 0; j < V::n; ++j) {
            from[0][j] = (Real)a[i + j];
            from[1][j] = (Real)b[i + j];
        }
        const V v = V::load(from[0]), w = V::load(from[1]);
        const V code = form == 0   ? V::limit(V::rounded_product(v, one.m), one.lo, one.hi)
                       : form == 1 ? one(v, w)
                       : form == 2 ? V::round(two.unrounded(v, w))
                                   : scaled(v, one.m);
        code.store(to);
        for (int j = 0; j < V::n; ++j) out[i + j] = to[j];
    }
}

// The integer of total / 2^k by a rule, clamped.
int64_t by_integers(int rule, int64_t total, int k) {
    constexpr int64_t kMost = 1 << 16;
    const int64_t half = k > 0 ? int64_t{1} << (k - 1) : 0, size = total < 0 ? -total : total;
    int64_t code = rule == QG_FLOOR     ? total >> k
                   : rule == QG_HALF_UP ? (total + half) >> k
                                        : (total < 0 ? -1 : 1) * ((size + half) >> k);
    if (rule == QG_HALF_EVEN) {
        code = (total + half) >> k;
        if (k > 0 && (code << k) - total == half) code &= -2;
    }
    return code < -kMost ? -kMost : code > kMost ? kMost : code;
}

// Rounds in another direction than the rest of this file is compiled for.
template <class V, class Run>
__attribute__((noinline)) void round_all(Run run, const V *from, V *to, int n) {
    for (int i = 0; i < n; ++i) to[i] = run(from[i]);
}

// Counts values v = first, first + step, .. below end whose result is not that of integers:
// products v * M / 2^k, or sums of v * M / 2^k and nothing else. `grown`: M is stretched although
// lanes cut off.
template <class Real, Ties kHow>
int64_t count_wrong(int rule, bool is_sum, bool grown, int64_t first, int64_t end, int64_t step,
                    int64_t M, int k) {
    typedef std::conditional_t<sizeof(Real) == 4, Floats, Doubles> Even;
    typedef std::conditional_t<kHow == Ties::even, Even, Ruled<Even, kHow> > V;
    constexpr int kBlock = 64;
    Sum sum;
    sum.rule = rule;
    sum.k = k;
    sum.m[0] = std::ldexp(static_cast<double>(M), -k) * (grown ? kStretch<Real> : 1);
    sum.lo = -(1 << 16);
    sum.hi = 1 << 16;
    const OneTerm<V> one(sum);
    const TwoTerms<V> two(sum);
    const typename ChannelAddends<V>::type by(rule);
    alignas(64) Real real[kBlock * V::n];
    V from[kBlock], to[kBlock];
    int64_t wrong = 0;
    for (int64_t at = first; at < end; at += kBlock * V::n * step) {
        for (int i = 0; i < kBlock * V::n; ++i) real[i] = static_cast<Real>(at + i * step);
        for (int i = 0; i < kBlock; ++i) from[i] = V(V::load(real + i * V::n));
        {
            const Direction direction(kHow == Ties::stretched ? QG_HALF_EVEN : rule);
            if (is_sum)
                round_all([&](const V &v) { return two.whole(two.unrounded(v, V(V::set(0)))); },
                          from, to, kBlock);
            else
                round_all(
                    [&](const V &v) {
                        const auto product = [&] {
                            if constexpr (plain(kHow))
                                return V::rounded_product(v, one.m);
                            else
                                return V::channels(v, one.m, by);
                        };
                        return V(V::limit(product(), one.lo, one.hi));
                    },
                    from, to, kBlock);
        }
        for (int i = 0; i < kBlock; ++i) to[i].store(real + i * V::n);
        for (int i = 0; i < kBlock * V::n && at + i * step < end; ++i)
            wrong += static_cast<int64_t>(real[i]) != by_integers(rule, (at + i * step) * M, k);
    }
    return wrong;
}

template <class Real>
int64_t count_wrong_of(int how, int rule, bool is_sum, bool grown, int64_t first, int64_t end,
                       int64_t step, int64_t M, int k) {
    const auto count = [&](auto counted) {
        return counted(rule, is_sum, grown, first, end, step, M, k);
    };
    switch (static_cast<Ties>(how)) {
        case Ties::even:
            return count(count_wrong<Real, Ties::even>);
        case Ties::stretched:
            return count(count_wrong<Real, Ties::stretched>);
        case Ties::up:
            return count(count_wrong<Real, Ties::up>);
        case Ties::away:
            // lanes of float64 have no such form
            if constexpr (sizeof(Real) == 4) return count(count_wrong<float, Ties::away>);
            return -1;
        default:
            return count(count_wrong<Real, Ties::any>);
    }
}

extern "C" long count_wrong(int in_float, int how, int rule, int is_sum, int grown, long first,
                            long end, long step, long M, int k) {
    return (in_float ? count_wrong_of<float> : count_wrong_of<double>)(how, rule, is_sum, grown,
                                                                       first, end, step, M, k);
}
extern "C" int stretches(int in_float, double bound, long M) {
    return in_float ? stretches_float(bound, M) : stretches_double(bound, M);
}

#endif

extern "C" void run_float(int form, long n, const double *a, const double *b, const double *m,
                          double lo, double hi, double *out) {
    run<float>(form, n, a, b, m, lo, hi, out);
}
extern "C" void run_double(int form, long n, const double *a, const double *b, const double *m,
                           double lo, double hi, double *out) {
    run<double>(form, n, a, b, m, lo, hi, out);
}
