// Four vectors of `Powers` in lockstep. A single vector would wait for its table lookups, and the
// waiting instructions would fill the processor's out-of-order window. Included inside the
// namespace of an instruction set after lockstep.inl and `Powers`.

struct WidePowers : Lockstep<WidePowers, Powers> {
    static constexpr bool kScales = false, kPowers = true;
    struct Roundings {
        Powers::Rounding v[kVectors];
    };
    Powers v[kVectors];

    template <class F>
    QG_INLINE static auto each(F f) {
        decltype(all_of(f(0))) all;
#pragma GCC unroll 4
        for (int k = 0; k < kVectors; ++k) all.v[k] = f(k);
        return all;
    }
    static WidePowers all_of(const Powers &);
    static Roundings all_of(const Powers::Rounding &);
    Powers lane(int k) const { return v[k]; }
    static const int32_t *multipliers(const Packed &p, int64_t channel) {
        return Powers::multipliers(p, channel);
    }
    static double base_of(const Table &t) { return Powers::base_of(t); }
    QG_INLINE static WidePowers rounded_product(const WidePowers &a, const Roundings &m) {
        return each([&](int k) { return Powers::rounded_product(a.v[k], m.v[k]); });
    }
    QG_INLINE static WidePowers find(const Table &t, const WidePowers &a) {
        if (!t.words)
            return each([&](int k) QG_LAMBDA { return Powers{Floats::look_up(t, a.v[k])}; });
        return each([&](int k) QG_LAMBDA { return Powers::find_word(t, a.v[k]); });
    }
};
