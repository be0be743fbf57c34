// The numbers of one layer and direction, laid out for the kernels. All structs are plain data.
// Files of instruction sets must not include the C++ standard library: its inline functions would
// be compiled for one instruction set and linked into code of others.
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

// For functions whose call would spill vector registers to memory.
#define QG_INLINE inline __attribute__((always_inline))
#define QG_LAMBDA __attribute__((always_inline))
// For loops that need all registers: inlined, they would compete with the surrounding code.
#define QG_ALONE __attribute__((noinline))
// For functions that run once for a plan: small code.
#define QG_ONCE __attribute__((cold))

namespace quant_gru {

// How lanes round; see rules.inl.
enum class Ties { even, stretched, up, away, any };

enum class Container : int { i8, u8, i16, i32, i64 };

inline int container_bytes(Container container) {
    switch (container) {
        case Container::i8:
        case Container::u8:
            return 1;
        case Container::i16:
            return 2;
        case Container::i32:
            return 4;
        default:
            return 8;
    }
}

// Converts real values to codes of up to 16 bits, and back.
struct Quantizer {
    float scale = 1;
    float reciprocal = 0;              // 1 / scale if it is exact, else 0; set by Layer
    int32_t zero = 0, lo = 0, hi = 0;  // lo and hi: limits minus the zero point
    Container container = Container::i8;
    int rule = QG_HALF_EVEN;  // of real values
};

// clamp(round((M[0]*v1 + M[1]*v2) / 2^k), lo, hi). The zero point is subtracted from the limits, so
// the result is a code minus its zero point. m = M / 2^k is exact in double; Layer sets it.
struct Sum {
    int present = 0;
    int tier = 'd';
    int64_t M[2] = {0, 0};
    int k = 0;
    int64_t lo = 0, hi = 0;  // limits minus the zero point
    double m[2] = {0, 0};
    int rule = QG_HALF_EVEN, first = 0;  // see qg_round_by
    double bound = 0;                    // the largest |M[0] * v1 + M[1] * v2|, or of one |v1|
};

// A table in the form of the plan, and in forms that kernels read fast.
struct Table {
    int64_t first = 0, last = 0;     // input codes, zero point included
    int64_t pre_zero = 0;            // zero point of the input
    int64_t pre_lo = 0, pre_hi = 0;  // limits of the input minus its zero point
    int segments = 0, degree = 0, shift = 0, segment_shift = -1;
    const int64_t *bounds = nullptr;
    const int64_t *coefficients = nullptr;  // (segments, degree + 1)
    int64_t lo = 0, hi = 0;                 // limits minus the zero point
    int rule = QG_HALF_EVEN;                // of the polynomial
    // Up to 4096 input codes: the output is `entries[v & mask]`, v being the input minus its zero
    // point. Up to 256 input codes, and outputs that span fewer than 256: `bytes[v & 255] + base`.
    const float *entries = nullptr;
    int32_t mask = 0;
    const uint8_t *bytes = nullptr;
    float base = 0;
    // `bytes` as differences, for lookups in 16-byte tables. In each half of 128 entries, byte i is
    // the exclusive or of the steps i % 16 + 16 * n of that half up to i.
    const uint8_t *steps = nullptr;
    // More input codes: `words[v - pre_lo] + word_base`. One word past the last input is readable,
    // because gathers read 32 bits.
    const uint16_t *words = nullptr;
    int32_t word_base = 0;
    int32_t even_lo = 0;  // pre_lo rounded down to an even number
    // Whether the inputs are all 256 codes of a byte, so that pack instructions can clamp them.
    // v + lift, in two 16-bit halves, is 0..255. That plus place, in four bytes, is v & 255.
    bool saturates = false;
    int32_t lift = 0, place = 0;
};

// The numbers of a layer and direction that every kernel needs, without the matrix products.
struct Cell {
    int H = 0;
    bool in_float = false;  // float32 is exact everywhere
    int rule = QG_HALF_EVEN;
    bool stretches = false;  // QG_HALF_AWAY: every product and sum may be stretched; see rules.inl
    Quantizer x, h;
    int64_t one = 0;
    Sum z_pre, r_pre, rRh, g_pre, old_contrib, new_contrib, h_new;
    Sum zoneout;  // of the states before and after a step; a job with `held` ignores it
    Table z, r, g;
};

// The numbers of W x or R h, in the caller's memory.
struct Matrix {
    const void *codes = nullptr;  // (3H, inputs)
    Container kind = Container::i32;
    int inputs = 0;
    const int64_t *bias = nullptr, *M = nullptr, *k = nullptr;  // (3H)
    int bias_shift = 0;           // wide layers: the bias has a unit of 2^bias_shift
    int64_t lo = 0, hi = 0;       // limits minus the zero point
    int64_t zero = 0;             // zero point of the operand
    int64_t moved = 0;            // this zero point minus that of real values
    int64_t least = 0, most = 0;  // limits of the operand minus its zero point
    int64_t reach = 0;            // the largest |code - zero point| of the operand
    int weight_bits = 0, operand_bits = 0;
    bool operand_signed = true;
    int rule = QG_HALF_EVEN, first = 0;  // as in Sum
};

// The input of the Layer constructor. Layer copies the tables. Layer::repack reads the matrices of
// a narrow layer again.
struct LayerPlan {
    Cell cell;             // tables without their fast forms
    Matrix W, R;           // with C and H inputs
    bool narrow = false;   // at most 16 bits: the fused or the general kernel runs the layer
    bool float32 = false;  // float32 is exact for the frozen numbers
    double product = 0;    // the largest |product| of two codes
};

// The layout that the fused kernel of an instruction set needs for weights and operand codes. Codes
// are unsigned or signed bytes (16-bit codes in two planes), or 16-bit words.
enum class Operand : int { u8, s8, s16 };
struct Layout {
    int group = 16;  // units that are adjacent in memory
    int depth = 4;   // products that one instruction sums
    // Weights of up to 4 bits share elements of so many bits; 0: each weight takes a byte. With
    // operands of unsigned bytes they are read times 2^(8 - bits), and `dot` shifts its sums back:
    // x86 cannot shift bytes.
    int shared = 0;
    Operand operand = Operand::u8;
    bool fused_multiply_add = true;
    int rows = 24;        // rows that one pass through time processes together
    int ahead = 16;       // maximum of steps times rows in one input projection
    int row_block = 1;    // operands are allocated in multiples of so many rows
    int step_block = 1;   // steps of weights are padded with zeros to a multiple of this
    int words_from = 0;   // not 0: from so many rows and steps on, weights are extended to words
    bool powers = false;  // the instruction set has lanes of `Powers`
};

// W x or R h of the fused kernel. Weights of up to 8 bits: [group][step][gate][unit][depth]. If
// `bits` is less than 8, `shared / bits` steps share elements, the first one in the highest bits.
struct Packed {
    int inputs = 0;  // features of the operand
    int steps = 0;   // inputs / depth, rounded up
    int groups = 0;
    int planes = 1;            // byte planes of the operand
    int32_t offset = 0;        // operand = code - offset
    int bits = 8;              // that a weight takes in `w`: 8, 4, 2 or 1
    int64_t group_stride = 0;  // bytes
    int64_t word_stride = 0;   // from one group to the next in `words`
    const int8_t *w = nullptr;
    const int16_t *words = nullptr;  // weights extended to words, or null
    const int32_t *bias = nullptr;  // [group][gate][unit], zero point and offset included, mod 2^32
    const float *m_float = nullptr;  // M / 2^k of each channel
    const double *m = nullptr;
    // With FusedPlan::powers: s, 2^(s-1) and 2^s - 1, with which sums are rounded to a multiple of
    // 2^s; s, 0 and -1 with QG_FLOOR; [group][gate][..][unit].
    const int32_t *rounding = nullptr;
    double lo = 0, hi = 0;  // limits of the result minus its zero point
};

struct FusedPlan : Cell {
    Packed W, R;
    // Codes have more than 8 bits, multipliers are powers of two, and sums of two terms are exact
    // in float32. Lanes of `Powers` are then exact.
    bool powers = false;
    bool halves = false;    // QG_HALF_UP: one half more leaves sums of two terms exact
    bool scalable = false;  // 1.5 * 2^23 (2^52) times any multiplier of a sum is a float (double)
    const char *gates = nullptr;  // kGatesBytes, what `Variant::prepare` wrote
};

// Size of the numbers that the fused kernel computes once for a plan.
constexpr int64_t kGatesBytes = 12288;

// Whether the processor rounds in a direction that a register says. The fused and the general
// kernel need it for other rules than ties to even.
#if defined(__SSE2__) || defined(__aarch64__)
constexpr bool kDirected = true;
#else
constexpr bool kDirected = false;
#endif

constexpr int kTile = 16;  // channels per tile of weights in the general kernel

// W x or R h of the general kernel. Weights are in tiles of 16 channels and pairs of inputs,
// [tile][pair][channel][2] int16. Weights of more than 8 bits use two planes:
// w = 256 * plane[0] + plane[1].
struct Projection {
    int inputs = 0;  // features of the operand
    int pairs = 0;   // (inputs + 1) / 2
    int tiles = 0;   // channels / 16, rounded up
    int planes = 1;
    int flush = 0;  // number of pairs whose sum of products fits int32
    const int16_t *w[2] = {nullptr, nullptr};
    const int64_t *bias = nullptr;      // bias and zero point, in accumulator units (tiles * 16)
    const double *real_bias = nullptr;  // the same in double
    bool exact = false;                 // every sum and partial sum is exact in double
    const double *m = nullptr;          // M / 2^k of each channel
    const float *m_float = nullptr;
    const double *more = nullptr;  // what the first step of QG_DOUBLE adds to the second one
    double lo = 0, hi = 0;         // limits of the result minus its zero point
    int32_t offset = 0;            // operand = code - offset, which fits int16
};

struct GeneralPlan : Cell {
    bool small_sums = true;  // every accumulator fits int32
    Projection W, R;
};

// Whether to extend weights to words for a number of rows and steps. It pays only while the words
// fit the level-2 cache.
inline bool extends(const Layout &layout, const FusedPlan &plan, int64_t rows, int64_t T) {
    constexpr int64_t kFits = 1 << 18;
    return layout.words_from > 0 && rows >= layout.words_from && T >= layout.words_from &&
           plan.W.groups * plan.W.word_stride <= kFits &&
           plan.R.groups * plan.R.word_stride <= kFits;
}

// Input values, real or codes. Strides count elements; features are contiguous.
struct Source {
    const void *data = nullptr;  // null: zeros
    bool real = false;
    int64_t step = 0, row = 0;
};

// Output values: codes, real values, or both.
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
    const uint8_t *held = nullptr;     // (T, N, H), 1 where a unit keeps its state, or null
    int64_t T = 0, N = 0;
    bool reverse = false;
    int64_t first_row = 0, end_row = 0;
    void *workspace = nullptr;
};

