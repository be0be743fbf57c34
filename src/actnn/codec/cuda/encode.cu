// Encodes a tensor, see docs/actnn_codec.md. Each element is read once, or
// twice in long groups that take the general path.
// Macro STOCHASTIC: 1, or 0 for rounding to the nearest code.
#include "actnn/codec/cuda/codec.cuh"

struct Noise {
    uint32_t tensor, step, key0, key1;

    Noise(const Codec &p) {
        tensor = (uint32_t)p.tensor;
        step = STOCHASTIC ? (uint32_t)p.state[1] : 0;
        const uint64_t seed = STOCHASTIC ? (uint64_t)p.state[0] : 0;
        key0 = (uint32_t)seed;
        key1 = (uint32_t)(seed >> 32);
    }

    // The words of a block, given by the words of its index.
    uint4 words(uint32_t low, uint32_t high) const {
        uint32_t a = low, b = high, c = tensor, d = step;
        uint32_t k0 = key0, k1 = key1;
        if (STOCHASTIC) PHILOX4X32(a, b, c, d, k0, k1, ACTNN_ROUNDS)
        return {a, b, c, d};
    }
};

// 2^23 + the noise of an element, 0 or 2 bytes from the start of its word.
inline float number_of(uint32_t word, int index, int fraction) {
    return STOCHASTIC ? noise_number(word, index, fraction)
                      : 8388608.f + (float)(1 << (fraction - 1));
}

// An element: its bits, or those of a float32.
inline uint32_t element(const Codec &p, int64_t at) {
    if (REAL == FLOAT32) return ((const uint32_t *)p.x)[at];
    if (REAL == FLOAT64) return actnn_word(actnn_narrow(((const double *)p.x)[at]));
    return ((const uint16_t *)p.x)[at];
}

// kVector elements at a multiple of 16 bytes: packed halves, or float32.
inline uint4 load(const Codec &p, int64_t at) {
    if (REAL != FLOAT64) return *(const uint4 *)((const char *)p.x + at * kElementBytes);
    struct alignas(16) Doubles {
        double first, second;
    };
    const Doubles a = *(const Doubles *)((const double *)p.x + at);
    const Doubles b = *(const Doubles *)((const double *)p.x + at + 2);
    return {actnn_word(actnn_narrow(a.first)), actnn_word(actnn_narrow(a.second)),
            actnn_word(actnn_narrow(b.first)), actnn_word(actnn_narrow(b.second))};
}

inline uint32_t word_of(const uint4 &v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

inline float number_in(const uint4 &v, int i) {
    if (kVector == 4) return actnn_number(word_of(v, i));
    const uint32_t pair = word_of(v, i / 2);
    if (REAL == BFLOAT16) return actnn_number(i % 2 ? pair & 0xFFFF0000u : pair << 16);
    return i % 2 ? second_half(pair) : first_half(pair);
}

inline uint32_t least(uint32_t a, uint32_t b) {
    return REAL == BFLOAT16  ? min_or_nan_bf16(a, b)
           : REAL == FLOAT16 ? min_or_nan_half(a, b)
                             : actnn_word(min_or_nan(actnn_number(a), actnn_number(b)));
}

inline uint32_t most(uint32_t a, uint32_t b) {
    return REAL == BFLOAT16  ? max_or_nan_bf16(a, b)
           : REAL == FLOAT16 ? max_or_nan_half(a, b)
                             : actnn_word(max_or_nan(actnn_number(a), actnn_number(b)));
}

// Combines a word with those of other lanes, and both halves of packed words.
template <int kOf, class Combine>
inline float of_lanes(uint32_t v, const Combine &combine) {
    for (int mask = 1; mask < kOf; mask *= 2) v = combine(v, shuffled(v, mask));
    if (kVector == 4) return actnn_number(v);
    v = combine(v, v >> 16 | v << 16);
    return REAL == BFLOAT16 ? actnn_number(v << 16) : first_half(v);
}

// Includes kCount vectors in a range.
template <int kCount>
inline void include(const uint4 *x, uint32_t &low, uint32_t &high) {
#pragma unroll
    for (int k = 0; k < kCount; ++k)
        for (int i = 0; i < 4; ++i) {
            low = least(low, word_of(x[k], i));
            high = most(high, word_of(x[k], i));
        }
}

// The group whose elements kOf lanes hold, and whether some of these are at the bounds.
template <int kOf>
inline ActnnGroup group_of(const Codec &p, uint32_t low, uint32_t high, int bits, bool &marked) {
    const float lowest = of_lanes<kOf>(low, least), highest = of_lanes<kOf>(high, most);
    marked = lowest <= p.lowest || highest >= p.highest;  // false if they are NaN
    return actnn_group(lowest, highest, bits);
}

// Codes of four elements as bytes.
inline uint32_t bytes_of(const uint32_t (&words)[4], int bits) {
    if (bits < 8)
        return byte_perm(byte_perm(words[0], words[1], 0x62), byte_perm(words[2], words[3], 0x62),
                         0x5410);
    // bits 15..22
    const uint32_t even = byte_perm(words[0], words[2], 0x6521);
    const uint32_t odd = byte_perm(words[1], words[3], 0x6521);
    return (even >> 7 & 0x00FF00FFu) | (odd << 1 & 0xFF00FF00u);
}

// Codes of part of the elements of a lane: elements 4 part to 4 part + 3 of a run, in bytes. The
// run is the first or the second one that share a block of noise.
inline uint32_t codes_of(const uint4 &x, int part, const ActnnGroup &group, const uint4 &random,
                         int second, int bits) {
    uint32_t words[4];
    for (int i = 0; i < 4; ++i)
        words[i] = actnn_code_word(
            number_in(x, 4 * part + i), group,
            number_of(word_of(random, 2 * second + i / 2), i % 2 * 2, actnn_fraction(bits)));
    return bytes_of(words, bits);
}

// The same for a marked group.
inline uint32_t marked_codes_of(const Codec &p, const uint4 &x, int part, const ActnnGroup &group,
                                const uint4 &random, int second, int bits) {
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) {
        const float noise =
            number_of(word_of(random, 2 * second + i / 2), i % 2 * 2, actnn_fraction(bits));
        bytes |=
            actnn_marked_code(number_in(x, 4 * part + i), group, noise, bits, p.lowest, p.highest)
            << 8 * i;
    }
    return bytes;
}

