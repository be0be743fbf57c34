// Raises the scale of each weight row to a minimum share of the largest scale. Then writes codes,
// biases, multipliers and all data that kernels derive from them.
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

extern "C" __global__ void __launch_bounds__(256)
    requantize_weights(const __grid_constant__ Weights w) {
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
        if (o.tiles) o.tiles[tile_at(K, gate, unit, i)] = (int8_t)code;
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
    const float b = o.corrected ? o.corrected[row] : o.b ? real(o.b, o.b_real, row, ignored) : 0.f;
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
    } else if (!which) {
        const bool power = (bits_of(c.m) & 0xfffffffffffffLL) == 0;
        const double above = c.m > 1 ? c.m : 1, below = c.m > 1 ? 1 : c.m;
        halves = exact && power && reach * above + o.added / below <= 16777216.;
        exact = exact && (double)reach * c.m < 12582912.;
    }
    if (o.exact_float && !exact) o.exact_float[0] = 0;
    if (o.exact_float && !halves) o.exact_float[1] = 0;
    for (int j = 0; j < count; ++j) {
        const Fragments &f = w.fragments[j];
        f.bias[gate * f.units + unit] = (double)(c.B + o.fold * sum);
        f.m[gate * f.units + unit] = c.m;
    }
}
