// Operands of rows, and sums of products for blocks of rows and units, for the fused kernel.
// Included inside the namespace of an instruction set, which defines
//   kGroup, kDepth       the layout of its weights,
//   OperandByte          int16_t, uint8_t or int8_t,
//   kMaxRows<planes>, max_groups(rows, planes)
//                        maximum number of rows and groups of a call of `dot`,
//   kShared              Layout::shared,
//   dot<G, R, P, B>(..)  sums of G groups for R rows, bias included; weights take B bits,
//   kTileRows<planes>    maximum number of rows of a call of `dot_tiles<P>`; 0 without tiles,
//   kTileGroups          maximum number of groups of such a call,
//   dot_planes<P>(..)    if QG_PLANES_APART is defined: `dot_tiles` with separate sums for the two
//                        planes of operands.

template <int P, int R, int G>
inline void dot_groups(int groups, const Packed &p, int first, const OperandByte *a, int64_t stride,
                       int32_t *out) {
    if constexpr (G > 1) {
        if (groups < G) return dot_groups<P, R, G - 1>(groups, p, first, a, stride, out);
    }
    if constexpr (kShared > 0) {
        if (p.bits == 4) return dot<G, R, P, 4>(p, first, a, stride, out);
        if (p.bits == 2) return dot<G, R, P, 2>(p, first, a, stride, out);
        if (p.bits == 1) return dot<G, R, P, 1>(p, first, a, stride, out);
    }
    dot<G, R, P, 8>(p, first, a, stride, out);
}

template <int P>
inline void dot_tiles(int rows, int groups, const Packed &p, int first, const OperandByte *a,
                      int64_t stride, int32_t *out);
template <int P>
inline void dot_planes(int rows, int groups, const Packed &p, int first, const OperandByte *a,
                       int64_t stride, int32_t *low, int32_t *high);

// Whether so many rows and groups use `dot_tiles`.
template <int P>
inline bool takes_tiles(int rows, int groups) {
    return kTileRows<P> > 0 && (rows > kMaxRows<P> || groups > max_groups(rows, P));
}

// Computes the sums of `groups` groups for `rows` rows: out[row][group][gate][unit].
template <int P, int R = kMaxRows<P>>
inline void dot_block(int rows, int groups, const Packed &p, int first, const OperandByte *a,
                      int64_t stride, int32_t *out) {
    if constexpr (R == kMaxRows<P> && kTileRows<P> > 0) {
        if (takes_tiles<P>(rows, groups))
            return dot_tiles<P>(rows, groups, p, first, a, stride, out);
    }
    if constexpr (R > 1) {
        if (rows < R) return dot_block<P, R - 1>(rows, groups, p, first, a, stride, out);
    }
    dot_groups<P, R, max_groups(R, P)>(groups, p, first, a, stride, out);
}

// Maximum number of rows of `dot_block`, and of groups for a number of rows.
template <int P>
constexpr int kBlockRows = kTileRows<P> > 0 ? kTileRows<P> : kMaxRows<P>;
template <int P>
constexpr int block_groups(int rows) {
    return rows > kMaxRows<P> ? kTileGroups : max_groups(rows, P);
}

// Maximum size of `out` of `dot_block`, in rows times groups.
template <int P>
constexpr int most_sums() {
    int most = (kTileRows<P> + 15) / 16 * 16 * kTileGroups;
    for (int rows = 1; rows <= kMaxRows<P>; ++rows)
        if (rows * max_groups(rows, P) > most) most = rows * max_groups(rows, P);
    return most;
}

#if defined(QG_PLANES_APART)
constexpr bool kPlanesApart = true;
#else
constexpr bool kPlanesApart = false;
#endif

// The sums of a block of rows. If tiles keep separate sums for two planes, lanes of `Powers` add
// them when they load.
template <class Lane, int P>
struct Sums {
    static constexpr bool kApart = kPlanesApart && Lane::kPowers && P == 2;
    alignas(64) int32_t low[most_sums<P>() * 3 * kGroup];
    alignas(64) int32_t high[kApart ? most_sums<P>() * 3 * kGroup : 16];

    void make(int rows, int groups, const Packed &p, int first, const OperandByte *a,
              int64_t stride) {
        if constexpr (kApart) {
            if (takes_tiles<P>(rows, groups))
                return dot_planes<P>(rows, groups, p, first, a, stride, low, high);
            for (int i = 0; i < rows * groups * 3 * kGroup; ++i) high[i] = 0;
        }
        dot_block<P>(rows, groups, p, first, a, stride, low);
    }
    // Loads lanes of sums, starting at `at` in `low`.
    QG_INLINE static Lane load(const int32_t *at) {
        if constexpr (kApart)
            return Lane::from_ints(at, at + kHigh);
        else
            return Lane::from_ints(at);
    }

 private:
    static constexpr int64_t kHigh = most_sums<P>() * 3 * kGroup;
};

// Writes a row of zero-point-free codes as operands, in planes of `stride / planes` values.
QG_ALONE void to_operand(const Packed &p, int32_t zero, const int32_t *v, int n, OperandByte *out,
                         int64_t stride) {
    const int32_t shift = zero - p.offset;
    n = static_cast<int>(round_up(n, 16));  // v and out have room for whole vectors
    if (p.planes == 1) {
        for (int i = 0; i < n; ++i) out[i] = static_cast<OperandByte>(v[i] + shift);
        return;
    }
    // code = 256 * high + low, with `low` in the range of OperandByte
    OperandByte *high = out + stride / 2;
    constexpr int32_t half = static_cast<OperandByte>(-1) < 0 ? 128 : 0;
    for (int i = 0; i < n; ++i) {
        const int32_t q = v[i] + shift;
        out[i] = static_cast<OperandByte>(q);
        high[i] = static_cast<OperandByte>((q + half) >> 8);
    }
}

// Reads n codes or real values at `start` as operands. Returns whether a value was NaN.
QG_ALONE bool read_operand(const Packed &p, const Quantizer &b, const Source &from, int64_t start,
                           int n, int32_t *codes, OperandByte *out, int64_t stride) {
#if defined(QG_ROWS_AVX512)
    if (from.data && from.real)
        return quantize_operand(p, b, static_cast<const float *>(from.data) + start, n, out,
                                stride);
#endif
    const bool nan = read_row(from, b, start, n, codes);
    to_operand(p, b.zero, codes, n, out, stride);
    return nan;
}