// Four codes in bytes, without gaps.
template <int kBits>
inline uint32_t squeezed(uint32_t bytes) {
    if (kBits == 8) return bytes;
    const uint32_t pairs = (bytes & 0x00FF00FFu) | (bytes & 0xFF00FF00u) >> (8 - kBits);
    return (pairs & 0xFFFFu) | pairs >> 16 << 2 * kBits;
}

// Packs a run of codes and stores it.
template <int kBits>
inline void store_run(uint32_t *to, const unsigned char *codes) {
    uint32_t words[kBits] = {};
    for (int half = 0; half < 2; ++half) {
        const uint4 found = load16(shared_address(codes + 16 * half));
        for (int i = 0; i < 4; ++i) {
            const uint32_t four = squeezed<kBits>(word_of(found, i));
            const int bit = (4 * half + i) * 4 * kBits, word = bit / 32, shift = bit % 32;
            words[word] |= four << shift;
            if (shift + 4 * kBits > 32) words[word + 1] |= four >> (32 - shift);
        }
    }
    // rows with bits of their own begin anywhere
    constexpr int kBytes = kBits % 4 == 0 ? 16 : kBits % 2 == 0 ? 8 : 4;
    const bool vectors = BITS || (uintptr_t)to % kBytes == 0;
    if (kBytes == 16 && vectors)
        for (int i = 0; i < kBits; i += 4)
            *(uint4 *)(to + i) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    else if (kBytes == 8 && vectors)
        for (int i = 0; i < kBits; i += 2) *(uint2 *)(to + i) = {words[i], words[i + 1]};
    else
        for (int i = 0; i < kBits; ++i) to[i] = words[i];
}

inline void store_run(uint32_t *to, const unsigned char *codes, int bits) {
    if (BITS) return store_run<BITS ? BITS : 1>(to, codes);
    switch (bits) {
        case 1:
            return store_run<1>(to, codes);
        case 2:
            return store_run<2>(to, codes);
        case 3:
            return store_run<3>(to, codes);
        case 4:
            return store_run<4>(to, codes);
        case 5:
            return store_run<5>(to, codes);
        case 6:
            return store_run<6>(to, codes);
        case 7:
            return store_run<7>(to, codes);
        default:
            return store_run<8>(to, codes);
    }
}

// Pairs of runs that a set holds on the general path.
constexpr int kPairs = 4;
// Runs of a set in shared memory, one byte for each code. The gap after them avoids bank conflicts.
constexpr int kRuns = kTileRuns > 2 * kPairs ? kTileRuns : 2 * kPairs;
constexpr int kWarpBytes = kSets * (kRuns + 1) * kRun;

