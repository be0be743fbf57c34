#include "cpu/core/pack_weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace quant_gru {
namespace {

constexpr double kExactDouble = 9007199254740992.;  // 2^53

int64_t size_of(int64_t v) { return v < 0 ? -v : v; }

// Calls `f` with a typed pointer to the codes of a row.
template <class F>
void with_row(const Matrix &m, int64_t start, F f) {
    switch (m.kind) {
        case Container::i8:
            f(static_cast<const int8_t *>(m.codes) + start);
            break;
        case Container::i16:
            f(static_cast<const int16_t *>(m.codes) + start);
            break;
        default:
            f(static_cast<const int32_t *>(m.codes) + start);
    }
}

// Adds the sum of the codes to `total` and the sum of their magnitudes to `magnitude`.
template <class Code>
void sum_codes(const Code *row, int inputs, int64_t &total, int64_t &magnitude) {
    constexpr int kBlock = 1 << 14;  // magnitudes are at most 2^15, so sums fit 32 bits
    for (int first = 0; first < inputs; first += kBlock) {
        const int end = std::min(inputs, first + kBlock);
        int32_t sum = 0, size = 0;
        for (int i = first; i < end; ++i) {
            const int32_t code = row[i];
            sum += code;
            size += code < 0 ? -code : code;
        }
        total += sum;
        magnitude += size;
    }
}

// Copies the codes of a row in pieces of `kDepth` bytes that are `stride` bytes apart.
template <int kDepth>
void interleave(const int8_t *row, int inputs, int64_t stride, int8_t *to) {
    int i = 0;
    for (; i + kDepth <= inputs; i += kDepth, to += stride) std::memcpy(to, row + i, kDepth);
    for (; i < inputs; ++i) *to++ = row[i];
}

void interleave(const int8_t *row, int inputs, int depth, int64_t stride, int8_t *to) {
    switch (depth) {
        case 2:
            return interleave<2>(row, inputs, stride, to);
        case 4:
            return interleave<4>(row, inputs, stride, to);
        default:
            for (int i = 0; i < inputs; ++i) to[i / depth * stride + i % depth] = row[i];
    }
}

// The same for codes of `bits` that share elements with those of the next steps.
template <class Element>
void share(const int8_t *row, int inputs, int depth, int bits, int64_t stride, int8_t *to) {
    constexpr int kWidth = 8 * sizeof(Element);
    const int mask = (1 << bits) - 1, shared = kWidth / bits * depth;
    for (int first = 0; first < inputs; first += shared, to += stride)
        for (int d = 0; d < depth; ++d) {
            unsigned element = 0;
            int place = kWidth - bits;
            for (int i = first + d; i < inputs && place >= 0; i += depth, place -= bits)
                element |= static_cast<unsigned>(row[i] & mask) << place;
            const Element stored = static_cast<Element>(element);
            std::memcpy(to + d * static_cast<int>(sizeof stored), &stored, sizeof stored);
        }
}

// Bits that a weight takes.
int stored_bits(const Matrix &from, const Layout &layout) {
    // Sums of unsigned bytes times 2^(8 - bits) w, which is at most 2^7, must fit 32 bits.
    if (!layout.shared || from.weight_bits > 4 || from.inputs >= 1 << 16) return 8;
    return from.weight_bits == 3 ? 4 : from.weight_bits;
}

}  // namespace

bool fits_float(double m) { return m == 0 || (m > 1e-20 && m < 1e20); }

// The largest power of two up to m; 0 for 0.
static double power_below(double m) { return m > 0 ? std::ldexp(1, std::ilogb(m)) : 0; }

bool is_power(double m) {
    int exponent;
    return std::frexp(m, &exponent) == 0.5;
}

// A power of two grows by 2^-23 of itself in float32, another multiplier by 2^-53 to 2^-51 in
// float64. docs/arithmetic.md, section 11, proves that no product reaches the next tie.
bool stretches_float(double bound, int64_t M) { return (M & (M - 1)) == 0 && bound < 0x1p23; }
bool stretches_double(double bound, int64_t M) {
    return M == 0 || bound * static_cast<double>(M / (M & -M)) < 0x1p51;
}

// Stretches a multiplier, or clears `all`. With others that are not, lanes cut off products plus
// one half; this does not reach the next integer either.
void stretch(double &m, double bound, int64_t M, bool &all) {
    if (stretches_double(bound, M))
        m *= 1 + 0x1p-52;
    else
        all = false;
}

