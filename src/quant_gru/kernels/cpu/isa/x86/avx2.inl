// AVX2 and FMA. Weights of up to 8 bits use vpmaddwd after sign extension (vpmaddubsw would
// saturate), or vpdpbusd if the including file defines QG_AVXVNNI. Wider weights use vpmaddwd.
#include <immintrin.h>

#include <cstdint>

#include "cpu/core/training.hpp"

namespace quant_gru {
namespace QG_NAMESPACE {
namespace {

#define QG_POWERS
#include "cpu/isa/rows.inl"
// products need rows
#include "cpu/isa/x86/avx2_products.inl"

// --- lanes

// Stores eight codes as operands.
template <int P>
inline void store_codes(__m128i first, __m128i second, OperandByte *low, int64_t plane) {
#if defined(QG_AVXVNNI)
    const __m128i words = _mm_packus_epi32(first, second);
    const __m128i bytes = _mm_packus_epi16(_mm_and_si128(words, _mm_set1_epi16(255)), words);
    _mm_storel_epi64(reinterpret_cast<__m128i *>(low), bytes);
    if (P == 2) {
        const __m128i high = _mm_srli_epi16(words, 8);
        _mm_storel_epi64(reinterpret_cast<__m128i *>(low + plane), _mm_packus_epi16(high, high));
    }
#else
    static_cast<void>(plane);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(low), _mm_packs_epi32(first, second));
#endif
}

struct Floats {
    using Real = float;
    using Lane = Floats;
    static constexpr int n = 8, kVectors = 1;
    static constexpr bool kScales = true, kPowers = false;
    static constexpr Ties kTies = Ties::even;
    static constexpr double kMagic = kRound;
    __m256 v;

    static Floats set(double x) { return {_mm256_set1_ps(static_cast<float>(x))}; }
    static Floats load(const float *p) { return {_mm256_load_ps(p)}; }
    static Floats load_floats(const float *p) { return {_mm256_load_ps(p)}; }
    static Floats from_ints(const int32_t *p) {
        return {_mm256_cvtepi32_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(p)))};
    }
    static const float *multipliers(const Packed &p, int64_t channel) {
        return p.m_float + channel;
    }
    static Floats multiplier(const float *m, int i) { return load(m + i); }
    template <class F>
    static Floats each(F f) {
        return f(0);
    }
    Floats lane(int) const { return *this; }
    static Floats add(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
    static Floats from(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
    static Floats scale(Floats a, Floats m) { return mul(a, m); }
    static Floats multiply_add(Floats a, Floats m, Floats b) {
        return {_mm256_fmadd_ps(a.v, m.v, b.v)};
    }
    static Floats mul(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
    // a + b * m, if the product and the sum are exact
    static Floats add_product(Floats a, Floats b, Floats m) {
        return {_mm256_fmadd_ps(b.v, m.v, a.v)};
    }
    static Floats limit(Floats a, Floats lo, Floats hi) {
        return {_mm256_min_ps(_mm256_max_ps(a.v, lo.v), hi.v)};
    }
    // 1 where lo <= a <= hi, else 0
    static Floats inside(Floats a, Floats lo, Floats hi) {
        const __m256 both = _mm256_and_ps(_mm256_cmp_ps(a.v, lo.v, _CMP_GE_OQ),
                                          _mm256_cmp_ps(a.v, hi.v, _CMP_LE_OQ));
        return {_mm256_and_ps(both, _mm256_set1_ps(1.f))};
    }
    // the rest: see rules.inl
    static Floats to_integer(Floats a) {
        return {_mm256_round_ps(a.v, _MM_FROUND_CUR_DIRECTION | _MM_FROUND_NO_EXC)};
    }
    static Floats sum_to_integer(Floats a, Floats c) { return to_integer(add(a, c)); }
    static Floats product_to_integer(Floats a, Floats m, Floats c) {
        return to_integer({_mm256_fmadd_ps(a.v, m.v, c.v)});
    }
    static Floats with_sign(Floats a, Floats c) {
        return {_mm256_or_ps(_mm256_and_ps(a.v, _mm256_set1_ps(-0.f)), c.v)};
    }
    static Floats by_sign(Floats a, Floats positive, Floats negative) {
        return {_mm256_blendv_ps(positive.v, negative.v, a.v)};
    }
    static Floats power_of(Floats m) {
        return {_mm256_and_ps(m.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)))};
    }
    static Floats round(Floats a) { return to_integer(a); }
    // rne(v * m), rounded once; a result beyond 2^22 is inexact, but beyond every limit
    static Floats rounded_product(Floats a, Floats m) {
        const __m256 magic = _mm256_set1_ps(kRound);
        return {_mm256_sub_ps(_mm256_fmadd_ps(a.v, m.v, magic), magic)};
    }
    // The table's output for an input that is not rounded yet.
    static Floats look_up(const Table &t, Floats a) {
        // The low bits of the sum are the rounded integer.
        const __m256i code = _mm256_castps_si256(_mm256_add_ps(a.v, _mm256_set1_ps(kRound)));
        const __m256i index = _mm256_and_si256(code, _mm256_set1_epi32(t.mask));
        return {_mm256_i32gather_ps(t.entries, index, 4)};
    }
    void store(float *p) const { _mm256_store_ps(p, v); }
    void store_floats(float *p) const { _mm256_store_ps(p, v); }
    template <int P>
    void store_operand(int32_t shift, OperandByte *low, int64_t plane) const {
        const __m256i code = _mm256_add_epi32(_mm256_cvtps_epi32(v), _mm256_set1_epi32(shift));
        store_codes<P>(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1), low, plane);
    }
};

