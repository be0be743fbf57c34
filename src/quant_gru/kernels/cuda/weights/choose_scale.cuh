// Scales of weight rows and biases, by one warp.
#ifndef QUANT_GRU_CHOOSE_SCALE_CUH
#define QUANT_GRU_CHOOSE_SCALE_CUH

#include "weights/weight_rows.cuh"

// Returns the scale of n values that start at `first`, or 0 if all values are 0. The sign is
// negative (-0 included) if a value is not finite.
inline double row_scale(const void *values, int64_t kind, int64_t first, int n, int bits, double lo,
                        double hi, bool free_scale) {
    const int lane = threadIdx.x % 32;
    double most = -1e300, minus_least = -1e300;
    bool bad = false;
#pragma unroll 4
    for (int i = lane; i < n; i += 32) {
        const double v = real(values, kind, first + i, bad);
        most = v > most ? v : most;
        minus_least = -v > minus_least ? -v : minus_least;
    }
    most = warp_largest(most);
    const double least = -warp_largest(minus_least);
    bad = any_lane(bad);
    double scale = 0;
    if (n && (least != 0 || most != 0)) {
        const int covering = qg_covering(least, most, bits, lo, hi);
        if (free_scale) {
            scale = qg_free_covering(least, most, hi);
            if (qg_searches_free(scale, bits, n)) {
                const double quantum = qg_free_quantum(bits, n), unit = scale;
                double candidates[QG_FREE], sums[QG_FREE];
                qg_free_candidates(scale, covering, candidates);
                for (int c = 0; c < QG_FREE; ++c) sums[c] = 0;
                for (int i = lane; i < n; i += 32) {
                    const double v = real(values, kind, first + i, bad);
                    for (int c = 0; c < QG_FREE; ++c)
                        sums[c] +=
                            qg_free_error(v, candidates[c], candidates[c] / unit, quantum, lo, hi);
                }
                for (int c = 0; c < QG_FREE; ++c) sums[c] = warp_sum(sums[c]);
                scale = qg_free_best(sums, candidates);
            }
        } else {
            double largest = 0, sums[QG_FINER + 1];
#pragma unroll 2
            for (int i = lane; i < n; i += 32) {
                const double v = real(values, kind, first + i, bad);
                for (int finer = 0; finer <= QG_FINER; ++finer) {
                    const double error = qg_error(v, covering, finer, lo, hi);
                    largest = error > largest ? error : largest;
                }
            }
            const double quantum = qg_quantum(warp_largest(largest), n);
            for (int finer = 0; finer <= QG_FINER; ++finer) sums[finer] = 0;
#pragma unroll 2
            for (int i = lane; i < n; i += 32) {
                const double v = real(values, kind, first + i, bad);
                for (int finer = 0; finer <= QG_FINER; ++finer)
                    sums[finer] += rint(qg_error(v, covering, finer, lo, hi) * quantum);
            }
            for (int finer = 0; finer <= QG_FINER; ++finer) sums[finer] = warp_sum(sums[finer]);
            scale = qg_power(-qg_best(sums, covering));
        }
    }
    return bad ? -scale : scale;
}

#endif
