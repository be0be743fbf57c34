// The derivatives of every element and step, from int32 sums of both GEMMs. The kernel recomputes
// the gates with the arithmetic of the forward. It also recomputes which values were clamped, since
// a clamp stops the gradient.
//
//   REAL, QG_WORDS, QG_RRH, QG_OLD, QG_NEW, QG_ZONEOUT, TZ, TR, TG: see recurrence/persistent.cu
//   BYTES       all weights and activations of both GEMMs are bytes
//   HALF        derivatives are stored in half precision
//   DIRS        directions per launch
#include "backward/element_derivatives.cuh"

struct Projected {
    const int32_t *product;   // (planes of the activation * rows, columns)
    const Channel *channels;  // (3H)
    int64_t columns, planes, weight_planes;
    double lo, hi;    // limits of the result minus its zero point
    float low, high;  // the same plus the magic number
};

struct Numbers {
    Projected W, R;
    const void *out, *h0;      // codes of the states after each step; initial codes, or null for 0
    const int64_t *lengths;    // (N) or null
    const uint8_t *held;       // (T * N, H) or null
    Derivatives *of_R, *of_W;  // (T * N, H): for the previous state and R h; for W x
    int64_t h_kind, T, N, H, reverse;
    int64_t first, rows;  // first row and number of rows of this chunk
    Gates gates;
};
struct Pair {
    Numbers d[DIRS];
};

// The constants of a channel of W x or R h, which are the same for all rows. The call operator
// requantizes a sum to a zero-point-free code without the magic number.
struct Column {
    const Projected *p;
    int64_t channel;
#if BYTES
    int folded, exact;
    float m;
#else
    Channel c;
#endif

    inline Watched in_double(double sum, double by) const {
        const double magic = Magic<double>::number();
        return rounded(sum, by, p->lo + magic, p->hi + magic);
    }
    inline void open(const Projected &from, int64_t of) {
        p = &from;
        channel = of;
        const Channel found = from.channels[of];
#if BYTES
        folded = (int)found.folded;
        exact = sizeof(Real) == 4 && found.exact;
        m = found.m_float;
#else
        c = found;
#endif
    }

#if BYTES
    typedef int Sums;
    inline Sums load(int64_t row, int64_t, int64_t) const {
        return p->product[row * p->columns + channel];
    }
    inline Watched operator()(int sum) const {
        if (__builtin_expect(!exact, 0)) {
            const Channel c = p->channels[channel];
            return in_double((double)(sum + c.folded), c.m);
        }
        return rounded((float)(sum + folded), m, p->low, p->high);
    }
#else
    typedef int64_t Sums;
    inline int64_t of_plane(const int32_t *v, int64_t H) const {
        if (p->weight_planes == 1) return v[channel];
        return 256 * (int64_t)v[channel] + v[3 * H + channel] + 128 * (int64_t)v[6 * H];
    }
    inline Sums load(int64_t row, int64_t H, int64_t rows) const {
        const int32_t *const v = p->product + row * p->columns;
        const int64_t sum = of_plane(v, H);
        return p->planes == 1 ? sum : 256 * sum + of_plane(v + rows * p->columns, H);
    }
    inline Watched operator()(int64_t sum) const {
        return in_double((double)(sum + c.folded), c.m);
    }
#endif
};

struct Element {
    Column::Sums Wx[3], Rh[3];
    int h;
    bool stays;
};

// A block processes some rows of 32 units.
extern "C" __global__ void __launch_bounds__(256, BYTES ? 3 : 1)
    derivatives_of(const __grid_constant__ Pair pair) {
    const Numbers &p = pair.d[blockIdx.y % DIRS];
    QG_SHARED(memory);
    Reader<TZ> z_of;
    Reader<TR> r_of;
    Reader<TG> g_of;
    const Cell<Real> &c = p.gates.cell;
    g_of.open(c.g, r_of.open(c.r, z_of.open(c.z, memory)));
    __syncthreads();
    const int64_t H = p.H, N = p.N, unit = (int64_t)(blockIdx.y / DIRS) * 32 + threadIdx.x % 32;
    if (unit >= H) return;
    Column of_Wx[3], of_Rh[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        of_Wx[gate].open(p.W, gate * H + unit);
        of_Rh[gate].open(p.R, gate * H + unit);
    }
    const auto load = [&](Element &to, int64_t local) {
        const int64_t row = p.first + local;
#pragma unroll
        for (int gate = 0; gate < 3; ++gate) {
            to.Wx[gate] = of_Wx[gate].load(local, H, p.rows);
            to.Rh[gate] = of_Rh[gate].load(local, H, p.rows);
        }
        int64_t from = p.reverse ? row + N : row - N;
        const void *states = p.out;
        if (from < 0 || from >= p.T * N) {
            states = p.h0;
            from = p.reverse ? from - p.T * N : from + N;
        }
        if (!states) {
            to.h = (int)c.h_zero;
        } else {
#if BYTES
            // keep the raw byte: converting it here would wait for the load
            to.h = ((const uint8_t *)states)[from * H + unit];
#else
            to.h = (int)read_code(states, p.h_kind, from * H + unit);
#endif
        }
        to.stays = p.lengths && row / N >= p.lengths[row % N];
        if (p.held) to.stays = to.stays || p.held[row * H + unit];
    };
    const int64_t step = (int64_t)gridDim.x * 8;
    int64_t local = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    Element ahead;
    if (local < p.rows) load(ahead, local);
    for (; local < p.rows; local += step) {
        const Element now = ahead;
        const int64_t at = (p.first + local) * H + unit;
        // the stores below may alias any load, so the next row is loaded before them
        if (local + step < p.rows) load(ahead, local + step);
        ElementDerivatives found = derivatives_of_staying();
        if (!now.stays) {
            const int code = BYTES && p.h_kind == 0 ? (int)(int8_t)now.h : now.h;
            Watched Wx[3], Rh[3];
#pragma unroll
            for (int gate = 0; gate < 3; ++gate) {
                Wx[gate] = of_Wx[gate](now.Wx[gate]);
                Rh[gate] = of_Rh[gate](now.Rh[gate]);
            }
            const Real h = (Real)(code - (int)c.h_zero);
            found = derivatives_of_element(p.gates, z_of, r_of, g_of, Wx, Rh, h, p.held != nullptr);
        }
        p.of_R[at] = found.of_R;
        p.of_W[at] = found.of_W;
    }
}
