// The local derivatives for plans of the general and the wide kernel. The general kernel's products
// and sums run without limits, so that clamps can be recorded afterwards. Included inside the
// namespace of an instruction set after general.inl and local_derivatives.inl.

constexpr int64_t kOpen = int64_t{1} << 62;

inline Sum opened(Sum s) {
    s.lo = -kOpen;
    s.hi = kOpen;
    return s;
}

inline Projection opened(Projection p) {
    p.lo = -static_cast<double>(kOpen);
    p.hi = static_cast<double>(kOpen);
    return p;
}

// Clamps values in place; inside: 1 where a value did not change, else 0.
template <class Real>
QG_ALONE void clamp_all(Real *v, double lo, double hi, int n, float *inside) {
    for (int i = 0; i < n; ++i) {
        const Real limited = limit(v[i], static_cast<Real>(lo), static_cast<Real>(hi));
        inside[i] = limited == v[i] ? 1.f : 0.f;
        v[i] = limited;
    }
}

template <class Real>
inline void clamp_all(Real *v, const Sum &s, int n, float *inside) {
    clamp_all(v, static_cast<double>(s.lo), static_cast<double>(s.hi), n, inside);
}

// The arrays of one item, each of H values.
template <class Real>
struct GeneralItem {
    Real *z, *r, *g, *rest, *not_z, *old, *fresh, *after, *h;
    Clamps in;

    GeneralItem(MemoryPieces &pieces, int H) {
        Real **const codes[] = {&z, &r, &g, &rest, &not_z, &old, &fresh, &after, &h};
        for (Real **v : codes) *v = static_cast<Real *>(pieces.take(H * sizeof(Real)));
        in.wx = static_cast<float *>(pieces.take(3 * H * sizeof(float)));
        in.rh = static_cast<float *>(pieces.take(3 * H * sizeof(float)));
        float **const units[] = {&in.z, &in.r, &in.g, &in.rest, &in.old, &in.fresh, &in.h};
        for (float **v : units) *v = static_cast<float *>(pieces.take(H * sizeof(float)));
    }
    static int64_t bytes(int H) { return 9 * round_up(8 * H, 64) + 13 * (4 * int64_t{H} + 64); }
};

// Runs the forward of one item from unclamped projections, which it clamps in place.
template <class Real, Ties kHow>
QG_ALONE void general_item(const GeneralPlan &p, Real *Wx, Real *Rh, const GeneralItem<Real> &t) {
    const int H = p.H;
    auto product = [&](const Sum &s, const Real *a, const Real *b, Real *out, float *inside) {
        if (s.present) {
            multiply<Real, kHow>(opened(s), a, b, out, H);
            clamp_all(out, s, H, inside);
        } else {
            for (int i = 0; i < H; ++i) inside[i] = 1;
        }
    };
    clamp_all(Wx, p.W.lo, p.W.hi, 3 * H, t.in.wx);
    clamp_all(Rh, p.R.lo, p.R.hi, 3 * H, t.in.rh);
    add<Real, kHow, false, false>(opened(p.z_pre), Wx, nullptr, Rh, nullptr, t.z, H);
    clamp_all(t.z, p.z_pre, H, t.in.z);
    look_up_all(p.z, t.z, H);
    add<Real, kHow, false, false>(opened(p.r_pre), Wx + H, nullptr, Rh + H, nullptr, t.r, H);
    clamp_all(t.r, p.r_pre, H, t.in.r);
    look_up_all(p.r, t.r, H);
    product(p.rRh, t.r, Rh + 2 * H, t.rest, t.in.rest);
    if (p.rRh.present)
        add<Real, kHow, false, false>(opened(p.g_pre), Wx + 2 * H, nullptr, t.rest, nullptr, t.g,
                                      H);
    else
        add<Real, kHow, false, true>(opened(p.g_pre), Wx + 2 * H, nullptr, t.r, Rh + 2 * H, t.g, H);
    clamp_all(t.g, p.g_pre, H, t.in.g);
    look_up_all(p.g, t.g, H);
    const Real one = static_cast<Real>(p.one);
    for (int i = 0; i < H; ++i) t.not_z[i] = one - t.z[i];
    product(p.old_contrib, t.z, t.h, t.old, t.in.old);
    product(p.new_contrib, t.not_z, t.g, t.fresh, t.in.fresh);
    const Sum h_new = opened(p.h_new);
    if (p.old_contrib.present && p.new_contrib.present)
        add<Real, kHow, false, false>(h_new, t.old, nullptr, t.fresh, nullptr, t.after, H);
    else if (p.old_contrib.present)
        add<Real, kHow, false, true>(h_new, t.old, nullptr, t.not_z, t.g, t.after, H);
    else if (p.new_contrib.present)
        add<Real, kHow, true, false>(h_new, t.z, t.h, t.fresh, nullptr, t.after, H);
    else
        add<Real, kHow, true, true>(h_new, t.z, t.h, t.not_z, t.g, t.after, H);
    clamp_all(t.after, p.h_new, H, t.in.h);
}

