// AVX-512 with VNNI: vpdpbusd for weights of up to 8 bits, vpdpwssd for wider ones. The including
// file names the namespace; with VBMI, tables of 256 bytes are looked up in registers.
#include <immintrin.h>

#include <cstdint>

#include "cpu/core/training.hpp"

namespace quant_gru {
namespace QG_NAMESPACE {
namespace {

#define QG_ROWS_AVX512
#define QG_POWERS
#include "cpu/isa/rows.inl"
// products need rows
#include "cpu/isa/x86/avx512_products.inl"

#if defined(QG_AMX)
#include "cpu/isa/x86/amx_tiles.inl"
#else

template <int P>
constexpr int kTileRows = 0;
constexpr int kTileGroups = 0;

#endif

// Benchmark: runs `loops` rounds of multiplications only. Returns the multiply-accumulates.
inline int64_t multiply_only(int64_t loops) {
#if defined(QG_AMX)
    const Tiles tiles;
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t i = 0; i < loops; ++i) {
        _tile_dpbusd(0, 4, 6);
        _tile_dpbusd(1, 4, 7);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
    }
    return loops * 4 * 16 * 16 * 64;
#else
    __m512i sum[24];
    const __m512i operand = _mm512_set1_epi8(1);
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) sum[i] = _mm512_setzero_si512();
    for (int64_t loop = 0; loop < loops; ++loop)
#pragma GCC unroll 24
        for (int i = 0; i < 24; ++i)
            __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sum[i]) : "v"(operand));
    return loops * 24 * 64;
#endif
}

// --- lanes

#if defined(__AVX512VBMI__)
// Looks up each byte of `index` in a table of 256 bytes.
QG_INLINE __m512i entries_at(const uint8_t *bytes, __m512i index) {
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(bytes), index, _mm512_load_si512(bytes + 64));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(bytes + 128), index,
                                                  _mm512_load_si512(bytes + 192));
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
}

// Looks up the low byte of each 32-bit lane. Returns the entries as floats, plus 2^23.
QG_INLINE __m512 bytes_at(const uint8_t *bytes, __m512i index) {
    const __m512i both = entries_at(bytes, index);
    // (both & 255) | bits of 2^23
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(both, _mm512_set1_epi32(255),
                                                         _mm512_set1_epi32(0x4b000000), 0xea));
}
#endif

// Stores the low bytes of 16 lanes.
inline void store_bytes(__m512i lanes, uint8_t *to) {
    __m128i bytes = _mm512_cvtepi32_epi8(lanes);
    // The barrier forces a plain store. The next step reads these bytes, and a load after a
    // narrowing store (vpmovdb) might have to wait for the cache.
    __asm__("" : "+v"(bytes));
    _mm_store_si128(reinterpret_cast<__m128i *>(to), bytes);
}

// Quantizes a row of real values to operands; `to` has room for whole vectors. Returns whether a
// value was NaN.
inline bool quantize_operand(const Packed &p, const Quantizer &given, const float *x, int n,
                             uint8_t *to, int64_t stride) {
    const Quantizer b = given;  // stores might change `given`, for all the compiler knows
    const __m512 lo = _mm512_set1_ps(static_cast<float>(b.lo));
    const __m512 hi = _mm512_set1_ps(static_cast<float>(b.hi));
    const __m512i shift = _mm512_set1_epi32(b.zero - p.offset);
    const bool wide = p.planes == 2;
    unsigned nan = 0;
    const auto quantize = [&](int i, __m512 v) QG_LAMBDA {
        const __m512 y = scaled_reals(v, b);
        const __mmask16 bad = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
        nan |= bad;
        const __m512 inside = _mm512_min_ps(_mm512_max_ps(y, lo), hi);
        const __m512i code = _mm512_add_epi32(codes_of(b, inside, bad), shift);
        store_bytes(code, to + i);
        if (wide) store_bytes(_mm512_srli_epi32(code, 8), to + stride / 2 + i);
    };
    int i = 0;
    for (; i + 16 <= n; i += 16) quantize(i, _mm512_loadu_ps(x + i));
    if (i < n) {
        const __mmask16 mask = static_cast<__mmask16>((1u << (n - i)) - 1);
        quantize(i, _mm512_maskz_loadu_ps(mask, x + i));
    }
    return nan != 0;
}