// A group that a warp encodes in windows of kSets * kPairs pairs of runs that share noise.
struct Window {
    const Codec &p;
    const Place &place;
    int before, pairs;  // 1 if the group begins with the second run of a pair; pairs of the group
    bool vectors;

    Window(const Codec &p, const Place &place) : p(p), place(place) {
        before = (int)(place.run & 1);
        pairs = (before + (place.count + kRun - 1) / kRun + 1) / 2;
        vectors = aligned(p, place);
    }

    // The first of the lane's elements in one of its runs, from the start of the group.
    int index(int first_pair, int k) const {
        const int pair = first_pair + k / 2 * kSets + set_index();
        return (2 * pair + k % 2 - before) * kRun + first_element();
    }

    // Elements outside of the group become one of its elements.
    void load_all(int first_pair, uint4 (&x)[2 * kPairs]) const {
#pragma unroll
        for (int k = 0; k < 2 * kPairs; ++k) {
            const int i = index(first_pair, k);
            if (vectors && i >= 0 && i + kVector <= place.count) {
                x[k] = load(p, place.at + i);
            } else {
                uint32_t v[kVector];
                for (int j = 0; j < kVector; ++j) {
                    const int inside = i + j < 0             ? 0
                                       : i + j < place.count ? i + j
                                                             : place.count - 1;
                    v[j] = element(p, place.at + inside);
                }
                if (kVector == 4)
                    x[k] = {v[0], v[1], v[2], v[3]};
                else
                    x[k] = {v[0] | v[1] << 16, v[2] | v[3] << 16,
                            v[4 % kVector] | v[5 % kVector] << 16,
                            v[6 % kVector] | v[7 % kVector] << 16};
            }
        }
    }

    void encode(int first_pair, const uint4 (&x)[2 * kPairs], const ActnnGroup &group,
                const Noise &noise, unsigned char *codes) const {
        const uint64_t blocks = ((uint64_t)place.run >> 1) * 8 + first_element() / 4;
#pragma unroll
        for (int k = 0; k < 2 * kPairs; k += 2) {
            const int pair = k / 2 * kSets + set_index();
            if (first_pair + pair >= pairs) continue;
            for (int part = 0; part < kVector / 4; ++part) {
                const uint64_t block = blocks + (first_pair + pair) * 8 + part;
                const uint4 random = noise.words((uint32_t)block, (uint32_t)(block >> 32));
                for (int j = 0; j < 2; ++j) {
                    const int left = place.count - index(first_pair, k + j) - 4 * part;
                    uint32_t bytes =
                        group.marked
                            ? marked_codes_of(p, x[k + j], part, group, random, j, place.bits)
                            : codes_of(x[k + j], part, group, random, j, place.bits);
                    if (left < 4) bytes = left > 0 ? bytes & ((1u << 8 * left) - 1) : 0;
                    *(uint32_t *)(codes + (2 * pair + j) * kRun + first_element() + 4 * part) =
                        bytes;
                }
            }
        }
        __syncwarp();
        for (int each = lane_index(); each < 2 * kSets * kPairs; each += 32) {
            const int run = 2 * first_pair + each - before;
            if (run >= 0 && run * kRun < place.count)
                store_run(place.words + run * place.bits, codes + each * kRun, place.bits);
        }
        __syncwarp();
    }
};

// A group with elements at the bounds, whose elements a warp holds, or reads.
inline ActnnGroup marked_group(const Window &window, uint4 (&x)[2 * kPairs]) {
    const Codec &p = window.p;
    float low = actnn_number(ACTNN_INFINITY), high = -low;
    for (int first = 0; first < window.pairs; first += kSets * kPairs) {
        if (window.pairs > kSets * kPairs) window.load_all(first, x);
#pragma unroll
        for (int k = 0; k < 2 * kPairs; ++k)
            for (int i = 0; i < kVector; ++i) {
                const float v = number_in(x[k], i);
                const bool inside = v > p.lowest && v < p.highest;
                low = inside && v < low ? v : low;
                high = inside && v > high ? v : high;
            }
    }
    for (int mask = 1; mask < 32; mask *= 2) {
        low = min_or_nan(low, actnn_number(shuffled(actnn_word(low), mask)));
        high = max_or_nan(high, actnn_number(shuffled(actnn_word(high), mask)));
    }
    return actnn_marked_group(low, high, window.place.bits);
}

