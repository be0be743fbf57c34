// Lanes that round by another rule than ties to even. Included inside the namespace of an
// instruction set after its lanes, which have
//   floor, trunc                  to an integer towards minus infinity, and towards zero,
//   half_of(a)                    1/2 with the sign of a,
//   kDirected                     whether there are product_down and product_to_zero: a * m + c,
//                                 rounded once to a lane in that direction.
// An integer that is rounded this way stays as it is, so that B may round it again.

template <class B, int kRule>
struct Ruled : B {
    using Lane = Ruled;
    static constexpr bool kScales = false;

    Ruled() = default;
    Ruled(const B &b) : B(b) {}

    // The integer of an exact sum; it has room for half a code more (see `Layer`).
    QG_INLINE static Ruled ready(const Ruled &a) {
        if constexpr (kRule == QG_FLOOR)
            return B::floor(a);
        else if constexpr (kRule == QG_HALF_UP)
            return B::floor(B::add(a, B::set(0.5)));
        else
            return B::trunc(B::add(a, B::half_of(a)));
    }
    QG_INLINE static Ruled round(const Ruled &a) { return ready(a); }
    QG_INLINE static Ruled look_up(const Table &t, const Ruled &a) {
        return B::look_up(t, ready(a));
    }
    // v * m, rounded once. m is not negative.
    QG_INLINE static Ruled rounded_product(const Ruled &a, const Ruled &m) {
        if constexpr (B::kDirected) {
            // cut off to a lane and then to an integer: in one direction that rounds once
            if constexpr (kRule == QG_FLOOR)
                return B::floor(B::product_down(a, m, B::set(0)));
            else if constexpr (kRule == QG_HALF_UP)
                return B::floor(B::product_down(a, m, B::set(0.5)));
            else
                return B::trunc(B::product_to_zero(a, m, B::half_of(a)));
        } else {
            // ties to even, corrected by the exact sign of what is left
            const Ruled near = B::rounded_product(a, m);
            if constexpr (kRule == QG_FLOOR) {
                const Ruled up = B::inside(rest(a, m, near), B::set(0), B::set(kHuge));
                return B::add(near, B::from(up, B::set(1)));
            } else if constexpr (kRule == QG_HALF_UP) {
                const Ruled left = rest(a, m, B::add(near, B::set(0.5)));
                return B::add(near, B::inside(left, B::set(0), B::set(kHuge)));
            } else {
                const Ruled half = B::half_of(a), left = rest(a, m, B::add(near, half));
                const Ruled tie = B::inside(left, B::set(0), B::set(0));
                return B::add(near, B::mul(tie, B::add(half, half)));
            }
        }
    }

 private:
    static constexpr double kHuge = 1e30;

    // a * m - c, of which the sign is exact
    QG_INLINE static Ruled rest(const Ruled &a, const Ruled &m, const Ruled &c) {
        if constexpr (B::kScales)
            return B::multiply_add(a, m, B::from(B::set(0), c));
        else
            return B::from(B::mul(a, m), c);  // the plan guarantees an exact product
    }
};

template <class Wide, int kRule>
struct RuledOf {
    using type = Ruled<Wide, kRule>;
};
#if defined(QG_FOUR)
template <int kRule>
struct RuledOf<Floats4, kRule> {
    using type = FourOf<Ruled<Floats, kRule>>;
};
#endif
