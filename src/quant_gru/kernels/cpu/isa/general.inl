// The general kernel, for plans of up to 16 bits that the fused kernel does not support. These have
// weights of more than 8 bits, sums beyond 32 bits or of tier d, or products that are inexact
// without fused multiply-add. All arithmetic is exact: float32 or float64 fused multiply-adds where
// the plan allows it, 64-bit integers elsewhere. Included inside the namespace of an instruction
// set, which defines `dot_pairs` and kDotRows.

template <class Real>
struct Magic;
template <>
struct Magic<float> {
    static constexpr float value =
        12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, half-even
    static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};
template <>
struct Magic<double> {
    static constexpr double value = 6755399441055744.;  // 1.5 * 2^52
    static inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
};

// rne(v * m) with one rounding, for an integer |v| < 2^24 (2^53) and m = M / 2^k. A result beyond
// 2^22 (2^51) is inexact, but stays beyond every limit.
template <class Real>
inline Real round_term(Real v, Real m) {
    return Magic<Real>::fma(v, m, Magic<Real>::value) - Magic<Real>::value;
}

template <class Real>
inline Real round_sum(Real v1, Real m1, Real v2, Real m2) {
    return (Magic<Real>::fma(v1, m1, v2 * m2) + Magic<Real>::value) - Magic<Real>::value;
}

// An integer of the sign of v, so that sums round in the direction of the processor.
template <class Real>
inline Real directed(Real v) {
    const Real far = v < 0 ? -Magic<Real>::value : Magic<Real>::value;
    return (v + far) - far;
}

// The rounding of a weighted sum; see rules.inl.
template <class Real, Ties kHow>
struct Rounding {
    Real positive = 0, negative = 0;
    explicit Rounding(const Addends &a)
        : positive(static_cast<Real>(a.positive)), negative(static_cast<Real>(a.negative)) {}
    explicit Rounding(const Sum &s) : Rounding(addends_of(s.rule, s.k, s.first)) {}

    QG_INLINE Real term(Real v, Real m) const { return channel(v, m, 0); }
    // of a channel, of which `Projection::more` is added too
    QG_INLINE Real channel(Real v, Real m, Real more) const {
        if constexpr (plain(kHow)) return round_term(v, m);
        if constexpr (kHow == Ties::up)
            return (Magic<Real>::fma(v, m, positive) + Magic<Real>::value) - Magic<Real>::value;
        return directed(Magic<Real>::fma(v, m, v < 0 ? negative - more : positive + more));
    }
    QG_INLINE Real sum(Real v1, Real m1, Real v2, Real m2) const {
        if constexpr (kHow == Ties::even) return round_sum(v1, m1, v2, m2);
        if constexpr (kHow == Ties::up)
            return (Magic<Real>::fma(v1, m1, v2 * m2 + positive) + Magic<Real>::value) -
                   Magic<Real>::value;
        const Real v = Magic<Real>::fma(v1, m1, v2 * m2);
        if constexpr (kHow == Ties::stretched)
            return round_term(v, static_cast<Real>(kStretch<Real>));
        return directed(v + (v < 0 ? negative : positive));
    }
};

template <class Real>
inline const Real *general_multipliers(const Projection &p);
template <>
inline const float *general_multipliers<float>(const Projection &p) {
    return p.m_float;
}
template <>
inline const double *general_multipliers<double>(const Projection &p) {
    return p.m;
}

// Computes the sums of a tile, bias included, in double. All of them must be exact.
QG_ALONE void sum_planes(const Projection &p, int tile, const int16_t *operand, int64_t a_stride,
                         int rows, int32_t *part, double *total) {
    const double *bias = p.real_bias + tile * kTile;
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < kTile; ++c) total[r * kTile + c] = bias[c];
    for (int plane = 0; plane < p.planes; ++plane) {
        const double weight = p.planes == 2 && plane == 0 ? 256 : 1;
        for (int pair = 0; pair < p.pairs; pair += p.flush) {
            const int n = p.pairs - pair < p.flush ? p.pairs - pair : p.flush;
            const int64_t at = static_cast<int64_t>(tile) * p.pairs + pair;
            dot_pairs(p.w[plane] + at * 2 * kTile, operand + 2 * pair, a_stride, rows, n, part);
            for (int i = 0; i < rows * kTile; ++i) total[i] += weight * part[i];
        }
    }
}

