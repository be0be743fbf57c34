// Four vectors of `Powers` in lockstep. A single vector would wait for its table lookups, and the
// waiting instructions would fill the processor's out-of-order window. Included inside the
// namespace of an instruction set after lockstep.inl and `Powers`. L is `Powers`, or derives from
// it and rounds differently (rules.inl).

#define QG_FOUR_POWERS
template <class L>
struct FourPowers : Lockstep<FourPowers<L>, L> {
    static constexpr int kVectors = 4;
    static constexpr bool kScales = false, kPowers = true;
    struct Roundings {
        Powers::Rounding v[kVectors];
    };
    L v[kVectors];

    template <class F>
    QG_INLINE static auto each(F f) {
        decltype(all_of(f(0))) all;
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) all.v[k] = f(k);
        return all;
    }
    static FourPowers all_of(const Powers &);
    static Roundings all_of(const Powers::Rounding &);
    L lane(int k) const { return v[k]; }
    static const int32_t *multipliers(const Packed &p, int64_t channel) {
        return Powers::multipliers(p, channel);
    }
    static double base_of(const Table &t) { return Powers::base_of(t); }
    QG_INLINE static FourPowers product(const FourPowers &a, const FourPowers &b, L positive,
                                        L negative) {
        return each([&](int k) { return L::product(a.v[k], b.v[k], positive, negative); });
    }
    QG_INLINE static FourPowers find(const Table &t, const FourPowers &a) {
        if (!t.words)
            return each([&](int k) QG_LAMBDA { return Powers{Floats::look_up(t, a.v[k])}; });
        return each([&](int k) QG_LAMBDA { return Powers::find_word(t, a.v[k]); });
    }
};
using WidePowers = FourPowers<Powers>;
