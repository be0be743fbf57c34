// The fused kernel, for weights of up to 8 bits and activations of up to 16: a block of units is
// multiplied and taken through its gates while its sums are in the nearest cache. Included inside
// the namespace of an instruction set, which defines
//   kGroup, kDepth       the layout of its weights,
//   OperandByte          int16_t, uint8_t or int8_t,
//   kMaxRows<planes>, max_groups(rows, planes)
//                        how much one call of `dot` takes,
//   dot<G, R, P>(..)     sums of G groups for R rows, bias included,
//   kTileRows<planes>    0, or how many rows one call of `dot_tiles<P>` takes at most,
//   kTileGroups          and groups,
//   Floats, Doubles      lanes of float and double with exact arithmetic and tables.

// One sum of two terms, as lanes.
template <class V>
struct TwoTerms {
    V m1, m2, lo, hi;
    explicit TwoTerms(const Sum &s)
        : m1(V::set(s.m[0])),
          m2(V::set(s.m[1])),
          lo(V::set(static_cast<double>(s.lo))),
          hi(V::set(static_cast<double>(s.hi))) {}
    // Clamped, but not rounded: the limits are integers, so that the order does not matter. The
    // plan's bounds make the sum exact.
    V unrounded(V a, V b) const { return V::limit(V::add_product(V::mul(a, m1), b, m2), lo, hi); }
    V operator()(V a, V b) const { return V::round(unrounded(a, b)); }
};

// A product that is rounded to a code of its own.
template <class V>
struct OneTerm {
    V m, lo, hi;
    explicit OneTerm(const Sum &s)
        : m(V::set(s.m[0])),
          lo(V::set(static_cast<double>(s.lo))),
          hi(V::set(static_cast<double>(s.hi))) {}
    V operator()(V a, V b) const { return V::limit(V::rounded_product(V::mul(a, b), m), lo, hi); }
};

template <class V>
struct Gates {
    const FusedPlan &p;
    TwoTerms<V> z_pre, r_pre, g_pre, h_new;
    OneTerm<V> rRh, old_contrib, new_contrib;
    V one, wx_lo, wx_hi, rh_lo, rh_hi;

    explicit Gates(const FusedPlan &plan)
        : p(plan),
          z_pre(plan.z_pre),
          r_pre(plan.r_pre),
          g_pre(plan.g_pre),
          h_new(plan.h_new),
          rRh(plan.rRh),
          old_contrib(plan.old_contrib),
          new_contrib(plan.new_contrib),
          one(V::set(static_cast<double>(plan.one))),
          wx_lo(V::set(plan.W.lo)),
          wx_hi(V::set(plan.W.hi)),
          rh_lo(V::set(plan.R.lo)),
          rh_hi(V::set(plan.R.hi)) {}

    // A zero-point-free code of Wx or Rh from the accumulators at `sums`.
    V input_product(const int32_t *sums, const typename V::Real *m) const {
        return V::limit(V::rounded_product(V::from_ints(sums), V::load(m)), wx_lo, wx_hi);
    }
    V state_product(const int32_t *sums, const typename V::Real *m) const {
        return V::limit(V::rounded_product(V::from_ints(sums), V::load(m)), rh_lo, rh_hi);
    }

    // The next state; kRounded: all three products have codes of their own.
    template <bool kRounded>
    V operator()(V Wx_z, V Wx_r, V Wx_g, V Rh_z, V Rh_r, V Rh_g, V h) const {
        const V z = V::look_up(p.z, z_pre.unrounded(Wx_z, Rh_z));
        const V r = V::look_up(p.r, r_pre.unrounded(Wx_r, Rh_r));
        const V rest = kRounded || p.rRh.present ? rRh(r, Rh_g) : V::mul(r, Rh_g);
        const V g = V::look_up(p.g, g_pre.unrounded(Wx_g, rest));
        const V not_z = V::sub(one, z);
        const V old = kRounded || p.old_contrib.present ? old_contrib(z, h) : V::mul(z, h);
        const V fresh =
            kRounded || p.new_contrib.present ? new_contrib(not_z, g) : V::mul(not_z, g);
        return h_new(old, fresh);
    }
};