struct Floats {
    using Real = float;
    using Lane = Floats;
    static constexpr int n = 16, kVectors = 1;
    static constexpr bool kScales = true, kPowers = false;
    static constexpr Ties kTies = Ties::even;
    static constexpr double kMagic = kRound;
    __m512 v;

    static Floats set(double x) { return {_mm512_set1_ps(static_cast<float>(x))}; }
    static Floats load(const float *p) { return {_mm512_load_ps(p)}; }
    static Floats load_floats(const float *p) { return {_mm512_load_ps(p)}; }
    static Floats from_ints(const int32_t *p) { return {_mm512_cvtepi32_ps(_mm512_load_si512(p))}; }
    static const float *multipliers(const Packed &p, int64_t channel) {
        return p.m_float + channel;
    }
    static Floats multiplier(const float *m, int i) { return load(m + i); }
    template <class F>
    static Floats each(F f) {
        return f(0);
    }
    Floats lane(int) const { return *this; }
    static Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
    static Floats from(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
    static Floats scale(Floats a, Floats m) { return mul(a, m); }
    static Floats multiply_add(Floats a, Floats m, Floats b) {
        return {_mm512_fmadd_ps(a.v, m.v, b.v)};
    }
    static Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
    // a + b * m, if the product and the sum are exact
    static Floats add_product(Floats a, Floats b, Floats m) {
        return {_mm512_fmadd_ps(b.v, m.v, a.v)};
    }
    static Floats limit(Floats a, Floats lo, Floats hi) {
        return {_mm512_min_ps(_mm512_max_ps(a.v, lo.v), hi.v)};
    }
    // 1 where lo <= a <= hi, else 0
    static Floats inside(Floats a, Floats lo, Floats hi) {
        const __mmask16 above = _mm512_cmp_ps_mask(a.v, lo.v, _CMP_GE_OQ);
        return {_mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(above, a.v, hi.v, _CMP_LE_OQ),
                                    _mm512_set1_ps(1.f))};
    }
    // the rest: see rules.inl
    static Floats to_integer(Floats a) {
        return {_mm512_roundscale_ps(a.v, _MM_FROUND_CUR_DIRECTION | _MM_FROUND_NO_EXC)};
    }
    static Floats sum_to_integer(Floats a, Floats c) { return to_integer(add(a, c)); }
    static Floats product_to_integer(Floats a, Floats m, Floats c) {
        return to_integer({_mm512_fmadd_ps(a.v, m.v, c.v)});
    }
    static Floats with_sign(Floats a, Floats c) {
        // (a & sign) | c
        return {_mm512_castsi512_ps(_mm512_ternarylogic_epi64(
            _mm512_castps_si512(a.v), _mm512_castps_si512(_mm512_set1_ps(-0.f)),
            _mm512_castps_si512(c.v), 0xea))};
    }
    static Floats by_sign(Floats a, Floats positive, Floats negative) {
        const __mmask16 below = _mm512_movepi32_mask(_mm512_castps_si512(a.v));
        return {_mm512_mask_blend_ps(below, positive.v, negative.v)};
    }
    static Floats power_of(Floats m) {
        return {_mm512_and_ps(m.v, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000)))};
    }
    static Floats round(Floats a) {
        const __m512 magic = _mm512_set1_ps(kRound);
        return {_mm512_sub_ps(_mm512_add_ps(a.v, magic), magic)};
    }
    // rne(v * m), rounded once; a result beyond 2^22 is inexact, but beyond every limit
    static Floats rounded_product(Floats a, Floats m) {
        const __m512 magic = _mm512_set1_ps(kRound);
        return {_mm512_sub_ps(_mm512_fmadd_ps(a.v, m.v, magic), magic)};
    }
    // The table's output for an input that is not rounded yet.
    QG_INLINE static Floats look_up(const Table &t, Floats a) {
        // The low bits of the sum are the rounded integer.
        const __m512i code = _mm512_castps_si512(_mm512_add_ps(a.v, _mm512_set1_ps(kRound)));
#if defined(__AVX512VBMI__)
        if (t.bytes)
            return {_mm512_sub_ps(bytes_at(t.bytes, code), _mm512_set1_ps(8388608.f - t.base))};
#endif
        const __m512i index = _mm512_and_si512(code, _mm512_set1_epi32(t.mask));
        return {_mm512_i32gather_ps(index, t.entries, 4)};
    }
    void store(float *p) const { _mm512_store_ps(p, v); }
    void store_floats(float *p) const { _mm512_store_ps(p, v); }
    template <int P>
    void store_operand(int32_t shift, uint8_t *low, int64_t) const {
        static_assert(P == 1, "float lanes hold codes of 8 bits");
        // The low bits of the sum are the integer.
        const __m512 code = _mm512_add_ps(v, _mm512_set1_ps(kRound + static_cast<float>(shift)));
        store_bytes(_mm512_castps_si512(code), low);
    }
};

