// The gate arithmetic of the fused kernel, from sums of matrix products to the next state. Included
// inside the namespace of an instruction set after its lanes.

// The addends of a sum with which lanes round it.
template <class V, bool kPlain = plain(V::kTies)>
struct SumAddends {
    explicit SumAddends(const Sum &) {}
};
template <class V>
struct SumAddends<V, false> {
    typename V::Lane positive, negative;
    explicit SumAddends(const Sum &s) : SumAddends(addends_of(s.rule, s.k, s.first)) {}

 private:
    explicit SumAddends(const Addends &a)
        : positive(V::Lane::set(a.positive)), negative(V::Lane::set(a.negative)) {}
};

// The addends of matrix products.
template <class V, bool kPlain = plain(V::kTies) && !V::kPowers>
struct ChannelAddends {
    struct type {
        explicit type(int) {}
    };
};
template <class V>
struct ChannelAddends<V, false> {
    using type = typename V::Lane::Channels;
};

// The multiplier of a product.
template <class V>
inline double multiplier_of(const Sum &s) {
    return s.m[0] * (V::kTies == Ties::stretched ? kStretch<typename V::Real> : 1);
}

// A weighted sum of two terms. Constants are one vector (C); values (V) may be several vectors.
template <class V>
struct TwoTerms {
    using C = typename V::Lane;
    C m1, m2, lo, hi;
    SumAddends<V> addends;
    explicit TwoTerms(const Sum &s)
        : m1(C::set(s.m[0])),
          m2(C::set(s.m[1])),
          lo(C::set(static_cast<double>(s.lo))),
          hi(C::set(static_cast<double>(s.hi))),
          addends(s) {}
    // Clamped but not rounded: the limits are integers, so clamping may precede rounding. The
    // bounds of the plan guarantee that the sum is exact.
    QG_INLINE V unrounded(const V &a, const V &b) const { return V::limit(sum(a, b), lo, hi); }
    QG_INLINE V sum(const V &a, const V &b) const {
        if constexpr (V::kTies == Ties::up)
            return V::add_product(V::add_product(addends.positive, a, m1), b, m2);
        else
            return V::add_product(V::scale(a, m1), b, m2);
    }
    // A sum that lookups, conversions and `V::round` round by the rule.
    QG_INLINE V ready(const V &sum) const {
        if constexpr (V::kTies == Ties::stretched)
            return V::scale(sum, C::set(kStretch<typename V::Real>));
        else if constexpr (V::kTies == Ties::even || V::kTies == Ties::up)
            return sum;
        else
            return V::whole(sum, addends.positive, addends.negative);
    }
    // The integer of a sum.
    QG_INLINE V whole(const V &sum) const {
        if constexpr (plain(V::kTies))
            return V::round(ready(sum));
        else if constexpr (V::kTies == Ties::up)
            return V::to_integer(sum);
        else
            return ready(sum);
    }
    // The table's output for a sum that is neither rounded nor clamped.
    QG_INLINE V look_up(const Table &t, const V &sum) const {
#if defined(QG_SATURATES)
        if constexpr (V::kVectors > 1) {
            if (t.saturates) return look_up_saturated(t, ready(sum));
        }
#endif
        return V::look_up(t, ready(V::limit(sum, lo, hi)));
    }
    QG_INLINE V find(const Table &t, const V &sum) const { return V::find(t, ready(sum)); }
    // For terms that already include their multipliers: the integer if both do, and `unrounded` if
    // only the second does.
    QG_INLINE V of_scaled(const V &a, const V &b) const {
        return whole(V::limit(V::add(a, b), lo, hi));
    }
    QG_INLINE V of_second_scaled(const V &a, const V &b) const {
        return V::limit(V::add_product(b, a, m1), lo, hi);
    }
};

// A product that is rounded to the code of its own operator (not fused).
template <class V>
struct OneTerm {
    using C = typename V::Lane;
    C m, lo, hi;
    SumAddends<V> addends;
    explicit OneTerm(const Sum &s)
        : m(C::set(multiplier_of<V>(s))),
          lo(C::set(static_cast<double>(s.lo))),
          hi(C::set(static_cast<double>(s.hi))),
          addends(s) {}
    QG_INLINE V operator()(const V &a, const V &b) const {
        return V::limit(unlimited(V::mul(a, b)), lo, hi);
    }
    // Of a product of two codes, which is exact.
    QG_INLINE V unlimited(const V &v) const {
        if constexpr (plain(V::kTies))
            return V::rounded_product(v, m);
        else
            return V::product(v, m, addends.positive, addends.negative);
    }
    // With lanes of `Powers`, whose first factor includes the multiplier.
    QG_INLINE V of_scaled(const V &a, const V &b) const {
        return V::limit(V::product(a, b, addends.positive, addends.negative), lo, hi);
    }
};

