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