bool pack_fused(const Matrix &from, int H, const Layout &layout, Arena &arena, Packed &p,
                Exactness &exact) {
    if (from.kind != Container::i8) return false;
    const int inputs = from.inputs;
    const int group = layout.group, depth = layout.depth;
    const bool wide_operand = from.operand_bits > 8, is_signed = from.operand_signed;
    p.inputs = inputs;
    p.steps = (inputs + depth - 1) / depth;
    p.groups = (H + group - 1) / group;
    p.planes = wide_operand && layout.operand != Operand::s16 ? 2 : 1;
    if (layout.operand == Operand::u8)
        p.offset = is_signed ? (wide_operand ? -32768 : -128) : 0;
    else if (layout.operand == Operand::s8)
        p.offset = wide_operand ? (is_signed ? 128 : 32896) : (is_signed ? 0 : 128);
    else
        p.offset = wide_operand && !is_signed ? 32768 : 0;
    p.lo = static_cast<double>(from.lo);
    p.hi = static_cast<double>(from.hi);
    // An odd number of cache lines, so that groups map to different cache sets.
    p.word_stride = cache_lines(round_up(p.steps, layout.step_block) * depth * 3 * group);
    if (p.word_stride / 64 % 2 == 0) p.word_stride += 64;
    p.bits = stored_bits(from, layout);
    const int width = p.bits < 8 ? layout.shared : 8;  // bits of an element
    const int64_t step_bytes = int64_t{3} * group * depth * width / 8;
    if (p.bits < 8) {
        p.group_stride = cache_lines((p.steps * p.bits + width - 1) / width * step_bytes);
        if (p.group_stride % 4096 == 0) p.group_stride += 64;
    } else {
        p.group_stride = p.word_stride;
    }
    const size_t channels = static_cast<size_t>(p.groups) * 3 * group;
    auto *w = arena.reuse(p.w, static_cast<size_t>(p.groups * p.group_stride));
    auto *bias = arena.reuse(p.bias, channels);
    auto *m = arena.reuse(p.m, channels);
    auto *m_float = arena.reuse(p.m_float, channels);
    auto *rounding = exact.powers ? arena.reuse(p.rounding, 3 * channels) : nullptr;
    for (int gate = 0; gate < 3; ++gate) {
        for (int unit = 0; unit < H; ++unit) {
            const int c = gate * H + unit, place = unit % group;
            int8_t *to =
                w + unit / group * p.group_stride + (gate * group + place) * depth * width / 8;
            int64_t total = 0, magnitude = 0;
            const auto *row =
                static_cast<const int8_t *>(from.codes) + static_cast<int64_t>(c) * inputs;
            if (p.bits == 8)
                interleave(row, inputs, depth, step_bytes, to);
            else if (width == 8)
                share<uint8_t>(row, inputs, depth, p.bits, step_bytes, to);
            else
                share<uint16_t>(row, inputs, depth, p.bits, step_bytes, to);
            sum_codes(row, inputs, total, magnitude);
            // Only the exact total must fit 32 bits; partial sums may wrap around.
            const int64_t bound = magnitude * from.reach + size_of(from.bias[c]);
            if (bound >= int64_t{1} << 31) return false;
            exact.in_float = exact.in_float && bound < int64_t{1} << 24;
            exact.in_double =
                exact.in_double &&
                static_cast<double>(bound) * static_cast<double>(from.M[c]) < kExactDouble;
            const size_t at = static_cast<size_t>((unit / group * 3 + gate) * group + place);
            const uint64_t folded =
                static_cast<uint64_t>(from.bias[c]) +
                static_cast<uint64_t>(p.offset - from.zero) * static_cast<uint64_t>(total);
            const uint32_t low = static_cast<uint32_t>(folded);
            std::memcpy(bias + at, &low, sizeof low);
            m[at] = std::ldexp(static_cast<double>(from.M[c]), static_cast<int>(-from.k[c]));
            exact.in_float = exact.in_float && fits_float(m[at]);
            m_float[at] = static_cast<float>(m[at]);
            if (from.rule == QG_HALF_AWAY) {
                const double most = static_cast<double>(bound);
                if (stretches_float(most, from.M[c]))
                    m_float[at] *= 1 + 0x1p-23f;
                else
                    exact.stretched_float = false;
                stretch(m[at], most, from.M[c], exact.stretched_double);
            }
            if (!exact.powers) continue;
            // The kernel adds half of 2^s before it shifts, and 1 more with QG_DOUBLE; the sum must
            // fit 32 bits.
            const int s = static_cast<int>(from.k[c]) - (from.M[c] ? std::ilogb(from.M[c]) : 0);
            exact.powers = from.M[c] > 0 && (from.M[c] & (from.M[c] - 1)) == 0 && s >= 1 &&
                           s <= 30 && bound + (int64_t{1} << (s - 1)) + 1 < int64_t{1} << 31;
            if (!exact.powers) continue;
            int32_t *numbers = rounding + (unit / group * 3 + gate) * 3 * group + place;
            numbers[0] = s;
            numbers[group] = from.rule == QG_FLOOR ? 0 : 1 << (s - 1);
            numbers[2 * group] = from.rule == QG_FLOOR ? -1 : (1 << s) - 1;
        }
    }
    return true;
}

