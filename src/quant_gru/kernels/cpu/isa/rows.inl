// Reads and writes rows of codes and real values. Included inside the namespace of an instruction
// set.

constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer, half-even
constexpr int32_t kRoundBits = 0x4b400000;

template <class T>
inline T limit(T v, T lo, T hi) {
    v = v < lo ? lo : v;
    return v > hi ? hi : v;
}

// The code of a scaled real value by a rule. Clamping before rounding gives the same codes: the
// limits are integers. Cutting off leaves an exact rest. There are no branches, so that compilers
// vectorize loops.
template <int kRule>
inline int32_t real_code(float y, float lo, float hi) {
    y = y > lo ? y : lo;  // NaN becomes lo
    y = y < hi ? y : hi;
    if (kRule == QG_HALF_EVEN) return static_cast<int32_t>((y + kRound) - kRound);
    const int32_t whole = static_cast<int32_t>(y);
    const float rest = y - static_cast<float>(whole);
    if (kRule == QG_FLOOR) return whole - (rest < 0);
    const int down = kRule == QG_HALF_AWAY ? rest <= -0.5f : rest < -0.5f;
    return whole + (rest >= 0.5f) - down;
}

// clamp(round(x / s), lo, hi), zero-point-free: a float32 division. NaN becomes 0.
template <int kRule>
inline bool quantize_by(const Quantizer &b, const float *x, int n, int32_t *out) {
    const float s = b.scale, inverse = b.reciprocal;
    const float lo = static_cast<float>(b.lo), hi = static_cast<float>(b.hi);
    int nan = 0;
    if (inverse != 0) {
        for (int i = 0; i < n; ++i) {
            const float y = x[i] * inverse;
            const int bad = y != y;
            nan |= bad;
            out[i] = real_code<kRule>(y, lo, hi) & (bad - 1);
        }
    } else {
        for (int i = 0; i < n; ++i) {
            const float y = x[i] / s;
            const int bad = y != y;
            nan |= bad;
            out[i] = real_code<kRule>(y, lo, hi) & (bad - 1);
        }
    }
    return nan != 0;
}

inline bool quantize(const Quantizer &b, const float *x, int n, int32_t *out) {
    switch (b.rule) {
        case QG_HALF_AWAY:
            return quantize_by<QG_HALF_AWAY>(b, x, n, out);
        case QG_HALF_UP:
            return quantize_by<QG_HALF_UP>(b, x, n, out);
        case QG_FLOOR:
            return quantize_by<QG_FLOOR>(b, x, n, out);
        default:
            return quantize_by<QG_HALF_EVEN>(b, x, n, out);
    }
}

template <class From>
inline void read_codes(const From *x, int n, int32_t zero, int32_t *out) {
    for (int i = 0; i < n; ++i) out[i] = static_cast<int32_t>(x[i]) - zero;
}

#if defined(QG_ROWS_AVX512)
// Real values within limits, rounded by the rule of a quantizer; with ties to even a conversion
// rounds them.
inline __m512 rounded_reals(const Quantizer &b, __m512 y) {
    if (__builtin_expect(b.rule == QG_HALF_EVEN, 1)) return y;
    constexpr int kDown = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    constexpr int kZero = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    if (b.rule == QG_FLOOR) return _mm512_roundscale_ps(y, kDown);
    const __m512 half = _mm512_set1_ps(0.5f);
    if (b.rule == QG_HALF_UP)
        return _mm512_roundscale_ps(_mm512_add_round_ps(y, half, kDown), kDown);
    const __m512 signed_half = _mm512_or_ps(_mm512_and_ps(y, _mm512_set1_ps(-0.f)), half);
    return _mm512_roundscale_ps(_mm512_add_round_ps(y, signed_half, kZero), kZero);
}

// x * reciprocal or x / scale, to the nearest in every direction of the processor.
inline __m512 scaled_reals(__m512 x, const Quantizer &b) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return b.reciprocal != 0 ? _mm512_mul_round_ps(x, _mm512_set1_ps(b.reciprocal), kNearest)
                             : _mm512_div_round_ps(x, _mm512_set1_ps(b.scale), kNearest);
}