template <int P, int R, int G>
inline void dot_groups(int groups, const Packed &p, int first, const OperandByte *a, int64_t stride,
                       int32_t *out) {
    if constexpr (G > 1) {
        if (groups < G) return dot_groups<P, R, G - 1>(groups, p, first, a, stride, out);
    }
    dot<G, R, P>(p, first, a, stride, out);
}

template <int P>
inline void dot_tiles(int rows, int groups, const Packed &p, int first, const OperandByte *a,
                      int64_t stride, int32_t *out);

// Sums of `groups` groups for `rows` rows: out[row][group][gate][unit].
template <int P, int R = kMaxRows<P>>
inline void dot_block(int rows, int groups, const Packed &p, int first, const OperandByte *a,
                      int64_t stride, int32_t *out) {
    if constexpr (R == kMaxRows<P> && kTileRows<P> > 0) {
        if (rows > R) return dot_tiles<P>(rows, groups, p, first, a, stride, out);
    }
    if constexpr (R > 1) {
        if (rows < R) return dot_block<P, R - 1>(rows, groups, p, first, a, stride, out);
    }
    dot_groups<P, R, max_groups(R, P)>(groups, p, first, a, stride, out);
}

// How many rows, and groups for so many rows, `dot_block` takes.
template <int P>
constexpr int kBlockRows = kTileRows<P> > 0 ? kTileRows<P> : kMaxRows<P>;
template <int P>
constexpr int block_groups(int rows) {
    return rows > kMaxRows<P> ? kTileGroups : max_groups(rows, P);
}

// The most that is at `out` of `dot_block`, in rows times groups.
template <int P>
constexpr int most_sums() {
    int most = (kTileRows<P> + 15) / 16 * 16 * kTileGroups;
    for (int rows = 1; rows <= kMaxRows<P>; ++rows)
        if (rows * max_groups(rows, P) > most) most = rows * max_groups(rows, P);
    return most;
}

// A row of zero-point-free codes as operands, in planes of `stride / planes` values.
inline void to_operand(const Packed &p, int32_t zero, const int32_t *v, int n, OperandByte *out,
                       int64_t stride) {
    const int32_t shift = zero - p.offset;
    if (p.planes == 1) {
        for (int i = 0; i < n; ++i) out[i] = static_cast<OperandByte>(v[i] + shift);
        return;
    }
    // 256 * high + low, with `low` in the range of the bytes
    OperandByte *high = out + stride / 2;
    constexpr int32_t half = static_cast<OperandByte>(-1) < 0 ? 128 : 0;
    for (int i = 0; i < n; ++i) {
        const int32_t q = v[i] + shift;
        out[i] = static_cast<OperandByte>(q);
        high[i] = static_cast<OperandByte>((q + half) >> 8);
    }
}

// Wx of rows of operands, as float: out[row][group][gate][unit].
template <class V, int P>
void project(const Gates<V> &gates, const OperandByte *a, int64_t stride, int rows, float *out) {
    const Packed &p = gates.p.W;
    alignas(64) int32_t sums[most_sums<P>() * 3 * kGroup];
    const int most = block_groups<P>(rows < kBlockRows<P> ? rows : kBlockRows<P>);
    for (int first = 0; first < p.groups; first += most) {
        const int groups = p.groups - first < most ? p.groups - first : most;
        const auto *m = V::multipliers(p) + static_cast<int64_t>(first) * 3 * kGroup;
        for (int row = 0; row < rows; row += kBlockRows<P>) {
            const int count = rows - row < kBlockRows<P> ? rows - row : kBlockRows<P>;
            dot_block<P>(count, groups, p, first, a + row * stride, stride, sums);
            for (int r = 0; r < count; ++r) {
                float *to = out + ((static_cast<int64_t>(row) + r) * p.groups + first) * 3 * kGroup;
                const int32_t *from = sums + r * groups * 3 * kGroup;
                for (int i = 0; i < groups * 3 * kGroup; i += V::n)
                    gates.input_product(from + i, m + i).store_floats(to + i);
            }
        }
    }
}

template <class V>
struct State {
    typename V::Real *h;  // [row][units], zero-point-free codes
    OperandByte *codes, *next;
    int64_t units, stride;  // per row
};

