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

#endif

extern "C" void run_float(int form, long n, const double *a, const double *b, const double *m,
                          double lo, double hi, double *out) {
    run<float>(form, n, a, b, m, lo, hi, out);
}
extern "C" void run_double(int form, long n, const double *a, const double *b, const double *m,
                           double lo, double hi, double *out) {
    run<double>(form, n, a, b, m, lo, hi, out);
}
