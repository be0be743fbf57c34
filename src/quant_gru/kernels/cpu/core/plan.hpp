// The numbers of one layer and direction, laid out for the kernels. Plain data: the instruction-set
// files see nothing of the standard library, so that none of its code is compiled for one of them
// and linked into the others.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "c99/fixed_point.h"
#include "c99/weight_rows.h"

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "the kernels are exact only where every float operation is rounded to its own type"
#endif

// Where a call would store and read again what is in vectors.
#define QG_INLINE inline __attribute__((always_inline))
#define QG_LAMBDA __attribute__((always_inline))
// Loops whose registers the code around them would need as well.
#define QG_ALONE __attribute__((noinline))

namespace quant_gru {

enum class Container : int { i8, u8, i16, i32, i64 };

// Real values to codes and back, for codes of up to 16 bits.
struct Quantizer {
    float scale = 1;
    float reciprocal = 0;              // 1 / scale where that is exact, else 0; set by Layer
    int32_t zero = 0, lo = 0, hi = 0;  // limits less the zero point
    Container container = Container::i8;
};

// clamp(rne((m1*v1 + m2*v2) / 2^k), lo, hi), zero point taken off the limits: the result is a
// zero-point-free code. A layer also keeps multipliers as M / 2^k, exact in float and double.
struct Sum {
    int present = 0;
    int tier = 'd';
    int64_t M[2] = {0, 0};
    int k = 0;
    int64_t lo = 0, hi = 0;  // limits less the zero point
    double m[2] = {0, 0};
};

// A table as the plan has it, and in the forms that kernels read fast.
struct Table {
    int64_t first = 0, last = 0;     // input codes, zero point included
    int64_t pre_zero = 0;            // zero point of the input
    int64_t pre_lo = 0, pre_hi = 0;  // limits of the input less its zero point
    int segments = 0, degree = 0, shift = 0, segment_shift = -1;
    const int64_t *bounds = nullptr;
    const int64_t *coefficients = nullptr;  // (segments, degree + 1)
    int64_t lo = 0, hi = 0;                 // limits less the zero point
    // Where there are few input codes: the output at `entries[v & mask]` for the zero-point-free
    // input v; and where there are at most 256, as `bytes[v & 255] + base`.
    const float *entries = nullptr;
    int32_t mask = 0;
    const uint8_t *bytes = nullptr;
    float base = 0;
    // The same as steps of 16: in either half of 128 the bytes at i are the exclusive or of what
    // stands at i % 16 + 16 * n up to i.
    const uint8_t *steps = nullptr;
    // Where there are more: `words[v - pre_lo] + word_base`; one word more than inputs is readable.
    const uint16_t *words = nullptr;
    int32_t word_base = 0;
    int32_t even_lo = 0;  // pre_lo, or one less
    // Whether the inputs are all codes of a byte, so that packing clamps them: v + lift, in 16 bits
    // twice, is 0..255, and that plus place, in bytes four times, is v & 255.
    bool saturates = false;
    int32_t lift = 0, place = 0;
};

// What every kernel needs of a layer and direction, besides its matrix products.
struct Cell {
    int H = 0;
    bool in_float = false;  // float32 is exact everywhere
    Quantizer x, h;
    int64_t one = 0;
    Sum z_pre, r_pre, rRh, g_pre, old_contrib, new_contrib, h_new;
    Sum zoneout;  // of the state before a step and after it; held units take its place
    Table z, r, g;
};

// The numbers of W x or R h, where the caller has them.
struct Matrix {
    const void *codes = nullptr;  // (3H, inputs)
    Container kind = Container::i32;
    int inputs = 0;
    const int64_t *bias = nullptr, *M = nullptr, *k = nullptr;  // (3H)
    int bias_shift = 0;                // of a layer that is not narrow: the bias is in 2^bias_shift
    int64_t lo = 0, hi = 0, zero = 0;  // limits less the zero point; zero point of the operand
    int64_t reach = 0;                 // the largest |code - zero point| of the operand
    int weight_bits = 0, operand_bits = 0;
    bool operand_signed = true;
};

// What a layer is made of. Tables are read once. The numbers of a narrow layer's matrices are read
// again by Layer::repack.
struct LayerPlan {
    Cell cell;             // tables without their fast forms
    Matrix W, R;           // of C and H inputs
    bool narrow = false;   // at most 16 bits: the fused or the general kernel runs it
    bool float32 = false;  // float32 is exact as far as the frozen numbers are concerned
    double product = 0;    // the largest |product| of two codes
};

// How an instruction set wants the weights of its fused kernel, and the codes they are multiplied
// with: unsigned or signed bytes (16-bit codes in two planes), or 16-bit words.
enum class Operand : int { u8, s8, s16 };
struct Layout {
    int group = 16;  // units that stand side by side
    int depth = 4;   // products that one instruction adds up
    Operand operand = Operand::u8;
    bool fused_multiply_add = true;
    int rows = 24;        // that one pass takes through time together
    int ahead = 16;       // steps times rows whose input projection is made at once, at most
    int row_block = 1;    // rows of operands are allocated in multiples of this
    int step_block = 1;   // steps of weights are padded with zeros to a multiple of this
    int words_from = 0;   // not 0: with so many rows and steps, weights are extended to words first
    bool powers = false;  // has lanes of `Powers`
};

// W x or R h of the fused kernel: weights of up to 8 bits, [group][step][gate][unit][depth].
struct Packed {
    int inputs = 0;  // features of the operand
    int steps = 0;   // inputs / depth, rounded up
    int groups = 0;
    int planes = 1;            // of the operand
    int32_t offset = 0;        // operand = code - offset
    int64_t group_stride = 0;  // bytes
    const int8_t *w = nullptr;
    const int16_t *words = nullptr;  // the same as words, or null
    const int32_t *bias = nullptr;  // [group][gate][unit], zero point and offset included, mod 2^32
    const float *m_float = nullptr;  // M / 2^k of each channel
    const double *m = nullptr;
    // Where FusedPlan::powers: how to round to a multiple of 2^s, [group][gate][..][unit]: s,
    // 2^(s-1) and 2^s - 1.
    const int32_t *rounding = nullptr;
    double lo = 0, hi = 0;  // limits of the result less its zero point
};

struct FusedPlan : Cell {
    Packed W, R;
    // Codes of more than 8 bits, but multipliers are powers of two and sums of two terms exact in
    // float32: lanes of `Powers` hold it.
    bool powers = false;
    bool scalable = false;  // 1.5 * 2^23 (2^52) times any multiplier of a sum is a float (double)
};

constexpr int kTile = 16;  // channels whose weights stand together in the general kernel

// W x or R h of the general kernel: weights in tiles of 16 channels and pairs of inputs,
// [tile][pair][channel][2] int16. Weights of more than 8 bits stand in two planes,
// w = 256 * plane[0] + plane[1].
struct Projection {
    int inputs = 0;  // features of the operand
    int pairs = 0;   // (inputs + 1) / 2
    int tiles = 0;   // channels / 16, rounded up
    int planes = 1;
    int flush = 0;  // pairs whose products fit int32
    const int16_t *w[2] = {nullptr, nullptr};
    const int64_t *bias = nullptr;      // bias and zero point, in accumulator units (tiles * 16)
    const double *real_bias = nullptr;  // the same
    bool exact = false;                 // every sum, and every part of one, is exact in double
    const double *m = nullptr;          // M / 2^k of each channel
    const float *m_float = nullptr;
    double lo = 0, hi = 0;  // limits of the result less its zero point
    int32_t offset = 0;     // operand codes are kept less this, to fit int16
};

struct GeneralPlan : Cell {
    bool small_sums = true;  // every accumulator fits int32
    Projection W, R;
};

// Whether so many rows and steps are worth extending weights to words: where these still fit the
// second cache.
inline bool extends(const Layout &layout, const FusedPlan &plan, int64_t rows, int64_t T) {
    constexpr int64_t kFits = 1 << 18;
    return layout.words_from > 0 && rows >= layout.words_from && T >= layout.words_from &&
           plan.W.groups * plan.W.group_stride <= kFits &&
           plan.R.groups * plan.R.group_stride <= kFits;
}

// Values that come in: real or codes. Strides count elements; the features stand side by side.
struct Source {
    const void *data = nullptr;  // null: zeros
    bool real = false;
    int64_t step = 0, row = 0;
};

// Values that go out: codes, real values, or both.
struct Sink {
    void *codes = nullptr;
    float *real = nullptr;
    int64_t codes_step = 0, codes_row = 0, real_step = 0, real_row = 0;
};

struct Job {
    Source x;                          // (T, N, C)
    Source h0;                         // (N, H)
    Sink out;                          // (T, N, H)
    Sink last;                         // (N, H)
    const int64_t *lengths = nullptr;  // (N) or null
    const uint8_t *held = nullptr;     // (T, N, H), units that keep their state, or null
    int64_t T = 0, N = 0;
    bool reverse = false;
    int64_t first_row = 0, end_row = 0;
    void *workspace = nullptr;
};

// The general kernel's numbers of the same kind as Layout::rows and Layout::ahead.
constexpr int kRows = 32;
constexpr int kAhead = 16;

// Of this file alone: what one instruction set compiled must not be linked into another.
namespace {

inline int64_t steps_ahead(int64_t T, int64_t rows, int64_t ahead) {
    const int64_t steps = rows < 1 ? ahead : rows < ahead ? ahead / rows : 1;
    return steps < T ? steps : T;
}

inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Bytes in whole cache lines.
inline int64_t cache_lines(int64_t bytes) { return round_up(bytes, 64); }

// A piece of memory that is handed out in parts of whole cache lines.
struct MemoryPieces {
    char *next;
    void *take(int64_t bytes) {
        char *part = next;
        next += cache_lines(bytes);
        return part;
    }
};

}  // namespace

// A matrix of weights to be quantized, a scale for each row.
struct WeightRows {
    const float *values = nullptr;  // (rows, n)
    int64_t n = 0;
    int bits = 8;
    bool free_scale = false;
    bool all_finite = true;
    double lo = 0, hi = 0;  // of a code
};

// What every instruction set defines. The kernels return whether an input was NaN; its code is then
// the zero point. `multiply` does nothing but multiply, for benchmarks, and returns how many
// multiply-accumulates it did; 0 where there is no such loop. `scales` are those of rows
// first..end, 0 for rows of zeros, and returns whether all values are finite; `codes` are those of
// a row, of up to 16 bits. Both have room for a row.
#define QG_WEIGHT_FUNCTIONS                                                                     \
    bool scales(const WeightRows &w, int64_t first, int64_t end, double *found, float *space);  \
    void codes(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped, void *to, \
               float *space);
#define QG_WEIGHTS                                                                              \
    bool scales(const WeightRows &w, int64_t first, int64_t end, double *found, float *space) { \
        return scales_of_rows(w, first, end, found, space);                                     \
    }                                                                                           \
    void codes(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped, void *to, \
               float *space) {                                                                  \
        codes_of_row(w, row, scale, dropped, to, space);                                        \
    }
#define QG_INSTRUCTION_SET(name)                           \
    namespace name {                                       \
    extern const Layout layout;                            \
    bool fused(const FusedPlan &plan, const Job &job);     \
    bool general(const GeneralPlan &plan, const Job &job); \
    int64_t multiply(int64_t loops);                       \
    QG_WEIGHT_FUNCTIONS                                    \
    }

QG_INSTRUCTION_SET(portable)
#if defined(QG_X86)
QG_INSTRUCTION_SET(avx2)
QG_INSTRUCTION_SET(avx_vnni)
QG_INSTRUCTION_SET(avx512_vnni)
QG_INSTRUCTION_SET(avx512_vbmi)
QG_INSTRUCTION_SET(amx_int8)
#endif
#if defined(QG_NEON_DOT)
QG_INSTRUCTION_SET(neon_dot)
#endif

}  // namespace quant_gru
