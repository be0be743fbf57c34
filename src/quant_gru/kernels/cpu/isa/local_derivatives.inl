// The local derivatives for plans of the fused kernel. They repeat its integer products and gates
// from known states, and record every clamp. Included inside the namespace of an instruction set
// after fused.inl.

#include "cpu/isa/masks.inl"

// 1 - s * q and 1 + s * q, to the precision of a float even if s * q is close to 1 or -1.
template <class V>
struct Complement {
    V s, one, rest;
    explicit Complement(double scale)
        : s(V::set(scale)),
          one(V::set(__builtin_rint(1 / scale))),
          rest(V::set(1 - scale * __builtin_rint(1 / scale))) {}
    V minus(V q) const { return V::add(V::mul(s, V::from(one, q)), rest); }
    V plus(V q) const { return V::add(V::mul(s, V::add(one, q)), rest); }
};

// The share of dL/dh' that zoneout passes to the state before the step. With a mask of held units
// it is 0, because `hold` processes them.
inline double kept_share(const Cell &p, const DerivativesJob &job) {
    return job.held ? 0 : p.zoneout.m[0];
}

// Clamps v in place. Returns the mask of lanes that did not change.
template <class V>
inline V clamped(V &v, V lo, V hi) {
    const V before = v;
    v = V::limit(v, lo, hi);
    return where_same(v, before);
}

// The intermediate values of the forward for the units of one vector.
template <class V>
struct Forward {
    V wx[3], rh[3], in_wx[3], in_rh[3];
    V h, z, r, g, in_z, in_r, in_g, in_rest, in_old, in_new, in_h;
};

// Pointers to inputs and derivatives of these units; sums and derivatives are [gate][unit].
template <class V>
struct Units {
    const int32_t *W, *R;
    const typename V::Real *m_W, *m_R, *state;
    float *Wx, *Rh, *direct;
};

template <class V>
struct Derivatives {
    const Gates<V> gates;
    const Complement<V> from_z, from_r, from_g;
    const V s_h, s_Rh, zero, one, kept, moved;

    Derivatives(const FusedPlan &plan, const Scales &scales, double share)
        : gates(plan),
          from_z(scales.z),
          from_r(scales.r),
          from_g(scales.g),
          s_h(V::set(scales.h)),
          s_Rh(V::set(scales.Rh)),
          zero(V::set(0)),
          one(V::set(1)),
          kept(V::set(share)),
          moved(V::set(1 - share)) {}

    V sum(const TwoTerms<V> &s, V a, V b, V &inside) const {
        V v = s.whole(V::add_product(V::scale(a, s.m1), b, s.m2));
        inside = clamped(v, s.lo, s.hi);
        return v;
    }
    V product(const Sum &plan, const OneTerm<V> &s, V a, V b, V &inside) const {
        V v = V::mul(a, b);
        if (!plan.present) {
            inside = everywhere<V>();
            return v;
        }
        v = s.unlimited(v);
        inside = clamped(v, s.lo, s.hi);
        return v;
    }

    // Runs each stage for kTogether vectors before the next one, to hide the latency of lookups.
    // The derivatives themselves are rounded to the nearest.
    void operator()(const Units<V> *units, int count) const {
        constexpr int kTogether = V::kTies == Ties::even ? 4 : 16;
        Forward<V> f[kTogether];
        for (int first = 0; first < count; first += kTogether) {
            const Units<V> *at = units + first;
            const int n = count - first < kTogether ? count - first : kTogether;
            if constexpr (V::kTies == Ties::even) {
                for (int i = 0; i < n; ++i) sums(at[i], f[i]);
                for (int i = 0; i < n; ++i) candidate(f[i]);
            } else {
                const Direction direction(gates.p.rule);
                forward(at, n, f);
            }
            for (int i = 0; i < n; ++i) write(f[i], at[i]);
        }
    }