#if defined(__AVX512VBMI__)
// Indices of the lowest bytes of 16 lanes, then of their second bytes.
alignas(64) constexpr uint8_t kTwoBytes[64] = {0,  4,  8,  12, 16, 20, 24, 28, 32, 36, 40,
                                               44, 48, 52, 56, 60, 1,  5,  9,  13, 17, 21,
                                               25, 29, 33, 37, 41, 45, 49, 53, 57, 61};
#endif

// Lanes for codes of up to 16 bits with multipliers that are powers of two. A sum of a matrix
// product has up to 32 bits, so it is rounded as an integer.
struct Powers : Floats {
    using Lane = Powers;
    static constexpr bool kScales = false, kPowers = true;
    struct Rounding {
        __m512i shift, half, rest;
    };
    // The numbers of QG_FLOOR make `channels` round downward.
    struct Channels {
        explicit Channels(int) {}
    };
    // What half of 2^s and -1, the latter for negative sums, become by their rule.
    struct Addend {
        __m512i negative, both;
        explicit Addend(int rule)
            : negative(_mm512_set1_epi32(rule == QG_HALF_UP ? 0 : -1)),
              both(_mm512_set1_epi32(rule == QG_DOUBLE ? 1 : 0)) {}
    };

    Powers() = default;
    Powers(Floats a) : Floats(a) {}
    template <class F>
    static auto each(F f) {
        return f(0);
    }
    // The lanes contain the bits of integers, although their type is float.
    static Powers from_ints(const int32_t *p) {
        return Floats{_mm512_castsi512_ps(_mm512_load_si512(p))};
    }
    // The same for the sums of two planes.
    static Powers from_ints(const int32_t *low, const int32_t *high) {
        const __m512i above = _mm512_slli_epi32(_mm512_load_si512(high), 8);
        return Floats{_mm512_castsi512_ps(_mm512_add_epi32(_mm512_load_si512(low), above))};
    }
    static const int32_t *multipliers(const Packed &p, int64_t channel) {
        return p.rounding + 3 * channel;
    }
    static Rounding multiplier(const int32_t *m, int i) {
        m += i / kGroup * 3 * kGroup;
        return {_mm512_load_si512(m), _mm512_load_si512(m + kGroup),
                _mm512_load_si512(m + 2 * kGroup)};
    }
    // rne(sums / 2^s)
    static Powers channels(Powers sums, const Rounding &m, const Channels &) {
        const __m512i more = _mm512_add_epi32(_mm512_castps_si512(sums.v), m.half);
        const __m512i up = _mm512_srav_epi32(more, m.shift);
        // Ties were rounded up. If the result is odd, the even neighbour is one less.
        const __mmask16 ties = _mm512_testn_epi32_mask(more, m.rest);
        const __m512i even = _mm512_mask_and_epi32(up, ties, up, _mm512_set1_epi32(-2));
        return Floats{_mm512_cvtepi32_ps(even)};
    }
    // By other rules: half up, and with an addend.
    static Powers shifted(Floats sums, const Rounding &m) {
        const __m512i more = _mm512_add_epi32(_mm512_castps_si512(sums.v), m.half);
        return Floats{_mm512_cvtepi32_ps(_mm512_srav_epi32(more, m.shift))};
    }
    static Powers shifted(Floats sums, const Rounding &m, const Addend &by) {
        const __m512i sum = _mm512_castps_si512(sums.v);
        // (sum < 0 ? -1 : 0) & negative | both
        const __m512i sign = _mm512_srai_epi32(sum, 31);
        const __m512i more = _mm512_ternarylogic_epi32(sign, by.negative, by.both, 0xea);
        return shifted(Floats{_mm512_castsi512_ps(_mm512_add_epi32(sum, more))}, m);
    }
    // Negative where one of both is.
    static Floats both_signs(Floats a, Floats b) { return {_mm512_xor_ps(a.v, b.v)}; }
    // The table's output minus `base_of(t)`, for an input that is not rounded yet.
    QG_INLINE static Powers find(const Table &t, Floats a) {
        if (!t.words) return Floats::look_up(t, a);
        return find_word(t, a);
    }
    static double base_of(const Table &t) { return t.words ? t.word_base - 8388608. : 0; }
    template <int P>
    void store_operand(int32_t shift, uint8_t *low, int64_t plane) const {
        if constexpr (P == 1) return Floats::store_operand<P>(shift, low, plane);
        const __m512i code = _mm512_castps_si512(
            _mm512_add_ps(v, _mm512_set1_ps(kRound + static_cast<float>(shift))));
#if defined(__AVX512VBMI__)
        const __m256i both =
            _mm512_castsi512_si256(_mm512_permutexvar_epi8(_mm512_load_si512(kTwoBytes), code));
        _mm_store_si128(reinterpret_cast<__m128i *>(low), _mm256_castsi256_si128(both));
        _mm_store_si128(reinterpret_cast<__m128i *>(low + plane),
                        _mm256_extracti128_si256(both, 1));
#else
        store_bytes(code, low);
        store_bytes(_mm512_srli_epi32(code, 8), low + plane);
#endif
    }

