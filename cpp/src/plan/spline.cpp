// The operations and their order equal integer/spline.py, so that both fit the same coefficients.
#include <algorithm>
#include <cmath>
#include <limits>

#include "plan/elementary.hpp"
#include "plan/tables.hpp"

namespace quant_gru {
namespace {

using Array = std::vector<double>;

constexpr size_t kPoints = 24, kFewestPoints = 384, kSamples = 4097;
constexpr int kPlacements = 16, kReweightings = 24;

double root_of(double value, int degree) {
    return degree == 1 ? std::sqrt(value) : cube_root(value);
}

double largest(const Array &values) { return *std::max_element(values.begin(), values.end()); }

Array linspace(double first, double last, size_t count) {
    Array found(count);
    const double step = (last - first) / static_cast<double>(count - 1);
    for (size_t i = 0; i < count; ++i) found[i] = static_cast<double>(i) * step + first;
    found.back() = last;
    return found;
}

// Linear interpolation at ascending places, which begin and end as `x` does.
Array interpolated(const Array &places, const Array &x, const Array &y) {
    Array found;
    size_t j = 0;
    for (double place : places) {
        while (j + 1 < x.size() && x[j + 1] <= place) ++j;
        found.push_back(j + 1 == x.size() || x[j] == place
                            ? y[j]
                            : (y[j + 1] - y[j]) / (x[j + 1] - x[j]) * (place - x[j]) + y[j]);
    }
    return found;
}

// Differences of neighbors, with unit spacing.
Array gradient(const Array &y) {
    Array found(y.size());
    for (size_t i = 1; i + 1 < y.size(); ++i) found[i] = (y[i + 1] - y[i - 1]) / 2.0;
    found.front() = y[1] - y[0];
    found.back() = y[y.size() - 1] - y[y.size() - 2];
    return found;
}

// segments + 1 knots, integers from first to last, possibly with duplicates.
Array by_curvature(const CodeFunction &f, double first, double last, size_t segments, int degree) {
    const Array x = linspace(first, last, kSamples);
    Array density;
    for (double place : x) density.push_back(f(place));
    for (int i = 0; i <= degree; ++i) density = gradient(density);
    for (double &value : density) value = root_of(std::fabs(value), degree);
    const double floor = 1e-3 * largest(density) + 1e-300;
    for (double &value : density) value += floor;
    Array mass = {0.0};
    double sum = 0;
    for (size_t i = 0; i + 1 < density.size(); ++i)
        mass.push_back(sum += 0.5 * (density[i + 1] + density[i]));
    Array knots = interpolated(linspace(0.0, mass.back(), segments + 1), mass, x);
    for (double &knot : knots) knot = std::rint(knot);
    knots.front() = first;
    knots.back() = last;
    return knots;
}

// Moves equal knots apart so that they ascend strictly.
Array distinct(const Array &knots) {
    Array apart(knots.size());
    double most = -std::numeric_limits<double>::infinity();
    const size_t n = knots.size();
    for (size_t i = 0; i < n; ++i) {
        most = std::max(most, knots[i] - static_cast<double>(i));
        apart[i] =
            std::min(most + static_cast<double>(i), knots.back() - static_cast<double>(n - 1 - i));
    }
    return apart;
}

std::vector<size_t> segments_of(const Array &knots, const Array &grid) {
    std::vector<size_t> found;
    for (double point : grid) {
        const auto after = std::upper_bound(knots.begin(), knots.end(), point) - knots.begin();
        found.push_back(static_cast<size_t>(
            std::clamp<ptrdiff_t>(after - 1, 0, static_cast<ptrdiff_t>(knots.size()) - 2)));
    }
    return found;
}

// Solves a symmetric tridiagonal system.
Array solved(Array pivots, const Array &beside, Array rest) {
    for (size_t i = 0; i < beside.size(); ++i) {
        const double factor = beside[i] / pivots[i];
        pivots[i + 1] -= factor * beside[i];
        rest[i + 1] -= factor * rest[i];
    }
    rest.back() /= pivots.back();
    for (size_t i = beside.size(); i-- > 0;)
        rest[i] = (rest[i] - beside[i] * rest[i + 1]) / pivots[i];
    return rest;
}

struct Fit {
    Array values;  // at the knots, then for degree 2 the bubbles of all segments
    Array error;   // at each point
};

// Sums of weight * a * b over the points of each segment.
Array sums_of(const std::vector<size_t> &segment, size_t count, const Array &weights,
              const Array &a, const Array &b) {
    Array sums(count, 0.0);
    for (size_t i = 0; i < segment.size(); ++i) sums[segment[i]] += weights[i] * a[i] * b[i];
    return sums;
}

Fit fit_values(const Array &grid, const Array &y, const Array &knots, const Array &at_knots,
               int degree) {
    const size_t count = knots.size() - 1, points = grid.size();
    const std::vector<size_t> segment = segments_of(knots, grid);
    Array left(points), right(points), bubble(points, 0.0), rest(points);
    for (size_t i = 0; i < points; ++i) {
        const size_t s = segment[i];
        right[i] = (grid[i] - knots[s]) / (knots[s + 1] - knots[s]);
        left[i] = 1.0 - right[i];
        if (degree == 2) bubble[i] = left[i] * right[i];
        rest[i] = y[i] - (left[i] * at_knots[s] + right[i] * at_knots[s + 1]);
    }
    Array weights(points, 1.0 / static_cast<double>(points));
    Fit best{{}, Array(points, std::numeric_limits<double>::infinity())};
    for (int round = 0; round < kReweightings; ++round) {
        const auto sums = [&](const Array &a, const Array &b) {
            return sums_of(segment, count, weights, a, b);
        };
        const Array ll = sums(left, left), lr = sums(left, right), rr = sums(right, right);
        const Array ly = sums(left, rest), ry = sums(right, rest), bb = sums(bubble, bubble);
        const Array bl = sums(bubble, left), br = sums(bubble, right), by = sums(bubble, rest);
        Array inverse(count), diagonal(count + 1, 0.0), beside(count), target(count + 1, 0.0);
        for (size_t i = 0; i < count; ++i) {
            inverse[i] = bb[i] > 1e-200 ? 1.0 / bb[i] : 0.0;
            diagonal[i] = ll[i] - bl[i] * bl[i] * inverse[i];
            target[i] = ly[i] - bl[i] * by[i] * inverse[i];
        }
        for (size_t i = 0; i < count; ++i) {
            diagonal[i + 1] += rr[i] - br[i] * br[i] * inverse[i];
            target[i + 1] += ry[i] - br[i] * by[i] * inverse[i];
            beside[i] = lr[i] - bl[i] * br[i] * inverse[i];
        }
        double total = 0;
        for (double value : diagonal) total += value;
        const double lift = 1e-12 * (total / static_cast<double>(count + 1));
        for (double &value : diagonal) value += lift;
        const Array added = solved(diagonal, beside, target);
        Array bubbles(count), error(points);
        for (size_t i = 0; i < count; ++i)
            bubbles[i] = (by[i] - bl[i] * added[i] - br[i] * added[i + 1]) * inverse[i];
        for (size_t i = 0; i < points; ++i) {
            const size_t s = segment[i];
            error[i] = std::fabs(left[i] * added[s] + right[i] * added[s + 1] +
                                 bubble[i] * bubbles[s] - rest[i]);
        }
        if (largest(error) < largest(best.error)) {
            best.values.clear();
            for (size_t i = 0; i <= count; ++i) best.values.push_back(at_knots[i] + added[i]);
            if (degree == 2) best.values.insert(best.values.end(), bubbles.begin(), bubbles.end());
            best.error = error;
        }
        const double least = 1e-3 * largest(error);
        double sum = 0;
        for (size_t i = 0; i < points; ++i) {
            weights[i] = weights[i] * (error[i] + least + 1e-300);
            sum += weights[i];
        }
        for (double &weight : weights) weight /= sum;
    }
    return best;
}

// Moves the knots so that segments with larger errors become shorter.
Array equalized(const Array &knots, const Array &grid, const Array &error, int degree) {
    const std::vector<size_t> segment = segments_of(knots, grid);
    Array worst(knots.size() - 1, 0.0), mass = {0.0};
    for (size_t i = 0; i < grid.size(); ++i)
        worst[segment[i]] = std::max(worst[segment[i]], error[i]);
    const double most = std::max(largest(worst), 1e-300);
    double sum = 0;
    for (double value : worst)
        mass.push_back(sum += std::sqrt(root_of(value / most + 1e-3, degree)));
    Array moved = interpolated(linspace(0.0, mass.back(), knots.size()), mass, knots);
    moved.front() = knots.front();
    moved.back() = knots.back();
    for (double &knot : moved) knot = std::rint(knot);
    return distinct(moved);
}

Spline coefficients(const Array &values, const Array &knots, int degree) {
    Spline found;
    const size_t count = knots.size() - 1;
    for (size_t i = 0; i < count; ++i) {
        const double T = knots[i + 1] - knots[i], slope = (values[i + 1] - values[i]) / T;
        found.starts.push_back(static_cast<int64_t>(knots[i]));
        found.coefficients.push_back(values[i]);
        if (degree == 1) {
            found.coefficients.push_back(slope);
            continue;
        }
        const double bubble = values[count + 1 + i];
        found.coefficients.push_back(slope + bubble / T);
        found.coefficients.push_back(-bubble / (T * T));
    }
    return found;
}

}  // namespace

Spline fit_spline(const CodeFunction &f, int64_t first, int64_t last, int segments, int degree) {
    if (last == first) {
        Spline constant{{first}, Array(static_cast<size_t>(degree) + 1, 0.0)};
        constant.coefficients[0] = f(static_cast<double>(first));
        return constant;
    }
    const double begin = static_cast<double>(first), end = static_cast<double>(last);
    const size_t points = std::max(kFewestPoints, kPoints * static_cast<size_t>(segments));
    // half of the points are evenly spaced, half follow the curvature
    Array grid = linspace(begin, end, points);
    const Array bends = by_curvature(f, begin, end, points, degree);
    grid.insert(grid.end(), bends.begin(), bends.end());
    for (double &point : grid) point = std::rint(point);
    std::sort(grid.begin(), grid.end());
    grid.erase(std::unique(grid.begin(), grid.end()), grid.end());
    const auto values_at = [&f](const Array &places) {
        Array found;
        for (double place : places) found.push_back(f(place));
        return found;
    };
    const Array y = values_at(grid);
    const auto most = static_cast<size_t>(std::min<int64_t>(segments, last - first));
    Array knots = distinct(by_curvature(f, begin, end, most, degree)), best_knots = knots, best;
    double best_error = std::numeric_limits<double>::infinity();
    for (int i = 0; i < kPlacements; ++i) {
        const Fit fit = fit_values(grid, y, knots, values_at(knots), degree);
        if (largest(fit.error) < best_error) {
            best = fit.values;
            best_knots = knots;
            best_error = largest(fit.error);
        }
        knots = equalized(knots, grid, fit.error, degree);
    }
    return coefficients(best, best_knots, degree);
}

}  // namespace quant_gru
