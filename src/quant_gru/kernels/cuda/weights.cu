// Weights to the numbers of the plan, anew at every training step: a warp takes one row of a matrix
// and the bias beside it. `measure` chooses each row's scale, `settle` raises it to its share of
// the largest and writes all that follows.
#include "cell.cuh"
#include "ptx.cuh"
#include "weights.h"

struct Operand {             // W with its bias, or R
    const void *w;           // (3H, K), rows reset, update, candidate
    const void *b;           // (3H), or null for zeros
    const uint8_t *dropped;  // (3H, K) codes that become 0, or null
    double *w_scale;         // (3H) between the kernels; below zero where a value is not finite
    double *b_scale;
    // from here on rows are update, reset, candidate; what is null is not wanted
    void *codes;
    void *b_codes;
    float *scales;
    float *b_scales;
    int64_t *B;
    int64_t *M;
    int64_t *k;
    double *m;
    int8_t *gemm;  // (planes * 3H + .., padded)
    int64_t *folded;
    int32_t *folded_bytes;
    float *m_float;
    int32_t *exact_float;
    int64_t w_real, b_real, kind, b_kind;  // dtypes
    int64_t K, padded, planes, significant, fold, fold_words, reach;
    double lo, hi, b_lo, b_hi, operand_scale, result_scale, b_unit, limit;
    int64_t bits, b_bits;
    // what is asked of accumulators and multipliers, see Numbers.exact_float: 1 where R h is in
    // int32, 2 where x has two planes
    int64_t whole, long_sums;
};

struct Fragments {  // R as the matrix instruction's A operand, see numbers.py
    int8_t *bytes;
    double *bias;
    double *m;
    int64_t features, units;
};

struct Weights {
    Operand operands[2];
    Fragments fragments[4];
    uint8_t *finite;
    int64_t H, count, planes_R, free;
    float keep;  // scales of R are divided by it where codes may be dropped
};

inline double real_half(uint16_t v) {
    const float sign = v & 0x8000 ? -1.f : 1.f;
    if ((v & 0x7c00) == 0x7c00) return __int_as_float(0x7f800000);
    return sign * (__int_as_float((v & 0x7fff) << 13) * 5.192296858534828e33f);  // 2^112
}

// A value as float32, 0 where that is not finite; `bad` where the value itself is not.
inline float real(const void *values, int64_t kind, int64_t i, bool &bad) {
    double v;
    switch (kind) {
        case 0:
            v = ((const float *)values)[i];
            break;
        case 1:
            v = real_half(((const uint16_t *)values)[i]);
            break;
        case 2:
            v = __int_as_float((int32_t)((uint32_t)((const uint16_t *)values)[i] << 16));
            break;
        default:
            v = ((const double *)values)[i];
    }
    bad |= !(v - v == 0);
    const float narrow = (float)v;
    return narrow - narrow == 0 ? narrow : 0.f;
}

inline int64_t bits_of(double v) {
    qg_bits b;
    b.value = v;
    return (int64_t)b.bits;
}
inline double from_bits(int64_t v) {
    qg_bits b;
    b.bits = (uint64_t)v;
    return b.value;
}
inline double warp_largest(double v) {
    for (int mask = 16; mask; mask >>= 1) {
        const double other = from_bits(shuffle_xor(bits_of(v), mask));
        v = other > v ? other : v;
    }
    return v;
}
inline double warp_sum(double v) {
    for (int mask = 16; mask; mask >>= 1) v += from_bits(shuffle_xor(bits_of(v), mask));
    return v;
}
inline int64_t warp_sum(int64_t v) {
    for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}

// The scale of n values from `first` on, 0 where all are; negative (-0, too) where one is not
// finite.
inline double measured(const void *values, int64_t kind, int64_t first, int n, int bits, double lo,
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
        if (free_scale) {
            scale = qg_free_scale(least, most, hi);
        } else {
            const int covering = qg_covering(least, most, bits, lo, hi);
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

extern "C" __global__ void __launch_bounds__(256) measure(const __grid_constant__ Weights w) {
    const Operand &o = w.operands[blockIdx.y];
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= 3 * w.H) return;
    const int K = (int)o.K;
    const bool first_lane = threadIdx.x % 32 == 0;
    // the row, then the bias, without another copy of the code
#pragma unroll 1
    for (int bias = 0; bias < 2; ++bias) {
        const double scale =
            measured(bias ? o.b : o.w, bias ? o.b_real : o.w_real, bias ? row : (int64_t)row * K,
                     bias ? o.b != nullptr : K, (int)(bias ? o.b_bits : o.bits),
                     bias ? o.b_lo : o.lo, bias ? o.b_hi : o.hi, w.free != 0);
        if (first_lane) (bias ? o.b_scale : o.w_scale)[row] = scale;
    }
    if (!first_lane) return;
    if (row == 0) {
        if (o.exact_float) o.exact_float[0] = o.exact_float[1] = 1;
        if (blockIdx.y == 0) *w.finite = 1;
    }
}

// The largest magnitude of n scales; `bad` where one is negative.
inline double largest_of(const double *scales, int n, bool &bad) {
    double largest = 0;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const int64_t bits = bits_of(scales[i]);
        bad |= bits < 0;
        const double v = from_bits(bits & 0x7fffffffffffffffLL);
        largest = v > largest ? v : largest;
    }
    return warp_largest(largest);
}

