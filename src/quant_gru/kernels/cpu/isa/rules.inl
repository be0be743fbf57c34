// Lanes that round by another rule than ties to even. Included inside the namespace of an
// instruction set after its lanes.
//
// The processor rounds downward or toward zero while such lanes compute (`Direction`). A number
// plus the addend of the rule, rounded in that direction to a lane and then to an integer, is
// rounded once. Everything else that lanes compute is exact. Lanes have
//   to_integer(a)           the next integer in the direction of the processor,
//   product_to_integer(a, m, c)
//                           the same of a * m + c,
//   by_sign(a, positive, negative)
//                           `negative` where a < 0, else `positive`; either one for 0,
//   power_of(m)             the largest power of two up to m; 0 for 0.

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

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

// B with a rule. kSigned: the addends of negative numbers may differ from those of others.
template <class B, bool kSigned>
struct Ruled : B {
    using Lane = Ruled;
    static constexpr bool kScales = false, kEven = false;

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
        if constexpr (kSigned)
            return B::by_sign(a, positive, negative);
        else
            return positive;
    }
    // The integer of an exact sum.
    QG_INLINE static Ruled whole(const Ruled &a, const Ruled &positive, const Ruled &negative) {
        return B::to_integer(B::add(a, addend(a, positive, negative)));
    }
    // a * m, rounded once. The sign of `a` is that of the product.
    QG_INLINE static Ruled product(const Ruled &a, const Ruled &m, const Ruled &positive,
                                   const Ruled &negative) {
        return B::product_to_integer(a, m, addend(a, positive, negative));
    }
    QG_INLINE static Ruled channels(const Ruled &a, const Ruled &m, const Channels &by) {
        if constexpr (kSigned) {
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
struct Ruled<Powers, true> : Powers {
    using Lane = Ruled;
    static constexpr bool kScales = false, kEven = false;

    // The addends of sums that are integers, besides half of 2^s.
    using Channels = Addend;

    Ruled() = default;
    Ruled(const Powers &b) : Powers(b) {}
    Ruled(const Floats &b) : Powers(b) {}

    QG_INLINE static Ruled whole(const Ruled &a, const Ruled &positive, const Ruled &negative) {
        return Ruled(to_integer(add(a, by_sign(a, positive, negative))));
    }
    // a * b, rounded once; both may be negative.
    QG_INLINE static Ruled product(const Ruled &a, const Ruled &b, const Ruled &positive,
                                   const Ruled &negative) {
        return Ruled(product_to_integer(a, b, by_sign(both_signs(a, b), positive, negative)));
    }
    QG_INLINE static Ruled channels(const Ruled &sums, const Rounding &m, const Channels &by) {
        return Ruled(shifted(sums, m, by));
    }
};
#endif

// The lanes of a rule for those of ties to even.
template <class Wide, bool kSigned>
struct RuledOf {
    using type = Ruled<Wide, kSigned>;
};
#if defined(QG_FOUR)
template <bool kSigned>
struct RuledOf<Floats4, kSigned> {
    using type = FourOf<Ruled<Floats, kSigned>>;
};
#endif
#if defined(QG_FOUR_POWERS)
template <>
struct RuledOf<WidePowers, true> {
    using type = FourPowers<Ruled<Powers, true>>;
};
#endif
