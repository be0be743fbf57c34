// The operations of four vectors that pass through the gates together, vector by vector. Included
// inside the namespace of an instruction set.

// Four has a member `v`, four vectors of type L. Four::each(f) returns a Four of f(0) to f(3).
template <class Four, class L>
struct Lockstep {
    using Real = float;
    using Lane = L;
    static constexpr int kVectors = 4;
    static constexpr double kMagic = kRound;
    static constexpr Ties kTies = L::kTies;

    QG_INLINE static Four add(const Four &a, const Four &b) {
        return Four::each([&](int k) { return L::add(a.v[k], b.v[k]); });
    }
    QG_INLINE static Four from(L a, const Four &b) {
        return Four::each([&](int k) { return L::from(a, b.v[k]); });
    }
    QG_INLINE static Four scale(const Four &a, L m) {
        return Four::each([&](int k) { return L::scale(a.v[k], m); });
    }
    QG_INLINE static Four add_product(const Four &a, const Four &b, L m) {
        return Four::each([&](int k) { return L::add_product(a.v[k], b.v[k], m); });
    }
    QG_INLINE static Four add_product(L a, const Four &b, L m) {
        return Four::each([&](int k) { return L::add_product(a, b.v[k], m); });
    }
    QG_INLINE static Four multiply_add(const Four &a, L m, L b) {
        return Four::each([&](int k) { return L::multiply_add(a.v[k], m, b); });
    }
    QG_INLINE static Four multiply_add(const Four &a, const Four &m, L b) {
        return Four::each([&](int k) { return L::multiply_add(a.v[k], m.v[k], b); });
    }
    QG_INLINE static Four limit(const Four &a, L lo, L hi) {
        return Four::each([&](int k) { return L::limit(a.v[k], lo, hi); });
    }
    QG_INLINE static Four round(const Four &a) {
        return Four::each([&](int k) { return L::round(a.v[k]); });
    }
    // The rest: see rules.inl.
    QG_INLINE static Four to_integer(const Four &a) {
        return Four::each([&](int k) { return L::to_integer(a.v[k]); });
    }
    QG_INLINE static Four whole(const Four &a, L positive, L negative) {
        return Four::each([&](int k) { return L::whole(a.v[k], positive, negative); });
    }
    template <class M, class Channels>
    QG_INLINE static Four channels(const Four &a, const M &m, const Channels &by) {
        return Four::each([&](int k) { return L::channels(a.v[k], m.v[k], by); });
    }
};