// Lanes for codes of up to 16 bits with multipliers that are powers of two. A sum of a matrix
// product has up to 32 bits, so it is rounded as an integer.
struct Powers : Floats {
    using Lane = Powers;
    static constexpr bool kScales = false, kPowers = true;
    struct Rounding {
        __m256i shift, half;
    };
    // Whether an even floor keeps a tie; see `channels`.
    struct Channels {
        __m256i even;
        explicit Channels(int rule) : even(_mm256_set1_epi32(rule == QG_HALF_EVEN ? 1 : 0)) {}
    };
    // What half of 2^s and -1, the latter for negative sums, become by their rule.
    struct Addend {
        __m256i negative, both;
        explicit Addend(int rule)
            : negative(_mm256_set1_epi32(rule == QG_HALF_UP ? 0 : -1)),
              both(_mm256_set1_epi32(rule == QG_DOUBLE ? 1 : 0)) {}
    };

    Powers() = default;
    Powers(Floats a) : Floats(a) {}
    template <class F>
    static auto each(F f) {
        return f(0);
    }
    // The lanes contain the bits of integers, although their type is float.
    static Powers from_ints(const int32_t *p) {
        return Floats{_mm256_castsi256_ps(_mm256_load_si256(reinterpret_cast<const __m256i *>(p)))};
    }
    static const int32_t *multipliers(const Packed &p, int64_t channel) {
        return p.rounding + 3 * channel;
    }
    static Rounding multiplier(const int32_t *m, int i) {
        m += i / kGroup * 3 * kGroup + i % kGroup;
        return {_mm256_load_si256(reinterpret_cast<const __m256i *>(m)),
                _mm256_load_si256(reinterpret_cast<const __m256i *>(m + kGroup))};
    }
    // rne(sums / 2^s): adds 2^(s-1), or 2^(s-1) - 1 if the floor is even, then shifts. The numbers
    // of QG_FLOOR have 0 for 2^(s-1).
    static Powers channels(Powers sums, const Rounding &m, const Channels &by) {
        const __m256i sum = _mm256_castps_si256(sums.v);
        const __m256i even = _mm256_andnot_si256(_mm256_srav_epi32(sum, m.shift), by.even);
        const __m256i more = _mm256_sub_epi32(_mm256_add_epi32(sum, m.half), even);
        return Floats{_mm256_cvtepi32_ps(_mm256_srav_epi32(more, m.shift))};
    }
    // By other rules: half up, and with an addend.
    static Powers shifted(Floats sums, const Rounding &m) {
        const __m256i more = _mm256_add_epi32(_mm256_castps_si256(sums.v), m.half);
        return Floats{_mm256_cvtepi32_ps(_mm256_srav_epi32(more, m.shift))};
    }
    static Powers shifted(Floats sums, const Rounding &m, const Addend &by) {
        const __m256i sum = _mm256_castps_si256(sums.v);
        const __m256i sign = _mm256_and_si256(_mm256_srai_epi32(sum, 31), by.negative);
        const __m256i more = _mm256_or_si256(sign, by.both);
        return shifted(Floats{_mm256_castsi256_ps(_mm256_add_epi32(sum, more))}, m);
    }
    // Negative where one of both is.
    static Floats both_signs(Floats a, Floats b) { return {_mm256_xor_ps(a.v, b.v)}; }
    // The table's output minus `base_of(t)`, for an input that is not rounded yet.
    static Powers find(const Table &t, Floats a) {
        if (!t.words) return Floats::look_up(t, a);
        const __m256i code = _mm256_cvtps_epi32(a.v);  // ties to even
        const __m256i first = _mm256_set1_epi32(static_cast<int32_t>(t.pre_lo));
        const __m256i found = _mm256_i32gather_epi32(reinterpret_cast<const int *>(t.words),
                                                     _mm256_sub_epi32(code, first), 2);
        return Floats{_mm256_cvtepi32_ps(_mm256_and_si256(found, _mm256_set1_epi32(65535)))};
    }
    static double base_of(const Table &t) { return t.words ? t.word_base : 0; }
};

