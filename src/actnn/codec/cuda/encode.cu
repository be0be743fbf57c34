// Encodes a tensor, see docs/actnn_codec.md. Each element is read once if groups are in tiles.
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

inline float element(const Codec &p, int64_t at) {
    if (REAL == FLOAT32) return ((const float *)p.x)[at];
    if (REAL == FLOAT64) return (float)((const double *)p.x)[at];
    const uint32_t half = ((const uint16_t *)p.x)[at];
    return REAL == FLOAT16 ? first_half(half) : actnn_number(half << 16);
}

inline float low_of_warp(float v) {
    for (int mask = 16; mask; mask >>= 1)
        v = min_or_nan(v, actnn_number(shuffled(actnn_word(v), mask)));
    return v;
}

// One group by a warp.
inline void encode_group(const Codec &p, const Place &place, const Noise &noise) {
    const int lane = lane_index(), fraction = actnn_fraction(place.bits);
    // the largest element is the smallest one negated
    float low = actnn_number(0x7F800000u), minus_high = low;
    for (int i = lane; i < place.count; i += 32) {
        const float v = element(p, place.at + i);
        low = min_or_nan(low, v);
        minus_high = min_or_nan(minus_high, -v);
    }
    const ActnnGroup group = actnn_group(low_of_warp(low), -low_of_warp(minus_high), place.bits);
    if (lane == 0)
        p.params[place.index] = place.stored ? actnn_parameters(group) : ACTNN_NAN_PARAMETERS;
    if (!place.stored) return;
    for (int first = 0; first < place.count; first += kRun) {
        const int64_t run = place.run + first / kRun;
        const int64_t block = (run >> 1) * 8 + lane / 4;
        const uint4 words = noise.words((uint32_t)block, (uint32_t)(block >> 32));
        const uint32_t pair =
            run & 1 ? (lane & 2 ? words.w : words.z) : (lane & 2 ? words.y : words.x);
        const float number = number_of(pair, lane & 1 ? 2 : 0, fraction);
        uint32_t code = 0;
        if (first + lane < place.count) {
            const float v = group.finite ? element(p, place.at + first + lane) : 0.f;
            code = (actnn_code_word(v, group, number) - ACTNN_MAGIC) >> fraction;
        }
        uint32_t mine = 0;
        for (int word = 0; word < place.bits; ++word) {
            const int bit = lane * place.bits - 32 * word;
            const uint32_t part =
                bit >= 0 ? (bit < 32 ? code << bit : 0) : (bit > -32 ? code >> -bit : 0);
            const uint32_t whole = or_of_warp(part);
            if (lane == word) mine = whole;
        }
        if (lane < place.bits) place.words[first / kRun * place.bits + lane] = mine;
    }
}

#if CHUNKS
constexpr int kWarpBytes = kGroups * (CHUNKS + 1) * kRun;  // of codes, one byte each

// Place of a run's codes in shared memory. The gap after each group avoids bank conflicts.
inline int run_bytes(int run) { return (run + run / CHUNKS) * kRun; }