 private:
    QG_ALONE void forward(const Units<V> *at, int n, Forward<V> *f) const {
        for (int i = 0; i < n; ++i) sums(at[i], f[i]);
        for (int i = 0; i < n; ++i) candidate(f[i]);
        for (int i = 0; i < n; ++i) state(f[i]);
    }

    void sums(const Units<V> &at, Forward<V> &f) const {
        const FusedPlan &p = gates.p;
        for (int gate = 0; gate < 3; ++gate) {
            const int i = gate * kGroup;
            f.wx[gate] = gates.channels(V::from_ints(at.W + i), V(V::load(at.m_W + i)));
            f.rh[gate] = gates.channels(V::from_ints(at.R + i), V(V::load(at.m_R + i)));
            f.in_wx[gate] = clamped(f.wx[gate], gates.wx_lo, gates.wx_hi);
            f.in_rh[gate] = clamped(f.rh[gate], gates.rh_lo, gates.rh_hi);
        }
        f.r = V::look_up(p.r, sum(gates.r_pre, f.wx[1], f.rh[1], f.in_r));
        f.z = V::look_up(p.z, sum(gates.z_pre, f.wx[0], f.rh[0], f.in_z));
        f.h = V::load(at.state);
    }

    void candidate(Forward<V> &f) const {
        const FusedPlan &p = gates.p;
        const V rest = product(p.rRh, gates.rRh, f.r, f.rh[2], f.in_rest);
        f.g = V::look_up(p.g, sum(gates.g_pre, f.wx[2], rest, f.in_g));
    }

    void state(Forward<V> &f) const {
        const FusedPlan &p = gates.p;
        const V old = product(p.old_contrib, gates.old_contrib, f.z, f.h, f.in_old);
        const V fresh =
            product(p.new_contrib, gates.new_contrib, V::from(gates.one, f.z), f.g, f.in_new);
        sum(gates.h_new, old, fresh, f.in_h);
    }

    void write(Forward<V> &f, const Units<V> &to) const {
        if constexpr (V::kTies == Ties::even) state(f);
        const V z = f.z, r = f.r, g = f.g, h = f.h;
        const V through = where(f.in_h, moved);
        const V through_old = where(f.in_old, through), through_new = where(f.in_new, through);

        const V z_real = V::mul(z, from_z.s), not_z = from_z.minus(z);
        const V r_real = V::mul(r, from_r.s), not_r = from_r.minus(r);
        const V tanh_derivative = V::limit(V::mul(from_g.minus(g), from_g.plus(g)), zero, one);
        const V difference =
            V::from(V::mul(through_old, V::mul(h, s_h)), V::mul(through_new, V::mul(g, from_g.s)));
        const V at_z = where(f.in_z, V::mul(difference, V::mul(z_real, not_z)));
        const V at_g = where(f.in_g, V::mul(V::mul(through_new, not_z), tanh_derivative));
        const V at_rest = where(f.in_rest, at_g);
        const V at_r =
            where(f.in_r, V::mul(V::mul(at_rest, V::mul(f.rh[2], s_Rh)), V::mul(r_real, not_r)));
        V::add_product(kept, through_old, z_real).store_floats(to.direct);
        where(f.in_wx[0], at_z).store_floats(to.Wx);
        where(f.in_wx[1], at_r).store_floats(to.Wx + kGroup);
        where(f.in_wx[2], at_g).store_floats(to.Wx + 2 * kGroup);
        where(f.in_rh[0], at_z).store_floats(to.Rh);
        where(f.in_rh[1], at_r).store_floats(to.Rh + kGroup);
        where(f.in_rh[2], V::mul(at_rest, r_real)).store_floats(to.Rh + 2 * kGroup);
    }
};