using WidePowers = Powers;

#include "cpu/isa/lockstep.inl"

// Looks up 32 bytes in a table of 256, given as `Table::steps`. `vpshufb` returns 0 if the top bit
// of an index is set, so steps up to the index accumulate and later steps contribute nothing.
QG_INLINE __m256i bytes_at(const uint8_t *steps, __m256i index) {
    const __m256i sixteen = _mm256_set1_epi8(16);
    __m256i low = index, high = _mm256_xor_si256(index, _mm256_set1_epi8(-128));
    __m256i found = _mm256_setzero_si256(), other = found;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m128i *at = reinterpret_cast<const __m128i *>(steps) + i;
        if (i > 0) {
            low = _mm256_subs_epi8(low, sixteen);
            high = _mm256_subs_epi8(high, sixteen);
        }
        found = _mm256_xor_si256(
            found, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(at)), low));
        other = _mm256_xor_si256(
            other, _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(at + 8)), high));
    }
    return _mm256_xor_si256(found, other);
}

// The table's outputs for four vectors, looked up as 32 bytes.
QG_INLINE void look_up_bytes(const Table &t, const Floats *a, Floats *out) {
    auto codes = [&](int k) {
        return _mm256_castps_si256(_mm256_add_ps(a[k].v, _mm256_set1_ps(kRound)));
    };
    // The low words of two vectors, interleaved.
    auto words = [&](int k) {
        return _mm256_blend_epi16(codes(k), _mm256_slli_epi32(codes(k + 2), 16), 0xaa);
    };
    const __m256i even = _mm256_and_si256(words(0), _mm256_set1_epi16(255));
    const __m256i index = _mm256_or_si256(even, _mm256_slli_epi16(words(1), 8));
    const __m256i found = bytes_at(t.steps, index);
    const __m256 base = _mm256_set1_ps(t.base);
    const __m256i first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12, -1, -1, -1));
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        // The addition changes only the low byte of a lane; the others stay -1 and give 0.
        const __m256i byte =
            _mm256_shuffle_epi8(found, _mm256_add_epi32(first, _mm256_set1_epi32(k)));
        out[k].v = _mm256_add_ps(_mm256_cvtepi32_ps(byte), base);
    }
}

