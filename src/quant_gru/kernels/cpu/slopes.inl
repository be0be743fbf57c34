// Slopes of the gradient for plans of the fused kernel: its integer products and gates, with all
// states known and every clamp remembered. Included inside the namespace of an instruction set
// after fused.inl.

// 1 - s * q, and 1 + s * q, to the precision of a float even where s * q is close to 1.
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

// The share of dL/dh' that goes straight to the state before the step; held units are seen to
// later.
inline double kept_share(const Cell &p, const SlopeJob &job) {
    return job.held ? 0 : p.zoneout.m[0];
}

// A value before its clamp becomes the clamped one; returns 1 where that changes nothing, else 0.
template <class V>
inline V clamped(V &v, V lo, V hi) {
    const V inside = V::inside(v, lo, hi);
    v = V::limit(v, lo, hi);
    return inside;
}

template <class V>
struct Slopes {
    const Gates<V> gates;
    const Complement<V> from_z, from_r, from_g;
    const V s_h, s_Rh, zero, one, kept, moved;

    Slopes(const FusedPlan &plan, const Scales &scales, double share)
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
        V v = V::round(V::add_product(V::scale(a, s.m1), b, s.m2));
        inside = clamped(v, s.lo, s.hi);
        return v;
    }
    V product(const Sum &plan, const OneTerm<V> &s, V a, V b, V &inside) const {
        V v = V::mul(a, b);
        inside = one;
        if (!plan.present) return v;
        v = V::rounded_product(v, s.m);
        inside = clamped(v, s.lo, s.hi);
        return v;
    }

    // Lanes of units: sums [gate][unit] with their multipliers, states; [gate][unit] slopes out.
    void operator()(const int32_t *W, const int32_t *R, const typename V::Real *m_W,
                    const typename V::Real *m_R, const typename V::Real *state, float *Wx,
                    float *Rh, float *direct) const {
        const FusedPlan &p = gates.p;
        V wx[3], rh[3], in_wx[3], in_rh[3];
        for (int gate = 0; gate < 3; ++gate) {
            const int at = gate * kGroup;
            wx[gate] = V::rounded_product(V::from_ints(W + at), V::load(m_W + at));
            rh[gate] = V::rounded_product(V::from_ints(R + at), V::load(m_R + at));
            in_wx[gate] = clamped(wx[gate], gates.wx_lo, gates.wx_hi);
            in_rh[gate] = clamped(rh[gate], gates.rh_lo, gates.rh_hi);
        }
        const V h = V::load(state);
        V in_z, in_r, in_g, in_rest, in_old, in_new, in_h;
        const V z = V::look_up(p.z, sum(gates.z_pre, wx[0], rh[0], in_z));
        const V r = V::look_up(p.r, sum(gates.r_pre, wx[1], rh[1], in_r));
        const V rest = product(p.rRh, gates.rRh, r, rh[2], in_rest);
        const V g = V::look_up(p.g, sum(gates.g_pre, wx[2], rest, in_g));
        const V old = product(p.old_contrib, gates.old_contrib, z, h, in_old);
        const V fresh = product(p.new_contrib, gates.new_contrib, V::from(gates.one, z), g, in_new);
        sum(gates.h_new, old, fresh, in_h);
        in_h = V::mul(in_h, moved);

        const V z_real = V::mul(z, from_z.s), not_z = from_z.minus(z);
        const V r_real = V::mul(r, from_r.s), not_r = from_r.minus(r);
        const V tanh_slope = V::limit(V::mul(from_g.minus(g), from_g.plus(g)), zero, one);
        const V through_old = V::mul(in_h, in_old), through_new = V::mul(in_h, in_new);
        const V difference =
            V::from(V::mul(through_old, V::mul(h, s_h)), V::mul(through_new, V::mul(g, from_g.s)));
        const V at_z = V::mul(V::mul(difference, V::mul(z_real, not_z)), in_z);
        const V at_g = V::mul(V::mul(V::mul(through_new, not_z), tanh_slope), in_g);
        const V at_rest = V::mul(at_g, in_rest);
        const V at_r =
            V::mul(V::mul(V::mul(at_rest, V::mul(rh[2], s_Rh)), V::mul(r_real, not_r)), in_r);
        V::add_product(kept, through_old, z_real).store_floats(direct);
        V::mul(at_z, in_wx[0]).store_floats(Wx);
        V::mul(at_r, in_wx[1]).store_floats(Wx + kGroup);
        V::mul(at_g, in_wx[2]).store_floats(Wx + 2 * kGroup);
        V::mul(at_z, in_rh[0]).store_floats(Rh);
        V::mul(at_r, in_rh[1]).store_floats(Rh + kGroup);
        V::mul(V::mul(at_rest, r_real), in_rh[2]).store_floats(Rh + 2 * kGroup);
    }
};