// Computes the derivatives of one item in double. Rh_g: (H), codes of matmul.Rh of the candidate.
template <class Real>
QG_ALONE void general_derivatives_of(const Cell &p, const DerivativesJob &job, const Real *Rh_g,
                                     int64_t item, const GeneralItem<Real> &t) {
    const Chunk &c = job.chunk;
    const Scales &s = job.scales;
    const double kept = kept_share(p, job);
    const int H = p.H;
    for (int i = 0; i < H; ++i) {
        const double z = s.z * static_cast<double>(t.z[i]), r = s.r * static_cast<double>(t.r[i]);
        const double g = s.g * static_cast<double>(t.g[i]), h = s.h * static_cast<double>(t.h[i]);
        const double moved = (1 - kept) * static_cast<double>(t.in.h[i]);
        const double through_old = moved * static_cast<double>(t.in.old[i]);
        const double through_new = moved * static_cast<double>(t.in.fresh[i]);
        const double at_z =
            (through_old * h - through_new * g) * z * (1 - z) * static_cast<double>(t.in.z[i]);
        const double tanh_derivative = g * g < 1 ? 1 - g * g : 0;
        const double at_g =
            through_new * (1 - z) * tanh_derivative * static_cast<double>(t.in.g[i]);
        const double at_rest = at_g * static_cast<double>(t.in.rest[i]);
        const double at_r = at_rest * s.Rh * static_cast<double>(Rh_g[i]) * r * (1 - r) *
                            static_cast<double>(t.in.r[i]);
        const int64_t group = i / kGroup, place = item * 3 * kGroup + i % kGroup;
        float *Wx = c.Wx + group * c.stride + place, *to = c.Rh + group * c.stride + place;
        Wx[0] = static_cast<float>(at_z) * t.in.wx[i];
        Wx[kGroup] = static_cast<float>(at_r) * t.in.wx[H + i];
        Wx[2 * kGroup] = static_cast<float>(at_g) * t.in.wx[2 * H + i];
        to[0] = static_cast<float>(at_z) * t.in.rh[i];
        to[kGroup] = static_cast<float>(at_r) * t.in.rh[H + i];
        to[2 * kGroup] = static_cast<float>(at_rest * r) * t.in.rh[2 * H + i];
        c.direct[group * c.direct_stride + item * kGroup + i % kGroup] =
            static_cast<float>(kept + through_old * z);
    }
}

// Clears the derivatives of the padding units beyond H.
inline void clear_padding(const Chunk &c, int64_t item, int H) {
    for (int64_t unit = H; unit < int64_t{c.groups} * kGroup; ++unit) {
        const int64_t group = unit / kGroup, place = unit % kGroup;
        for (int gate = 0; gate < 3; ++gate) {
            const int64_t at = group * c.stride + (item * 3 + gate) * kGroup + place;
            c.Wx[at] = c.Rh[at] = 0;
        }
        c.direct[group * c.direct_stride + item * kGroup + place] = 0;
    }
}

template <class Real, Ties kHow>
void general_derivatives_in(const GeneralPlan &p, const DerivativesJob &job) {
    const Chunk &c = job.chunk;
    const int H = p.H, C = p.W.inputs;
    const int rule = p.rule;
    const Projection W = opened(p.W), R = opened(p.R);
    const int64_t wx_stride = int64_t{p.W.tiles} * kTile, rh_stride = int64_t{p.R.tiles} * kTile;
    const int64_t x_stride = 2 * p.W.pairs, h_stride = 2 * p.R.pairs;
    MemoryPieces pieces{static_cast<char *>(job.workspace)};
    Real *Wx = static_cast<Real *>(pieces.take(kItems * wx_stride * sizeof(Real)));
    Real *Rh = static_cast<Real *>(pieces.take(kItems * rh_stride * sizeof(Real)));
    auto *x16 = static_cast<int16_t *>(pieces.take(kItems * x_stride * sizeof(int16_t)));
    auto *h16 = static_cast<int16_t *>(pieces.take(kItems * h_stride * sizeof(int16_t)));
    auto *x = static_cast<int32_t *>(pieces.take(C * sizeof(int32_t)));
    auto *h = static_cast<int32_t *>(pieces.take(kItems * int64_t{H} * sizeof(int32_t)));
    const GeneralItem<Real> t(pieces, H);

    const int64_t rows = job.end_row - job.first_row, all = c.steps * rows;
    for (int64_t start = 0; start < all; start += kItems) {
        const int count = static_cast<int>(all - start < kItems ? all - start : kItems);
        for (int i = 0; i < count; ++i) {
            int32_t *state = h + int64_t{i} * H;
            read_item(job, p, C, (start + i) / rows, job.first_row + (start + i) % rows, x, state);
            to_words(p.W, p.x.zero, x, C, x16 + i * x_stride);
            to_words(p.R, p.h.zero, state, H, h16 + i * h_stride);
        }
        {
            const Direction direction(rule);
            project_pairs<Real, kHow>(W, rule, x16, x_stride, count, Wx, p.small_sums);
            project_pairs<Real, kHow>(R, rule, h16, h_stride, count, Rh, p.small_sums);
        }
        for (int i = 0; i < count; ++i) {
            const int64_t step = (start + i) / rows, row = job.first_row + (start + i) % rows;
            for (int u = 0; u < H; ++u) t.h[u] = static_cast<Real>(h[int64_t{i} * H + u]);
            {
                const Direction direction(rule);
                general_item<Real, kHow>(p, Wx + i * wx_stride, Rh + i * rh_stride, t);
            }
            const int64_t item = item_of(c, step, row);
            general_derivatives_of(p, job, Rh + i * rh_stride + 2 * H, item, t);
            clear_padding(c, item, H);
            hold(job, step_of(c, c.first_step + step), row, item, H);
        }
    }
}