int64_t pack_general(const Matrix &from, int H, const Quantizer &operand, Arena &arena,
                     Projection &p, bool &stretched) {
    const int channels = 3 * H, inputs = from.inputs;
    int64_t bound = 0;
    p.inputs = inputs;
    p.pairs = (inputs + 1) / 2;
    p.tiles = (channels + kTile - 1) / kTile;
    const bool wide_weights = from.weight_bits > 8, wide_operand = from.operand_bits > 8;
    p.planes = wide_weights ? 2 : 1;
    // The sum of a pair is at most 2^8 (2^9 with planes, whose low bytes reach 255) times the
    // magnitude of the operand, 2^8 or 2^15. A flush then stays within 2^30.
    p.flush = (wide_weights ? 64 : 128) * (wide_operand ? 1 : 128);
    // 2^15 is subtracted from unsigned 16-bit codes, so that they fit int16.
    p.offset = operand.zero + operand.hi > 32767 ? 1 << 15 : 0;
    p.lo = static_cast<double>(from.lo);
    p.hi = static_cast<double>(from.hi);
    const size_t padded = static_cast<size_t>(p.tiles) * kTile;
    const size_t size = padded * 2 * p.pairs;
    int16_t *planes[2] = {arena.reuse(p.w[0], size), nullptr};
    if (p.planes == 2) planes[1] = arena.reuse(p.w[1], size);
    auto *bias = arena.reuse(p.bias, padded);
    auto *real_bias = arena.reuse(p.real_bias, padded);
    auto *m = arena.reuse(p.m, padded);
    auto *m_float = arena.reuse(p.m_float, padded);
    auto *more = arena.reuse(p.more, padded);
    int64_t largest = 0;
    for (int c = 0; c < channels; ++c) {
        int16_t *to[2];
        const size_t tile = static_cast<size_t>(c / kTile) * p.pairs * 2 * kTile;
        for (int plane = 0; plane < p.planes; ++plane)
            to[plane] = planes[plane] + tile + 2 * (c % kTile);
        int64_t total = 0, magnitude = 0;
        with_row(from, static_cast<int64_t>(c) * inputs, [&](auto *row) {
            for (int i = 0; i < inputs; ++i) {
                const size_t at = static_cast<size_t>(i / 2) * 2 * kTile + i % 2;
                if (p.planes == 2) {
                    to[0][at] = static_cast<int16_t>(row[i] >> 8);
                    to[1][at] = static_cast<int16_t>(row[i] & 255);
                } else {
                    to[0][at] = static_cast<int16_t>(row[i]);
                }
            }
            sum_codes(row, inputs, total, magnitude);
        });
        bias[c] = from.bias[c] + (p.offset - from.zero) * total;
        real_bias[c] = static_cast<double>(bias[c]);
        // A bound of the exact total, and of the sum before the bias is added.
        const int64_t reach = from.reach + size_of(p.offset - from.zero);
        const int64_t most = magnitude * reach + size_of(from.bias[c]) + size_of(bias[c]);
        bound = most > bound ? most : bound;
        // Also a bound of partial sums: a plane differs from its share of a weight by < 256.
        largest = std::max(largest, most + 256 * reach * inputs);
        m[c] = std::ldexp(static_cast<double>(from.M[c]), static_cast<int>(-from.k[c]));
        m_float[c] = static_cast<float>(m[c]);
        if (from.rule == QG_HALF_AWAY)
            stretch(m[c], static_cast<double>(most), from.M[c], stretched);
        more[c] = from.rule == QG_DOUBLE && m[c] < 0.5 ? power_below(m[c]) : 0;
    }
    p.exact = largest < (int64_t{1} << 53);
    return bound;
}

void copy_wide(const Matrix &from, int H, Arena &arena, WideProjection &p) {
    const size_t channels = 3 * static_cast<size_t>(H), inputs = static_cast<size_t>(from.inputs);
    p.inputs = from.inputs;
    auto *w = arena.reuse(p.w, channels * inputs);
    with_row(from, 0, [&](const auto *codes) { std::copy_n(codes, channels * inputs, w); });
    std::copy_n(from.bias, channels, arena.reuse(p.bias, channels));
    std::copy_n(from.M, channels, arena.reuse(p.M, channels));
    std::copy_n(from.k, channels, arena.reuse(p.k, channels));
    p.bias_shift = from.bias_shift;
    p.lo = from.lo;
    p.hi = from.hi;
    p.zero = from.zero;
    p.least = from.least;
    p.most = from.most;
    p.moved = from.moved;
    p.rule = from.rule;
    p.first = from.first;
    const double reach = static_cast<double>(from.reach);
    p.in_word = reach < 0x1p31 && std::ldexp(reach * from.inputs, from.weight_bits - 1) < 0x1p62;
}

}  // namespace quant_gru
