// Rows of weights to scales and codes. Included inside the namespace of an instruction set, whose
// vectors the loops become: sixteen lanes side by side, no sum that an order could change.

constexpr int kLanes = 16;
constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: rounds half-even what is below 2^22

inline bool is_finite(float v) {
    uint32_t bits;
    __builtin_memcpy(&bits, &v, sizeof bits);
    return (bits & 0x7f800000u) != 0x7f800000u;
}

// Smallest and largest of n values, and whether all are finite.
inline bool extremes(const float *v, int64_t n, float &least, float &most) {
    float low[kLanes], high[kLanes];
    uint32_t exponent[kLanes];
    for (int j = 0; j < kLanes; ++j) {
        low[j] = high[j] = v[0];
        exponent[j] = 0;
    }
    auto take = [&](int j, float x) {
        uint32_t bits;
        __builtin_memcpy(&bits, &x, sizeof bits);
        bits &= 0x7f800000u;
        exponent[j] = exponent[j] > bits ? exponent[j] : bits;
        low[j] = x < low[j] ? x : low[j];
        high[j] = x > high[j] ? x : high[j];
    };
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int j = 0; j < kLanes; ++j) take(j, v[i + j]);
    for (; i < n; ++i) take(0, v[i]);
    least = low[0];
    most = high[0];
    uint32_t all = exponent[0];
    for (int j = 1; j < kLanes; ++j) {
        least = low[j] < least ? low[j] : least;
        most = high[j] > most ? high[j] : most;
        all = all > exponent[j] ? all : exponent[j];
    }
    return all != 0x7f800000u;
}

// The finer of the candidates' exponents by sums in float, if no rounding can have changed the
// choice; otherwise false.
inline bool quick_best(const float *v, int64_t n, int covering, float lo, float hi, int &best) {
    if (covering < -100 || covering > 100) return false;
    double sums[QG_FINER + 1];
    const float unit = static_cast<float>(qg_power(covering));
    float lanes[QG_FINER + 1][kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int j = 0; j < kLanes; ++j) {
            float y = v[i + j] * unit;
            for (int finer = 0; finer <= QG_FINER; ++finer, y *= 2) {
                float r = y < lo ? lo : y;
                r = r > hi ? hi : r;
                const float error = y - ((r + kMagic) - kMagic);
                lanes[finer][j] += error * error;
            }
        }
    for (; i < n; ++i) {
        float y = v[i] * unit;
        for (int finer = 0; finer <= QG_FINER; ++finer, y *= 2) {
            const float r = static_cast<float>(qg_within(y, lo, hi));
            const float error = y - ((r + kMagic) - kMagic);
            lanes[finer][0] += error * error;
        }
    }
    double largest = 0;
    for (int finer = 0; finer <= QG_FINER; ++finer) {
        double sum = 0;
        for (int j = 0; j < kLanes; ++j) sum += static_cast<double>(lanes[finer][j]);
        sums[finer] = sum * qg_power(-2 * finer);
        largest = sums[finer] > largest ? sums[finer] : largest;
    }
    // what float sums, and the definition's rounding to a quantum, may be off by
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

// The same as the definition does it.
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

// The scale of each row of (rows, n), 0 where all of it is; whether all values are finite. `space`
// is room for n values.
inline bool scales_of_rows(const WeightRows &w, int64_t first, int64_t end, double *scales,
                           float *space) {
    bool finite = true;
    for (int64_t row = first; row < end; ++row) {
        const float *v = w.values + row * w.n;
        float least, most;
        scales[row] = 0;
        if (!w.n) continue;
        if (!extremes(v, w.n, least, most)) {
            finite = false;
            for (int64_t i = 0; i < w.n; ++i) space[i] = is_finite(v[i]) ? v[i] : 0.f;
            v = space;
            extremes(v, w.n, least, most);
        }
        if (least == 0 && most == 0) continue;
        if (w.free_scale) {
            scales[row] = qg_free_scale(least, most, w.hi);
            continue;
        }
        const int covering = qg_covering(least, most, w.bits, w.lo, w.hi);
        int best;
        if (w.bits > 16 ||
            !quick_best(v, w.n, covering, static_cast<float>(w.lo), static_cast<float>(w.hi), best))
            best = exact_best(v, w.n, covering, w.lo, w.hi);
        scales[row] = qg_power(-best);
    }
    return finite;
}

// Codes of n values of up to 16 bits.
template <class Code>
inline void code_values(const float *v, int64_t n, float scale, float lo, float hi,
                        const uint8_t *dropped, Code *to) {
    for (int64_t i = 0; i < n; ++i) {
        float y = v[i] / scale;
        y = y < lo ? lo : y;
        y = y > hi ? hi : y;
        to[i] = static_cast<Code>(static_cast<int32_t>((y + kMagic) - kMagic));
    }
    if (dropped)
        for (int64_t i = 0; i < n; ++i) to[i] = dropped[i] ? Code(0) : to[i];
}

// Codes of one row; `space` is room for it.
inline void codes_of_row(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped,
                         void *to, float *space) {
    const float *v = w.values + row * w.n;
    if (!w.all_finite) {
        for (int64_t i = 0; i < w.n; ++i) space[i] = is_finite(v[i]) ? v[i] : 0.f;
        v = space;
    }
    const float lo = static_cast<float>(w.lo), hi = static_cast<float>(w.hi);
    if (w.bits <= 8)
        code_values(v, w.n, scale, lo, hi, dropped, static_cast<int8_t *>(to));
    else
        code_values(v, w.n, scale, lo, hi, dropped, static_cast<int16_t *>(to));
}