#include "cpu/isa/four.inl"

using WideFloats = Floats4;

// Eight doubles in two registers, so that a vector has the size of a group.
struct Doubles {
    using Real = double;
    using Lane = Doubles;
    static constexpr int n = 8, kVectors = 1;
    static constexpr bool kScales = true, kPowers = false;
    static constexpr Ties kTies = Ties::even;
    static constexpr double kMagic = 6755399441055744.;  // 1.5 * 2^52
    __m256d a, b;

    static Doubles set(double x) { return {_mm256_set1_pd(x), _mm256_set1_pd(x)}; }
    static Doubles load(const double *p) { return {_mm256_load_pd(p), _mm256_load_pd(p + 4)}; }
    static Doubles load_floats(const float *p) {
        return {_mm256_cvtps_pd(_mm_load_ps(p)), _mm256_cvtps_pd(_mm_load_ps(p + 4))};
    }
    static Doubles from_ints(const int32_t *p) {
        const __m128i *at = reinterpret_cast<const __m128i *>(p);
        return {_mm256_cvtepi32_pd(_mm_load_si128(at)), _mm256_cvtepi32_pd(_mm_load_si128(at + 1))};
    }
    static const double *multipliers(const Packed &p, int64_t channel) { return p.m + channel; }
    static Doubles multiplier(const double *m, int i) { return load(m + i); }
    template <class F>
    static Doubles each(F f) {
        return f(0);
    }
    Doubles lane(int) const { return *this; }
    static Doubles add(const Doubles &x, const Doubles &y) {
        return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)};
    }
    static Doubles from(const Doubles &x, const Doubles &y) {
        return {_mm256_sub_pd(x.a, y.a), _mm256_sub_pd(x.b, y.b)};
    }
    static Doubles scale(const Doubles &x, const Doubles &m) { return mul(x, m); }
    static Doubles multiply_add(const Doubles &x, const Doubles &m, const Doubles &y) {
        return {_mm256_fmadd_pd(x.a, m.a, y.a), _mm256_fmadd_pd(x.b, m.b, y.b)};
    }
    static Doubles mul(const Doubles &x, const Doubles &y) {
        return {_mm256_mul_pd(x.a, y.a), _mm256_mul_pd(x.b, y.b)};
    }
    static Doubles add_product(const Doubles &x, const Doubles &y, const Doubles &m) {
        return {_mm256_fmadd_pd(y.a, m.a, x.a), _mm256_fmadd_pd(y.b, m.b, x.b)};
    }
    static Doubles limit(const Doubles &x, const Doubles &lo, const Doubles &hi) {
        return {_mm256_min_pd(_mm256_max_pd(x.a, lo.a), hi.a),
                _mm256_min_pd(_mm256_max_pd(x.b, lo.b), hi.b)};
    }
    static __m256d inside(__m256d v, __m256d lo, __m256d hi) {
        const __m256d both =
            _mm256_and_pd(_mm256_cmp_pd(v, lo, _CMP_GE_OQ), _mm256_cmp_pd(v, hi, _CMP_LE_OQ));
        return _mm256_and_pd(both, _mm256_set1_pd(1.));
    }
    static Doubles inside(const Doubles &x, const Doubles &lo, const Doubles &hi) {
        return {inside(x.a, lo.a, hi.a), inside(x.b, lo.b, hi.b)};
    }
    static Doubles to_integer(const Doubles &x) {
        constexpr int mode = _MM_FROUND_CUR_DIRECTION | _MM_FROUND_NO_EXC;
        return {_mm256_round_pd(x.a, mode), _mm256_round_pd(x.b, mode)};
    }
    static Doubles sum_to_integer(const Doubles &a, const Doubles &c) {
        return to_integer(add(a, c));
    }
    static Doubles product_to_integer(const Doubles &x, const Doubles &m, const Doubles &c) {
        return to_integer(multiply_add(x, m, c));
    }
    static Doubles by_sign(const Doubles &x, const Doubles &positive, const Doubles &negative) {
        return {_mm256_blendv_pd(positive.a, negative.a, x.a),
                _mm256_blendv_pd(positive.b, negative.b, x.b)};
    }
    static Doubles power_of(const Doubles &m) {
        const __m256d exponent = _mm256_castsi256_pd(_mm256_set1_epi64x(0x7ff0000000000000));
        return {_mm256_and_pd(m.a, exponent), _mm256_and_pd(m.b, exponent)};
    }
    static Doubles round(const Doubles &x) { return to_integer(x); }
    static Doubles rounded_product(const Doubles &x, const Doubles &m) {
        const __m256d magic = _mm256_set1_pd(6755399441055744.);  // 1.5 * 2^52
        return {_mm256_sub_pd(_mm256_fmadd_pd(x.a, m.a, magic), magic),
                _mm256_sub_pd(_mm256_fmadd_pd(x.b, m.b, magic), magic)};
    }
    static Doubles look_up(const Table &t, const Doubles &x) {
        const __m256i code = _mm256_set_m128i(_mm256_cvtpd_epi32(x.b), _mm256_cvtpd_epi32(x.a));
        if (t.entries) {
            const __m256i index = _mm256_and_si256(code, _mm256_set1_epi32(t.mask));
            const __m256 y = _mm256_i32gather_ps(t.entries, index, 4);
            return {_mm256_cvtps_pd(_mm256_castps256_ps128(y)),
                    _mm256_cvtps_pd(_mm256_extractf128_ps(y, 1))};
        }
        const __m256i first = _mm256_set1_epi32(static_cast<int32_t>(t.pre_lo));
        const __m256i found = _mm256_i32gather_epi32(reinterpret_cast<const int *>(t.words),
                                                     _mm256_sub_epi32(code, first), 2);
        const __m256i y = _mm256_add_epi32(_mm256_and_si256(found, _mm256_set1_epi32(65535)),
                                           _mm256_set1_epi32(t.word_base));
        return {_mm256_cvtepi32_pd(_mm256_castsi256_si128(y)),
                _mm256_cvtepi32_pd(_mm256_extracti128_si256(y, 1))};
    }
    void store(double *p) const {
        _mm256_store_pd(p, a);
        _mm256_store_pd(p + 4, b);
    }
    void store_floats(float *p) const {
        _mm_store_ps(p, _mm256_cvtpd_ps(a));
        _mm_store_ps(p + 4, _mm256_cvtpd_ps(b));
    }
    template <int P>
    void store_operand(int32_t shift, OperandByte *low, int64_t plane) const {
        const __m128i s = _mm_set1_epi32(shift);
        store_codes<P>(_mm_add_epi32(_mm256_cvtpd_epi32(a), s),
                       _mm_add_epi32(_mm256_cvtpd_epi32(b), s), low, plane);
    }
};

// --- the backward's products
// The registers have room for 8 to 12 accumulators, besides weights and an operand.

constexpr int kPanelVectors = 2, kFloatRows = 6, kFeatures = 4;
constexpr int panels_at_once(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

}  // namespace

#if defined(QG_AVXVNNI)
extern const Layout layout{kGroup, kDepth, kShared, Operand::u8, true, kTileRows<1>,
                           16,     1,      1,       0,           true};
#else
extern const Layout layout{kGroup, kDepth, kShared, Operand::s16, true, kTileRows<1>, 16,
                           1,      1,      8,       true};
#endif

#include "cpu/isa/entries.inl"

}  // namespace QG_NAMESPACE
}  // namespace quant_gru
