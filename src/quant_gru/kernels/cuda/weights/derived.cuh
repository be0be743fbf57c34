// What kernels read of weights besides their codes: operands of products in several layouts, sums
// that are added to products, and whether arithmetic is exact.
//
// exact_float has two flags. Unless a case below applies, both say that float32 holds every
// accumulator and every multiplier exactly.
// W x, one plane of x: the first flag also says that results are below the magic number of float32:
// adding it keeps them positive, and the bits of positive numbers are ordered as integers. The
// second also says that multipliers are powers of two and that float32 holds the value before
// rounding to a byte, `added` included.
// W x, two planes of x (whole = 2): the first says that int32 holds every accumulator and every
// rounded value before the clamp, and float32 every multiplier. With `long_sums`, only the second
// plane's accumulator is considered. The second also says that multipliers are integers in units of
// 2^-31, and at most 2.
// R h in int32 (whole = 1): the first says that int32 holds every accumulator, and every multiplier
// in units of 2^-32. The second says so of sums over half of the features.
#ifndef QUANT_GRU_DERIVED_CUH
#define QUANT_GRU_DERIVED_CUH

#include "weights/weight_rows.cuh"

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

// Index of a weight in the tiled layout of wgmma_pingpong.cuh.
inline int64_t tile_at(int features, int gate, int unit, int feature) {
    int64_t at = unit / 64 * ((features + 127) / 128) + feature / 128;
    at = (at * 3 + gate) * 64 + unit % 64;
    return at * 128 + (feature / 16 % 8 ^ unit % 8) * 16 + feature % 16;
}

// Sums over the codes of a row, of a lane or of all lanes.
struct RowSums {
    int64_t sum, magnitude, first_half;
};

inline RowSums warp_sum(const RowSums &s) {
    return {warp_sum(s.sum), warp_sum(s.magnitude), warp_sum(s.first_half)};
}

// Writes what depends on a single code, and adds it to the sums.
inline void add_code(const Weights &w, int which, int gate, int unit, int i, int code,
                     RowSums &sums) {
    const Operand &o = w.operands[which];
    const int H = (int)w.H, channel = gate * H + unit, K = (int)o.K;
    const int count = which ? (int)w.count : 0, middle = (K + 127) / 128 * 64;
    sums.sum += code;
    const int size = code < 0 ? -code : code;
    sums.magnitude += size;
    if (i < middle) sums.first_half += size;
    if (o.gemm) {
        int8_t *const byte = o.gemm + channel * o.padded + i;
        *byte = (int8_t)(o.planes == 2 ? code >> 8 : code);
        if (o.planes == 2) byte[3 * H * o.padded] = (int8_t)((code & 255) - 128);
    }
    if (o.tiles) o.tiles[tile_at(K, gate, unit, i)] = (int8_t)code;
    for (int j = 0; j < count; ++j) {
        const Fragments &f = w.fragments[j];
        f.bytes[fragment_at(f, 0, gate, unit, i)] = (int8_t)(code & 255);
        if (w.planes_R == 2) f.bytes[fragment_at(f, 1, gate, unit, i)] = (int8_t)(code >> 8);
    }
}

// Writes what depends on a whole row: its bias B, its multiplier m, and the sums of all lanes.
inline void finish_row(const Weights &w, int which, int gate, int unit, int64_t B, double m,
                       const RowSums &sums) {
    const Operand &o = w.operands[which];
    const int channel = gate * (int)w.H + unit, count = which ? (int)w.count : 0;
    if (o.m) o.m[channel] = m;
    if (o.folded) o.folded[channel] = B + o.fold_words * sums.sum;
    if (o.folded_bytes) o.folded_bytes[channel] = (int32_t)(B + o.fold_words * sums.sum);
    if (o.m_float) o.m_float[channel] = (float)m;
    const int64_t reach = sums.magnitude * o.reach + (B < 0 ? -B : B);
    const double units = m * 4294967296.;
    const bool normal = m == 0 || (m > 1e-20 && m < 1e20);
    bool exact = reach < 1 << 24 && normal, halves = exact;
    if (o.whole == 2) {
        const double double_units = m * 2147483648.;
        const int64_t words = B + o.fold_words * sums.sum;
        exact = o.long_sums ? words < 1073741824 && words > -1073741824 : reach < 2147483648LL;
        exact = exact && (double)reach * m < 1073741824. && normal;
        halves = exact && double_units == rint(double_units) && m <= 2;
    } else if (o.whole) {
        const int64_t half = sums.first_half > sums.magnitude - sums.first_half
                                 ? sums.first_half
                                 : sums.magnitude - sums.first_half;
        const int64_t folded = B + o.fold * sums.sum;
        const int64_t reach_half =
            half * (32768 + 128) + sums.magnitude * 128 + (folded < 0 ? -folded : folded);
        const bool integer = units == rint(units);
        exact = reach < 2147483648LL && units < 2147483648. && integer;
        halves = reach_half < 2147483648LL && units < 1073741824. && integer;
    } else if (!which) {
        const bool power = (bits_of(m) & 0xfffffffffffffLL) == 0;
        const double above = m > 1 ? m : 1, below = m > 1 ? 1 : m;
        halves = exact && power && reach * above + o.added / below <= 16777216.;
        exact = exact && (double)reach * m < 12582912.;
    }
    if (o.exact_float && !exact) o.exact_float[0] = 0;
    if (o.exact_float && !halves) o.exact_float[1] = 0;
    for (int j = 0; j < count; ++j) {
        const Fragments &f = w.fragments[j];
        f.bias[gate * f.units + unit] = (double)(B + o.fold * sums.sum);
        f.m[gate * f.units + unit] = m;
    }
}

#endif