    QG_INLINE static Powers find_word(const Table &t, Floats a) {
        const void *const start = before(t.words, (int64_t{kRoundBits} + t.pre_lo - t.even_lo) * 2);
        const __m512i found = _mm512_i32gather_epi32(index_of(t, a), start, 2);
        // (found & 65535) | bits of 2^23
        return Floats{_mm512_castsi512_ps(_mm512_ternarylogic_epi32(
            found, _mm512_set1_epi32(65535), _mm512_set1_epi32(0x4b000000), 0xea))};
    }

 private:
    // The rounded input minus even_lo, plus kRoundBits. Subtracting an even number changes no tie.
    static __m512i index_of(const Table &t, Floats a) {
        const __m512 lift = _mm512_set1_ps(kRound - static_cast<float>(t.even_lo));
        return _mm512_castps_si512(_mm512_add_ps(a.v, lift));
    }
    // The address `bytes` before the table, as base of a gather with indices that are too large.
    static const void *before(const void *table, int64_t bytes) {
        return reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(table) -
                                              static_cast<uintptr_t>(bytes));
    }
};

#include "cpu/isa/lockstep.inl"
#include "cpu/isa/powers.inl"

#if defined(__AVX512VBMI__)

// The table's outputs for four vectors, looked up as 64 bytes.
QG_INLINE void look_up_bytes(const Table &t, const Floats *a, Floats *out) {
    // Codes of two vectors in 16 bits each, then the low bytes of all four in one vector. The
    // order is undone below.
    auto codes = [&](int k) QG_LAMBDA {
        return _mm512_castps_si512(_mm512_add_ps(a[k].v, _mm512_set1_ps(kRound)));
    };
    const __m512i bytes = _mm512_set1_epi16(255);
    auto words = [&](int k) QG_LAMBDA {
        // The blend drops bits 16..31 of the codes: 0x4b40, or 0x4b3f for negative inputs.
        const __m512i both =
            _mm512_mask_blend_epi16(0xaaaaaaaa, codes(k), _mm512_slli_epi32(codes(k + 1), 16));
        return _mm512_and_si512(both, bytes);
    };
    const __m512i index = _mm512_or_si512(words(0), _mm512_slli_epi16(words(2), 8));
    const __m512i found = entries_at(t.bytes, index);
    const __m512 base = _mm512_set1_ps(8388608.f - t.base);
    auto value = [&](__m512i shifted) QG_LAMBDA {
        // (shifted & 255) | bits of 2^23
        const __m512i real = _mm512_ternarylogic_epi32(shifted, _mm512_set1_epi32(255),
                                                       _mm512_set1_epi32(0x4b000000), 0xea);
        return Floats{_mm512_sub_ps(_mm512_castsi512_ps(real), base)};
    };
    out[0] = value(found);
    out[1] = value(_mm512_srli_epi32(found, 16));
    out[2] = value(_mm512_srli_epi32(found, 8));
    out[3] = value(_mm512_srli_epi32(found, 24));
}

