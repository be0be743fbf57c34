#include "plan/tables.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "c99/fixed_point.h"
#include "plan/elementary.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr int kExactBits = 12, kNarrowBits = 16;
constexpr int kMostSegments = 256, kMostWideSegments = 1 << 14;

CodeFunction in_code_units(Operator op, const ActivationQuantizer &pre,
                           const ActivationQuantizer &out) {
    const double scale = pre.scale, zero = static_cast<double>(pre.zero_point), unit = out.scale;
    if (op == Operator::g_out)
        return [=](double q) { return exact_tanh(scale * (q - zero)) / unit; };
    return [=](double q) { return exact_sigmoid(scale * (q - zero)) / unit; };
}

int64_t yardstick(const CodeFunction &f, const ActivationQuantizer &out, int64_t code) {
    const double y = std::rint(f(static_cast<double>(code)));
    const double lo = static_cast<double>(out.lo() - out.zero_point);
    const double hi = static_cast<double>(out.hi() - out.zero_point);
    return static_cast<int64_t>(std::min(std::max(y, lo), hi)) + out.zero_point;
}

// Builds the table of one function between two quantizers.
class Builder {
 public:
    Builder(Operator op, const ActivationQuantizer &pre, const ActivationQuantizer &out,
            Rounding rounding)
        : op_(op), pre_(pre), out_(out), rounding_(rounding), f_(in_code_units(op, pre, out)) {}

    ActivationTable one_entry_per_code() const {
        std::vector<int64_t> codes(static_cast<size_t>(pre_.hi() - pre_.lo() + 1)), entries;
        std::iota(codes.begin(), codes.end(), pre_.lo());
        for (int64_t code : codes) entries.push_back(yardstick(f_, out_, code) - out_.zero_point);
        return make(codes, pre_.hi(), 0, entries, 0, 0);
    }

    ActivationTable exact() const {
        int most = kMostSegments;
        ActivationTable table = uniform(most);
        if (std::max(pre_.bits, out_.bits) <= kNarrowBits) return table;
        while (most < kMostWideSegments && largest_difference(table) > 1) {
            most *= 2;
            table = uniform(most);
        }
        return table;
    }

    ActivationTable spline(int segments, int degree) const {
        const auto [first, last] = active_range();
        const Spline found = fit_spline(f_, first, last, segments, degree);
        return quantized(found.starts, last, degree, found.coefficients, -1);
    }

 private:
    // The codes outside of which the monotonic function is constant.
    std::pair<int64_t, int64_t> active_range() const {
        const auto value = [this](int64_t code) { return yardstick(f_, out_, code); };
        const int64_t first = value(pre_.lo()), last = value(pre_.hi());
        if (first == last) return {pre_.lo(), pre_.lo()};
        int64_t low = pre_.lo(), high = pre_.hi();
        while (high - low > 1) {
            const int64_t middle = (low + high) >> 1;
            (value(middle) == first ? low : high) = middle;
        }
        const int64_t begin = low;
        low = pre_.lo();
        high = pre_.hi();
        while (high - low > 1) {
            const int64_t middle = (low + high) >> 1;
            (value(middle) == last ? high : low) = middle;
        }
        return {begin, high};
    }

    static int bit_length(int64_t value) {
        int bits = 0;
        while (value >> bits) ++bits;
        return bits;
    }

    // Quadratic segments of equal length, a power of two; at most `most` segments.
    ActivationTable uniform(int most) const {
        const auto [first, last] = active_range();
        const int64_t span = last - first;
        int u = std::max(0, bit_length(std::max<int64_t>(span, 1) - 1) - (bit_length(most) - 1));
        while ((span >> u) >= most) ++u;
        std::vector<int64_t> starts;
        for (int64_t start = first; start <= last; start += int64_t{1} << u)
            starts.push_back(start);
        return quantized(starts, last, 2, fit_uniform(starts, int64_t{1} << u), u);
    }

    // Quadratics through the three Chebyshev nodes of each segment, in powers of code - start.
    std::vector<double> fit_uniform(const std::vector<int64_t> &starts, int64_t length) const {
        const double span = static_cast<double>(length - 1), node = std::sqrt(0.75);
        const double t0 = 0.5 * span * (1.0 - node), t1 = 0.5 * span;
        const double t2 = 0.5 * span * (1.0 + node);
        std::vector<double> rows;
        for (int64_t begin : starts) {
            const double start = static_cast<double>(begin);
            const double y0 = f_(start + t0), y1 = f_(start + t1), y2 = f_(start + t2);
            if (span == 0) {
                rows.insert(rows.end(), {y0, 0 * y0, 0 * y0});
                continue;
            }
            const double d01 = (y1 - y0) / (t1 - t0), d12 = (y2 - y1) / (t2 - t1);
            const double c2 = (d12 - d01) / (t2 - t0), c1 = d01 - c2 * (t0 + t1);
            rows.insert(rows.end(), {y0 - c1 * t0 - c2 * t0 * t0, c1, c2});
        }
        return rows;
    }

