// Lanes that round by another rule than ties to even. Included inside the namespace of an
// instruction set after its lanes.
//
// The processor rounds downward or toward zero while such lanes compute (`Direction`). A number
// plus the addend of the rule, rounded in that direction to a lane and then to an integer, is
// rounded once. Everything else that lanes compute is exact. Lanes have
//   sum_to_integer<toward>(a, c), product_to_integer<toward>(a, m, c)
//                           a + c and a * m + c, rounded in the direction of the processor, or in
//                           the given one if kDirects says that instructions can,
//   with_sign(a, c)         c, which is not negative, with the sign of a,
//   by_sign(a, positive, negative)
//                           `negative` where a < 0, else `positive`; either one for 0,
//   power_of(m)             the largest power of two up to m; 0 for 0.

// The direction in which the processor rounds during a scope. Only functions that are not inlined
// compute in the scope, because the compiler knows nothing of directions.
class Direction {
 public:
    explicit Direction(int rule) {
        if (rule == QG_HALF_EVEN) return;
        changed_ = true;
        const bool zero = rule == QG_HALF_AWAY;
#if defined(__SSE2__)
        before_ = _mm_getcsr();
        _mm_setcsr(before_ | (zero ? 0x6000u : 0x2000u));
#elif defined(__aarch64__)
        __asm__ volatile("mrs %0, fpcr" : "=r"(before_));
        const uint64_t after = before_ | (zero ? uint64_t{3} << 22 : uint64_t{2} << 22);
        __asm__ volatile("msr fpcr, %0" : : "r"(after) : "memory");
#endif
    }
    ~Direction() {
        if (!changed_) return;
#if defined(__SSE2__)
        _mm_setcsr(before_);
#elif defined(__aarch64__)
        __asm__ volatile("msr fpcr, %0" : : "r"(before_) : "memory");
#endif
    }
    Direction(const Direction &) = delete;
    Direction &operator=(const Direction &) = delete;

 private:
    bool changed_ = false;
#if defined(__SSE2__)
    unsigned before_ = 0;
#elif defined(__aarch64__)
    uint64_t before_ = 0;
#endif
};

// What is added to a number that is not negative, and to a negative one.
struct Addends {
    double positive = 0, negative = 0;
};

inline double power_of_two(int exponent) { return __builtin_ldexp(1., exponent); }

// The addends of sums that are divided by 2^k; see qg_round_by for `first`. With QG_DOUBLE, the
// first step rounds up what would be a tie of the second one: one addend does both.
inline Addends addends_of(int rule, int k, int first) {
    if (rule == QG_HALF_AWAY) return {0.5, -0.5};
    if (rule == QG_HALF_UP) return {0.5, 0.5};
    if (rule == QG_FLOOR) return {0, 0};
    const double more = k > first ? power_of_two(first - 1 - k) : 0;
    return {0.5 + more, 0.5 - more};
}

// Which numbers have the same addend: all, those of a magnitude but for its sign, or those of a
// sign.
enum class Same { all, magnitude, sign };

// B with a rule.
template <class B, Same kSame, Toward kToward>
struct Ruled : B {
    using Lane = Ruled;
    static constexpr bool kScales = false, kEven = false;
    // whether the processor has to round in the direction of the rule
    static constexpr bool kNeedsDirection = !B::kDirects || kToward == Toward::current;

    // The addends of matrix products. With QG_DOUBLE they depend on the multiplier of a channel.
    struct Channels {
        Ruled positive, negative;
        bool twice;
        explicit Channels(int rule)
            : positive(B::set(rule == QG_FLOOR ? 0 : 0.5)),
              negative(B::set(addends_of(rule, 0, 0).negative)),
              twice(rule == QG_DOUBLE) {}
    };

    Ruled() = default;
    Ruled(const B &b) : B(b) {}

    QG_INLINE static B addend(const B &a, const B &positive, const B &negative) {
        if constexpr (kSame == Same::sign)
            return B::by_sign(a, positive, negative);
        else if constexpr (kSame == Same::magnitude)
            return B::with_sign(a, positive);
        else
            return positive;
    }
    // The integer of an exact sum.
    QG_INLINE static Ruled whole(const Ruled &a, const Ruled &positive, const Ruled &negative) {
        return B::template sum_to_integer<kToward>(a, addend(a, positive, negative));
    }
    // a * m, rounded once. The sign of `a` is that of the product.
    QG_INLINE static Ruled product(const Ruled &a, const Ruled &m, const Ruled &positive,
                                   const Ruled &negative) {
        return B::template product_to_integer<kToward>(a, m, addend(a, positive, negative));
    }
    QG_INLINE static Ruled channels(const Ruled &a, const Ruled &m, const Channels &by) {
        if constexpr (kSame == Same::sign) {
            if (by.twice) {
                // multipliers are below 1/2; see `Layer`
                const B more = B::power_of(m);
                return product(a, m, B::add(by.positive, more), B::from(by.negative, more));
            }
        }
        return product(a, m, by.positive, by.negative);
    }
};

#if defined(QG_POWERS)
// Lanes of `Powers` with a rule.
template <>
struct Ruled<Powers, Same::sign, Toward::current> : Powers {
    using Lane = Ruled;
    static constexpr bool kScales = false, kEven = false, kNeedsDirection = true;

    // The addends of sums that are integers, besides half of 2^s.
    using Channels = Addend;

    Ruled() = default;
    Ruled(const Powers &b) : Powers(b) {}
    Ruled(const Floats &b) : Powers(b) {}

    QG_INLINE static Ruled whole(const Ruled &a, const Ruled &positive, const Ruled &negative) {
        return Ruled(sum_to_integer<Toward::current>(a, by_sign(a, positive, negative)));
    }
    // a * b, rounded once; both may be negative.
    QG_INLINE static Ruled product(const Ruled &a, const Ruled &b, const Ruled &positive,
                                   const Ruled &negative) {
        return Ruled(product_to_integer<Toward::current>(
            a, b, by_sign(both_signs(a, b), positive, negative)));
    }
    QG_INLINE static Ruled channels(const Ruled &sums, const Rounding &m, const Channels &by) {
        return Ruled(shifted(sums, m, by));
    }
};
#endif

// Lanes for all rules.
template <class B>
using AnyRule = Ruled<B, Same::sign, Toward::current>;

// The lanes of a rule for those of ties to even.
template <class Wide, Same kSame, Toward kToward>
struct RuledOf {
    using type = Ruled<Wide, kSame, kToward>;
};
#if defined(QG_FOUR)
template <Same kSame, Toward kToward>
struct RuledOf<Floats4, kSame, kToward> {
    using type = FourOf<Ruled<Floats, kSame, kToward>>;
};
#endif
#if defined(QG_FOUR_POWERS)
template <>
struct RuledOf<WidePowers, Same::sign, Toward::current> {
    using type = FourPowers<AnyRule<Powers>>;
};
#endif