// Input of one step: operands, or where those were multiplied ahead, their Wx.
struct Input {
    const OperandByte *operands;
    int64_t stride;
    const float *Wx;
};

// One step of `rows` rows: all units, block by block. kAhead: Wx was made ahead.
template <class V, int P, bool kRounded, bool kAhead>
void step(const Gates<V> &gates, const State<V> &state, const Input &input, int rows,
          const int64_t *lengths, int64_t at) {
    const FusedPlan &p = gates.p;
    const Packed &R = p.R;
    constexpr int kSums = most_sums<P>() * 3 * kGroup;
    alignas(64) int32_t state_sums[kSums], input_sums[kAhead ? 1 : kSums];
    const int32_t shift = p.h.zero - R.offset;
    const int most = block_groups<P>(rows < kBlockRows<P> ? rows : kBlockRows<P>);
    for (int first = 0; first < R.groups; first += most) {
        const int groups = R.groups - first < most ? R.groups - first : most;
        const auto *m = V::multipliers(R) + static_cast<int64_t>(first) * 3 * kGroup;
        const auto *mx = V::multipliers(p.W) + static_cast<int64_t>(first) * 3 * kGroup;
        for (int row = 0; row < rows; row += kBlockRows<P>) {
            const int count = rows - row < kBlockRows<P> ? rows - row : kBlockRows<P>;
            dot_block<P>(count, groups, R, first, state.codes + row * state.stride, state.stride,
                         state_sums);
            if constexpr (!kAhead)
                dot_block<P>(count, groups, p.W, first, input.operands + row * input.stride,
                             input.stride, input_sums);
            for (int r = 0; r < count; ++r) {
                if (lengths && lengths[row + r] <= at) continue;
                const int64_t wx =
                    kAhead ? ((static_cast<int64_t>(row) + r) * R.groups + first) * 3 * kGroup : 0;
                const int32_t *sums = state_sums + r * groups * 3 * kGroup;
                const int32_t *x_sums = input_sums + (kAhead ? 0 : r * groups * 3 * kGroup);
                typename V::Real *h = state.h + (row + r) * state.units + first * kGroup;
                OperandByte *codes = state.next + (row + r) * state.stride + first * kGroup;
                for (int g = 0; g < groups; ++g) {
                    for (int i = 0; i < kGroup; i += V::n) {
                        V Wx[3], Rh[3];
#pragma GCC unroll 3
                        for (int gate = 0; gate < 3; ++gate) {
                            const int j = (g * 3 + gate) * kGroup + i;
                            Rh[gate] = gates.state_product(sums + j, m + j);
                            if constexpr (kAhead)
                                Wx[gate] = V::load_floats(input.Wx + wx + j);
                            else
                                Wx[gate] = gates.input_product(x_sums + j, mx + j);
                        }
                        const V now = gates.template operator()<kRounded>(
                            Wx[0], Wx[1], Wx[2], Rh[0], Rh[1], Rh[2], V::load(h + g * kGroup + i));
                        now.store(h + g * kGroup + i);
                        now.template store_operand<P>(shift, codes + g * kGroup + i,
                                                      state.stride / 2);
                    }
                }
            }
        }
    }
}

inline int64_t operand_stride(const Packed &p) {
    // whole groups, so that blocks can be stored without looking at the end
    const int64_t least = static_cast<int64_t>(p.steps) * kDepth;
    return p.planes * round_up(least, 64);
}

