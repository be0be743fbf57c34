// Lanes for every rule of rounding. Included inside the namespace of an instruction set after its
// lanes, which have
//   to_integer(a)              a, rounded in the direction of the processor,
//   sum_to_integer(a, c), product_to_integer(a, m, c)
//                              a + c and a * m + c, rounded in this direction,
//   with_sign(a, c)            c, which is not negative, with the sign of a,
//   by_sign(a, positive, negative)
//                              `negative` where a < 0, else `positive`; either one for 0,
//   power_of(m)                the largest power of two up to m; 0 for 0.
//
// The processor rounds to the nearest, downward or toward zero while lanes compute (`Direction`).
// Everything that lanes do not round by a rule is exact. A lane's type says how it rounds (`Ties`):
//   even       Sums and products are rounded by the operation that also computes something else. To
//              the nearest this is QG_HALF_EVEN; downward it is QG_FLOOR.
//   stretched  QG_HALF_AWAY, to the nearest: multipliers of products, and sums, are larger by so
//              little that only ties move (`Cell::stretches`).
//   up         QG_HALF_UP, downward: sums include one half (`FusedPlan::halves`).
//   away       QG_HALF_AWAY, toward zero: a number plus one half of its sign.
//   any        A number plus an addend of its sign, in the direction of the rule.
// docs/arithmetic.md, section 11, proves them.

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

// What stretches a multiplier: 1 plus the smallest step.
template <class Real>
constexpr double kStretch = 1 + (sizeof(Real) == sizeof(float) ? 0x1p-23 : 0x1p-52);

// Whether lanes round with the instructions of ties to even.
constexpr bool plain(Ties ties) { return ties == Ties::even || ties == Ties::stretched; }

// B that rounds in another way.
template <class B, Ties kHow>
struct Ruled : B {
    using Lane = Ruled;
    static constexpr bool kScales = plain(kHow) && B::kScales;
    static constexpr Ties kTies = kHow;

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
        if constexpr (kHow == Ties::any)
            return B::by_sign(a, positive, negative);
        else if constexpr (kHow == Ties::away)
            return B::with_sign(a, positive);
        else
            return positive;
    }
    // The integer of an exact sum.
    QG_INLINE static Ruled whole(const Ruled &a, const Ruled &positive, const Ruled &negative) {
        return B::sum_to_integer(a, addend(a, positive, negative));
    }
    // a * m, rounded once. The sign of `a` is that of the product.
    QG_INLINE static Ruled product(const Ruled &a, const Ruled &m, const Ruled &positive,
                                   const Ruled &negative) {
        return B::product_to_integer(a, m, addend(a, positive, negative));
    }
    QG_INLINE static Ruled channels(const Ruled &a, const Ruled &m, const Channels &by) {
        if constexpr (kHow == Ties::any) {
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
// Lanes of `Powers`: Ties::up or Ties::any.
template <Ties kHow>
struct Ruled<Powers, kHow> : Powers {
    using Lane = Ruled;
    static constexpr Ties kTies = kHow;

    // The addends of sums that are integers, besides half of 2^s.
    using Channels = Addend;

    Ruled() = default;
    Ruled(const Powers &b) : Powers(b) {}
    Ruled(const Floats &b) : Powers(b) {}

    QG_INLINE static Ruled whole(const Ruled &a, const Ruled &positive, const Ruled &negative) {
        return Ruled(sum_to_integer(a, by_sign(a, positive, negative)));
    }
    // a * b, rounded once; both may be negative.
    QG_INLINE static Ruled product(const Ruled &a, const Ruled &b, const Ruled &positive,
                                   const Ruled &negative) {
        if constexpr (kHow == Ties::up)
            return Ruled(product_to_integer(a, b, positive));
        else
            return Ruled(product_to_integer(a, b, by_sign(both_signs(a, b), positive, negative)));
    }
    QG_INLINE static Ruled channels(const Ruled &sums, const Rounding &m, const Channels &by) {
        if constexpr (kHow == Ties::up)
            return Ruled(shifted(sums, m));
        else
            return Ruled(shifted(sums, m, by));
    }
};
#endif

// The lanes of another way of rounding for those of ties to even.
template <class Wide, Ties kHow>
struct RuledOf {
    using type = Ruled<Wide, kHow>;
};
#if defined(QG_FOUR)
template <Ties kHow>
struct RuledOf<Floats4, kHow> {
    using type = FourOf<Ruled<Floats, kHow>>;
};
#endif
#if defined(QG_FOUR_POWERS)
template <Ties kHow>
struct RuledOf<WidePowers, kHow> {
    using type = FourPowers<Ruled<Powers, kHow>>;
};
#endif