// Computes rows of zero-point-free results (stride: tiles * 16) from rows of int16 operands.
template <class Real, Ties kHow>
QG_ALONE void project_pairs(const Projection &p, int rule, const int16_t *a, int64_t a_stride,
                            int rows, Real *out, bool small_sums) {
    const Rounding<Real, kHow> by(addends_of(rule, 0, 0));
    const int stride = p.tiles * kTile;
    const Real lo = static_cast<Real>(p.lo), hi = static_cast<Real>(p.hi);
    for (int tile = 0; tile < p.tiles; ++tile) {
        const int first = tile * kTile;
        const int64_t *bias = p.bias + first;
        const Real *m = general_multipliers<Real>(p) + first;
        const double *more = p.more + first;
        const auto code = [&](Real v, int c) QG_LAMBDA {
            return limit(by.channel(v, m[c], static_cast<Real>(more[c])), lo, hi);
        };
        for (int row = 0; row < rows; row += kDotRows) {
            const int count = rows - row < kDotRows ? rows - row : kDotRows;
            alignas(64) int32_t part[kDotRows * kTile];
            const int16_t *operand = a + row * a_stride;
            if (small_sums) {
                const int16_t *w = p.w[0] + static_cast<int64_t>(tile) * p.pairs * 2 * kTile;
                dot_pairs(w, operand, a_stride, count, p.pairs, part);
                for (int r = 0; r < count; ++r) {
                    Real *to = out + static_cast<int64_t>(row + r) * stride + first;
                    for (int c = 0; c < kTile; ++c) {
                        const int32_t v = part[r * kTile + c] + static_cast<int32_t>(bias[c]);
                        to[c] = code(static_cast<Real>(v), c);
                    }
                }
                continue;
            }
            if (p.exact) {
                alignas(64) double total[kDotRows * kTile];
                sum_planes(p, tile, operand, a_stride, count, part, total);
                for (int r = 0; r < count; ++r) {
                    Real *to = out + static_cast<int64_t>(row + r) * stride + first;
                    for (int c = 0; c < kTile; ++c)
                        to[c] = code(static_cast<Real>(total[r * kTile + c]), c);
                }
                continue;
            }
            int64_t total[kDotRows * kTile];
            for (int i = 0; i < kDotRows * kTile; ++i) total[i] = bias[i % kTile];
            for (int plane = 0; plane < p.planes; ++plane) {
                const int64_t weight = p.planes == 2 && plane == 0 ? 256 : 1;
                for (int pair = 0; pair < p.pairs; pair += p.flush) {
                    const int n = p.pairs - pair < p.flush ? p.pairs - pair : p.flush;
                    const int64_t at = static_cast<int64_t>(tile) * p.pairs + pair;
                    dot_pairs(p.w[plane] + at * 2 * kTile, operand + 2 * pair, a_stride, count, n,
                              part);
                    for (int i = 0; i < count * kTile; ++i) total[i] += weight * part[i];
                }
            }
            for (int r = 0; r < count; ++r) {
                Real *to = out + static_cast<int64_t>(row + r) * stride + first;
                for (int c = 0; c < kTile; ++c)
                    to[c] = code(static_cast<Real>(total[r * kTile + c]), c);
            }
        }
    }
}

// Replaces zero-point-free input codes in v by zero-point-free output codes.
template <class Real>
QG_ALONE void look_up_all(const Table &t, Real *v, int n) {
    if (t.entries) {
        for (int i = 0; i < n; ++i)
            v[i] = static_cast<Real>(t.entries[static_cast<int32_t>(v[i]) & t.mask]);
        return;
    }
    const int32_t first = static_cast<int32_t>(t.pre_lo), base = t.word_base;
    for (int i = 0; i < n; ++i)
        v[i] = static_cast<Real>(t.words[static_cast<int32_t>(v[i]) - first] + base);
}

// out = weighted sum of a (or a * a2) and b (or b * b2). Tier d uses 64-bit integers.
template <class Real, Ties kHow, bool kProductA, bool kProductB>
QG_ALONE void add(const Sum &s, const Real *a, const Real *a2, const Real *b, const Real *b2,
                  Real *out, int n) {
    const Real lo = static_cast<Real>(s.lo), hi = static_cast<Real>(s.hi);
    if (s.tier == 'd') {
        for (int i = 0; i < n; ++i) {
            int64_t v1 = static_cast<int64_t>(a[i]), v2 = static_cast<int64_t>(b[i]);
            if (kProductA) v1 *= static_cast<int64_t>(a2[i]);
            if (kProductB) v2 *= static_cast<int64_t>(b2[i]);
            const int64_t v = qg_round_by(v1 * s.M[0] + v2 * s.M[1], s.k, s.rule, s.first);
            out[i] = static_cast<Real>(qg_clamp(v, s.lo, s.hi));
        }
        return;
    }
    const Rounding<Real, kHow> by(s);
    const Real m1 = static_cast<Real>(s.m[0]), m2 = static_cast<Real>(s.m[1]);
    for (int i = 0; i < n; ++i) {
        const Real v1 = kProductA ? a[i] * a2[i] : a[i], v2 = kProductB ? b[i] * b2[i] : b[i];
        out[i] = limit(by.sum(v1, m1, v2, m2), lo, hi);
    }
}

