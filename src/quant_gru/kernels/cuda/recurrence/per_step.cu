// One step of a recurrence whose weights do not fit registers. A GEMM of bytes computes R h before
// this kernel. Each block computes units of one row.
//
// Macro       Values        Meaning
// REAL        float, double type of the gate arithmetic
// QG_WORDS    0, 1          some sums of the gates need 64-bit integers
// QG_RRH, QG_OLD, QG_NEW  0, 1  whether the product is requantized to codes of its own
// QG_ZONEOUT  0, 1          the new state includes a fraction of the previous state
#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

typedef REAL Real;

struct Numbers {
    Sequence s;              // x is not read
    const double *m;         // (3H), M / 2^k
    const int64_t *folded;   // (3H), bias and zero points, folded for the GEMM of bytes
    const int32_t *product;  // (planes of h * N, columns)
    int8_t *bytes;           // (planes of h * N, padded H): the new state
    const void *Wx;          // [t][row][group][16], as int_mm.cu stores it for tiles of one row
    int64_t planes_h, planes_R, columns, padded_H, groups, wide;
    int64_t t, before;  // this step, and the previous step or -1
    Cell<Real> cell;
};

inline int64_t of_plane(const Numbers &p, int64_t row, int64_t channel) {
    const int32_t *v = p.product + row * p.columns;
    if (p.planes_R == 1) return v[channel];
    return 256 * (int64_t)v[channel] + v[3 * p.s.H + channel] + 128 * (int64_t)v[6 * p.s.H];
}

extern "C" __global__ void __launch_bounds__(256) step(const __grid_constant__ Numbers p) {
    typedef Magic<double> D;
    const int64_t H = p.s.H, N = p.s.N, row = blockIdx.x;
    Reader<kDistant> z_of, r_of, g_of;
    z_of.open(p.cell.z, 0);
    r_of.open(p.cell.r, 0);
    g_of.open(p.cell.g, 0);
    const bool moves = !p.s.lengths || p.s.lengths[row] > p.t;
    for (int64_t unit = threadIdx.x + blockIdx.y * blockDim.x; unit < H;
         unit += blockDim.x * gridDim.y) {
        const void *const states = p.before < 0 ? p.s.h0 : p.s.out;
        const int64_t from = p.before < 0 ? row : p.before * N + row;
        int64_t code = read_code(states, p.s.h_kind, from * H + unit);
        if (moves && !(p.s.held && p.s.held[(p.t * N + row) * H + unit])) {
            const int64_t at =
                ((p.t * N + row) * p.groups + unit / 16) * 16 + unit % 8 * 2 + unit % 16 / 8;
            Real Wx[3], Rh[3];
            const double lo = (double)p.cell.Rh_lo - (double)Magic<Real>::number();
            const double hi = (double)p.cell.Rh_hi - (double)Magic<Real>::number();
            for (int gate = 0; gate < 3; ++gate) {
                const int64_t channel = gate * H + unit;
                int64_t total = of_plane(p, row, channel);
                if (p.planes_h == 2) total = 256 * total + of_plane(p, N + row, channel);
                const double v = round_term((double)(total + p.folded[channel]), p.m[channel]);
                Rh[gate] = (Real)D::limit(plain(v), lo, hi);
                const int stored = p.wide ? ((const uint16_t *)p.Wx)[at * 4 + gate]
                                          : ((const uint8_t *)p.Wx)[at * 4 + gate];
                Wx[gate] = (Real)stored - p.cell.Wx_offset;
            }
            const Real before = (Real)(code - p.cell.h_zero);
            Real h = next_state<Real>(p.cell, z_of, r_of, g_of, Wx[0], Wx[1], Wx[2], Rh[0], Rh[1],
                                      Rh[2], before);
#if QG_ZONEOUT
            if (!p.s.held) h = weighted(p.cell.zoneout, before, plain(h));
#endif
            code = Magic<Real>::integer(h) + p.cell.h_zero;
        }
        write_code(p.s.out, p.s.h_kind, (p.t * N + row) * H + unit, code);
        write_code(p.s.last, p.s.h_kind, row * H + unit, code);
        const int v = (int)(code - p.cell.h_offset);
        int8_t *const to = p.bytes + row * p.padded_H + unit;
        if (p.planes_h == 1) {
            *to = (int8_t)v;
        } else {
            *to = (int8_t)(v >> 8);
            to[N * p.padded_H] = (int8_t)((v & 255) - 128);
        }
    }
}
