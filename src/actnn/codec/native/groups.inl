// Encodes and decodes groups. Included once for each instruction set, inside a namespace.

constexpr int kRun = 32;
constexpr int kLanes = 16;   // independent minima and maxima, so that compilers use vectors
constexpr int kPiece = 256;  // elements that are converted at once, a multiple of two runs

float from_half(uint32_t half) {
    // The exponent is corrected by a product, which also handles subnormal numbers.
    const float v = actnn_number((half & 0x7FFFu) << 13) * 0x1p112f;
    const uint32_t word =
        (half & 0x7C00u) == 0x7C00u ? 0x7F800000u | (half & 0x3FFu) << 13 : actnn_word(v);
    return actnn_number(word | (half & 0x8000u) << 16);
}

uint32_t to_half(float v) {
    const uint32_t word = actnn_word(v), sign = word >> 16 & 0x8000u, size = word & 0x7FFFFFFFu;
    if (size >= ACTNN_INFINITY) return sign | (size > ACTNN_INFINITY ? 0x7E00u : 0x7C00u);
    // A sum whose unit is that of the result rounds to it. Numbers below 2^-14 have one unit.
    const uint32_t exponent = std::max(size >> 23, 113u);
    const float sum = actnn_number(size) + actnn_number((exponent + 13) << 23);
    const uint32_t rounded = actnn_word(sum) - ((exponent + 13) << 23);
    return sign | (rounded + ((exponent - 113) << 10));
}

uint32_t to_bfloat16(float v) {
    const uint32_t word = actnn_word(v);
    return v != v ? 0x7FC0u : (word + 0x7FFFu + (word >> 16 & 1)) >> 16;
}

template <Real kReal>
void load(const Codec &codec, int64_t at, int count, float *to) {
    if constexpr (kReal == kFloat32) std::memcpy(to, (const float *)codec.x + at, 4 * count);
    if constexpr (kReal == kFloat64)
        for (int i = 0; i < count; ++i) to[i] = actnn_narrow(((const double *)codec.x)[at + i]);
    const uint16_t *const halves = (const uint16_t *)codec.x + at;
    if constexpr (kReal == kFloat16)
        for (int i = 0; i < count; ++i) to[i] = from_half(halves[i]);
    if constexpr (kReal == kBFloat16)
        for (int i = 0; i < count; ++i) to[i] = actnn_number(uint32_t(halves[i]) << 16);
}

template <Real kReal>
void store(const Codec &codec, int64_t at, int count, const float *from) {
    if constexpr (kReal == kFloat32) std::memcpy((float *)codec.x + at, from, 4 * count);
    if constexpr (kReal == kFloat64)
        for (int i = 0; i < count; ++i) ((double *)codec.x)[at + i] = from[i];
    uint16_t *const halves = (uint16_t *)codec.x + at;
    if constexpr (kReal == kFloat16)
        for (int i = 0; i < count; ++i) halves[i] = uint16_t(to_half(from[i]));
    if constexpr (kReal == kBFloat16)
        for (int i = 0; i < count; ++i) halves[i] = uint16_t(to_bfloat16(from[i]));
}

// The smallest and the largest number between the bounds of a tensor.
struct Inner {
    float low = INFINITY, high = -INFINITY;

    void add(const Codec &codec, const float *x, int count) {
        for (int i = 0; i < count; ++i)
            if (x[i] > codec.lowest && x[i] < codec.highest) {
                low = std::min(low, x[i]);
                high = std::max(high, x[i]);
            }
    }
};

// The smallest and the largest number seen; both are NaN if a number was NaN.
struct Range {
    float low[kLanes], high[kLanes];
    uint32_t nan[kLanes] = {};

    Range() {
        std::fill(low, low + kLanes, INFINITY);
        std::fill(high, high + kLanes, -INFINITY);
    }
    void add(const float *x, int count) {
        // copies that stay in registers
        float least[kLanes], most[kLanes];
        uint32_t seen[kLanes];
        std::memcpy(least, low, sizeof low);
        std::memcpy(most, high, sizeof high);
        std::memcpy(seen, nan, sizeof nan);
        int i = 0;
        for (; i + kLanes <= count; i += kLanes)
            for (int j = 0; j < kLanes; ++j) {
                const float v = x[i + j];
                least[j] = v < least[j] ? v : least[j];
                most[j] = v > most[j] ? v : most[j];
                seen[j] |= v != v ? ~0u : 0u;
            }
        for (; i < count; ++i) {
            least[0] = x[i] < least[0] ? x[i] : least[0];
            most[0] = x[i] > most[0] ? x[i] : most[0];
            seen[0] |= x[i] != x[i];
        }
        std::memcpy(low, least, sizeof low);
        std::memcpy(high, most, sizeof high);
        std::memcpy(nan, seen, sizeof nan);
    }
    float least() const { return is_nan() ? NAN : *std::min_element(low, low + kLanes); }
    float most() const { return is_nan() ? NAN : *std::max_element(high, high + kLanes); }
    bool is_nan() const {
        return std::any_of(nan, nan + kLanes, [](uint32_t found) { return found != 0; });
    }
};

