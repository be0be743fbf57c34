// The arguments of the kernels of float passes. The build puts this text, too, in front of
// units.cu.
#pragma once

#include <stdint.h>

#include "passes/equations.hpp"

namespace quant_gru {

// Arguments of one step, as in ForwardArguments; `count` is N * H.
template <class T>
struct ForwardUnits {
    const T *Wx, *Rh, *bx, *br, *h, *mask;
    T *out, *v;
    int64_t count, H;
    T share;
    Zoneout zoneout;
};

// Arguments of one step, as in BackwardArguments.
template <class T>
struct BackwardUnits {
    const T *h;
    int64_t row, unit;
    const T *v, *dh_new, *mask;
    T *dh, *dp, *dq;
    int64_t count, H;
};

// A step with its product with R: blocks of up to kStepWarps rows and kStepUnits units, whose warps
// divide the features and add their sums in shared memory. Every block reads all of its columns of
// R, which is fast for few rows.
constexpr int kStepUnits = 32, kStepWarps = 8;
constexpr int kStepChunk = 256;  // features whose operands are in shared memory together

template <class T>
struct ForwardStep {
    const T *R;
    int64_t N;
    ForwardUnits<T> units;  // Rh is not used, and out is not h
};

// First adds the product of `dq_after` (N, 3H), of the step after this one, to dh; then the
// derivatives, unless v is null.
template <class T>
struct BackwardStep {
    const T *R_t, *dq_after;  // dq_after: null after the last step
    int64_t N;
    BackwardUnits<T> units;
};

// Values of a row of shared memory; one more than columns, so that columns have different banks.
constexpr int kColumnStride = 33;

// dp and dq are (rows, columns).
template <class T>
struct ColumnSums {
    const T *dp, *dq;
    T *dbx, *dbr;
    int64_t rows, columns;
};

}  // namespace quant_gru