// A rounded code times the multiplier of the next sum. The multiplication and the subtraction of
// the rounding constant are one fused multiply-add; `FusedPlan::scalable` says that this is exact.
template <class V>
struct Scaled {
    using C = typename V::Lane;
    C m, offset, lo, hi;
    Scaled(double multiplier, double low, double high)
        : m(C::set(multiplier)),
          offset(C::set(-V::kMagic * multiplier)),
          lo(C::set(low * multiplier)),
          hi(C::set(high * multiplier)) {}
    // clamp(rne(v * own)) * m; the limits are scaled by m, too
    template <class M>
    QG_INLINE V operator()(const V &v, const M &own) const {
        return V::limit(V::multiply_add(V::multiply_add(v, own, C::set(V::kMagic)), m, offset), lo,
                        hi);
    }
};

// The output of a table times the multiplier of the next product. The lookup returns the output
// minus a constant, which the same multiply-add adds back.
template <class V>
struct Based {
    using C = typename V::Lane;
    C m, base;
    Based(double multiplier, double table_base)
        : m(C::set(multiplier)), base(C::set(table_base * multiplier)) {}
    QG_INLINE V operator()(const V &found) const { return V::multiply_add(found, m, base); }
};

// The kinds of plans. any: products may be unrounded (fused). rounded: all three products are
// rounded to codes. scaled: the same, and `Scaled` is exact; with `Powers`, terms are scaled in
// both.
enum class Mode { any, scaled };

// The index of a gate, as a type.
template <int kGate>
struct Gate {
    static constexpr int value = kGate;
};

template <class V>
struct Gates {
    using C = typename V::Lane;
    const FusedPlan &p;
    TwoTerms<V> z_pre, r_pre, g_pre, h_new, zoneout;
    OneTerm<V> rRh, old_contrib, new_contrib;
    C one, wx_lo, wx_hi, rh_lo, rh_hi;
    Scaled<V> wx_z, wx_r, wx_g, rh_z, rh_r, rest_g, old_h, new_h;
    // used only if V::kPowers
    Based<V> r_rest, z_old, g_new;
    C one_less;
    typename ChannelAddends<V>::type by;

    explicit Gates(const FusedPlan &plan)
        : p(plan),
          z_pre(plan.z_pre),
          r_pre(plan.r_pre),
          g_pre(plan.g_pre),
          h_new(plan.h_new),
          zoneout(plan.zoneout),
          rRh(plan.rRh),
          old_contrib(plan.old_contrib),
          new_contrib(plan.new_contrib),
          one(C::set(static_cast<double>(plan.one))),
          wx_lo(C::set(plan.W.lo)),
          wx_hi(C::set(plan.W.hi)),
          rh_lo(C::set(plan.R.lo)),
          rh_hi(C::set(plan.R.hi)),
          wx_z(plan.z_pre.m[0], plan.W.lo, plan.W.hi),
          wx_r(plan.r_pre.m[0], plan.W.lo, plan.W.hi),
          wx_g(plan.g_pre.m[0], plan.W.lo, plan.W.hi),
          rh_z(plan.z_pre.m[1], plan.R.lo, plan.R.hi),
          rh_r(plan.r_pre.m[1], plan.R.lo, plan.R.hi),
          rest_g(plan.g_pre.m[1], static_cast<double>(plan.rRh.lo),
                 static_cast<double>(plan.rRh.hi)),
          old_h(plan.h_new.m[0], static_cast<double>(plan.old_contrib.lo),
                static_cast<double>(plan.old_contrib.hi)),
          new_h(plan.h_new.m[1], static_cast<double>(plan.new_contrib.lo),
                static_cast<double>(plan.new_contrib.hi)),
          r_rest(plan.rRh.m[0], base_of(plan.r)),
          z_old(plan.old_contrib.m[0], base_of(plan.z)),
          g_new(plan.new_contrib.m[0], base_of(plan.g)),
          one_less(C::set(static_cast<double>(plan.one) - base_of(plan.z))),
          by(plan.rule) {}

    static double base_of(const Table &t) {
        if constexpr (V::kPowers)
            return V::base_of(t);
        else
            return 0;
    }

    // Wx is stored as float. A code always fits; its product with a multiplier fits only if lanes
    // are floats, too.
    static constexpr bool kScalesInput = sizeof(typename V::Real) == sizeof(float);

