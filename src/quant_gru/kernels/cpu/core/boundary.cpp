#include "cpu/core/boundary.hpp"

namespace quant_gru {
namespace {

constexpr float kRound = 12582912.f;              // 1.5 * 2^23: adding it rounds half-even
constexpr double kRoundWide = 6755399441055744.;  // 1.5 * 2^52

template <class T>
inline T limited(T v, T lo, T hi) {
    v = v < lo ? lo : v;
    return v > hi ? hi : v;
}

// Calls f with a pointer to integers of the container's type.
template <class F>
void typed(Container container, void *data, F f) {
    switch (container) {
        case Container::i8:
            return f(static_cast<int8_t *>(data));
        case Container::u8:
            return f(static_cast<uint8_t *>(data));
        case Container::i16:
            return f(static_cast<int16_t *>(data));
        case Container::i32:
            return f(static_cast<int32_t *>(data));
        default:
            return f(static_cast<int64_t *>(data));
    }
}

template <class F>
void typed(Container container, const void *data, F f) {
    typed(container, const_cast<void *>(data), [&](auto *values) {
        const auto *unchanged = values;
        f(unchanged);
    });
}

// A real value of less than 2^22, rounded by a rule. Cutting off leaves an exact rest.
template <int kRule>
inline float rounded_real(float y) {
    if (kRule == QG_HALF_EVEN) return (y + kRound) - kRound;
    const float whole = static_cast<float>(static_cast<int32_t>(y)), rest = y - whole;
    if (kRule == QG_FLOOR) return whole - (rest < 0 ? 1.f : 0.f);
    const bool down = kRule == QG_HALF_AWAY ? rest <= -0.5f : rest < -0.5f;
    return whole + (rest >= 0.5f ? 1.f : 0.f) - (down ? 1.f : 0.f);
}

// Calls f with a function that rounds by a rule for real values.
template <class F>
auto by_rule(int rule, F f) {
    switch (rule) {
        case QG_HALF_AWAY:
            return f([](float y) { return rounded_real<QG_HALF_AWAY>(y); });
        case QG_HALF_UP:
            return f([](float y) { return rounded_real<QG_HALF_UP>(y); });
        case QG_FLOOR:
            return f([](float y) { return rounded_real<QG_FLOOR>(y); });
        default:
            return f([](float y) { return rounded_real<QG_HALF_EVEN>(y); });
    }
}

// Clamping before rounding gives the same codes, because the limits are integers.
template <class To>
bool quantize_row(const float *x, int64_t n, const Quantizer &b, To *to) {
    const float s = b.scale, lo = static_cast<float>(b.lo), hi = static_cast<float>(b.hi);
    const int32_t zero = b.zero;
    return by_rule(b.rule, [=](auto round) {
        int nan = 0;
        for (int64_t i = 0; i < n; ++i) {
            const float y = x[i] / s;
            nan |= y != y;
            const float inside = y != y ? 0.f : limited(y, lo, hi);
            to[i] = static_cast<To>(static_cast<int32_t>(round(inside)) + zero);
        }
        return nan != 0;
    });
}

void mask_row(const float *x, int64_t n, const Quantizer &b, float *grad) {
    const float s = b.scale, lo = static_cast<float>(b.lo), hi = static_cast<float>(b.hi);
    by_rule(b.rule, [=](auto round) {
        for (int64_t i = 0; i < n; ++i) {
            // Clamped to one beyond the limits, so that every rule rounds. NaN is not inside.
            const float v = limited(x[i] / s, lo - 1, hi + 1), y = v != v ? lo - 1 : round(v);
            // A multiplication keeps a gradient that is NaN; a selection would not.
            const float above = y >= lo ? 1.f : 0.f, below = y <= hi ? 1.f : 0.f;
            grad[i] *= above * below;
        }
    });
}

inline double rounded(const Requantizer &r, int32_t from_zero, int32_t code, double lo, double hi) {
    const double v = limited(static_cast<double>(code - from_zero) * r.m, lo, hi);
    return (v + (v < 0 ? r.below : r.above) + kRoundWide) - kRoundWide;
}

// `r` is passed by value and stays in registers: byte stores may alias a reference.
template <class From, class To>
void requantize_row(Requantizer r, const From *from, int64_t n, To *to) {
    const auto from_zero = static_cast<int32_t>(r.from_zero);
    const auto to_zero = static_cast<int32_t>(r.to_zero);
    for (int64_t i = 0; i < n; ++i) {
        const double v = rounded(r, from_zero, static_cast<int32_t>(from[i]), r.lo, r.hi);
        to[i] = static_cast<To>(static_cast<int32_t>(v) + to_zero);
    }
}

// codes have up to 32 bits and multipliers 24
inline int64_t in_integers(const Requantizer &r, int64_t code) {
    return qg_round_by((code - r.from_zero) * r.M, r.k, r.rule, 24);
}

template <class From, class To>
void requantize_wide_row(Requantizer r, const From *from, int64_t n, To *to) {
    const auto lo = static_cast<int64_t>(r.lo), hi = static_cast<int64_t>(r.hi);
    for (int64_t i = 0; i < n; ++i) {
        to[i] = static_cast<To>(qg_clamp(in_integers(r, from[i]), lo, hi) + r.to_zero);
    }
}

}  // namespace

void quantize_input(const RealInput &x, const Quantizer &b, void *codes, uint8_t *nan) {
    typed(b.container, codes, [&](auto *to) {
        for (int64_t step = 0; step < x.T; ++step)
            for (int64_t row = 0; row < x.N; ++row, to += x.C)
                *nan++ = quantize_row(x.values + step * x.step + row * x.row, x.C, b, to);
    });
}

void mask_input(const RealInput &x, const Quantizer &b, float *grad) {
    for (int64_t step = 0; step < x.T; ++step)
        for (int64_t row = 0; row < x.N; ++row, grad += x.C)
            mask_row(x.values + step * x.step + row * x.row, x.C, b, grad);
}

void requantize(const Requantizer &r, const void *codes, int64_t count, int64_t n, void *to,
                int64_t to_row) {
    typed(r.from, codes, [&](const auto *from) {
        typed(r.to, to, [&](auto *out) {
            for (int64_t row = 0; row < count; ++row) {
                if (r.narrow)
                    requantize_row(r, from + row * n, n, out + row * to_row);
                else
                    requantize_wide_row(r, from + row * n, n, out + row * to_row);
            }
        });
    });
}

void mask_requantized(const Requantizer &r, const void *codes, int64_t count, int64_t n,
                      float *grad, int64_t grad_row) {
    const auto from_zero = static_cast<int32_t>(r.from_zero);
    typed(r.from, codes, [&](const auto *from) {
        for (int64_t row = 0; row < count; ++row, from += n, grad += grad_row)
            for (int64_t i = 0; i < n; ++i) {
                const auto code = static_cast<int32_t>(from[i]);
                const double v = r.narrow ? rounded(r, from_zero, code, r.lo - 1, r.hi + 1)
                                          : static_cast<double>(in_integers(r, from[i]));
                grad[i] *= v >= r.lo && v <= r.hi ? 1.f : 0.f;
            }
    });
}

}  // namespace quant_gru
