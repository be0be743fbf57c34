#include "cpu/calibration/effects.hpp"

#include <algorithm>
#include <cmath>

#include "cpu/core/clones.hpp"
#include "cpu/core/exponential.hpp"

namespace quant_gru {
namespace {

// Errors up to this much of a step's argument use two derivatives of its function; larger ones,
// above all of clipped values, use the function itself.
constexpr float kSmall = 0.125f;
// Clipping that costs nothing in calibration may cost much on other data: the effect counts again
// on values this much larger. If the range was not seen in these steps alone, they grow to it.
constexpr double kMargin = 1.12, kLargestMargin = 2;
// Codes so wide clip only arguments of sigmoid and tanh, and only where these are flat, so they
// need no margin. Of other ranges they may leave out the outermost.
constexpr double kWide = 1 << 14;
constexpr double kFlatSigmoid = 11, kFlatTanh = 6, kCovered = 31. / 32;
constexpr float kClipped = 2.f;
constexpr double kTie = 1e-9, kZeroTie = 0.02;
constexpr double kLeastScale = 0x1p-126, kMostScale = 0x1p127;
constexpr int kCoarser = 1, kFiner = 16, kPatience = 3;
constexpr int64_t kLanes = 16, kChunk = 512;

QG_BODY float sigmoid(float x) {
    const float e = exp_of_negative(x < 0 ? x : -x);
    return (x < 0 ? e : 1.f) / (1.f + e);
}

QG_BODY float hyperbolic_tangent(float x) {
    const float e = exp_of_negative(x < 0 ? 2 * x : -2 * x), y = (1.f - e) / (1.f + e);
    return x < 0 ? -y : y;
}

// How a value enters the state: through the update gate, the candidate, the reset gate and the
// candidate, or as a part of the state.
enum class Path { update, candidate, reset, state };

// A run of values of one operator with what the step makes of them.
struct Run {
    const float *value;
    const float *z_pre, *r_pre, *g_pre, *z, *r, *g, *Rh_g, *from_old, *from_new;
    const float *slope, *curvature, *reach;
    const float *factor;  // of the error on its way to g_pre, or null
};

struct Grid {
    float scale, lo, hi;  // limits less the zero point
};

template <Path path>
QG_BODY float exact_change(const Run &x, int64_t i, float d) {
    if constexpr (path == Path::update) return (sigmoid(x.z_pre[i] + d) - x.z[i]) * x.from_old[i];
    if constexpr (path == Path::candidate)
        return (hyperbolic_tangent(x.g_pre[i] + d) - x.g[i]) * x.from_new[i];
    if constexpr (path == Path::reset) {
        const float moved = (sigmoid(x.r_pre[i] + d) - x.r[i]) * x.Rh_g[i];
        return (hyperbolic_tangent(x.g_pre[i] + moved) - x.g[i]) * x.from_new[i];
    }
    return d;
}

// Writes the change of the state by rounding each value to the grid.
template <Path path, bool has_factor>
QG_BODY void changes(const Run &x, int64_t count, const Grid &q, float *change) {
    constexpr float rounder = 12582912.f;
    float error[kChunk], weight[kChunk];
    int large = 0;
    QG_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
        const float wanted = x.value[i] / q.scale;
        float y = wanted < q.lo ? q.lo : wanted;
        y = y > q.hi ? q.hi : y;
        const float rounded = (y + rounder) - rounder;
        float d = rounded * q.scale - x.value[i];
        if (path == Path::state)
            weight[i] = rounded - wanted > 2 || rounded - wanted < -2 ? kClipped : 1.f;
        if (has_factor) d *= x.factor[i];
        error[i] = d;
        if (path == Path::state) {
            change[i] = d * weight[i];
        } else {
            change[i] = d * (x.slope[i] + d * x.curvature[i]);
            const float size = (d < 0 ? -d : d) * (path == Path::reset ? x.reach[i] : 1.f);
            large |= size > kSmall;
        }
    }
    if (path == Path::state || !large) return;
    QG_INDEPENDENT
    for (int64_t i = 0; i < count; ++i) {
        const float d = error[i], exact = exact_change<path>(x, i, d);
        const float size = (d < 0 ? -d : d) * (path == Path::reset ? x.reach[i] : 1.f);
        change[i] = size > kSmall ? exact : change[i];
    }
}

#define QG_CHANGES(name, path, has_factor)                                           \
    QG_CLONES void name(const Run &x, int64_t count, const Grid &q, float *change) { \
        changes<path, has_factor>(x, count, q, change);                              \
    }
QG_CHANGES(changes_of_update, Path::update, false)
QG_CHANGES(changes_of_candidate, Path::candidate, false)
QG_CHANGES(changes_of_product, Path::candidate, true)
QG_CHANGES(changes_of_reset, Path::reset, false)
QG_CHANGES(changes_of_state, Path::state, false)
#undef QG_CHANGES

// A row of steps, with where its values go; see Effects::Values.
struct Row {
    int64_t H;
    float factor;
    const float *all_Wx, *all_Rh, *before;
    float *Wx[3], *Rh[3], *slope[3], *curvature[3];
    float *z_pre, *r_pre, *g_pre, *z, *r, *g, *rRh, *old, *fresh, *h, *reach, *from_old, *from_new;
};

QG_CLONES void evaluate(const Row &v) {
    const int64_t H = v.H;
    QG_INDEPENDENT
    for (int64_t j = 0; j < H; ++j) {
        const float Wx_z = v.factor * v.all_Wx[H + j], Rh_z = v.factor * v.all_Rh[H + j];
        const float Wx_r = v.factor * v.all_Wx[j], Rh_r = v.factor * v.all_Rh[j];
        const float Wx_g = v.factor * v.all_Wx[2 * H + j], Rh_g = v.factor * v.all_Rh[2 * H + j];
        const float before = v.before[j], z_pre = Wx_z + Rh_z, r_pre = Wx_r + Rh_r;
        const float z = sigmoid(z_pre), r = sigmoid(r_pre), rRh = r * Rh_g, g_pre = Wx_g + rRh;
        const float g = hyperbolic_tangent(g_pre), from_old = before - g, from_new = 1 - z;
        v.Wx[0][j] = Wx_z;
        v.Wx[1][j] = Wx_r;
        v.Wx[2][j] = Wx_g;
        v.Rh[0][j] = Rh_z;
        v.Rh[1][j] = Rh_r;
        v.Rh[2][j] = Rh_g;
        v.z_pre[j] = z_pre;
        v.r_pre[j] = r_pre;
        v.g_pre[j] = g_pre;
        v.z[j] = z;
        v.r[j] = r;
        v.g[j] = g;
        v.rRh[j] = rRh;
        v.from_old[j] = from_old;
        v.from_new[j] = from_new;
        const float old = z * before, fresh = from_new * g;
        v.old[j] = old;
        v.fresh[j] = fresh;
        v.h[j] = old + fresh;
        const float of_update = z * from_new * from_old;
        v.slope[0][j] = of_update;
        v.curvature[0][j] = of_update * (0.5f - z);
        const float of_candidate = (1 - g * g) * from_new;
        v.slope[2][j] = of_candidate;
        v.curvature[2][j] = -g * of_candidate;
        const float inner = r * (1 - r) * Rh_g;
        v.slope[1][j] = of_candidate * inner;
        v.curvature[1][j] = of_candidate * (inner * (0.5f - r) - g * inner * inner);
        const float size = Rh_g < 0 ? -Rh_g : Rh_g;
        v.reach[j] = size > 1.f ? size : 1.f;
    }
}

using Changes = void (*)(const Run &, int64_t, const Grid &, float *);

// The errors of the states after a step; returns the sum of their squares, in lanes whose order
// does not depend on the processor.
QG_CLONES double add_errors(const float *z, const float *change, int64_t count, float *error) {
    float lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes)
        for (int64_t j = 0; j < kLanes; ++j) {
            const float e = z[i + j] * error[i + j] + change[i + j];
            error[i + j] = e;
            lanes[j] += e * e;
        }
    double total = 0;
    for (; i < count; ++i) {
        error[i] = z[i] * error[i] + change[i];
        total += static_cast<double>(error[i]) * static_cast<double>(error[i]);
    }
    for (float lane : lanes) total += static_cast<double>(lane);
    return total;
}

