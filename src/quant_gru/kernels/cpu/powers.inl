// Vectors of `Powers` that go through the gates together: one alone would wait for its tables, and
// what waits leaves a processor no room to look further ahead. Included inside the namespace of an
// instruction set after `Powers`.

struct WidePowers {
    using Real = float;
    using Lane = Powers;
    static constexpr int kVectors = 4;
    static constexpr bool kScales = false, kPowers = true;
    static constexpr double kMagic = kRound;
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
    QG_INLINE static WidePowers add(const WidePowers &a, const WidePowers &b) {
        return each([&](int k) { return Powers::add(a.v[k], b.v[k]); });
    }
    QG_INLINE static WidePowers from(Powers a, const WidePowers &b) {
        return each([&](int k) { return Powers::from(a, b.v[k]); });
    }
    QG_INLINE static WidePowers scale(const WidePowers &a, Powers m) {
        return each([&](int k) { return Powers::scale(a.v[k], m); });
    }
    QG_INLINE static WidePowers add_product(const WidePowers &a, const WidePowers &b, Powers m) {
        return each([&](int k) { return Powers::add_product(a.v[k], b.v[k], m); });
    }
    QG_INLINE static WidePowers multiply_add(const WidePowers &a, Powers m, Powers b) {
        return each([&](int k) { return Powers::multiply_add(a.v[k], m, b); });
    }
    QG_INLINE static WidePowers multiply_add(const WidePowers &a, const WidePowers &m, Powers b) {
        return each([&](int k) { return Powers::multiply_add(a.v[k], m.v[k], b); });
    }
    QG_INLINE static WidePowers limit(const WidePowers &a, Powers lo, Powers hi) {
        return each([&](int k) { return Powers::limit(a.v[k], lo, hi); });
    }
    QG_INLINE static WidePowers round(const WidePowers &a) {
        return each([&](int k) { return Powers::round(a.v[k]); });
    }
    QG_INLINE static WidePowers rounded_product(const WidePowers &a, const Roundings &m) {
        return each([&](int k) { return Powers::rounded_product(a.v[k], m.v[k]); });
    }
    QG_INLINE static WidePowers find(const Table &t, const WidePowers &a) {
        if (!t.words)
            return each([&](int k) QG_LAMBDA { return Powers{Floats::look_up(t, a.v[k])}; });
        return each([&](int k) QG_LAMBDA { return Powers::find_word(t, a.v[k]); });
    }
};