    int64_t largest_difference(const ActivationTable &table) const {
        const int64_t length = int64_t{1} << table.segment_shift;
        int64_t largest = 0;
        for (int64_t start : table.bounds)
            for (int64_t place : {int64_t{0}, length / 4, length * 3 / 4, length - 1}) {
                const int64_t code = std::min(start + place, table.last);
                largest = std::max(largest, std::abs(table(code) - yardstick(f_, out_, code)));
            }
        return largest;
    }

    // Rounds coefficients with the largest shift that keeps every sum exact.
    ActivationTable quantized(const std::vector<int64_t> &starts, int64_t last, int degree,
                              const std::vector<double> &real, int u) const {
        const int width = std::max(pre_.bits, out_.bits);
        const int budget = width <= 8 ? 30 : width <= 16 ? 52 : 62;
        const size_t n = static_cast<size_t>(degree) + 1;
        std::vector<double> lengths;
        double largest = 0;
        for (size_t i = 0; i < starts.size(); ++i) {
            const int64_t end = i + 1 < starts.size() ? starts[i + 1] : last;
            lengths.push_back(static_cast<double>(end - starts[i]));
            const double t = std::max(lengths[i], 1.0), *row = real.data() + i * n;
            double size = std::fabs(row[0]) + std::fabs(row[1]) * t;
            if (degree == 2) size += std::fabs(row[2]) * (t * t);
            largest = std::max(largest, size);
        }
        int exponent = 0;
        const bool is_power = std::frexp(largest + 1.0, &exponent) == 0.5;
        const int k = std::max(0, budget - (is_power ? exponent - 1 : exponent) - 1);
        auto rows = u < 0 ? joined_rows(real, degree, lengths, k)
                          : uniform_rows(real, (int64_t{1} << u) - 1, k);
        if (rounding_ == Rounding::floor && k)
            for (size_t i = 0; i < rows.size(); i += static_cast<size_t>(degree) + 1)
                rows[i] += int64_t{1} << (k - 1);
        return make(starts, last, degree, rows, k, u);
    }

    static int64_t integer(double value) {
        if (!(std::fabs(value) < 0x1p63))
            throw ArgumentError(
                "Expected entries of a table to fit in 64 bits, got larger ones: the scale of its "
                "output is too small");
        return static_cast<int64_t>(value);
    }

    // rint(a / b) of the float64 nearest to the fraction, for b > 0.
    static __int128 divided(__int128 a, int64_t b) {
        unsigned __int128 rest =
            a < 0 ? -static_cast<unsigned __int128>(a) : static_cast<unsigned __int128>(a);
        int shift = 0;
        while (shift < 60 && (rest >> 120) == 0) {
            rest <<= 1;
            ++shift;
        }
        unsigned __int128 quotient = rest / static_cast<uint64_t>(b);
        bool sticky = rest % static_cast<uint64_t>(b) != 0;
        while (quotient >> 62) {
            sticky = sticky || (quotient & 1);
            quotient >>= 1;
            --shift;
        }
        const auto bits = static_cast<uint64_t>(quotient) << 1 | (sticky ? 1 : 0);
        const double value = std::rint(std::ldexp(static_cast<double>(bits), -shift - 1));
        return static_cast<__int128>(a < 0 ? -value : value);
    }