std::vector<float> sized(int64_t count) { return std::vector<float>(static_cast<size_t>(count)); }

double rounded_quotient(double v, double s) {
    return std::rint(static_cast<double>(static_cast<float>(v) / static_cast<float>(s)));
}

// Zero points of a scale, the preferred ones first: those that center the range or fit an end, and
// even positions. If none covers the range, the middle of the codes comes first: sigmoid and tanh
// are symmetric, and nothing is known of the side on which other data exceed these.
std::vector<double> zero_points(const Codes &c, double scale) {
    if (c.symmetric) return {0};
    const double first = rounded_quotient(c.low, scale), last = rounded_quotient(c.high, scale);
    const double fit_low = c.lo - first, fit_high = c.hi - last;
    const double center = std::rint((c.lo + c.hi) / 2 - (c.low + c.high) / (2 * scale));
    std::vector<double> wanted = {center, fit_low, fit_high};
    if (c.high == 0) wanted = {fit_high, fit_low, center};
    if (c.low == 0) wanted = {fit_low, fit_high, center};
    for (int k : {4, 0, 1, 2, 3, 5, 6, 7, 8})
        wanted.push_back(c.lo + std::rint((c.hi - c.lo + 1) * k / 8));
    if (last - first > c.hi - c.lo)
        std::rotate(wanted.begin(), wanted.begin() + 3, wanted.begin() + 4);
    std::vector<double> found;
    for (double each : wanted) {
        each = std::min(c.hi, std::max(c.lo, each));
        if (std::find(found.begin(), found.end(), each) == found.end()) found.push_back(each);
    }
    return found;
}

}  // namespace

