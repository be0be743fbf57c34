// The numbers of one layer and direction, laid out for the kernels. Plain data: the instruction-set
// files see nothing of the standard library, so that none of its code is compiled for one of them
// and linked into the others.
#pragma once

#include <cstdint>

namespace quant_gru {

constexpr int kTile = 16;  // channels whose weights stand together

enum class Container : int { i8, u8, i16, i32, i64 };

// clamp(rne((m1*v1 + m2*v2) / 2^k), lo, hi), zero point taken off the limits: the result is a
// zero-point-free code. Multipliers are also kept as M / 2^k, exact in float and double.
struct Sum {
    int present = 0;
    int tier = 'd';
    int64_t M[2] = {0, 0};
    int k = 0;
    int64_t lo = 0, hi = 0;  // limits less the zero point
    double m[2] = {0, 0};
};

struct Table {
    int64_t first = 0, last = 0;  // input codes, zero point included
    int64_t pre_zero = 0;         // zero point of the input
    int segments = 0, degree = 0, shift = 0, segment_shift = -1;
    const int64_t *bounds = nullptr;
    const int64_t *coefficients = nullptr;  // (segments, degree + 1)
    int64_t lo = 0, hi = 0;                 // limits less the zero point
    // One entry per code in [first, last], where those are few.
    const float *direct_float = nullptr;
    const double *direct_double = nullptr;
    // Coefficients as (degree + 1, segments) doubles, where every step of the sum is exact in them:
    // segments of equal length, widths up to 16 bits.
    const double *exact_double = nullptr;
    double scale = 1;  // 2^-shift
};

// W x or R h: weights in tiles of 16 channels and pairs of inputs, [tile][pair][channel][2] int16.
// Weights of more than 8 bits stand in two planes, w = 256 * plane[0] + plane[1].
struct Projection {
    int inputs = 0;  // features of the operand
    int pairs = 0;   // (inputs + 1) / 2
    int tiles = 0;   // channels / 16, rounded up
    int planes = 1;
    int flush = 0;  // pairs whose products fit int32
    const int16_t *w[2] = {nullptr, nullptr};
    const int64_t *bias = nullptr;  // bias and zero point, in accumulator units (tiles * 16)
    const double *m = nullptr;      // M / 2^k of each channel
    const float *m_float = nullptr;
    double lo = 0, hi = 0;  // limits of the result less its zero point
    int64_t offset = 0;     // operand codes are kept less this, to fit int16
};

struct NarrowPlan {
    int H = 0;
    bool in_float = false;   // float32 is exact everywhere
    bool small_sums = true;  // every accumulator fits int32
    Container x_container = Container::i8, h_container = Container::i8;
    int64_t h_zero = 0, one = 0;
    Projection W, R;
    Sum z_pre, r_pre, rRh, g_pre, old_contrib, new_contrib, h;
    Table z, r, g;
};

struct Job {
    const void *x = nullptr;           // (T, N, C)
    const void *h0 = nullptr;          // (N, H)
    void *out = nullptr;               // (T, N, H)
    void *last = nullptr;              // (N, H)
    const int64_t *lengths = nullptr;  // (N) or null
    int64_t T = 0, N = 0;
    bool reverse = false;
    int64_t first_row = 0, end_row = 0;
    void *workspace = nullptr;
};

// Rows that one pass takes through time together.
constexpr int kRows = 16;

// Real values to codes and back, for codes of up to 16 bits.
struct Border {
    float scale = 1;
    int32_t zero = 0, lo = 0, hi = 0;  // limits less the zero point
    Container container = Container::i8;
    int64_t count = 0;
};

using Kernel = void (*)(const NarrowPlan &, const Job &);
// Returns whether a value was NaN; its code is the zero point.
using Quantize = bool (*)(const Border &, const float *, void *);
using Dequantize = void (*)(const Border &, const void *, float *);

int64_t workspace_bytes(const NarrowPlan &plan);

namespace portable {
void run(const NarrowPlan &plan, const Job &job);
bool quantize(const Border &border, const float *x, void *codes);
void dequantize(const Border &border, const void *codes, float *x);
}  // namespace portable
#if defined(QG_X86)
namespace avx2 {
void run(const NarrowPlan &plan, const Job &job);
bool quantize(const Border &border, const float *x, void *codes);
void dequantize(const Border &border, const void *codes, float *x);
}  // namespace avx2
namespace avx512 {
void run(const NarrowPlan &plan, const Job &job);
bool quantize(const Border &border, const float *x, void *codes);
void dequantize(const Border &border, const void *codes, float *x);
}  // namespace avx512
#endif

}  // namespace quant_gru