inline int64_t fragment_at(const Fragments &f, int plane, int gate, int unit, int feature) {
    int64_t at = plane * (f.units / 16) + unit / 16;
    at = at * (f.features / 64) + feature / 64;
    at = at * 2 + feature / 8 % 2;
    at = at * 3 + gate;
    at = at * 2 + feature / 4 % 2;
    at = at * 2 + unit / 8 % 2;
    at = at * 8 + unit % 8;
    at = at * 4 + feature / 16 % 4;
    return at * 4 + feature % 4;
}

extern "C" __global__ void __launch_bounds__(256) settle(const __grid_constant__ Weights w) {
    const int which = blockIdx.y, lane = threadIdx.x % 32, H = (int)w.H;
    const Operand &o = w.operands[which];
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (row >= 3 * H) return;
    bool bad = false;
    const double largest = largest_of(o.w_scale, 3 * H, bad);
    const double b_largest = largest_of(o.b_scale, 3 * H, bad);
    if (row == 0 && any_lane(bad) && lane == 0) *w.finite = 0;
    const int gate = row / H == 0 ? 1 : row / H == 1 ? 0 : 2, unit = row % H;
    const int channel = gate * H + unit;
    const float scale = qg_matrix_scale(fabs(o.w_scale[row]), largest);
    const int K = (int)o.K, count = which ? (int)w.count : 0;
    const int middle = (K + 127) / 128 * 64;
    int64_t sum = 0, magnitude = 0, first_half = 0;
    bool ignored = false;
#pragma unroll 4
    for (int i = lane; i < K; i += 32) {
        const int64_t at = row * o.K + i;
        int code = (int)qg_code(real(o.w, o.w_real, at, ignored), scale, o.lo, o.hi);
        if (o.dropped && o.dropped[at]) code = 0;
        sum += code;
        const int size = code < 0 ? -code : code;
        magnitude += size;
        if (i < middle) first_half += size;
        write_code(o.codes, o.kind, channel * o.K + i, code);
        if (o.gemm) {
            int8_t *const byte = o.gemm + channel * o.padded + i;
            *byte = (int8_t)(o.planes == 2 ? code >> 8 : code);
            if (o.planes == 2) byte[3 * H * o.padded] = (int8_t)((code & 255) - 128);
        }
        for (int j = 0; j < count; ++j) {
            const Fragments &f = w.fragments[j];
            f.bytes[fragment_at(f, 0, gate, unit, i)] = (int8_t)(code & 255);
            if (w.planes_R == 2) f.bytes[fragment_at(f, 1, gate, unit, i)] = (int8_t)(code >> 8);
        }
    }
    sum = warp_sum(sum);
    magnitude = warp_sum(magnitude);
    first_half = warp_sum(first_half);
    if (lane) return;
    float given = scale;
    if (which && o.dropped) {
        given = divided(scale, w.keep);
        given = given > (float)QG_LARGEST_SCALE ? (float)QG_LARGEST_SCALE : given;
    }
    const float b_scale = qg_bias_scale(fabs(o.b_scale[row]), b_largest);
    const float b = o.b ? real(o.b, o.b_real, row, ignored) : 0.f;
    const int64_t b_code = qg_code(b, b_scale, o.b_lo, o.b_hi);
    const qg_channel c = qg_channel_of(b_code, b_scale, given, o.operand_scale, o.result_scale,
                                       o.b_unit, o.limit, (int)o.significant);
    o.scales[channel] = given;
    o.b_scales[channel] = b_scale;
    write_code(o.b_codes, o.b_kind, channel, b_code);
    o.B[channel] = c.B;
    o.M[channel] = c.M;
    o.k[channel] = c.k;
    if (o.m) o.m[channel] = c.m;
    if (o.folded) o.folded[channel] = c.B + o.fold_words * sum;
    if (o.folded_bytes) o.folded_bytes[channel] = (int32_t)(c.B + o.fold_words * sum);
    if (o.m_float) o.m_float[channel] = (float)c.m;
    const int64_t reach = magnitude * o.reach + (c.B < 0 ? -c.B : c.B);
    const double units = c.m * 4294967296.;
    const bool normal = c.m == 0 || (c.m > 1e-20 && c.m < 1e20);
    bool exact = reach < 1 << 24 && normal, halves = exact;
    if (o.whole == 2) {
        const double double_units = c.m * 2147483648.;
        const int64_t words = c.B + o.fold_words * sum;
        exact = o.long_sums ? words < 1073741824 && words > -1073741824 : reach < 2147483648LL;
        exact = exact && (double)reach * c.m < 1073741824. && normal;
        halves = exact && double_units == rint(double_units) && c.m <= 2;
    } else if (o.whole) {
        const int64_t half =
            first_half > magnitude - first_half ? first_half : magnitude - first_half;
        const int64_t folded = c.B + o.fold * sum;
        const int64_t reach_half =
            half * (32768 + 128) + magnitude * 128 + (folded < 0 ? -folded : folded);
        const bool integer = units == rint(units);
        exact = reach < 2147483648LL && units < 2147483648. && integer;
        halves = reach_half < 2147483648LL && units < 1073741824. && integer;
    }
    if (o.exact_float && !exact) o.exact_float[0] = 0;
    if (o.exact_float && !halves) o.exact_float[1] = 0;
    for (int j = 0; j < count; ++j) {
        const Fragments &f = w.fragments[j];
        f.bias[gate * f.units + unit] = (double)(c.B + o.fold * sum);
        f.m[gate * f.units + unit] = c.m;
    }
}