// For a unit that keeps its state (held, or beyond the row's length), passes dL/dh' to the state
// before the step and clears all other derivatives.
QG_ALONE void hold(const DerivativesJob &job, int64_t step, int64_t row, int64_t item, int H) {
    const Chunk &c = job.chunk;
    const bool over = !counts(c, row, step);
    if (!over && !job.held) return;
    const uint8_t *held = over ? nullptr : job.held + (step * c.N + row) * H;
    for (int unit = 0; unit < H; ++unit) {
        if (held && !held[unit]) continue;
        const int64_t group = unit / kGroup, place = unit % kGroup;
        float *Wx = c.Wx + group * c.stride + item * 3 * kGroup + place;
        float *Rh = c.Rh + group * c.stride + item * 3 * kGroup + place;
        for (int gate = 0; gate < 3; ++gate) Wx[gate * kGroup] = Rh[gate * kGroup] = 0;
        c.direct[group * c.direct_stride + item * kGroup + place] = 1;
    }
}

template <class Code>
inline void pack_codes(float *to, int64_t stride, int64_t item, const Code *codes, int n) {
    to += item * kFeatures;
    int i = 0;
    for (; i + kFeatures <= n; i += kFeatures, to += stride)
        for (int j = 0; j < kFeatures; ++j) to[j] = static_cast<float>(codes[i + j]);
    if (i == n) return;
    for (int j = 0; j < kFeatures; ++j) to[j] = i + j < n ? static_cast<float>(codes[i + j]) : 0.f;
}

// Reads the codes of an item's input and previous state, and packs them for weight gradients.
QG_ALONE void read_item(const DerivativesJob &job, const Cell &p, int C, int64_t step_in_chunk,
                        int64_t row, int32_t *x, int32_t *h) {
    const Chunk &c = job.chunk;
    const int64_t place = c.first_step + step_in_chunk, item = item_of(c, step_in_chunk, row);
    const Source inputs{job.x, false, 0, 0};
    const Source states{place ? job.out : job.h0, false, 0, 0};
    read_row(inputs, p.x, (step_of(c, place) * c.N + row) * C, C, x);
    const int64_t before = place ? step_of(c, place - 1) * c.N + row : row;
    read_row(states, p.h, before * p.H, p.H, h);
    pack_codes(c.x, c.code_stride, item, x, C);
    pack_codes(c.h, c.code_stride, item, h, p.H);
}

// The functions of operand_blocks.inl for the planes of a matrix.
inline int block_rows_of(const Packed &p) {
    return p.planes == 1 ? kBlockRows<1> : kBlockRows<kMaxPlanes>;
}
inline int block_groups_of(const Packed &p, int rows) {
    return p.planes == 1 ? block_groups<1>(rows) : block_groups<kMaxPlanes>(rows);
}
inline void dot_block_of(int rows, int groups, const Packed &p, int first, const OperandByte *a,
                         int64_t stride, int32_t *out) {
    p.planes == 1 ? dot_block<1>(rows, groups, p, first, a, stride, out)
                  : dot_block<kMaxPlanes>(rows, groups, p, first, a, stride, out);
}