// One group by a warp.
inline void encode_group(const Codec &p, const Place &place, const Noise &noise,
                         unsigned char *codes) {
    if (!place.stored) {
        if (lane_index() == 0) p.params[place.index] = ACTNN_NAN_PARAMETERS;
        return;
    }
    constexpr int kStep = kSets * kPairs;
    const Window window(p, place);
    uint4 x[2 * kPairs];
    uint32_t low = element(p, place.at);
    if (kVector == 8) low |= low << 16;
    uint32_t high = low;
    for (int first = 0; first < window.pairs; first += kStep) {
        window.load_all(first, x);
        include<2 * kPairs>(x, low, high);
    }
    bool marked;
    ActnnGroup group = group_of<32>(p, low, high, place.bits, marked);
    if (marked) group = marked_group(window, x);
    if (lane_index() == 0) p.params[place.index] = actnn_parameters(group);
    for (int first = 0; first < window.pairs; first += kStep) {
        if (window.pairs > kStep) window.load_all(first, x);
        if (!group.finite)
            for (int k = 0; k < 2 * kPairs; ++k) x[k] = {0, 0, 0, 0};
        window.encode(first, x, group, noise, codes);
    }
}

#if CHUNKS
// Place of a run's codes in shared memory.
inline int run_bytes(int run) { return (run + run / kTileRuns) * kRun; }

// The groups of a tile by a warp. The first one is at `place`. Returns whether they are encoded:
// not if one has elements at the bounds.
inline bool encode_tile(const Codec &p, const Place &place, const Noise &noise,
                        unsigned char *codes) {
    const int run = set_index() * kTileRuns, first = first_element(), bits = place.bits;
    uint4 x[kTileRuns];
#pragma unroll
    for (int k = 0; k < kTileRuns; ++k) x[k] = load(p, place.at + (run + k) * kRun + first);
    ActnnGroup groups[JOINED];
    bool bounds = false;
#pragma unroll
    for (int j = 0; j < JOINED; ++j) {
        uint32_t low = x[j * CHUNKS].x, high = low;
        include<CHUNKS>(x + j * CHUNKS, low, high);
        bool marked;
        groups[j] = group_of<kLanes>(p, low, high, bits, marked);
        bounds |= marked;
        if (first == 0)
            p.params[place.index + set_index() * JOINED + j] = actnn_parameters(groups[j]);
        if (!groups[j].finite) {
#pragma unroll
            for (int k = 0; k < CHUNKS; ++k) x[j * CHUNKS + k] = {0, 0, 0, 0};
            asm volatile("");  // a branch instead of a selection per word
        }
    }
    if (any_lane(bounds)) return false;
    const uint32_t block = (uint32_t)(place.run + run) * 4 + first / 4;
#pragma unroll
    for (int k = 0; k < kTileRuns; k += 2)
        for (int part = 0; part < kVector / 4; ++part) {
            const uint4 random = noise.words(block + k * 4 + part, 0);
            for (int j = 0; j < 2; ++j)
                *(uint32_t *)(codes + run_bytes(run + k + j) + first + 4 * part) =
                    codes_of(x[k + j], part, groups[(k + j) / CHUNKS], random, j, bits);
        }
    __syncwarp();
    for (int each = lane_index(); each < kSets * kTileRuns; each += 32)
        store_run(place.words + each * bits, codes + run_bytes(each), bits);
    return true;
}
#endif

// Blocks of a multiprocessor for which the registers of a tile suffice.
constexpr bool kPlain = CHUNKS && BITS && JOINED <= 4 && REAL != FLOAT64;
constexpr int kBlocks = kRuns > 12 ? 2 : kRuns > 8 || !kPlain ? 3 : 4;

extern "C" __global__ void __launch_bounds__(kBlock, kBlocks)
    encode(const __grid_constant__ Codec p) {
    const Share share(p);
    if (!share.any) return;
    const Noise noise(p);
    SHARED_MEMORY(memory);
    unsigned char *const codes = memory + threadIdx.x / 32 * kWarpBytes;
    const Place place(p, share.row, share.first);
#if CHUNKS
    if (share.tile && place.stored && encode_tile(p, place, noise, codes)) return;
#endif
    encode_group(p, place, noise, codes);
    for (int i = 1; i < (share.tile ? kGroups : 1); ++i)
        encode_group(p, Place(p, share.row, share.first + i), noise, codes);
}