// A unit that keeps its state passes dL/dh' on, and nothing else.
inline void hold(const SlopeJob &job, int64_t step, int64_t row, int64_t item, int H) {
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

inline void pack_codes(float *to, int64_t items, int64_t item, const int32_t *codes, int n) {
    for (int i = 0; i < n; i += kFeatures)
        for (int j = 0; j < kFeatures; ++j)
            to[(i / kFeatures * items + item) * kFeatures + j] =
                i + j < n ? static_cast<float>(codes[i + j]) : 0.f;
}

// Codes of the inputs and of the state before an item's step; also packed for products.
inline void read_item(const SlopeJob &job, const Cell &p, int C, int64_t step_in_chunk, int64_t row,
                      int32_t *x, int32_t *h) {
    const Chunk &c = job.chunk;
    const int64_t place = c.first_step + step_in_chunk, item = item_of(c, step_in_chunk, row);
    const Source inputs{job.x, false, 0, 0};
    const Source states{place ? job.out : job.h0, false, 0, 0};
    read_row(inputs, p.x, (step_of(c, place) * c.N + row) * C, C, x);
    const int64_t before = place ? step_of(c, place - 1) * c.N + row : row;
    read_row(states, p.h, before * p.H, p.H, h);
    pack_codes(c.x, c.items, item, x, C);
    pack_codes(c.h, c.items, item, h, p.H);
}

template <class V, int PW, int PR>
void slopes_of(const FusedPlan &p, const SlopeJob &job) {
    using Real = typename V::Real;
    constexpr int kRowsAtOnce = kBlockRows<PW> < kBlockRows<PR> ? kBlockRows<PW> : kBlockRows<PR>;
    const Slopes<V> slopes(p, job.scales, kept_share(p, job));
    const Chunk &c = job.chunk;
    const int H = p.H, C = p.W.inputs;
    const int64_t units = static_cast<int64_t>(p.R.groups) * kGroup;
    const int64_t x_stride = operand_stride(p.W), h_stride = operand_stride(p.R);
    Space space{static_cast<char *>(job.workspace)};
    auto *x = static_cast<OperandByte *>(space.take(kItems * x_stride * sizeof(OperandByte)));
    auto *h = static_cast<OperandByte *>(space.take(kItems * h_stride * sizeof(OperandByte)));
    auto *state = static_cast<Real *>(space.take(kItems * units * sizeof(Real)));
    auto *x_codes = static_cast<int32_t *>(space.take(round_up(C, 16) * sizeof(int32_t)));
    auto *h_codes = static_cast<int32_t *>(space.take(round_up(H, 16) * sizeof(int32_t)));
    for (int64_t i = 0; i < round_up(C, 16); ++i) x_codes[i] = 0;
    for (int64_t i = 0; i < round_up(H, 16); ++i) h_codes[i] = 0;
    for (int64_t i = 0; i < kItems * units; ++i) state[i] = 0;
    alignas(64) int32_t W[most_sums<PW>() * 3 * kGroup], R[most_sums<PR>() * 3 * kGroup];

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
        const int most_rows = count < kRowsAtOnce ? count : kRowsAtOnce;
        const int of_W = block_groups<PW>(most_rows), of_R = block_groups<PR>(most_rows);
        const int most = of_W < of_R ? of_W : of_R;
        for (int first = 0; first < p.R.groups; first += most) {
            const int groups = p.R.groups - first < most ? p.R.groups - first : most;
            for (int i = 0; i < count; i += kRowsAtOnce) {
                const int n = count - i < kRowsAtOnce ? count - i : kRowsAtOnce;
                dot_block<PW>(n, groups, p.W, first, x + i * x_stride, x_stride, W);
                dot_block<PR>(n, groups, p.R, first, h + i * h_stride, h_stride, R);
                for (int r = 0; r < n; ++r)
                    for (int g = 0; g < groups; ++g) {
                        const int64_t channel = (static_cast<int64_t>(first) + g) * 3 * kGroup;
                        const int64_t unit = (static_cast<int64_t>(first) + g) * kGroup;
                        const int sums = (r * groups + g) * 3 * kGroup;
                        const int64_t to = (first + g) * c.stride + item[i + r] * 3 * kGroup;
                        float *direct =
                            c.direct + (first + g) * c.direct_stride + item[i + r] * kGroup;
                        for (int j = 0; j < kGroup; j += V::n)
                            slopes(W + sums + j, R + sums + j, V::multipliers(p.W) + channel + j,
                                   V::multipliers(p.R) + channel + j,
                                   state + (i + r) * units + unit + j, c.Wx + to + j, c.Rh + to + j,
                                   direct + j);
                    }
            }
        }
        for (int i = 0; i < count; ++i)
            hold(job, step_of(c, c.first_step + (start + i) / rows),
                 job.first_row + (start + i) % rows, item[i], H);
    }
}

int64_t fused_slopes_bytes(const FusedPlan &p) {
    const int64_t units = static_cast<int64_t>(p.R.groups) * kGroup;
    const int64_t operands = operand_stride(p.W) + operand_stride(p.R);
    return kItems * (operands * static_cast<int64_t>(sizeof(OperandByte)) + units * 8) +
           4 * (round_up(p.W.inputs, 16) + round_up(p.H, 16)) + 5 * 64;
}

void run_fused_slopes(const FusedPlan &p, const SlopeJob &job) {
    using Single = typename WideFloats::Lane;
    constexpr int kTwo = kMaxPlanes;
    const bool x_one = p.W.planes == 1, h_one = p.R.planes == 1;
    if (p.in_float)
        return x_one ? slopes_of<Single, 1, 1>(p, job) : slopes_of<Single, kTwo, 1>(p, job);
    if (h_one)
        return x_one ? slopes_of<Doubles, 1, 1>(p, job) : slopes_of<Doubles, kTwo, 1>(p, job);
    x_one ? slopes_of<Doubles, 1, kTwo>(p, job) : slopes_of<Doubles, kTwo, kTwo>(p, job);
}