// kVector elements: packed halves, or float32.
inline void load(uint4 &to, const void *x, int64_t at) {
    if (REAL != FLOAT64) {
        to = load_once((const char *)x + at * kElementBytes);
        return;
    }
    const uint4 a = load_once((const double *)x + at), b = load_once((const double *)x + at + 2);
    const auto single = [](uint32_t low, uint32_t high) {
        return actnn_word((float)bits_as_double((int64_t)((uint64_t)high << 32 | low)));
    };
    to = {single(a.x, a.y), single(a.z, a.w), single(b.x, b.y), single(b.z, b.w)};
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

// Combines a word with those of the other lanes of the group, and both halves of packed words.
template <class Combine>
inline float of_group(uint32_t v, const Combine &combine) {
    for (int mask = 1; mask < kLanes; mask *= 2) v = combine(v, shuffled(v, mask));
    if (kVector == 4) return actnn_number(v);
    v = combine(v, v >> 16 | v << 16);
    return REAL == BFLOAT16 ? actnn_number(v << 16) : first_half(v);
}

// Codes of four elements as bytes.
template <int kBits>
inline uint32_t bytes_of(const uint32_t (&words)[4]) {
    if (kBits < 8)
        return byte_perm(byte_perm(words[0], words[1], 0x62), byte_perm(words[2], words[3], 0x62),
                         0x5410);
    // bits 15..22
    const uint32_t even = byte_perm(words[0], words[2], 0x6521);
    const uint32_t odd = byte_perm(words[1], words[3], 0x6521);
    return (even >> 7 & 0x00FF00FFu) | (odd << 1 & 0xFF00FF00u);
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
    if (kBits % 4 == 0)
        for (int i = 0; i < kBits; i += 4)
            *(uint4 *)(to + i) = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    else if (kBits % 2 == 0)
        for (int i = 0; i < kBits; i += 2) *(uint2 *)(to + i) = {words[i], words[i + 1]};
    else
        for (int i = 0; i < kBits; ++i) to[i] = words[i];
}

// kGroups whole groups by a warp. The first one is at `place`.
struct Tile {
    const Codec &p;
    const Place &place;
    const Noise &noise;
    unsigned char *codes;

    template <int kBits>
    void run() const;
};

template <int kBits>
inline void Tile::run() const {
    const int lane = lane_index(), mine = lane / kLanes, first = lane % kLanes * kVector;
    uint4 x[CHUNKS];
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) load(x[k], p.x, place.at + (mine * CHUNKS + k) * kRun + first);
    uint32_t low = x[0].x, high = low;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        for (int i = 0; i < 4; ++i) {
            low = least(low, word_of(x[k], i));
            high = most(high, word_of(x[k], i));
        }
    const ActnnGroup group = actnn_group(of_group(low, least), of_group(high, most), kBits);
    if (first == 0) p.params[place.index + mine] = actnn_parameters(group);
    if (!group.finite) {
#pragma unroll
        for (int k = 0; k < CHUNKS; ++k) x[k] = {0, 0, 0, 0};
        asm volatile("");  // a branch instead of a selection per word
    }
    const uint32_t block = (uint32_t)(place.run + mine * CHUNKS) * 4 + first / 4;
#pragma unroll
    for (int k = 0; k < CHUNKS; k += 2) {
        for (int part = 0; part < kVector / 4; ++part) {
            const uint4 random = noise.words(block + k * 4 + part, 0);
            for (int j = 0; j < 2; ++j) {
                uint32_t words[4];
                for (int i = 0; i < 4; ++i)
                    words[i] = actnn_code_word(number_in(x[k + j], 4 * part + i), group,
                                               number_of(word_of(random, 2 * j + i / 2), i % 2 * 2,
                                                         actnn_fraction(kBits)));
                *(uint32_t *)(codes + run_bytes(mine * CHUNKS + k + j) + first + 4 * part) =
                    bytes_of<kBits>(words);
            }
        }
    }
    __syncwarp();
    for (int each = lane; each < kGroups * CHUNKS; each += 32)
        store_run<kBits>(place.words + each * kBits, codes + run_bytes(each));
}
#endif

extern "C" __global__ void __launch_bounds__(kBlock) encode(const __grid_constant__ Codec p) {
    const Share share(p);
    if (!share.any) return;
    const Noise noise(p);
#if CHUNKS
    SHARED_MEMORY(memory);
    const Place place(p, share.row, share.first);
    if (share.whole(p) && place.stored) {
        with_bits(place.bits, Tile{p, place, noise, memory + threadIdx.x / 32 * kWarpBytes});
        return;
    }
#endif
    for (int64_t i = share.first; i < share.last(p); ++i)
        encode_group(p, Place(p, share.row, i), noise);
}