template <class V, int P, bool kRounded>
bool run_rows(const FusedPlan &p, const Job &job, int64_t first_row, int rows) {
    using Real = typename V::Real;
    const Gates<V> gates(p);
    const int H = p.H, C = p.W.inputs;
    const int64_t units = static_cast<int64_t>(p.R.groups) * kGroup;
    const int64_t x_stride = operand_stride(p.W), h_stride = operand_stride(p.R);
    const int64_t ahead = steps_ahead(job.T, rows, layout.ahead);
    const int64_t padded = round_up(rows, layout.row_block);
    Space space{static_cast<char *>(job.workspace)};
    // one step at a time and operands of one kind: each block multiplies both
    const bool direct = ahead <= 1 && p.W.planes == p.R.planes;
    float *Wx = static_cast<float *>(space.take(ahead * rows * units * 3 * sizeof(float)));
    auto *x = static_cast<OperandByte *>(
        space.take(round_up(ahead * rows, layout.row_block) * x_stride * sizeof(OperandByte)));
    auto *row_codes = static_cast<int32_t *>(space.take((H > C ? H : C) * sizeof(int32_t)));
    State<V> state;
    state.h = static_cast<Real *>(space.take(rows * units * sizeof(Real)));
    state.codes = static_cast<OperandByte *>(space.take(padded * h_stride * sizeof(OperandByte)));
    state.next = static_cast<OperandByte *>(space.take(padded * h_stride * sizeof(OperandByte)));
    state.units = units;
    state.stride = h_stride;

    bool nan = false;
    for (int64_t i = 0; i < rows * units; ++i) state.h[i] = 0;
    for (int row = 0; row < rows; ++row) {
        nan |= read_row(job.h0, p.h, (first_row + row) * job.h0.row, H, row_codes);
        to_operand(p.R, p.h.zero, row_codes, H, state.codes + row * h_stride, h_stride);
        for (int i = 0; i < H; ++i) state.h[row * units + i] = static_cast<Real>(row_codes[i]);
    }
    const int64_t *lengths = job.lengths ? job.lengths + first_row : nullptr;
    for (int64_t block = 0; block < job.T; block += ahead) {
        const int steps = static_cast<int>(job.T - block < ahead ? job.T - block : ahead);
        for (int s = 0; s < steps; ++s) {
            const int64_t at = job.reverse ? job.T - 1 - (block + s) : block + s;
            for (int row = 0; row < rows; ++row) {
                const int64_t start = at * job.x.step + (first_row + row) * job.x.row;
                nan |= read_row(job.x, p.x, start, C, row_codes);
                to_operand(p.W, p.x.zero, row_codes, C, x + (s * rows + row) * x_stride, x_stride);
            }
        }
        if (!direct) {
            if (p.W.planes == 1 || kMaxPlanes == 1)
                project<V, 1>(gates, x, x_stride, steps * rows, Wx);
            else
                project<V, kMaxPlanes>(gates, x, x_stride, steps * rows, Wx);
        }
        for (int s = 0; s < steps; ++s) {
            const int64_t at = job.reverse ? job.T - 1 - (block + s) : block + s;
            if (lengths)
                for (int row = 0; row < rows; ++row)
                    if (lengths[row] <= at)
                        __builtin_memcpy(state.next + row * h_stride, state.codes + row * h_stride,
                                         h_stride * sizeof(OperandByte));
            const Input input{x, x_stride, Wx + s * rows * units * 3};
            if (direct)
                step<V, P, kRounded, false>(gates, state, input, rows, lengths, at);
            else
                step<V, P, kRounded, true>(gates, state, input, rows, lengths, at);
            OperandByte *codes = state.codes;
            state.codes = state.next;
            state.next = codes;
            for (int row = 0; row < rows; ++row)
                write_row(job.out, p.h, at, first_row + row, state.h + row * units, H);
        }
    }
    for (int row = 0; row < rows; ++row)
        write_row(job.last, p.h, 0, first_row + row, state.h + row * units, H);
    return nan;
}

template <class V, int P>
bool run_lanes(const FusedPlan &p, const Job &job) {
    const bool rounded = p.rRh.present && p.old_contrib.present && p.new_contrib.present;
    bool nan = false;
    for (int64_t row = job.first_row; row < job.end_row; row += layout.rows) {
        const int64_t left = job.end_row - row;
        const int rows = static_cast<int>(left < layout.rows ? left : layout.rows);
        nan |= rounded ? run_rows<V, P, true>(p, job, row, rows)
                       : run_rows<V, P, false>(p, job, row, rows);
    }
    return nan;
}

bool run_fused(const FusedPlan &p, const Job &job) {
    if (p.in_float) return run_lanes<Floats, 1>(p, job);
    return p.R.planes == 1 ? run_lanes<Doubles, 1>(p, job) : run_lanes<Doubles, kMaxPlanes>(p, job);
}
