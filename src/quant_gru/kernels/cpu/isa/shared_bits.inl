// Weights of 4, 2 and 1 bits share elements of kShared bits, the first of several steps in the
// highest bits of each. Included by the products of an instruction set, which define kShared; it is
// 0 if weights always take a byte.

// Steps that share elements.
template <int kBits>
constexpr int kSteps = kBits < 8 ? kShared / kBits : 1;

template <int kValue>
struct Step {
    static constexpr int value = kValue;
};

// Calls f with the first `left` of the steps that share elements, or with all if there are fewer.
template <int kCount, int kFirst = 0, class F>
QG_INLINE void each_step(int left, const F &f) {
    if constexpr (kFirst > 0) {
        if (left <= kFirst) return;
    }
    f(Step<kFirst>{});
    if constexpr (kFirst + 1 < kCount) each_step<kCount, kFirst + 1>(left, f);
}
