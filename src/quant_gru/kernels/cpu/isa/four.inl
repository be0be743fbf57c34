// Four vectors of floats in lockstep, so that one byte-table lookup serves all four. Included
// inside the namespace of an instruction set after lockstep.inl and `Floats`; it defines
//   look_up_bytes(table, a, found)    table outputs of a[0..3], inputs that are not rounded yet.
// L is `Floats`, or derives from it and rounds differently (rules.inl).

#define QG_FOUR
template <class L>
struct FourOf : Lockstep<FourOf<L>, L> {
    static constexpr bool kScales = L::kScales, kPowers = false;
    L v[4];

    template <class F>
    QG_INLINE static FourOf each(F f) {
        return {{}, {f(0), f(1), f(2), f(3)}};
    }
    L lane(int k) const { return v[k]; }
    static const float *multipliers(const Packed &p, int64_t channel) {
        return p.m_float + channel;
    }
    QG_INLINE static FourOf mul(const FourOf &a, const FourOf &b) {
        return each([&](int k) { return L::mul(a.v[k], b.v[k]); });
    }
    QG_INLINE static FourOf rounded_product(const FourOf &a, L m) {
        return each([&](int k) { return L::rounded_product(a.v[k], m); });
    }
    QG_INLINE static FourOf rounded_product(const FourOf &a, const FourOf &m) {
        return each([&](int k) { return L::rounded_product(a.v[k], m.v[k]); });
    }
    QG_INLINE static FourOf product(const FourOf &a, L m, L positive, L negative) {
        return each([&](int k) { return L::product(a.v[k], m, positive, negative); });
    }
    QG_INLINE static FourOf look_up(const Table &t, const FourOf &a) {
        if (!t.bytes) return each([&](int k) { return L::look_up(t, a.v[k]); });
        Floats inputs[4], found[4];
        for (int k = 0; k < 4; ++k) inputs[k] = a.v[k];
        look_up_bytes(t, inputs, found);
        return each([&](int k) { return found[k]; });
    }
};
using Floats4 = FourOf<Floats>;