template <class V>
void derivatives_of(const FusedPlan &p, const DerivativesJob &job) {
    using Real = typename V::Real;
    constexpr int kOne = most_sums<1>(), kAll = most_sums<kMaxPlanes>();
    constexpr int kMost = kOne > kAll ? kOne : kAll;
    const int of_x = block_rows_of(p.W), of_h = block_rows_of(p.R);
    const int rows_at_once = of_x < of_h ? of_x : of_h;
    const Derivatives<V> derivatives(p, job.scales, kept_share(p, job));
    const Chunk &c = job.chunk;
    const int H = p.H, C = p.W.inputs;
    const int64_t units = static_cast<int64_t>(p.R.groups) * kGroup;
    const int64_t x_stride = operand_stride(p.W), h_stride = operand_stride(p.R);
    MemoryPieces pieces{static_cast<char *>(job.workspace)};
    auto *x = static_cast<OperandByte *>(pieces.take(kItems * x_stride * sizeof(OperandByte)));
    auto *h = static_cast<OperandByte *>(pieces.take(kItems * h_stride * sizeof(OperandByte)));
    auto *state = static_cast<Real *>(pieces.take(kItems * units * sizeof(Real)));
    auto *x_codes = static_cast<int32_t *>(pieces.take(round_up(C, 16) * sizeof(int32_t)));
    auto *h_codes = static_cast<int32_t *>(pieces.take(round_up(H, 16) * sizeof(int32_t)));
    for (int64_t i = 0; i < round_up(C, 16); ++i) x_codes[i] = 0;
    for (int64_t i = 0; i < round_up(H, 16); ++i) h_codes[i] = 0;
    for (int64_t i = 0; i < kItems * units; ++i) state[i] = 0;
    alignas(64) int32_t W[kMost * 3 * kGroup], R[kMost * 3 * kGroup];
    Units<V> places[kMost * kGroup / V::n];

    const int64_t rows = job.end_row - job.first_row, all = c.steps * rows;
    for (int64_t start = 0; start < all; start += kItems) {
        const int count = static_cast<int>(all - start < kItems ? all - start : kItems);
        int64_t item[kItems];
        for (int i = 0; i < count; ++i) {
            const int64_t step = (start + i) / rows, row = job.first_row + (start + i) % rows;
            item[i] = item_of(c, step, row);
            read_item(job, p, C, step, row, x_codes, h_codes);
            to_operand(p.W, p.x.zero, x_codes, C, x + i * x_stride, x_stride);
            to_operand(p.R, p.h.zero, h_codes, H, h + i * h_stride, h_stride);
            for (int u = 0; u < H; ++u) state[i * units + u] = static_cast<Real>(h_codes[u]);
        }
        const int most_rows = count < rows_at_once ? count : rows_at_once;
        const int of_W = block_groups_of(p.W, most_rows), of_R = block_groups_of(p.R, most_rows);
        const int most = of_W < of_R ? of_W : of_R;
        for (int first = 0; first < p.R.groups; first += most) {
            const int groups = p.R.groups - first < most ? p.R.groups - first : most;
            for (int i = 0; i < count; i += rows_at_once) {
                const int n = count - i < rows_at_once ? count - i : rows_at_once;
                dot_block_of(n, groups, p.W, first, x + i * x_stride, x_stride, W);
                dot_block_of(n, groups, p.R, first, h + i * h_stride, h_stride, R);
                int found = 0;
                for (int r = 0; r < n; ++r)
                    for (int g = 0; g < groups; ++g)
                        for (int j = 0; j < kGroup; j += V::n) {
                            const int64_t group = int64_t{first} + g;
                            const int64_t channel = group * 3 * kGroup + j;
                            const int sums = (r * groups + g) * 3 * kGroup + j;
                            const int64_t to = group * c.stride + item[i + r] * 3 * kGroup + j;
                            places[found++] = {
                                W + sums,
                                R + sums,
                                V::multipliers(p.W, channel),
                                V::multipliers(p.R, channel),
                                state + (i + r) * units + group * kGroup + j,
                                c.Wx + to,
                                c.Rh + to,
                                c.direct + group * c.direct_stride + item[i + r] * kGroup + j};
                        }
                derivatives(places, found);
            }
        }
        for (int i = 0; i < count; ++i)
            hold(job, step_of(c, c.first_step + (start + i) / rows),
                 job.first_row + (start + i) % rows, item[i], H);
    }
}

int64_t fused_derivatives_bytes(const FusedPlan &p) {
    const int64_t units = static_cast<int64_t>(p.R.groups) * kGroup;
    const int64_t operands = operand_stride(p.W) + operand_stride(p.R);
    return kItems * (operands * static_cast<int64_t>(sizeof(OperandByte)) + units * 8) +
           4 * (round_up(p.W.inputs, 16) + round_up(p.H, 16)) + 5 * 64;
}

void run_fused_derivatives(const FusedPlan &p, const DerivativesJob &job) {
    using Single = typename WideFloats::Lane;
    if (p.rule == QG_HALF_EVEN)
        return p.in_float ? derivatives_of<Single>(p, job) : derivatives_of<Doubles>(p, job);
    p.in_float ? derivatives_of<Ruled<Single, Ties::any>>(p, job)
               : derivatives_of<Ruled<Doubles, Ties::any>>(p, job);
}