// 2^23 + the noise of the elements of two runs.
void noise_of(const Codec &codec, int64_t pair, int fraction, float *to) {
    const uint32_t mask = (1u << fraction) - 1;
    if (!codec.stochastic) {
        std::fill(to, to + 2 * kRun, actnn_number(ACTNN_MAGIC | 1u << (fraction - 1)));
        return;
    }
    uint32_t words[4][8];
    for (int j = 0; j < 8; ++j) {
        const uint64_t block = uint64_t(pair) * 8 + j;
        uint32_t a = uint32_t(block), b = uint32_t(block >> 32), c = codec.tensor, d = codec.step;
        uint32_t key0 = uint32_t(codec.seed), key1 = uint32_t(codec.seed >> 32);
        PHILOX4X32(a, b, c, d, key0, key1, ACTNN_ROUNDS)
        words[0][j] = a;
        words[1][j] = b;
        words[2][j] = c;
        words[3][j] = d;
    }
    for (int word = 0; word < 4; ++word)
        for (int j = 0; j < 8; ++j) {
            float *const two = to + word / 2 * kRun + 4 * j + word % 2 * 2;
            two[0] = actnn_number(ACTNN_MAGIC | (words[word][j] & mask));
            two[1] = actnn_number(ACTNN_MAGIC | (words[word][j] >> 16 & mask));
        }
}

// Codes in the bytes of a number, without gaps, and back.
uint64_t squeezed(uint64_t v, int bits) {
    v = (v & 0x00FF00FF00FF00FF) | (v >> 8 & 0x00FF00FF00FF00FF) << bits;
    v = (v & 0x0000FFFF0000FFFF) | (v >> 16 & 0x0000FFFF0000FFFF) << 2 * bits;
    return (v & 0xFFFFFFFF) | v >> 32 << 4 * bits;
}

uint64_t spread(uint64_t v, int bits) {
    const uint64_t four = (uint64_t(1) << 4 * bits) - 1, two = (uint64_t(1) << 2 * bits) - 1;
    const uint64_t one = (uint64_t(1) << bits) - 1;
    v = (v & four) | (v >> 4 * bits & four) << 32;
    v = (v & (two | two << 32)) | (v >> 2 * bits & (two | two << 32)) << 16;
    const uint64_t all = one * 0x0001000100010001;
    return (v & all) | (v >> bits & all) << 8;
}

// Where a group is.
struct Place {
    int64_t at, run;  // the first element, and the first run, of all rows
    int64_t count;
    int bits;
    bool stored;
    uint8_t *data;

    Place(const Codec &codec, int64_t index) {
        const int64_t row = index / codec.groups(), first = index % codec.groups() * codec.group;
        at = row * codec.m + first;
        run = row * codec.runs() + first / kRun;
        count = std::min(codec.m - first, codec.group);
        bits = int(codec.bits[row]);
        stored = codec.ends[row] <= codec.capacity;
        data = codec.data + 4 * ((codec.ends[row] - bits) * codec.runs() + first / kRun * bits);
    }
};

// Codes of up to kPiece elements, written as whole runs.
void encode_piece(const Codec &codec, const float *x, const float *noise, int count,
                  const ActnnGroup &group, int bits, uint8_t *to) {
    uint8_t codes[kPiece];
    const int whole = (count + kRun - 1) / kRun * kRun, fraction = actnn_fraction(bits);
    if (group.marked)
        for (int i = 0; i < count; ++i)
            codes[i] = uint8_t(
                actnn_marked_code(x[i], group, noise[i], bits, codec.lowest, codec.highest));
    else
        for (int i = 0; i < count; ++i)
            codes[i] = uint8_t((actnn_code_word(x[i], group, noise[i]) - ACTNN_MAGIC) >> fraction);
    std::memset(codes + count, 0, size_t(whole - count));
    uint8_t packed[kPiece + 8], *end = packed;
    for (int i = 0; i < whole; i += 8, end += bits) {
        uint64_t eight;
        std::memcpy(&eight, codes + i, 8);
        eight = squeezed(eight, bits);
        std::memcpy(end, &eight, 8);  // the next eight overwrite what is too much
    }
    std::memcpy(to, packed, size_t(end - packed));
}

