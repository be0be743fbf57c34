// Rows of codes and real values, in and out of the kernels. Included inside the namespace of an
// instruction set.

constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, half-even

template <class T>
inline T limit(T v, T lo, T hi) {
    v = v < lo ? lo : v;
    return v > hi ? hi : v;
}

// clamp(rint(x / s), lo, hi), zero-point-free: a float32 division, ties to even.
inline bool quantize(const Border &b, const float *x, int n, int32_t *out) {
    const float s = b.scale, inverse = b.reciprocal;
    const float lo = static_cast<float>(b.lo), hi = static_cast<float>(b.hi);
    int nan = 0;
    // clamping first is the same, for the limits are integers; NaN becomes 0
    if (inverse != 0) {
        for (int i = 0; i < n; ++i) {
            const float y = x[i] * inverse;
            nan |= y != y;
            const float inside = y != y ? 0.f : limit(y, lo, hi);
            out[i] = static_cast<int32_t>((inside + kRound) - kRound);
        }
    } else {
        for (int i = 0; i < n; ++i) {
            const float y = x[i] / s;
            nan |= y != y;
            const float inside = y != y ? 0.f : limit(y, lo, hi);
            out[i] = static_cast<int32_t>((inside + kRound) - kRound);
        }
    }
    return nan != 0;
}

template <class From>
inline void read_codes(const From *x, int n, int32_t zero, int32_t *out) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<int32_t>(x[i]) - zero;
}

// Zero-point-free codes of n values at `start`; returns whether one was NaN.
inline bool read_row(const Source &from, const Border &b, int64_t start, int n, int32_t *out) {
    if (!from.data) {
        for (int i = 0; i < n; ++i) out[i] = 0;
        return false;
    }
    if (from.real) return quantize(b, static_cast<const float *>(from.data) + start, n, out);
    switch (b.container) {
        case Container::i8:
            read_codes(static_cast<const int8_t *>(from.data) + start, n, b.zero, out);
            break;
        case Container::u8:
            read_codes(static_cast<const uint8_t *>(from.data) + start, n, b.zero, out);
            break;
        case Container::i16:
            read_codes(static_cast<const int16_t *>(from.data) + start, n, b.zero, out);
            break;
        default:
            read_codes(static_cast<const int32_t *>(from.data) + start, n, b.zero, out);
            break;
    }
    return false;
}

template <class To, class Real>
inline void write_codes(To *out, const Real *v, int n, int32_t zero) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<To>(static_cast<int32_t>(v[i]) + zero);
}

// Writes n zero-point-free codes as codes, real values or both.
template <class Real>
inline void write_row(const Sink &to, const Border &b, int64_t step, int64_t row, const Real *v,
                      int n) {
    if (to.codes) {
        const int64_t start = step * to.codes_step + row * to.codes_row;
        switch (b.container) {
            case Container::i8:
                write_codes(static_cast<int8_t *>(to.codes) + start, v, n, b.zero);
                break;
            case Container::u8:
                write_codes(static_cast<uint8_t *>(to.codes) + start, v, n, b.zero);
                break;
            case Container::i16:
                write_codes(static_cast<int16_t *>(to.codes) + start, v, n, b.zero);
                break;
            default:
                write_codes(static_cast<int32_t *>(to.codes) + start, v, n, b.zero);
                break;
        }
    }
    if (to.real) {
        float *real = to.real + step * to.real_step + row * to.real_row;
        for (int i = 0; i < n; ++i) real[i] = b.scale * static_cast<float>(v[i]);
    }
}
