// Lanes made of the compiler's generic vectors, for instruction sets without lanes of their own.
// Included inside the namespace of an instruction set; kGroup is a multiple of 8.

using Floats8 = float __attribute__((vector_size(32)));
using Ints8 = int32_t __attribute__((vector_size(32)));
using Doubles8 = double __attribute__((vector_size(64)));
using Longs8 = int64_t __attribute__((vector_size(64)));

#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)
constexpr bool kFusedMultiplyAdd = true;
#else
constexpr bool kFusedMultiplyAdd = false;
#endif

template <class To, class From>
inline To get(const From *p) {
    To v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// Stores codes as 8-bit operands, 16-bit operands, or two planes of bytes.
template <int P>
inline void store_codes(Ints8 code, int32_t shift, OperandByte *low, int64_t plane) {
    constexpr int32_t half = static_cast<OperandByte>(-1) < 0 ? 128 : 0;
    code += shift;
    for (int i = 0; i < 8; ++i) low[i] = static_cast<OperandByte>(code[i]);
    if (P == 2)
        for (int i = 0; i < 8; ++i)
            low[plane + i] = static_cast<OperandByte>((code[i] + half) >> 8);
}

struct Doubles {
    using Real = double;
    using Lane = Doubles;
    static constexpr int n = 8, kVectors = 1;
    static constexpr bool kScales = kFusedMultiplyAdd, kPowers = false;
    static constexpr Ties kTies = Ties::even;
    static constexpr double kMagic = 6755399441055744.;  // 1.5 * 2^52
    Doubles8 v;

    static inline Doubles set(double x) { return {x - Doubles8{}}; }
    static inline Doubles load(const double *p) { return {get<Doubles8>(p)}; }
    static inline Doubles load_floats(const float *p) {
        return {__builtin_convertvector(get<Floats8>(p), Doubles8)};
    }
    static inline Doubles from_ints(const int32_t *p) {
        return {__builtin_convertvector(get<Ints8>(p), Doubles8)};
    }
    static inline const double *multipliers(const Packed &p, int64_t channel) {
        return p.m + channel;
    }
    static inline Doubles multiplier(const double *m, int i) { return load(m + i); }
    template <class F>
    static inline Doubles each(F f) {
        return f(0);
    }
    inline Doubles lane(int) const { return *this; }
    static inline Doubles add(Doubles a, Doubles b) { return {a.v + b.v}; }
    static inline Doubles from(Doubles a, Doubles b) { return {a.v - b.v}; }
    static inline Doubles scale(Doubles a, Doubles m) { return mul(a, m); }
    static inline Doubles multiply_add(Doubles a, Doubles m, Doubles b) {
        for (int i = 0; i < 8; ++i) a.v[i] = __builtin_fma(a.v[i], m.v[i], b.v[i]);
        return a;
    }
    static inline Doubles mul(Doubles a, Doubles b) { return {a.v * b.v}; }
    // a + b * m, if the product and the sum are exact
    static inline Doubles add_product(Doubles a, Doubles b, Doubles m) { return {a.v + b.v * m.v}; }
    static inline Doubles limit(Doubles a, Doubles lo, Doubles hi) {
        a.v = a.v < lo.v ? lo.v : a.v;
        return {a.v > hi.v ? hi.v : a.v};
    }
    // 1 where lo <= a <= hi, else 0
    static inline Doubles inside(Doubles a, Doubles lo, Doubles hi) {
        for (int i = 0; i < 8; ++i) a.v[i] = a.v[i] >= lo.v[i] && a.v[i] <= hi.v[i] ? 1 : 0;
        return a;
    }
    // the rest: see rules.inl
    static inline Doubles to_integer(Doubles a) {
        const double magic = 6755399441055744.;
        // of the sign of a, so that sums round in the direction of the processor
        const Doubles8 far = a.v < 0 ? -magic - Doubles8{} : magic - Doubles8{};
        return {(a.v + far) - far};
    }
    static inline Doubles sum_to_integer(Doubles a, Doubles c) { return to_integer(add(a, c)); }
    static inline Doubles product_to_integer(Doubles a, Doubles m, Doubles c) {
        return to_integer(kFusedMultiplyAdd ? multiply_add(a, m, c) : add(mul(a, m), c));
    }
    static inline Doubles by_sign(Doubles a, Doubles positive, Doubles negative) {
        return {a.v < 0 ? negative.v : positive.v};
    }
    static inline Doubles power_of(Doubles m) {
        return {reinterpret_cast<Doubles8>(reinterpret_cast<Longs8>(m.v) & 0x7ff0000000000000)};
    }
    static inline Doubles round(Doubles a) {
        const double magic = 6755399441055744.;  // 1.5 * 2^52
        return {(a.v + magic) - magic};
    }
    // rne(v * m), rounded once: without fused multiply-add the plan guarantees an exact product
    static inline Doubles rounded_product(Doubles a, Doubles m) {
        if (!kFusedMultiplyAdd) return round(mul(a, m));
        const double magic = 6755399441055744.;
        for (int i = 0; i < 8; ++i) a.v[i] = __builtin_fma(a.v[i], m.v[i], magic) - magic;
        return a;
    }
    static inline Doubles look_up(const Table &t, Doubles a) {
        const Ints8 code = __builtin_convertvector(round(a).v, Ints8);
        Doubles8 y;
        if (t.entries) {
            for (int i = 0; i < 8; ++i) y[i] = t.entries[code[i] & t.mask];
            return {y};
        }
        const int32_t first = static_cast<int32_t>(t.pre_lo);
        for (int i = 0; i < 8; ++i) y[i] = t.words[code[i] - first] + t.word_base;
        return {y};
    }
    inline void store(double *p) const { __builtin_memcpy(p, &v, sizeof v); }
    inline void store_floats(float *p) const {
        const Floats8 f = __builtin_convertvector(v, Floats8);
        __builtin_memcpy(p, &f, sizeof f);
    }
    template <int P>
    inline void store_operand(int32_t shift, OperandByte *low, int64_t plane) const {
        store_codes<P>(__builtin_convertvector(v, Ints8), shift, low, plane);
    }
};

struct Floats {
    using Real = float;
    using Lane = Floats;
    static constexpr int n = 8, kVectors = 1;
    static constexpr bool kScales = kFusedMultiplyAdd, kPowers = false;
    static constexpr Ties kTies = Ties::even;
    static constexpr double kMagic = kRound;
    Floats8 v;

    static inline Floats set(double x) { return {static_cast<float>(x) - Floats8{}}; }
    static inline Floats load(const float *p) { return {get<Floats8>(p)}; }
    static inline Floats load_floats(const float *p) { return load(p); }
    static inline Floats from_ints(const int32_t *p) {
        return {__builtin_convertvector(get<Ints8>(p), Floats8)};
    }
    static inline const float *multipliers(const Packed &p, int64_t channel) {
        return p.m_float + channel;
    }
    static inline Floats multiplier(const float *m, int i) { return load(m + i); }
    template <class F>
    static inline Floats each(F f) {
        return f(0);
    }
    inline Floats lane(int) const { return *this; }
    static inline Floats add(Floats a, Floats b) { return {a.v + b.v}; }
    static inline Floats from(Floats a, Floats b) { return {a.v - b.v}; }
    static inline Floats scale(Floats a, Floats m) { return mul(a, m); }
    static inline Floats multiply_add(Floats a, Floats m, Floats b) {
        for (int i = 0; i < 8; ++i) a.v[i] = __builtin_fmaf(a.v[i], m.v[i], b.v[i]);
        return a;
    }
    static inline Floats mul(Floats a, Floats b) { return {a.v * b.v}; }
    static inline Floats add_product(Floats a, Floats b, Floats m) { return {a.v + b.v * m.v}; }
    static inline Floats limit(Floats a, Floats lo, Floats hi) {
        a.v = a.v < lo.v ? lo.v : a.v;
        return {a.v > hi.v ? hi.v : a.v};
    }
    static inline Floats inside(Floats a, Floats lo, Floats hi) {
        for (int i = 0; i < 8; ++i) a.v[i] = a.v[i] >= lo.v[i] && a.v[i] <= hi.v[i] ? 1.f : 0.f;
        return a;
    }
    static inline Floats to_integer(Floats a) {
        const Floats8 far = a.v < 0 ? -kRound - Floats8{} : kRound - Floats8{};
        return {(a.v + far) - far};
    }
    static inline Floats sum_to_integer(Floats a, Floats c) { return to_integer(add(a, c)); }
    static inline Floats product_to_integer(Floats a, Floats m, Floats c) {
        if (kFusedMultiplyAdd) return to_integer(multiply_add(a, m, c));
        // The product of two floats is exact in double.
        const Doubles8 y =
            __builtin_convertvector(a.v, Doubles8) * __builtin_convertvector(m.v, Doubles8) +
            __builtin_convertvector(c.v, Doubles8);
        return {__builtin_convertvector(Doubles::to_integer({y}).v, Floats8)};
    }
    static inline Floats with_sign(Floats a, Floats c) { return {a.v < 0 ? -c.v : c.v}; }
    static inline Floats by_sign(Floats a, Floats positive, Floats negative) {
        return {a.v < 0 ? negative.v : positive.v};
    }
    static inline Floats power_of(Floats m) {
        return {reinterpret_cast<Floats8>(reinterpret_cast<Ints8>(m.v) & 0x7f800000)};
    }
    static inline Floats round(Floats a) { return {(a.v + kRound) - kRound}; }
    static inline Floats rounded_product(Floats a, Floats m) {
        if (kFusedMultiplyAdd) {
            for (int i = 0; i < 8; ++i) a.v[i] = __builtin_fmaf(a.v[i], m.v[i], kRound) - kRound;
            return a;
        }
        // The product of two floats is exact in double.
        const Doubles8 y =
            __builtin_convertvector(a.v, Doubles8) * __builtin_convertvector(m.v, Doubles8);
        return {__builtin_convertvector(Doubles::round({y}).v, Floats8)};
    }
    static inline Floats look_up(const Table &t, Floats a) {
        const Ints8 code = __builtin_convertvector(round(a).v, Ints8);
        for (int i = 0; i < 8; ++i) a.v[i] = t.entries[code[i] & t.mask];
        return a;
    }
    inline void store(float *p) const { __builtin_memcpy(p, &v, sizeof v); }
    inline void store_floats(float *p) const { store(p); }
    template <int P>
    inline void store_operand(int32_t shift, OperandByte *low, int64_t plane) const {
        store_codes<P>(__builtin_convertvector(v, Ints8), shift, low, plane);
    }
};
using WideFloats = Floats;