Effects::Effects(const PackedSteps &steps) : steps_(steps) {
    for (int64_t size : steps.batch_sizes) {
        offsets_.push_back(rows_);
        rows_ += size;
    }
}

const Effects::Values &Effects::values(double stretch) {
    // the float values stay; of the others, only the last ones
    Values &v = values_[stretch == 1 ? 0 : 1];
    if (v.stretch == stretch) return v;
    v.stretch = stretch;
    const int64_t H = steps_.H, count = rows_ * H;
    for (auto *each : {&v.z_pre, &v.r_pre, &v.g_pre, &v.z, &v.r, &v.g, &v.rRh, &v.old, &v.fresh,
                       &v.h, &v.reach, &v.from_old, &v.from_new})
        *each = sized(count);
    for (int i = 0; i < 3; ++i)
        for (auto *each : {&v.Wx[i], &v.Rh[i], &v.slope[i], &v.curvature[i]}) *each = sized(count);
    const auto factor = static_cast<float>(stretch);
    for (int64_t row = 0; row < rows_; ++row) {
        const auto at = static_cast<size_t>(row * H);
        const auto three = [at](std::vector<float>(&of)[3], int i) { return of[i].data() + at; };
        evaluate({H,
                  factor,
                  steps_.Wx + row * 3 * H,
                  steps_.Rh + row * 3 * H,
                  steps_.before + at,
                  {three(v.Wx, 0), three(v.Wx, 1), three(v.Wx, 2)},
                  {three(v.Rh, 0), three(v.Rh, 1), three(v.Rh, 2)},
                  {three(v.slope, 0), three(v.slope, 1), three(v.slope, 2)},
                  {three(v.curvature, 0), three(v.curvature, 1), three(v.curvature, 2)},
                  v.z_pre.data() + at,
                  v.r_pre.data() + at,
                  v.g_pre.data() + at,
                  v.z.data() + at,
                  v.r.data() + at,
                  v.g.data() + at,
                  v.rRh.data() + at,
                  v.old.data() + at,
                  v.fresh.data() + at,
                  v.h.data() + at,
                  v.reach.data() + at,
                  v.from_old.data() + at,
                  v.from_new.data() + at});
    }
    return v;
}

double Effects::sum(const Values &v, Quantized op, const Codes &codes, double scale,
                    double zero_point, double limit) {
    struct Part {
        const std::vector<float> *value;
        Changes changes;
        int gate;
        const std::vector<float> *factor;
    };
    std::vector<Part> parts;
    switch (op) {
        case Quantized::Wx:
            parts = {{&v.Wx[0], changes_of_update, 0, nullptr},
                     {&v.Wx[1], changes_of_reset, 1, nullptr},
                     {&v.Wx[2], changes_of_candidate, 2, nullptr}};
            break;
        case Quantized::Rh:
            parts = {{&v.Rh[0], changes_of_update, 0, nullptr},
                     {&v.Rh[1], changes_of_reset, 1, nullptr},
                     {&v.Rh[2], changes_of_product, 2, &v.r}};
            break;
        case Quantized::z_pre:
            parts = {{&v.z_pre, changes_of_update, 0, nullptr}};
            break;
        case Quantized::r_pre:
            parts = {{&v.r_pre, changes_of_reset, 1, nullptr}};
            break;
        case Quantized::g_pre:
            parts = {{&v.g_pre, changes_of_candidate, 2, nullptr}};
            break;
        case Quantized::rRh:
            parts = {{&v.rRh, changes_of_candidate, 2, nullptr}};
            break;
        case Quantized::old_contrib:
            parts = {{&v.old, changes_of_state, 0, nullptr}};
            break;
        case Quantized::new_contrib:
            parts = {{&v.fresh, changes_of_state, 0, nullptr}};
            break;
        case Quantized::h:
            parts = {{&v.h, changes_of_state, 0, nullptr}};
            break;
    }
    const Grid grid{static_cast<float>(scale), static_cast<float>(codes.lo - zero_point),
                    static_cast<float>(codes.hi - zero_point)};
    const auto T = static_cast<int64_t>(steps_.batch_sizes.size());
    double total = 0;
    float change[kChunk];
    for (const Part &part : parts) {
        const auto gate = static_cast<size_t>(part.gate);
        error_.assign(static_cast<size_t>(T ? steps_.batch_sizes[0] * steps_.H : 0), 0.f);
        for (int64_t i = 0; i < T; ++i) {
            const auto t = static_cast<size_t>(steps_.reverse ? T - 1 - i : i);
            const int64_t first = offsets_[t] * steps_.H, count = steps_.batch_sizes[t] * steps_.H;
            for (int64_t begin = 0; begin < count; begin += kChunk) {
                const int64_t size = std::min(kChunk, count - begin), at = first + begin;
                const Run run{
                    part.value->data() + at,   v.z_pre.data() + at,
                    v.r_pre.data() + at,       v.g_pre.data() + at,
                    v.z.data() + at,           v.r.data() + at,
                    v.g.data() + at,           v.Rh[2].data() + at,
                    v.from_old.data() + at,    v.from_new.data() + at,
                    v.slope[gate].data() + at, v.curvature[gate].data() + at,
                    v.reach.data() + at,       part.factor ? part.factor->data() + at : nullptr};
                part.changes(run, size, grid, change);
                total += add_errors(v.z.data() + at, change, size, error_.data() + begin);
            }
            if (total > limit) return total;
        }
    }
    return total;
}