#include "cpu/isa/four.inl"

using WideFloats = Floats4;

#define QG_SATURATES
// The table's outputs for sums that are neither rounded nor clamped yet.
template <class Four>
QG_INLINE Four look_up_saturated(const Table &t, const Four &a) {
    const __m512i lift = _mm512_set1_epi32(t.lift);
    auto words = [&](int k) QG_LAMBDA {
        return _mm512_adds_epi16(
            _mm512_packs_epi32(_mm512_cvtps_epi32(a.v[k].v), _mm512_cvtps_epi32(a.v[k + 1].v)),
            lift);
    };
    // Each 128-bit part contains four bytes of each vector.
    const __m512i index =
        _mm512_add_epi8(_mm512_packus_epi16(words(0), words(2)), _mm512_set1_epi32(t.place));
    const __m512i found = entries_at(t.bytes, index);
    const __m512 base = _mm512_set1_ps(8388608.f - t.base);
    auto value = [&](int first) QG_LAMBDA {
        constexpr int zeros = static_cast<int>(0x80808000u);
        const __m512i order = _mm512_set4_epi32(zeros + first + 3, zeros + first + 2,
                                                zeros + first + 1, zeros + first);
        const __m512i real =
            _mm512_or_si512(_mm512_shuffle_epi8(found, order), _mm512_set1_epi32(0x4b000000));
        return Floats{_mm512_sub_ps(_mm512_castsi512_ps(real), base)};
    };
    return {{}, {value(0), value(4), value(8), value(12)}};
}

#else
using WideFloats = Floats;
#endif

struct Doubles {
    using Real = double;
    using Lane = Doubles;
    static constexpr int n = 8, kVectors = 1;
    static constexpr bool kScales = true, kPowers = false;
    static constexpr Ties kTies = Ties::even;
    static constexpr double kMagic = 6755399441055744.;
    __m512d v;

