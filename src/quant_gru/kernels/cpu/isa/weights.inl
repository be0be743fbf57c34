// Scales and codes of weight rows. Included inside the namespace of an instruction set: the
// compiler maps its generic vectors to the vectors of that instruction set.

constexpr int kLanes = 8;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t Words __attribute__((vector_size(4 * kLanes)));

constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: adding it rounds values below 2^22 half-even
constexpr int32_t kInfinite = 0x7f800000;

inline bool is_finite(float v) {
    int32_t bits;
    __builtin_memcpy(&bits, &v, sizeof bits);
    return (bits & kInfinite) != kInfinite;
}

inline Lanes load(const float *v) {
    Lanes found;
    __builtin_memcpy(&found, v, sizeof found);
    return found;
}

// Loads the last n % kLanes values; the remaining lanes are `other`.
inline Lanes load_rest(const float *v, int64_t n, float other) {
    Lanes found = Lanes{} + other;
    const int64_t rest = n % kLanes;
    __builtin_memcpy(&found, v + n - rest, static_cast<size_t>(rest) * sizeof(float));
    return found;
}

struct Limits {
    Lanes lo, hi;
    inline Lanes operator()(Lanes v) const {
        v = v < lo ? lo : v;
        return v > hi ? hi : v;
    }
};

inline Limits limits_of(const WeightRows &w) {
    return {Lanes{} + static_cast<float>(w.lo), Lanes{} + static_cast<float>(w.hi)};
}

struct Extremes {
    Lanes low, high;
    Words infinite = {};
    inline void take(Lanes x) {
        Words bits;
        __builtin_memcpy(&bits, &x, sizeof bits);
        infinite |= (bits & kInfinite) == kInfinite;
        low = x < low ? x : low;
        high = x > high ? x : high;
    }
};

// Finds the smallest and largest of n values. Returns whether all are finite.
inline bool extremes(const float *v, int64_t n, float &least, float &most) {
    Extremes found[2];
    for (Extremes &e : found) e.low = e.high = Lanes{} + v[0];
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        found[0].take(load(v + i));
        found[1].take(load(v + i + kLanes));
    }
    if (i + kLanes <= n) found[0].take(load(v + i));
    if (n % kLanes) found[1].take(load_rest(v, n, v[0]));
    least = most = v[0];
    int32_t any = 0;
    for (const Extremes &e : found)
        for (int j = 0; j < kLanes; ++j) {
            least = e.low[j] < least ? e.low[j] : least;
            most = e.high[j] > most ? e.high[j] : most;
            any |= e.infinite[j];
        }
    return !any;
}

// Sums of squared errors at the covering scale and at finer scales, in units of the covering scale.
struct Errors {
    Lanes sums[QG_FINER + 1] = {};
    inline void add(Lanes y, const Limits &limits) {
        for (int finer = 0; finer <= QG_FINER; ++finer) {
            const Lanes error = y - ((limits(y) + kMagic) - kMagic);
            sums[finer] += error * error;
            y += y;
        }
    }
};

// Finds the candidate with the smallest error from float sums. Returns false if rounding of the
// sums could have changed the choice.
inline bool quick_best(const float *v, int64_t n, int covering, const Limits &limits, int &best) {
    if (covering < -100 || covering > 100) return false;
    double sums[QG_FINER + 1];
    const float unit = static_cast<float>(qg_power(covering));
    Errors errors;
    for (int64_t i = 0; i + kLanes <= n; i += kLanes) errors.add(load(v + i) * unit, limits);
    if (n % kLanes) errors.add(load_rest(v, n, 0.f) * unit, limits);
    double largest = 0;
    for (int finer = 0; finer <= QG_FINER; ++finer) {
        double sum = 0;
        for (int j = 0; j < kLanes; ++j) sum += static_cast<double>(errors.sums[finer][j]);
        sums[finer] = sum * qg_power(-2 * finer);
        largest = sums[finer] > largest ? sums[finer] : largest;
    }
    // Bounds of the rounding errors of float sums and of the definition's rounding to a quantum.
    const double count = static_cast<double>(n);
    const double relative = (count / kLanes + kLanes + 8) * 0x1p-22;
    const double absolute = count * qg_power(qg_ceil_log2(n) - 50) * largest + 0x1p-90;
    for (int a = 0; a <= QG_FINER; ++a)
        for (int b = 0; b < a; ++b) {
            const double off = sums[a] > sums[b] ? sums[a] - sums[b] : sums[b] - sums[a];
            const double more = sums[a] > sums[b] ? sums[a] : sums[b];
            if (!(off > relative * more + absolute)) return false;
        }
    best = qg_best(sums, covering);
    return true;
}