    // Returns the zero-point-free codes of Wx from accumulators. In scaled mode, and if the product
    // fits, it returns them times the multiplier of the next sum.
    template <Mode kMode, int kGate, class M>
    QG_INLINE V input_product(const V &sums, const M &m) const {
        if constexpr (kMode == Mode::scaled && kScalesInput)
            return (kGate == 0 ? wx_z : kGate == 1 ? wx_r : wx_g)(sums, m);
        else
            return V::limit(channels(sums, m), wx_lo, wx_hi);
    }
    // The same for Rh; codes of the candidate are never scaled.
    template <Mode kMode, int kGate, class M>
    QG_INLINE V state_product(const V &sums, const M &m) const {
        if constexpr (kMode == Mode::scaled && kGate < 2)
            return (kGate == 0 ? rh_z : rh_r)(sums, m);
        else
            return V::limit(channels(sums, m), rh_lo, rh_hi);
    }
    // Accumulators times their multipliers, rounded.
    template <class M>
    QG_INLINE V channels(const V &sums, const M &m) const {
        if constexpr (plain(V::kTies) && !V::kPowers)
            return V::rounded_product(sums, m);
        else
            return V::channels(sums, m, by);
    }

    // The table's output for a sum of scaled terms; from_input is unscaled without kScalesInput.
    QG_INLINE static V gate(const Table &t, const TwoTerms<V> &s, const V &from_input,
                            const V &rest) {
        if constexpr (kScalesInput)
            return s.look_up(t, V::add(from_input, rest));
        else
            return s.look_up(t, V::add_product(rest, from_input, s.m1));
    }

    // Computes the next state. `input` and `state` return the results of `input_product` and
    // `state_product` for a gate; `before` returns the previous state. Each is called where its
    // value is used, so that few values occupy registers. The reset gate is first, because the
    // candidate depends on it.
    template <Mode kMode, class Wx, class Rh, class Before>
    QG_INLINE V next(Wx input, Rh state, Before before) const {
        if constexpr (V::kPowers) {
            const V r = r_pre.find(p.r, r_pre.unrounded(input(Gate<1>{}), state(Gate<1>{})));
            const V z = z_pre.find(p.z, z_pre.unrounded(input(Gate<0>{}), state(Gate<0>{})));
            if constexpr (V::kTies != Ties::even) {
                const V rest = rRh.of_scaled(r_rest(r), state(Gate<2>{}));
                const V g = g_pre.find(p.g, g_pre.unrounded(input(Gate<2>{}), rest));
                const V old = old_contrib.of_scaled(z_old(z), before());
                const V fresh = new_contrib.of_scaled(g_new(g), V::from(one_less, z));
                return h_new.whole(h_new.unrounded(old, fresh));
            } else {
                const V rest = rest_g(r_rest(r), state(Gate<2>{}));
                const V g = V::find(p.g, g_pre.of_second_scaled(input(Gate<2>{}), rest));
                const V old = old_h(z_old(z), before());
                const V fresh = new_h(g_new(g), V::from(one_less, z));
                return h_new.of_scaled(old, fresh);
            }
        } else if constexpr (kMode == Mode::scaled) {
            const V r = gate(p.r, r_pre, input(Gate<1>{}), state(Gate<1>{}));
            const V z = gate(p.z, z_pre, input(Gate<0>{}), state(Gate<0>{}));
            const V rest = rest_g(V::mul(r, state(Gate<2>{})), rRh.m);
            const V g = gate(p.g, g_pre, input(Gate<2>{}), rest);
            const V old = old_h(V::mul(z, before()), old_contrib.m);
            const V fresh = new_h(V::mul(V::from(one, z), g), new_contrib.m);
            return h_new.of_scaled(old, fresh);
        } else {
            const V r = r_pre.look_up(p.r, r_pre.sum(input(Gate<1>{}), state(Gate<1>{})));
            const V z = z_pre.look_up(p.z, z_pre.sum(input(Gate<0>{}), state(Gate<0>{})));
            const V Rh_g = state(Gate<2>{}), h = before();
            const V rest = p.rRh.present ? rRh(r, Rh_g) : V::mul(r, Rh_g);
            const V g = g_pre.look_up(p.g, g_pre.sum(input(Gate<2>{}), rest));
            const V not_z = V::from(one, z);
            const V old = p.old_contrib.present ? old_contrib(z, h) : V::mul(z, h);
            const V fresh = p.new_contrib.present ? new_contrib(not_z, g) : V::mul(not_z, g);
            return h_new.whole(h_new.unrounded(old, fresh));
        }
    }
};