    // Coefficients times 2^k, so that every segment starts where the previous one ends.
    static std::vector<int64_t> joined_rows(const std::vector<double> &real, int degree,
                                            const std::vector<double> &lengths, int k) {
        const size_t n = static_cast<size_t>(degree) + 1;
        std::vector<int64_t> rows;
        for (size_t i = 0; i < lengths.size(); ++i) {
            const double *row = real.data() + i * n;
            const auto T = static_cast<int64_t>(lengths[i]);
            __int128 c0;
            if (i > 0) {
                const int64_t *before = rows.data() + (i - 1) * n;
                const auto T0 = static_cast<__int128>(lengths[i - 1]);
                c0 = before[0] + before[1] * T0;
                if (degree == 2) c0 += before[2] * (T0 * T0);
            } else {
                c0 = static_cast<__int128>(std::rint(row[0] * std::ldexp(1.0, k)));
            }
            int64_t c1 = integer(std::rint(row[1] * std::ldexp(1.0, k))), c2 = 0;
            if (degree == 2) c2 = integer(std::rint(row[2] * std::ldexp(1.0, k)));
            if (T) {
                // the slope is rounded last, so that the segment ends where the spline's does
                const double t = static_cast<double>(T);
                double end = row[0] + row[1] * t;
                const auto square = static_cast<__int128>(T) * T;
                if (degree == 2) end += row[2] * static_cast<double>(square);
                __int128 rest = static_cast<__int128>(std::rint(end * std::ldexp(1.0, k))) - c0;
                if (degree == 2) rest -= c2 * square;
                c1 = static_cast<int64_t>(divided(rest, T));
            }
            rows.push_back(static_cast<int64_t>(c0));
            rows.push_back(c1);
            if (degree == 2) rows.push_back(c2);
        }
        return rows;
    }

    // Coefficients of quadratics times 2^k. c1 and c0 compensate for the rounding of c2 and c1.
    static std::vector<int64_t> uniform_rows(const std::vector<double> &real, int64_t last, int k) {
        const double length = static_cast<double>(last), power = std::ldexp(1.0, k);
        std::vector<int64_t> rows;
        for (size_t i = 0; i < real.size(); i += 3) {
            const double s0 = real[i] * power, s1 = real[i + 1] * power, s2 = real[i + 2] * power;
            const double c2 = std::rint(s2), lost = s2 - c2;
            const double slope = s1 + lost * length, c1 = std::rint(slope);
            const double c0 =
                std::rint(s0 - lost * (length * length) / 8 + (slope - c1) * length / 2);
            for (double c : {c0, c1, c2}) rows.push_back(integer(c));
        }
        return rows;
    }

    ActivationTable make(std::vector<int64_t> starts, int64_t last, int degree,
                         std::vector<int64_t> rows, int shift, int u) const {
        const bool tanh = op_ == Operator::g_out;
        const double least = std::rint((tanh ? -1.0 : 0.0) / out_.scale);
        const double most = std::rint(1.0 / out_.scale);
        const double zero = static_cast<double>(out_.zero_point);
        ActivationTable table;
        table.bounds = std::move(starts);
        table.last = last;
        table.degree = degree;
        table.coefficients = std::move(rows);
        table.shift = shift;
        table.zero_point = out_.zero_point;
        table.lo = static_cast<int64_t>(std::max(static_cast<double>(out_.lo()), least + zero));
        table.hi = static_cast<int64_t>(std::min(static_cast<double>(out_.hi()), most + zero));
        table.segment_shift = u;
        table.rounding = rounding_;
        return table;
    }

    Operator op_;
    const ActivationQuantizer &pre_, &out_;
    Rounding rounding_;
    CodeFunction f_;
};

}  // namespace

ActivationTable build_table(Operator op, const ActivationQuantizer &pre,
                            const ActivationQuantizer &out, Activation activation, int segments,
                            Rounding rounding) {
    const Builder builder(op, pre, out, rounding);
    if (activation == Activation::pwl) return builder.spline(segments ? segments : 16, 1);
    if (activation == Activation::quadratic) return builder.spline(segments ? segments : 8, 2);
    return pre.bits <= kExactBits ? builder.one_entry_per_code() : builder.exact();
}

int64_t float_table(Operator op, const ActivationQuantizer &pre, const ActivationQuantizer &out,
                    int64_t code) {
    return yardstick(in_code_units(op, pre, out), out, code);
}

int64_t ActivationTable::operator()(int64_t code) const {
    code = std::min(std::max(code, bounds[0]), last);
    const auto segment =
        segment_shift >= 0
            ? static_cast<size_t>((code - bounds[0]) >> segment_shift)
            : static_cast<size_t>(std::upper_bound(bounds.begin(), bounds.end(), code) -
                                  bounds.begin()) -
                  1;
    const int64_t t = code - bounds[segment],
                  *c = coefficients.data() + segment * static_cast<size_t>(degree + 1);
    int64_t y = c[degree];
    for (int power = degree - 1; power >= 0; --power) y = y * t + c[power];
    y = qg_round_by(y, shift, static_cast<int>(rounding), shift);
    return std::min(std::max(y + zero_point, lo), hi);
}

}  // namespace quant_gru
