#include "cuda/host/plans/gate_tables.hpp"

#include <algorithm>
#include <cmath>

#include "c99/fixed_point.h"

namespace quant_gru::cuda {
namespace {

constexpr int64_t kLine = 16;       // codes per line
constexpr int64_t kUnit = 1 << 10;  // of a line's base and slope
constexpr int64_t kSteepest = (1 << 16) - 1;
constexpr int64_t kReserved = 256;  // quadratics reserve room for a multiple of this number

int64_t output_of(const TableNumbers &t, int rule, int64_t code) {
    const int64_t q = std::min(std::max(code, t.bounds[0]), t.last);
    const int64_t segment = std::upper_bound(t.bounds, t.bounds + t.segments, q) - t.bounds - 1;
    const int64_t *c = t.coefficients + segment * (t.degree + 1), d = q - t.bounds[segment];
    int64_t y = c[t.degree];
    for (int power = t.degree - 1; power >= 0; --power) y = y * d + c[power];
    return qg_clamp(qg_round_by(y, t.shift, rule, t.shift), t.lo - t.zero, t.hi - t.zero);
}

int mode_of(const TableNumbers &t, const QuantizerNumbers &pre) {
    if (pre.bits <= kExactBits) return kDirect;
    if (pre.bits > kNarrowBits || t.segment_shift < 0 || t.degree != 2) return kDirectGlobal;
    const double length = std::ldexp(1.0, t.segment_shift);
    for (int64_t i = 0; i < t.segments; ++i) {
        const int64_t *c = t.coefficients + 3 * i;
        const double size = std::fabs(static_cast<double>(c[0])) +
                            std::fabs(static_cast<double>(c[1])) * length +
                            std::fabs(static_cast<double>(c[2])) * length * length;
        // a sum below 2^53 is exact, and a larger one stays larger
        if (size >= 9007199254740992.0) return kDirectGlobal;
    }
    return kQuadratic;
}

// One line of 16 outputs, or a negative `room` if none fits.
struct Line {
    int64_t room = -1, slope = 0, base = 0;

    void try_slope(const int64_t *y, int64_t wanted) {
        const int64_t fit = std::min(std::max<int64_t>(wanted, 0), kSteepest);
        int64_t least = INT64_MIN, most = INT64_MAX;
        for (int64_t t = 0; t < kLine; ++t) {
            least = std::max(least, (y[t] - 1) * kUnit - fit * t);
            most = std::min(most, (y[t] + 1) * kUnit - 1 - fit * t);
        }
        if (most - least <= room) return;
        room = most - least;
        slope = fit;
        base = qg_floor_shift(least + most, 1);
    }
};

void add_lines(GateTable &table, const std::vector<int64_t> &outputs) {
    // lines begin at multiples of 16 codes, and kernels copy them in pairs
    const int64_t before = ((table.first % kLine) + kLine) % kLine;
    const auto count = static_cast<int64_t>(outputs.size());
    const int64_t after = (2 * kLine - (before + count) % (2 * kLine)) % (2 * kLine);
    const auto at = [&](int64_t i) { return outputs[static_cast<size_t>(i)]; };
    // extrapolated at both ends, so that unused entries do not prevent compression
    std::vector<int64_t> all;
    for (int64_t i = before; i > 0; --i) all.push_back(2 * at(0) - at(i));
    all.insert(all.end(), outputs.begin(), outputs.end());
    for (int64_t i = 1; i <= after; ++i) all.push_back(2 * at(count - 1) - at(count - 1 - i));
    table.lines = compressed(all);
    table.line_origin = table.first - before;
}

}  // namespace

std::vector<int32_t> compressed(const std::vector<int64_t> &outputs) {
    std::vector<int32_t> lines;
    for (size_t start = 0; start < outputs.size(); start += kLine) {
        const int64_t *const y = outputs.data() + start;
        int64_t product = 0, squares = 0;
        for (int64_t t = 0; t < kLine; ++t) {
            product += y[t] * (2 * t - (kLine - 1));
            squares += (2 * t - (kLine - 1)) * (2 * t - (kLine - 1));
        }
        // the least squares fit, and the chord, which suits some rounded tables better
        Line line;
        line.try_slope(y, std::llround(static_cast<double>(2 * kUnit * product) /
                                       static_cast<double>(squares)));
        line.try_slope(y, std::llround(static_cast<double>((y[kLine - 1] - y[0]) * kUnit) /
                                       static_cast<double>(kLine - 1)));
        if (line.room < 0) return {};
        uint32_t word = static_cast<uint32_t>(line.slope) << 16;
        for (int64_t t = 0; t < kLine; ++t)
            if (y[t] != qg_floor_shift(line.base + line.slope * t, 10)) word |= 1u << t;
        lines.push_back(static_cast<int32_t>(line.base));
        lines.push_back(static_cast<int32_t>(word));
    }
    return lines;
}

int GateTable::shared_bytes(int how) const {
    const auto entries = static_cast<int64_t>(direct.size());
    switch (how) {
        case kDirect:
            return static_cast<int>((entries + 1) / 2 * 8);
        case kQuadratic:
            return static_cast<int>(24 * ((segments + kReserved - 1) / kReserved) * kReserved);
        case kCompressed:
            return static_cast<int>(8 * ((entries + 3 * kLine - 2) / (2 * kLine) * 2) + 8);
        default:
            return 0;
    }
}

GateTable gate_table(const TableNumbers &table, const QuantizerNumbers &pre, int rule) {
    GateTable found;
    found.mode = found.near = mode_of(table, pre);
    found.segments = table.segments;
    found.first = pre.lo() - pre.zero;
    if (pre.bits > kNarrowBits) return found;
    int64_t count = pre.hi() - pre.lo() + 1;
    if (count <= kFractionCodes) {
        found.first = first_entry(pre);
        count = kFractionCodes + 1;
    }
    std::vector<int64_t> outputs;
    for (int64_t i = 0; i < count; ++i)
        outputs.push_back(output_of(
            table, rule, std::min(std::max(found.first + pre.zero + i, pre.lo()), pre.hi())));
    found.direct.assign(outputs.begin(), outputs.end());
    if (pre.bits > kExactBits) add_lines(found, outputs);
    if (!found.lines.empty()) found.near = kCompressed;
    return found;
}

}  // namespace quant_gru::cuda
