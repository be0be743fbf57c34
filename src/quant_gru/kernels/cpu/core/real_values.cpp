#include "cpu/core/real_values.hpp"

#include <algorithm>
#include <cstring>

namespace quant_gru {
namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// A value of 16 bits. Its own type for each dtype selects the conversion.
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};

float real(float value) { return value; }
float real(double value) { return static_cast<float>(value); }
float real(Brain value) { return float_of(uint32_t{value.bits} << 16); }

// Subnormal numbers are multiples of 2^-24.
float real(Half value) {
    const uint32_t all = value.bits & 0x7fffu, exponent = all & 0x7c00u;
    const uint32_t normal = (all << 13) + (112u << 23);
    const uint32_t special = (all << 13) | kInfinity;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(all)) * 0x1p-24f);
    const uint32_t found = exponent == 0 ? subnormal : exponent == 0x7c00u ? special : normal;
    return float_of(found | (value.bits & 0x8000u) << 16);
}

void put(float value, float &to) { to = value; }
void put(float value, double &to) { to = value; }

void put(float value, Brain &to) {
    const uint32_t bits = bits_of(value), odd = bits >> 16 & 1;
    to.bits = static_cast<uint16_t>(value != value ? 0x7fc0u : (bits + 0x7fffu + odd) >> 16);
}

void put(float value, Half &to) {
    const uint32_t bits = bits_of(value), all = bits & 0x7fffffffu, odd = all >> 13 & 1;
    uint32_t found = (all + 0xfffu + odd - (112u << 23)) >> 13;
    // The sum has units of 2^-24 below 1.
    if (all < 0x38800000u) found = bits_of(float_of(all) + 0.5f) - bits_of(0.5f);
    if (all >= 0x477ff000u) found = all > kInfinity ? 0x7e00u : 0x7c00u;
    to.bits = static_cast<uint16_t>(found | (bits >> 16 & 0x8000u));
}

// Calls f with a pointer to values of the dtype.
template <class F>
void typed(const RealValues &values, F f) {
    switch (values.kind) {
        case Real::float32:
            return f(static_cast<float *>(values.data));
        case Real::float16:
            return f(static_cast<Half *>(values.data));
        case Real::bfloat16:
            return f(static_cast<Brain *>(values.data));
        default:
            return f(static_cast<double *>(values.data));
    }
}

// Rows of a step.
int64_t rows_of(const RealValues &values, int64_t step, int64_t N) {
    return values.starts ? values.starts[step + 1] - values.starts[step] : N;
}

int64_t place(const RealValues &values, int64_t step, int64_t row) {
    return values.starts ? (values.starts[step] + row) * values.row
                         : step * values.step + row * values.row;
}

size_t floats(int64_t T, int64_t N, int64_t n) {
    return static_cast<size_t>(T * N * n) * sizeof(float);
}

}  // namespace

void read(const RealValues &from, int64_t T, int64_t N, int64_t n, float *to) {
    typed(from, [&](const auto *values) {
        for (int64_t t = 0; t < T; ++t, to += N * n) {
            const int64_t rows = rows_of(from, t, N);
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t original = from.order ? from.order[row] : row;
                const auto *at = values + place(from, t, original);
                float *own = to + row * n;
                if (from.feature == 1)
                    for (int64_t i = 0; i < n; ++i) own[i] = real(at[i]);
                else
                    for (int64_t i = 0; i < n; ++i) own[i] = real(at[i * from.feature]);
            }
            std::fill(to + rows * n, to + N * n, 0.f);
        }
    });
}

void write(const float *from, int64_t T, int64_t N, int64_t n, const RealValues &to) {
    typed(to, [&](auto *values) {
        for (int64_t t = 0; t < T; ++t, from += N * n) {
            const int64_t rows = rows_of(to, t, N);
            for (int64_t row = 0; row < rows; ++row) {
                const float *own = from + (to.order ? to.order[row] : row) * n;
                auto *at = values + place(to, t, row);
                for (int64_t i = 0; i < n; ++i) put(own[i], at[i * to.feature]);
            }
        }
    });
}

Readable::Readable(const RealValues &from, int64_t T, int64_t N, int64_t n, bool contiguous)
    : data(static_cast<const float *>(from.data)), step(from.step), row(from.row) {
    if (!data || (contiguous ? from.is_contiguous(N, n) : from.is_plain())) return;
    own_ = std::make_unique<Aligned>(floats(T, N, n));
    read(from, T, N, n, static_cast<float *>(own_->data));
    data = static_cast<const float *>(own_->data);
    step = N * n;
    row = n;
}

Writable::Writable(const RealValues &to, int64_t T, int64_t N, int64_t n)
    : data(static_cast<float *>(to.data)), to_(to), T_(T), N_(N), n_(n) {
    if (!data || to.is_contiguous(N, n)) return;
    own_ = std::make_unique<Aligned>(floats(T, N, n));
    data = static_cast<float *>(own_->data);
}

void Writable::finish() const {
    if (own_) write(data, T_, N_, n_, to_);
}

}  // namespace quant_gru