template <Real kReal>
void encode_group(const Codec &codec, int64_t index) {
    const Place place(codec, index);
    float x[kPiece], noise[kPiece + 2 * kRun];
    Range range;
    for (int64_t i = 0; i < place.count; i += kPiece) {
        const int count = int(std::min<int64_t>(place.count - i, kPiece));
        load<kReal>(codec, place.at + i, count, x);
        range.add(x, count);
    }
    const float low = range.least(), high = range.most();
    ActnnGroup group = actnn_group(low, high, place.bits);
    if (low <= codec.lowest || high >= codec.highest) {
        Inner inner;
        for (int64_t i = 0; i < place.count; i += kPiece) {
            const int count = int(std::min<int64_t>(place.count - i, kPiece));
            if (place.count > kPiece) load<kReal>(codec, place.at + i, count, x);
            inner.add(codec, x, count);
        }
        group = actnn_marked_group(inner.low, inner.high, place.bits);
    }
    codec.params[index] = place.stored ? actnn_parameters(group) : ACTNN_NAN_PARAMETERS;
    if (!place.stored) return;
    for (int64_t i = 0; i < place.count; i += kPiece) {
        const int count = int(std::min<int64_t>(place.count - i, kPiece));
        if (place.count > kPiece) load<kReal>(codec, place.at + i, count, x);
        if (!group.finite) std::fill(x, x + count, 0.f);
        const int64_t run = place.run + i / kRun, odd = run % 2;
        for (int64_t at = 0; at < odd * kRun + count; at += 2 * kRun)
            noise_of(codec, run / 2 + at / (2 * kRun), actnn_fraction(place.bits), noise + at);
        encode_piece(codec, x, noise + odd * kRun, count, group, place.bits,
                     place.data + i / 8 * place.bits);
    }
}

template <Real kReal>
void decode_group(const Codec &codec, int64_t index) {
    const Place place(codec, index);
    const float base = actnn_number(codec.params[index] << 16);
    const float step = actnn_number(codec.params[index] & 0x7FFF0000u);
    const bool marked = codec.params[index] & ACTNN_MARK;
    const int last = (1 << place.bits) - 1;
    // rounded parameters may lie beyond the largest element, and beyond the bounds
    const float most = kReal == kFloat16 ? 65504.f : INFINITY;
    const float lowest = std::max(codec.lowest, -most), highest = std::min(codec.highest, most);
    const bool limited = lowest > -INFINITY || highest < INFINITY;
    uint8_t codes[kPiece] = {}, packed[kPiece + 8] = {};
    float v[kPiece];
    for (int64_t i = 0; i < place.count; i += kPiece) {
        const int count = int(std::min<int64_t>(place.count - i, kPiece));
        if (place.stored)
            std::memcpy(packed, place.data + i / 8 * place.bits,
                        size_t((count + 7) / 8 * place.bits));
        const uint8_t *from = packed;
        for (int j = 0; place.stored && j < count; j += 8, from += place.bits) {
            uint64_t eight;
            std::memcpy(&eight, from, 8);
            eight = spread(eight, place.bits);
            std::memcpy(codes + j, &eight, 8);
        }
        // the product is exact
        for (int j = 0; j < count; ++j) v[j] = base + float(codes[j] - marked) * step;
        for (int j = 0; limited && j < count; ++j)
            v[j] = v[j] < lowest ? lowest : v[j] > highest ? highest : v[j];
        for (int j = 0; marked && j < count; ++j)
            if (codes[j] == 0 || codes[j] == last) v[j] = codes[j] ? codec.highest : codec.lowest;
        store<kReal>(codec, place.at + i, count, v);
    }
}

template <Real kReal>
void encode_groups(const Codec &codec, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) encode_group<kReal>(codec, i);
}

template <Real kReal>
void decode_groups(const Codec &codec, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) decode_group<kReal>(codec, i);
}

void encode_part(const Codec &codec, int64_t first, int64_t last) {
    constexpr Part parts[] = {encode_groups<kFloat32>, encode_groups<kFloat16>,
                              encode_groups<kBFloat16>, encode_groups<kFloat64>};
    parts[codec.real](codec, first, last);
}

void decode_part(const Codec &codec, int64_t first, int64_t last) {
    constexpr Part parts[] = {decode_groups<kFloat32>, decode_groups<kFloat16>,
                              decode_groups<kBFloat16>, decode_groups<kFloat64>};
    parts[codec.real](codec, first, last);
}
