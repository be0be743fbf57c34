// The generic kernel: any widths up to 32 bits. Sums of products are made in 64 bits, whole or as
// those of two halves of the operand; what 64 bits do not hold is rounded in 128.
#pragma once

#include "cpu/core/plan.hpp"

namespace quant_gru {

// One matrix product in plain row-major codes.
struct WideProjection {
    int inputs = 0;
    const int32_t *w = nullptr;     // (channels, inputs)
    const int64_t *bias = nullptr;  // (channels), in 2^bias_shift accumulator units
    int bias_shift = 0;
    const int64_t *M = nullptr, *k = nullptr;  // (channels)
    int64_t lo = 0, hi = 0;                    // limits less the zero point of the result
    int64_t zero = 0;                          // zero point of the operand
    int64_t moved = 0;                         // this zero point minus that of real values
    int64_t least = 0, most = 0;               // limits of the operand less its zero point
    bool in_word = false;                      // whether 64 bits hold the sums of products
    int rule = QG_HALF_EVEN, first = 0;        // as in Sum
};

// Sums of products of all channels and some rows: sums[r][c] = sum over i of w[c][i] * v[r][i].
struct WideSums {
    const int32_t *w;  // (channels, inputs)
    const int32_t *v;  // (rows, inputs)
    int channels, inputs, rows;
    int64_t *sums;  // (rows, channels)
};
using MultiplyWide = void (*)(const WideSums &);

struct WidePlan : Cell {
    WideProjection W, R;
};

// The zero-point-free output code of an input code in a segment.
int64_t polynomial(const Table &t, int segment, int64_t q);

// The zero-point-free output code of a zero-point-free input code, by the definition itself.
int64_t look_up(const Table &t, int64_t v);

// Rows that share one pass over the weights.
constexpr int kWideRows = 4;

// The arrays of up to kWideRows rows, in `workspace_bytes` of memory. Codes are zero-point-free.
struct WideSpace {
    int64_t *x, *h;         // (rows, C), (rows, H)
    int64_t *Wx, *Rh;       // (rows, 3H), before their clamp
    int64_t *sums, *sums2;  // (rows, 3H)
    int32_t *low, *high;    // an operand (rows, inputs), whole or in two halves
};

// Where no clamp changed a value: 1, else 0. Those of wx and rh are (3H), the others (H).
struct Clamps {
    float *wx, *rh, *z, *r, *g, *rest, *old, *fresh, *h;
};

// The codes of one item that its derivatives need, (H) each, and its clamps.
struct WideItem {
    double *z, *r, *g, *Rh_g;
    Clamps in;
};

int64_t workspace_bytes(const WidePlan &plan);
WideSpace wide_space(const WidePlan &plan, void *workspace);
// Returns whether an input was NaN; its code is then the zero point.
bool run_wide(const WidePlan &plan, const Job &job, MultiplyWide multiply);

// Zero-point-free codes from a container.
void read_codes(const void *from, Container container, int64_t first, int64_t zero, int n,
                int64_t *to);

// Both projections of some rows, from x and h to Wx and Rh of the space.
void project_wide(const WidePlan &plan, const WideSpace &space, int rows, MultiplyWide multiply);

// The gates of one row, recorded. Wx, Rh: (3H), before their clamp; h: (H).
void record_item(const WidePlan &plan, const int64_t *Wx, const int64_t *Rh, const int64_t *h,
                 const WideItem &item);

}  // namespace quant_gru