// The codes of real values within limits; those of `bad` lanes are 0.
inline __m512i codes_of(const Quantizer &b, __m512 inside, __mmask16 bad) {
    return _mm512_maskz_cvt_roundps_epi32(static_cast<__mmask16>(~bad), rounded_reals(b, inside),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// `quantize` in whole vectors; the last vector is masked.
inline bool quantize_row(const Quantizer &given, const float *x, int n, int32_t *out) {
    const Quantizer b = given;  // stores might change `given`, for all the compiler knows
    const __m512 lo = _mm512_set1_ps(static_cast<float>(b.lo));
    const __m512 hi = _mm512_set1_ps(static_cast<float>(b.hi));
    unsigned nan = 0;
    for (int i = 0; i < n; i += 16) {
        const __mmask16 mask = static_cast<__mmask16>(n - i < 16 ? (1u << (n - i)) - 1 : 0xffff);
        const __m512 v = _mm512_maskz_loadu_ps(mask, x + i);
        const __m512 y = scaled_reals(v, b);
        const __mmask16 bad = _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q);
        nan |= bad;
        const __m512 inside = _mm512_min_ps(_mm512_max_ps(y, lo), hi);
        _mm512_mask_storeu_epi32(out + i, mask, codes_of(b, inside, bad));
    }
    return nan != 0;
}

// Rows are converted alike in every direction of the processor, so that one direction serves a
// call.
constexpr bool kRowsDirect = true;

inline __m512 load_codes(const float *v, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, v); }
inline __m512 load_codes(const double *v, __mmask16 mask) {
    const __mmask8 above = static_cast<__mmask8>(mask >> 8);
    const __m256 low = _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), v));
    const __m256 high = _mm512_cvtpd_ps(_mm512_maskz_loadu_pd(above, v + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// Gates may round to -0; adding zero gives the 0 that an integer gives.
template <class Real>
inline void dequantize_row(float scale, const Real *v, int n, float *out) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m512 s = _mm512_set1_ps(scale), zero = _mm512_setzero_ps();
    auto real = [&](__m512 code) QG_LAMBDA {
        return _mm512_add_round_ps(_mm512_mul_round_ps(s, code, kNearest), zero, kNearest);
    };
    int i = 0;
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, real(load_codes(v + i, 0xffff)));
    if (i == n) return;
    const __mmask16 mask = static_cast<__mmask16>((1u << (n - i)) - 1);
    _mm512_mask_storeu_ps(out + i, mask, real(load_codes(v + i, mask)));
}
#else
constexpr bool kRowsDirect = false;

inline bool quantize_row(const Quantizer &b, const float *x, int n, int32_t *out) {
    return quantize(b, x, n, out);
}

// Gates may round to -0; adding zero gives the 0 that an integer gives.
inline void dequantize_row(float scale, const float *v, int n, float *out) {
    for (int i = 0; i < n; ++i) out[i] = scale * v[i] + 0.f;
}

inline void dequantize_row(float scale, const double *v, int n, float *out) {
    for (int i = 0; i < n; ++i) out[i] = scale * static_cast<float>(v[i]) + 0.f;
}
#endif

// Reads n zero-point-free codes at `start`. Returns whether a value was NaN.
QG_ALONE bool read_row(const Source &from, const Quantizer &b, int64_t start, int n, int32_t *out) {
    if (!from.data) {
        for (int i = 0; i < n; ++i) out[i] = 0;
        return false;
    }
    if (from.real) return quantize_row(b, static_cast<const float *>(from.data) + start, n, out);
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
QG_ALONE void write_row(const Sink &to, const Quantizer &b, int64_t step, int64_t row,
                        const Real *v, int n) {
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
        dequantize_row(b.scale, v, n, to.real + step * to.real_step + row * to.real_row);
    }
}