template <class Real, Ties kHow>
QG_ALONE void multiply(const Sum &s, const Real *a, const Real *b, Real *out, int n) {
    const Rounding<Real, kHow> by(s);
    const Real lo = static_cast<Real>(s.lo), hi = static_cast<Real>(s.hi);
    const double stretch = kHow == Ties::stretched ? kStretch<Real> : 1;
    const Real m = static_cast<Real>(s.m[0] * stretch);
    for (int i = 0; i < n; ++i) out[i] = limit(by.term(a[i] * b[i], m), lo, hi);
}

template <class Real, Ties kHow>
QG_ALONE void general_gates(const GeneralPlan &p, const Real *Wx, const Real *Rh, Real *h,
                            Real *t) {
    const int H = p.H;
    Real *z = t, *r = t + H, *g = t + 2 * H, *rest = t + 3 * H, *old = t + 4 * H,
         *fresh = t + 5 * H;
    add<Real, kHow, false, false>(p.z_pre, Wx, nullptr, Rh, nullptr, z, H);
    look_up_all(p.z, z, H);
    add<Real, kHow, false, false>(p.r_pre, Wx + H, nullptr, Rh + H, nullptr, r, H);
    look_up_all(p.r, r, H);
    if (p.rRh.present) {
        multiply<Real, kHow>(p.rRh, r, Rh + 2 * H, rest, H);
        add<Real, kHow, false, false>(p.g_pre, Wx + 2 * H, nullptr, rest, nullptr, g, H);
    } else {
        add<Real, kHow, false, true>(p.g_pre, Wx + 2 * H, nullptr, r, Rh + 2 * H, g, H);
    }
    look_up_all(p.g, g, H);
    const Real one = static_cast<Real>(p.one);
    for (int i = 0; i < H; ++i) rest[i] = one - z[i];
    if (p.old_contrib.present) multiply<Real, kHow>(p.old_contrib, z, h, old, H);
    if (p.new_contrib.present) multiply<Real, kHow>(p.new_contrib, rest, g, fresh, H);
    if (p.old_contrib.present && p.new_contrib.present)
        add<Real, kHow, false, false>(p.h_new, old, nullptr, fresh, nullptr, h, H);
    else if (p.old_contrib.present)
        add<Real, kHow, false, true>(p.h_new, old, nullptr, rest, g, h, H);
    else if (p.new_contrib.present)
        add<Real, kHow, true, false>(p.h_new, z, h, fresh, nullptr, h, H);
    else
        add<Real, kHow, true, true>(p.h_new, z, h, rest, g, h, H);
}

// Writes zero-point-free codes as int16 operands: code - offset of the projection.
inline void to_words(const Projection &p, int32_t zero, const int32_t *v, int n, int16_t *out) {
    const int32_t shift = zero - p.offset;
    for (int i = 0; i < n; ++i) out[i] = static_cast<int16_t>(v[i] + shift);
    if (n & 1) out[n] = 0;
}

// Interpolates between the codes before the step and the new states in h (zoneout).
template <class Real, Ties kHow>
QG_ALONE void interpolate(const Sum &s, const int16_t *before, int32_t shift, Real *h, int n) {
    const Real lo = static_cast<Real>(s.lo), hi = static_cast<Real>(s.hi);
    const Rounding<Real, kHow> by(s);
    const Real m1 = static_cast<Real>(s.m[0]), m2 = static_cast<Real>(s.m[1]);
    for (int i = 0; i < n; ++i) {
        const Real v = static_cast<Real>(before[i] - shift);
        h[i] = limit(by.sum(v, m1, h[i], m2), lo, hi);
    }
}