int64_t general_derivatives_bytes(const GeneralPlan &p) {
    const int64_t channels = (int64_t{p.W.tiles} + p.R.tiles) * kTile;
    const int64_t words = 2 * (int64_t{p.W.pairs} + p.R.pairs);
    return kItems * (channels * 8 + words * 2 + int64_t{p.H} * 4) + 4 * int64_t{p.W.inputs} +
           6 * 64 + GeneralItem<double>::bytes(p.H);
}

void run_general_derivatives(const GeneralPlan &p, const DerivativesJob &job) {
    if (p.rule != QG_HALF_EVEN && p.rule != QG_FLOOR)
        return general_derivatives_in<double, Ties::any>(p, job);
    p.in_float ? general_derivatives_in<float, Ties::even>(p, job)
               : general_derivatives_in<double, Ties::even>(p, job);
}

// The same for plans of the wide kernel.
void run_wide_derivatives(const WidePlan &p, const DerivativesJob &job) {
    const Chunk &c = job.chunk;
    const int H = p.H, C = p.W.inputs;
    const WideSpace space = wide_space(p, job.workspace);
    MemoryPieces pieces{static_cast<char *>(job.workspace) + cache_lines(workspace_bytes(p))};
    auto *const Rh_g = static_cast<double *>(pieces.take(H * sizeof(double)));
    const GeneralItem<double> t(pieces, H);
    const WideItem record{t.z, t.r, t.g, Rh_g, t.in};

    const int64_t rows = job.end_row - job.first_row, all = c.steps * rows;
    for (int64_t start = 0; start < all; start += kWideRows) {
        const int count = static_cast<int>(all - start < kWideRows ? all - start : kWideRows);
        for (int i = 0; i < count; ++i) {
            const int64_t step = (start + i) / rows, row = job.first_row + (start + i) % rows;
            const int64_t item = item_of(c, step, row), place = c.first_step + step;
            const int64_t before = place ? step_of(c, place - 1) * c.N + row : row;
            int64_t *const x = space.x + int64_t{i} * C, *const h = space.h + int64_t{i} * H;
            read_codes(job.x, p.x.container, (step_of(c, place) * c.N + row) * C, p.W.zero, C, x);
            read_codes(place ? job.out : job.h0, p.h.container, before * H, p.R.zero, H, h);
            pack_codes(c.x, c.code_stride, item, x, C);
            pack_codes(c.h, c.code_stride, item, h, H);
        }
        project_wide(p, space, count, wide_sums);
        for (int i = 0; i < count; ++i) {
            const int64_t step = (start + i) / rows, row = job.first_row + (start + i) % rows;
            const int64_t item = item_of(c, step, row);
            const int64_t *const h = space.h + int64_t{i} * H;
            record_item(p, space.Wx + int64_t{i} * 3 * H, space.Rh + int64_t{i} * 3 * H, h, record);
            for (int u = 0; u < H; ++u) t.h[u] = static_cast<double>(h[u]);
            general_derivatives_of(p, job, Rh_g, item, t);
            clear_padding(c, item, H);
            hold(job, step_of(c, c.first_step + step), row, item, H);
        }
    }
}

int64_t wide_derivatives_bytes(const WidePlan &p) {
    return cache_lines(workspace_bytes(p)) + 8 * int64_t{p.H} + 64 +
           GeneralItem<double>::bytes(p.H);
}
