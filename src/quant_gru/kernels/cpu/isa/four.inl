// Four vectors of floats in lockstep, so that one byte-table lookup serves all four. Included
// inside the namespace of an instruction set after lockstep.inl and `Floats`; it defines
//   look_up_bytes(table, a, found)    table outputs of a[0..3], inputs that are not rounded yet.

struct Floats4 : Lockstep<Floats4, Floats> {
    static constexpr bool kScales = true, kPowers = false;
    Floats v[4];

    template <class F>
    QG_INLINE static Floats4 each(F f) {
        return {{}, {f(0), f(1), f(2), f(3)}};
    }
    Floats lane(int k) const { return v[k]; }
    static const float *multipliers(const Packed &p, int64_t channel) {
        return p.m_float + channel;
    }
    QG_INLINE static Floats4 mul(const Floats4 &a, const Floats4 &b) {
        return each([&](int k) { return Floats::mul(a.v[k], b.v[k]); });
    }
    QG_INLINE static Floats4 rounded_product(const Floats4 &a, Floats m) {
        return each([&](int k) { return Floats::rounded_product(a.v[k], m); });
    }
    QG_INLINE static Floats4 rounded_product(const Floats4 &a, const Floats4 &m) {
        return each([&](int k) { return Floats::rounded_product(a.v[k], m.v[k]); });
    }
    QG_INLINE static Floats4 look_up(const Table &t, const Floats4 &a) {
        if (!t.bytes) return each([&](int k) { return Floats::look_up(t, a.v[k]); });
        Floats4 found;
        look_up_bytes(t, a.v, found.v);
        return found;
    }
};