template <class Real, Ties kHow>
bool run_general_rows(const GeneralPlan &p, const Job &job, int64_t first_row, int rows) {
    const int H = p.H, C = p.W.inputs;
    const int64_t wx_stride = static_cast<int64_t>(p.W.tiles) * kTile;
    const int64_t rh_stride = static_cast<int64_t>(p.R.tiles) * kTile;
    const int64_t x_stride = 2 * p.W.pairs, h_stride = 2 * p.R.pairs;
    const int64_t ahead = steps_ahead(job.T, rows, kAhead);
    MemoryPieces pieces{static_cast<char *>(job.workspace)};
    Real *Wx = static_cast<Real *>(pieces.take(ahead * rows * wx_stride * sizeof(Real)));
    Real *Rh = static_cast<Real *>(pieces.take(rows * rh_stride * sizeof(Real)));
    Real *h = static_cast<Real *>(pieces.take(static_cast<int64_t>(rows) * H * sizeof(Real)));
    Real *t = static_cast<Real *>(pieces.take(static_cast<int64_t>(H) * 6 * sizeof(Real)));
    auto *x16 = static_cast<int16_t *>(pieces.take(ahead * rows * x_stride * sizeof(int16_t)));
    auto *h16 = static_cast<int16_t *>(pieces.take(rows * h_stride * sizeof(int16_t)));
    auto *row_codes = static_cast<int32_t *>(pieces.take((H > C ? H : C) * sizeof(int32_t)));

    const int rule = kHow == Ties::stretched ? QG_HALF_EVEN : p.rule;
    const int of_rows = kRowsDirect ? rule : QG_HALF_EVEN,
              of_step = kRowsDirect ? QG_HALF_EVEN : rule;
    const Direction whole_call(of_rows);
    const auto project = [&](const Projection &of, const int16_t *a, int64_t stride, int count,
                             Real *to) {
        const Direction direction(of_step);
        project_pairs<Real, kHow>(of, rule, a, stride, count, to, p.small_sums);
    };
    bool nan = false;
    for (int row = 0; row < rows; ++row) {
        nan |= read_row(job.h0, p.h, (first_row + row) * job.h0.row, H, row_codes);
        to_words(p.R, p.h.zero, row_codes, H, h16 + row * h_stride);
        for (int i = 0; i < H; ++i) h[row * H + i] = static_cast<Real>(row_codes[i]);
    }
    const int32_t shift = p.h.zero - p.R.offset;
    for (int64_t block = 0; block < job.T; block += ahead) {
        const int steps = static_cast<int>(job.T - block < ahead ? job.T - block : ahead);
        for (int s = 0; s < steps; ++s) {
            const int64_t step = job.reverse ? job.T - 1 - (block + s) : block + s;
            for (int row = 0; row < rows; ++row) {
                const int64_t start = step * job.x.step + (first_row + row) * job.x.row;
                nan |= read_row(job.x, p.x, start, C, row_codes);
                to_words(p.W, p.x.zero, row_codes, C, x16 + (s * rows + row) * x_stride);
            }
        }
        project(p.W, x16, x_stride, steps * rows, Wx);
        for (int s = 0; s < steps; ++s) {
            const int64_t step = job.reverse ? job.T - 1 - (block + s) : block + s;
            project(p.R, h16, h_stride, rows, Rh);
            for (int row = 0; row < rows; ++row) {
                Real *state = h + static_cast<int64_t>(row) * H;
                if (!job.lengths || job.lengths[first_row + row] > step) {
                    const Direction direction(of_step);
                    general_gates<Real, kHow>(p, Wx + (s * rows + row) * wx_stride,
                                              Rh + row * rh_stride, state, t);
                    int16_t *codes = h16 + row * h_stride;
                    if (job.held) {
                        const uint8_t *held = job.held + (step * job.N + first_row + row) * H;
                        for (int i = 0; i < H; ++i)
                            if (held[i]) state[i] = static_cast<Real>(codes[i] - shift);
                    } else if (p.zoneout.present) {
                        interpolate<Real, kHow>(p.zoneout, codes, shift, state, H);
                    }
                    for (int i = 0; i < H; ++i)
                        codes[i] = static_cast<int16_t>(static_cast<int32_t>(state[i]) + shift);
                }
                write_row(job.out, p.h, step, first_row + row, state, H);
            }
        }
    }
    for (int row = 0; row < rows; ++row)
        write_row(job.last, p.h, 0, first_row + row, h + static_cast<int64_t>(row) * H, H);
    return nan;
}

bool run_general(const GeneralPlan &plan, const Job &job) {
    bool nan = false;
    for (int64_t row = job.first_row; row < job.end_row; row += kRows) {
        const int64_t left = job.end_row - row;
        const int rows = static_cast<int>(left < kRows ? left : kRows);
        if (plan.rule == QG_HALF_UP)
            nan |= run_general_rows<double, Ties::up>(plan, job, row, rows);
        else if (plan.rule == QG_HALF_AWAY && plan.stretches)
            nan |= run_general_rows<double, Ties::stretched>(plan, job, row, rows);
        else if (plan.rule != QG_HALF_EVEN && plan.rule != QG_FLOOR)
            nan |= run_general_rows<double, Ties::any>(plan, job, row, rows);
        else
            nan |= plan.in_float ? run_general_rows<float, Ties::even>(plan, job, row, rows)
                                 : run_general_rows<double, Ties::even>(plan, job, row, rows);
    }
    return nan;
}