// The same choice from the definition's float64 sums.
inline int exact_best(const float *v, int64_t n, int covering, double lo, double hi) {
    double largest = 0, sums[QG_FINER + 1] = {};
    for (int64_t i = 0; i < n; ++i)
        for (int finer = 0; finer <= QG_FINER; ++finer) {
            const double error = qg_error(v[i], covering, finer, lo, hi);
            largest = error > largest ? error : largest;
        }
    const double quantum = qg_quantum(largest, n);
    for (int64_t i = 0; i < n; ++i)
        for (int finer = 0; finer <= QG_FINER; ++finer)
            sums[finer] += rint(qg_error(v[i], covering, finer, lo, hi) * quantum);
    return qg_best(sums, covering);
}

// Returns the free scale with the smallest error from float sums, or 0 if rounding of the sums
// could have changed the choice.
inline double quick_free(const float *v, int64_t n, int bits, double unit, const double *candidates,
                         const Limits &limits) {
    Lanes inverse[QG_FREE], share[QG_FREE], sums[QG_FREE] = {};
    for (int c = 0; c < QG_FREE; ++c) {
        inverse[c] = Lanes{} + static_cast<float>(1 / candidates[c]);
        share[c] = Lanes{} + static_cast<float>(candidates[c] / unit);
    }
    auto add = [&](Lanes x) {
        for (int c = 0; c < QG_FREE; ++c) {
            const Lanes y = x * inverse[c];
            const Lanes error = (y - ((limits(y) + kMagic) - kMagic)) * share[c];
            sums[c] += error * error;
        }
    };
    for (int64_t i = 0; i + kLanes <= n; i += kLanes) add(load(v + i));
    if (n % kLanes) add(load_rest(v, n, 0.f));
    double found[QG_FREE], least = 0, second = 0, most = 0;
    for (int c = 0; c < QG_FREE; ++c) {
        found[c] = 0;
        for (int j = 0; j < kLanes; ++j) found[c] += static_cast<double>(sums[c][j]);
        most = found[c] > most ? found[c] : most;
        if (!c || found[c] < least) {
            second = c ? least : 1e300;
            least = found[c];
        } else {
            second = found[c] < second ? found[c] : second;
        }
    }
    // Bounds of the errors of float sums, of quotients that are off by one ulp, and of the
    // definition's rounding to a quantum. An ulp of a quotient is at most an ulp of the largest
    // code. It changes an error within half a code by that much, and the squared error of a clamped
    // value by that much times its error.
    const double count = static_cast<double>(n);
    const double codes = static_cast<double>(limits.hi[0]) + 1;
    const double relative = (count / kLanes + kLanes + 16) * 0x1p-22;
    const double absolute = count * codes * 0x1p-18 + codes * sqrt(count * second) * 0x1p-21 +
                            count / qg_free_quantum(bits, n);
    if (!(second - least > relative * second + absolute)) return 0;
    return qg_free_best(found, candidates);
}

// The same choice from the definition's float64 sums.
inline double exact_free(const float *v, int64_t n, int bits, double unit, const double *candidates,
                         double lo, double hi) {
    const double quantum = qg_free_quantum(bits, n);
    double sums[QG_FREE] = {};
    for (int64_t i = 0; i < n; ++i)
        for (int c = 0; c < QG_FREE; ++c)
            sums[c] += qg_free_error(v[i], candidates[c], candidates[c] / unit, quantum, lo, hi);
    return qg_free_best(sums, candidates);
}

inline double free_scale(const WeightRows &w, const float *v, const Limits &limits, double least,
                         double most) {
    const double unit = qg_free_covering(least, most, w.hi);
    if (!qg_searches_free(unit, w.bits, w.n)) return unit;
    double candidates[QG_FREE];
    qg_free_candidates(unit, qg_covering(least, most, w.bits, w.lo, w.hi), candidates);
    const double quick = quick_free(v, w.n, w.bits, unit, candidates, limits);
    return quick > 0 ? quick : exact_free(v, w.n, w.bits, unit, candidates, w.lo, w.hi);
}

