// Runs any plan of up to 32 bits exactly. Each block computes all steps of one row of the batch,
// with sums in two 64-bit words.
//
// Macro       Values        Meaning
// QG_WORDS    0, 1          some sums of the gates need 64-bit integers
// QG_RULE     0 to 4        the rule of rounding, see fixed_point.h
// QG_RRH, QG_OLD, QG_NEW  0, 1  whether the product is requantized to codes of its own
// QG_ZONEOUT  0, 1          the new state includes a fraction of the previous state
#include "gates/arithmetic.cuh"

struct Numbers {
    Sequence s;
    Matrix W, R;  // codes transposed, (K, 3H) int32
    Cell<double> cell;
};
struct Pair {
    Numbers d[2];
};

// A term: a code (b = 1), or a product of two codes.
struct Term {
    int64_t a, b;
};

inline Term code(int64_t v) {
    Term t;
    t.a = v;
    t.b = 1;
    return t;
}

inline Term product(int64_t a, int64_t b) {
    Term t;
    t.a = a;
    t.b = b;
    return t;
}

// The bits of a multiplier, which the first step of QG_DOUBLE shifts out.
inline int bits_of(int64_t M) {
    int bits = 0;
    if (QG_RULE == QG_DOUBLE)
        for (; M; M >>= 1) ++bits;
    return bits;
}

inline int64_t rounded(const Sum<double> &s, qg_wide total) {
    const int first = bits_of(s.M[0] | s.M[1]);
    return qg_clamp(qg_wide_round_by(total, (int)s.k, QG_RULE, first), s.low, s.high);
}

inline int64_t apply(const Sum<double> &s, Term t1, Term t2) {
    const qg_wide v1 = qg_wide_product(t1.a, t1.b), v2 = qg_wide_product(t2.a, t2.b);
    const qg_wide total = qg_wide_add(qg_wide_times_word(v1, (uint64_t)s.M[0]),
                                      qg_wide_times_word(v2, (uint64_t)s.M[1]));
    return rounded(s, total);
}

inline int64_t apply(const Sum<double> &s, Term t) {
    return rounded(s, qg_wide_times(qg_wide_product(t.a, t.b), (uint32_t)s.M[0]));
}

inline int64_t look_up(const Table &t, int64_t v) {
    const int64_t q = qg_clamp(v + t.pre_zero, t.bounds[0], t.last);
    int low = 0, high = (int)t.segments - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (t.bounds[middle] <= q)
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t d = q - t.bounds[low];
    const int64_t *c = t.coefficients + (int64_t)low * (t.degree + 1);
    int64_t y = c[t.degree];
    for (int power = (int)t.degree - 1; power >= 0; --power) y = y * d + c[power];
    return qg_clamp(qg_round_by(y, (int)t.shift, QG_RULE, (int)t.shift), t.lo, t.hi);
}

// Computes the three channels of one unit: W x or R h, requantized.
inline void project(const Matrix &p, const int64_t *v, const void *codes, int64_t kind,
                    int64_t start, int64_t K, int64_t H, int64_t unit, int64_t *out) {
    const int32_t *w = (const int32_t *)p.codes + unit;
    qg_wide total[3];
    for (int gate = 0; gate < 3; ++gate)
        total[gate] = qg_wide_left(qg_wide_of(p.bias[gate * H + unit]), (int)p.bias_shift);
    for (int64_t i = 0; i < K; ++i, w += 3 * H) {
        const int64_t operand = v ? v[i] : read_code(codes, kind, start + i) - p.zero;
        for (int gate = 0; gate < 3; ++gate)
            total[gate] = qg_wide_add(total[gate], qg_wide_product(w[gate * H], operand));
    }
    for (int gate = 0; gate < 3; ++gate) {
        const int64_t c = gate * H + unit;
        const qg_wide product = qg_wide_times(total[gate], (uint32_t)p.M[c]);
        out[gate] =
            qg_clamp(qg_wide_round_by(product, (int)p.k[c], QG_RULE, bits_of(p.M[c])), p.lo, p.hi);
    }
}

inline int64_t next(const Cell<double> &c, const int64_t *Wx, const int64_t *Rh, int64_t h) {
    const int64_t z = look_up(c.z, apply(c.z_pre, code(Wx[0]), code(Rh[0])));
    const int64_t r = look_up(c.r, apply(c.r_pre, code(Wx[1]), code(Rh[1])));
    Term rest = product(r, Rh[2]);
#if QG_RRH
    rest = code(apply(c.rRh, rest));
#endif
    const int64_t g = look_up(c.g, apply(c.g_pre, code(Wx[2]), rest));
    Term old = product(z, h), fresh = product(c.one_integer - z, g);
#if QG_OLD
    old = code(apply(c.old_contrib, old));
#endif
#if QG_NEW
    fresh = code(apply(c.new_contrib, fresh));
#endif
    return apply(c.h, old, fresh);
}

extern "C" __global__ void __launch_bounds__(256) generic(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y];
    const Sequence &s = p.s;
    const int64_t row = blockIdx.x, H = s.H, N = s.N;
    int64_t *h[2];
    h[0] = (int64_t *)s.workspace + row * 2 * H;
    h[1] = h[0] + H;
    for (int64_t i = threadIdx.x; i < H; i += blockDim.x)
        h[0][i] = read_code(s.h0, s.h_kind, row * H + i) - p.R.zero;
    __syncthreads();
    int now = 0;
    for (int64_t n = 0; n < s.T; ++n) {
        const int64_t t = s.reverse ? s.T - 1 - n : n;
        const bool moves = !s.lengths || s.lengths[row] > t;
        for (int64_t unit = threadIdx.x; unit < H; unit += blockDim.x) {
            int64_t state = h[now][unit];
            if (moves && !(s.held && s.held[(t * N + row) * H + unit])) {
                int64_t Wx[3], Rh[3];
                project(p.W, 0, s.x, s.x_kind, (t * N + row) * s.C, s.C, H, unit, Wx);
                project(p.R, h[now], 0, 0, 0, H, H, unit, Rh);
                const int64_t now = next(p.cell, Wx, Rh, state);
#if QG_ZONEOUT
                state = s.held ? now : apply(p.cell.zoneout, code(state), code(now));
#else
                state = now;
#endif
            }
            h[1 - now][unit] = state;
            write_code(s.out, s.h_kind, (t * N + row) * H + unit, state + p.R.zero);
        }
        __syncthreads();
        now = 1 - now;
    }
    for (int64_t i = threadIdx.x; i < H; i += blockDim.x)
        write_code(s.last, s.h_kind, row * H + i, h[now][i] + p.R.zero);
}