double Effects::effect(Quantized op, const Codes &codes, double scale, double zero_point,
                       double stretch) {
    return sum(values(stretch), op, codes, scale, zero_point, INFINITY);
}

Choice Effects::choose(Quantized op, const Codes &codes) {
    const Values &plain = values(1);
    // the range of the operator in these steps
    double low = 0, high = 0;
    const auto cover = [&](const std::vector<float> &found) {
        for (float each : found) {
            low = std::min(low, static_cast<double>(each));
            high = std::max(high, static_cast<double>(each));
        }
    };
    for (int i = 0; i < 3; ++i) {
        if (op == Quantized::Wx) cover(plain.Wx[i]);
        if (op == Quantized::Rh) cover(plain.Rh[i]);
    }
    if (op == Quantized::z_pre) cover(plain.z_pre);
    if (op == Quantized::r_pre) cover(plain.r_pre);
    if (op == Quantized::g_pre) cover(plain.g_pre);
    if (op == Quantized::rRh) cover(plain.rRh);
    double margin = kMargin;
    if (low < 0) margin = std::max(margin, codes.low / low);
    if (high > 0) margin = std::max(margin, codes.high / high);
    const Values &stretched = values(std::min(margin, kLargestMargin));

    double flat = 0;
    const bool is_wide = codes.hi - codes.lo > kWide;
    if (is_wide) {
        const bool is_sigmoid = op == Quantized::z_pre || op == Quantized::r_pre;
        flat = is_sigmoid ? kFlatSigmoid : op == Quantized::g_pre ? kFlatTanh : INFINITY;
    }
    const auto clips_too_much = [&](double scale, double zero) {
        const double first = (codes.lo - zero) * scale, last = (codes.hi - zero) * scale;
        return first > kCovered * std::max(codes.low, -flat) ||
               last < kCovered * std::min(codes.high, flat);
    };

    Choice best;
    double least = INFINITY;
    // Returns whether the scale is better than all before, with any zero point.
    const auto consider = [&](double scale) {
        scale = static_cast<double>(static_cast<float>(scale));
        if (scale < kLeastScale || scale > kMostScale) return false;
        bool better = false;
        double at_scale = INFINITY;
        for (double zero : zero_points(codes, scale)) {
            if (clips_too_much(scale, zero)) continue;
            const double limit = std::min(least * (1 - kTie), at_scale * (1 - kZeroTie));
            double found = sum(plain, op, codes, scale, zero, limit);
            if (found < limit && !is_wide)
                found += sum(stretched, op, codes, scale, zero, limit - found);
            if (found < limit) {
                least = at_scale = found;
                best = {true, scale, zero};
                better = true;
            }
        }
        return better;
    };
    consider(codes.covering);
    for (int k = 1; k <= kCoarser; ++k) consider(std::ldexp(codes.covering, k));
    int useless = 0;
    for (int k = 1; k <= kFiner && useless < kPatience && least > 0; ++k)
        useless = consider(std::ldexp(codes.covering, -k)) ? 0 : useless + 1;
    if (codes.free_scale)
        for (double step : {8., 64.}) {
            const double center = best.scale;
            for (int k = -8; k <= 8; ++k)
                if (k != 0) consider(center * std::pow(2., k / step));
        }
    best.found = best.found && least > 0;
    return best;
}

}  // namespace quant_gru