// Layout::rows and Layout::ahead of the general kernel.
constexpr int kRows = 32;
constexpr int kAhead = 16;

// Internal linkage: functions compiled for one instruction set must not be linked into another.
namespace {

inline int64_t steps_ahead(int64_t T, int64_t rows, int64_t ahead) {
    const int64_t steps = rows < 1 ? ahead : rows < ahead ? ahead / rows : 1;
    return steps < T ? steps : T;
}

inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// A number of bytes rounded up to whole cache lines.
inline int64_t cache_lines(int64_t bytes) { return round_up(bytes, 64); }

// Divides a block of memory into parts of whole cache lines.
struct MemoryPieces {
    char *next;
    void *take(int64_t bytes) {
        char *part = next;
        next += cache_lines(bytes);
        return part;
    }
};

}  // namespace

// A weight matrix to quantize with one scale per row.
struct WeightRows {
    const float *values = nullptr;  // (rows, n)
    int64_t n = 0;
    int bits = 8;
    bool free_scale = false;
    bool all_finite = true;
    double lo = 0, hi = 0;  // limits of the codes
    // Factors (n) and limit of the terms that correct a bias; null without a correction.
    const double *factors = nullptr;
    double term_limit = 0;
};

// The functions that every instruction set defines.
// - `fused` and `general` return whether an input was NaN; its code is then the zero point.
// - `multiply` is a benchmark of multiplications only. It returns the number of
//   multiply-accumulates; 0 if the instruction set has no such loop.
// - `scales` computes the scales of rows first..end, 0 for rows of zeros. It returns whether all
//   values are finite.
// - `codes` computes the codes of a row, of up to 16 bits. It returns the sum of the mean errors,
//   0 without factors.
// - The argument `space` of both has room for one row of floats.
#define QG_WEIGHT_FUNCTIONS                                                                       \
    bool scales(const WeightRows &w, int64_t first, int64_t end, double *found, float *space);    \
    double codes(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped, void *to, \
                 float *space);
#define QG_WEIGHTS                                                                                \
    bool scales(const WeightRows &w, int64_t first, int64_t end, double *found, float *space) {   \
        return scales_of_rows(w, first, end, found, space);                                       \
    }                                                                                             \
    double codes(const WeightRows &w, int64_t row, float scale, const uint8_t *dropped, void *to, \
                 float *space) {                                                                  \
        return codes_of_row(w, row, scale, dropped, to, space);                                   \
    }
#define QG_INSTRUCTION_SET(name)                           \
    namespace name {                                       \
    extern const Layout layout;                            \
    void prepare(const FusedPlan &plan, void *gates);      \
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