    static Doubles set(double x) { return {_mm512_set1_pd(x)}; }
    static Doubles load(const double *p) { return {_mm512_load_pd(p)}; }
    static Doubles load_floats(const float *p) { return {_mm512_cvtps_pd(_mm256_load_ps(p))}; }
    static Doubles from_ints(const int32_t *p) {
        return {_mm512_cvtepi32_pd(_mm256_load_si256(reinterpret_cast<const __m256i *>(p)))};
    }
    static const double *multipliers(const Packed &p, int64_t channel) { return p.m + channel; }
    static Doubles multiplier(const double *m, int i) { return load(m + i); }
    template <class F>
    static Doubles each(F f) {
        return f(0);
    }
    Doubles lane(int) const { return *this; }
    static Doubles add(Doubles a, Doubles b) { return {_mm512_add_pd(a.v, b.v)}; }
    static Doubles from(Doubles a, Doubles b) { return {_mm512_sub_pd(a.v, b.v)}; }
    static Doubles scale(Doubles a, Doubles m) { return mul(a, m); }
    static Doubles multiply_add(Doubles a, Doubles m, Doubles b) {
        return {_mm512_fmadd_pd(a.v, m.v, b.v)};
    }
    static Doubles mul(Doubles a, Doubles b) { return {_mm512_mul_pd(a.v, b.v)}; }
    static Doubles add_product(Doubles a, Doubles b, Doubles m) {
        return {_mm512_fmadd_pd(b.v, m.v, a.v)};
    }
    static Doubles limit(Doubles a, Doubles lo, Doubles hi) {
        return {_mm512_min_pd(_mm512_max_pd(a.v, lo.v), hi.v)};
    }
    static Doubles inside(Doubles a, Doubles lo, Doubles hi) {
        const __mmask8 above = _mm512_cmp_pd_mask(a.v, lo.v, _CMP_GE_OQ);
        return {_mm512_maskz_mov_pd(_mm512_mask_cmp_pd_mask(above, a.v, hi.v, _CMP_LE_OQ),
                                    _mm512_set1_pd(1.))};
    }
    static Doubles to_integer(Doubles a) {
        return {_mm512_roundscale_pd(a.v, _MM_FROUND_CUR_DIRECTION | _MM_FROUND_NO_EXC)};
    }
    static Doubles sum_to_integer(Doubles a, Doubles c) { return to_integer(add(a, c)); }
    static Doubles product_to_integer(Doubles a, Doubles m, Doubles c) {
        return to_integer({_mm512_fmadd_pd(a.v, m.v, c.v)});
    }
    static Doubles by_sign(Doubles a, Doubles positive, Doubles negative) {
        const __mmask8 below = _mm512_movepi64_mask(_mm512_castpd_si512(a.v));
        return {_mm512_mask_blend_pd(below, positive.v, negative.v)};
    }
    static Doubles power_of(Doubles m) {
        return {_mm512_and_pd(m.v, _mm512_castsi512_pd(_mm512_set1_epi64(0x7ff0000000000000)))};
    }
    static Doubles round(Doubles a) { return to_integer(a); }
    static Doubles rounded_product(Doubles a, Doubles m) {
        const __m512d magic = _mm512_set1_pd(6755399441055744.);  // 1.5 * 2^52
        return {_mm512_sub_pd(_mm512_fmadd_pd(a.v, m.v, magic), magic)};
    }
    QG_INLINE static Doubles look_up(const Table &t, Doubles a) {
        const __m256i code = _mm512_cvtpd_epi32(a.v);  // ties to even
        if (t.entries) {
            const __m256i index = _mm256_and_si256(code, _mm256_set1_epi32(t.mask));
            return {_mm512_cvtps_pd(_mm256_i32gather_ps(t.entries, index, 4))};
        }
        const __m256i first = _mm256_set1_epi32(static_cast<int32_t>(t.pre_lo));
        const __m256i found = _mm256_i32gather_epi32(reinterpret_cast<const int *>(t.words),
                                                     _mm256_sub_epi32(code, first), 2);
        const __m256i y = _mm256_and_si256(found, _mm256_set1_epi32(65535));
        return {_mm512_cvtepi32_pd(_mm256_add_epi32(y, _mm256_set1_epi32(t.word_base)))};
    }
    void store(double *p) const { _mm512_store_pd(p, v); }
    void store_floats(float *p) const { _mm256_store_ps(p, _mm512_cvtpd_ps(v)); }
    template <int P>
    void store_operand(int32_t shift, uint8_t *low, int64_t plane) const {
        const __m256i code = _mm256_add_epi32(_mm512_cvtpd_epi32(v), _mm256_set1_epi32(shift));
        _mm_storel_epi64(reinterpret_cast<__m128i *>(low), _mm256_cvtepi32_epi8(code));
        if (P == 2)
            _mm_storel_epi64(reinterpret_cast<__m128i *>(low + plane),
                             _mm256_cvtepi32_epi8(_mm256_srli_epi32(code, 8)));
    }
};

// --- the backward's products
// The registers have room for 8 to 24 accumulators, besides weights and an operand.

constexpr int kPanelVectors = 2, kFloatRows = 12, kFeatures = 8;
constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 6 ? 2 : 1; }

}  // namespace

#if defined(QG_AMX)
extern const Layout layout{kGroup, kDepth, kShared, Operand::u8, true, 32, 32, 16, 16, 0, true};
#else
extern const Layout layout{kGroup, kDepth, kShared, Operand::u8, true, 24, 16, 1, 1, 0, true};
#endif

#include "cpu/isa/entries.inl"

}  // namespace QG_NAMESPACE
}  // namespace quant_gru