// Computes the scale of each row of (rows, n); 0 for a row of zeros. Returns whether all values are
// finite. `space` has room for n values.
inline bool scales_of_rows(const WeightRows &w, int64_t first, int64_t end, double *scales,
                           float *space) {
    bool finite = true;
    const Limits limits = limits_of(w);
    for (int64_t row = first; row < end; ++row) {
        const float *v = w.values + row * w.n;
        scales[row] = 0;
        if (!w.n) continue;
        float least = v[0], most = v[0];
        if (w.n == 1 ? !is_finite(v[0]) : !extremes(v, w.n, least, most)) {
            finite = false;
            for (int64_t i = 0; i < w.n; ++i) space[i] = is_finite(v[i]) ? v[i] : 0.f;
            v = space;
            extremes(v, w.n, least, most);
        }
        if (least == 0 && most == 0) continue;
        if (w.free_scale) {
            scales[row] = free_scale(w, v, limits, least, most);
            continue;
        }
        const int covering = qg_covering(least, most, w.bits, w.lo, w.hi);
        int best;
        if (w.n == 1 || w.bits > 16 || !quick_best(v, w.n, covering, limits, best))
            best = exact_best(v, w.n, covering, w.lo, w.hi);
        scales[row] = qg_power(-best);
    }
    return finite;
}

typedef double LaneDoubles __attribute__((vector_size(8 * kLanes)));

// Sums the mean errors of a row; see qg_mean_error. All terms are integers, so their order does not
// matter.
struct MeanErrors {
    static constexpr double kRound = 6755399441055744.;  // 1.5 * 2^52
    const double *factors;
    double scale, row_factor, limit;
    LaneDoubles sums = {};

    MeanErrors(const WeightRows &w, float row_scale)
        : factors(w.factors),
          scale(row_scale),
          row_factor(qg_row_factor(row_scale)),
          limit(w.term_limit) {}

    // Adds the errors of kLanes values; only the first `count` have factors.
    inline void add(Lanes x, Lanes code, int64_t first, int64_t count) {
        LaneDoubles factor = {};
        __builtin_memcpy(&factor, factors + first, static_cast<size_t>(count) * sizeof(double));
        const LaneDoubles product = __builtin_convertvector(code, LaneDoubles) * scale;
        LaneDoubles term =
            (__builtin_convertvector(x, LaneDoubles) - product) * row_factor * factor;
        term = term < -limit ? LaneDoubles{} - limit : term;
        term = term > limit ? LaneDoubles{} + limit : term;
        sums += (term + kRound) - kRound;
    }
    double total() const {
        double found = 0;
        for (int j = 0; j < kLanes; ++j) found += sums[j];
        return found;
    }
};

// Computes the codes of n values, of up to 16 bits. Returns the sum of the mean errors.
template <bool corrects, class Code>
inline double code_values(const WeightRows &w, const float *v, float scale, const uint8_t *dropped,
                          Code *to) {
    const int64_t n = w.n;
    const Limits limits = limits_of(w);
    MeanErrors errors(w, scale);
    typedef Code Codes __attribute__((vector_size(sizeof(Code) * kLanes)));
    typedef int16_t Halves __attribute__((vector_size(2 * kLanes)));
    auto codes = [&](Lanes x, int64_t first, int64_t count) {
        const Lanes rounded = limits(x / scale) + kMagic;
        if (corrects) errors.add(x, rounded - kMagic, first, count);
        Words bits;
        __builtin_memcpy(&bits, &rounded, sizeof bits);
        // After adding kMagic, the low bits of the float are the rounded integer.
        return __builtin_convertvector(__builtin_convertvector(bits, Halves), Codes);
    };
    for (int64_t i = 0; i + kLanes <= n; i += kLanes) {
        const Codes found = codes(load(v + i), i, kLanes);
        __builtin_memcpy(to + i, &found, sizeof found);
    }
    if (const int64_t rest = n % kLanes) {
        const Codes found = codes(load_rest(v, n, 0.f), n - rest, rest);
        __builtin_memcpy(to + n - rest, &found, static_cast<size_t>(rest) * sizeof(Code));
    }
    if (dropped)
        for (int64_t i = 0; i < n; ++i) to[i] = dropped[i] ? Code(0) : to[i];
    return errors.total();
}

template <bool corrects>
inline double code_row(const WeightRows &w, const float *v, float scale, const uint8_t *dropped,
                       void *to) {
    if (w.bits <= 8) return code_values<corrects>(w, v, scale, dropped, static_cast<int8_t *>(to));
    return code_values<corrects>(w, v, scale, dropped, static_cast<int16_t *>(to));
}

// Computes the codes of one row. `space` has room for one row.
inline double codes_of_row(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped,
                           void *to, float *space) {
    const float *v = w.values + row * w.n;
    if (!w.all_finite) {
        for (int64_t i = 0; i < w.n; ++i) space[i] = is_finite(v[i]) ? v[i] : 0.f;
        v = space;
    }
    return w.factors ? code_row<true>(w, v, scale, dropped, to)
                     : code_row<false>(w, v, scale, dropped, to);
}
