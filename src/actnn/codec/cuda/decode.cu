// Decodes a tensor, see docs/actnn_codec.md.
#include "actnn/codec/cuda/codec.cuh"

struct Decoder {
    float base, step;

    Decoder(uint32_t parameters)
        : base(actnn_number(parameters << 16)), step(actnn_number(parameters & 0xFFFF0000u)) {}

    // The product is exact, so one rounding or two give the same number. `code` may have more bits
    // above those of the code.
    float operator()(uint32_t code, int bits) const {
        const uint32_t magic = (code & ((1u << bits) - 1)) | ACTNN_MAGIC;
        const float v = fmaf(actnn_number(magic) - 8388608.f, step, base);
        // rounded parameters may lie beyond the largest element
        return REAL == FLOAT16 ? max_or_nan(min_or_nan(v, 65504.f), -65504.f) : v;
    }
};

inline void store_element(const Codec &p, int64_t at, float v) {
    if (REAL == FLOAT32)
        ((float *)p.x)[at] = v;
    else if (REAL == FLOAT64)
        ((double *)p.x)[at] = v;
    else
        ((uint16_t *)p.x)[at] = (uint16_t)(REAL == FLOAT16 ? half_pair(v, v) : bf16_pair(v, v));
}

// One group by a warp.
inline void decode_group(const Codec &p, const Place &place) {
    const int lane = lane_index();
    const Decoder decoder(p.params[place.index]);
    for (int i = lane; i < place.count; i += kRun) {
        uint32_t code = 0;
        if (place.stored) {
            const uint32_t *words = place.words + i / kRun * place.bits;
            const int bit = lane * place.bits, shift = bit % 32;
            code = words[bit / 32] >> shift;
            if (shift + place.bits > 32) code |= words[bit / 32 + 1] << (32 - shift);
        }
        store_element(p, place.at + i, decoder(code, place.bits));
    }
}

#if CHUNKS
// Four codes of a run.
template <int kBits>
inline uint32_t four_codes(const uint32_t *run, int first) {
    const int bit = first * kBits, word = bit / 32, shift = bit % 32;
    if (32 % (4 * kBits) == 0) return run[word] >> shift;
    const int next = word + 1 < kBits ? word + 1 : word;
    return shifted_right(run[word], run[next], shift);
}

// kVector numbers to a multiple of 16 bytes.
inline void store(char *to, const float (&v)[kVector]) {
    if (REAL == FLOAT64) {
        for (int i = 0; i < 4; ++i) ((double *)to)[i] = v[i];
    } else if (REAL == FLOAT32) {
        *(uint4 *)to = {actnn_word(v[0]), actnn_word(v[1]), actnn_word(v[2]), actnn_word(v[3])};
    } else {
        uint32_t pairs[4];
        for (int i = 0; i < 4; ++i) {
            const float a = v[2 * i % kVector], b = v[(2 * i + 1) % kVector];
            pairs[i] = REAL == FLOAT16 ? half_pair(a, b) : bf16_pair(a, b);
        }
        *(uint4 *)to = {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
}

// kGroups whole groups by a warp. The first one is at `place`.
struct Tile {
    const Codec &p;
    const Place &place;

    template <int kBits>
    void run() const;
};

template <int kBits>
inline void Tile::run() const {
    constexpr int kParts = kVector / 4;
    const int lane = lane_index(), mine = lane / kLanes, first = lane % kLanes * kVector;
    uint32_t codes[CHUNKS][kParts];
    const uint32_t *words = place.words + mine * (CHUNKS * kBits);
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k)
        for (int part = 0; part < kParts; ++part)
            codes[k][part] = four_codes<kBits>(words + k * kBits, first + 4 * part);
    const Decoder decoder(p.params[place.index + mine]);
    char *const to = (char *)p.x + (place.at + mine * (CHUNKS * kRun) + first) * kElementBytes;
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        float v[kVector];
        for (int i = 0; i < kVector; ++i) v[i] = decoder(codes[k][i / 4] >> (i % 4 * kBits), kBits);
        store(to + k * kRun * kElementBytes, v);
    }
}
#endif

extern "C" __global__ void __launch_bounds__(kBlock) decode(const __grid_constant__ Codec p) {
    const Share share(p);
    if (!share.any) return;
#if CHUNKS
    const Place place(p, share.row, share.first);
    if (share.whole(p) && place.stored) {
        with_bits(place.bits, Tile{p, place});
        return;
    }
#endif
    for (int64_t i = share.first; i < share.last(p); ++i) decode_group(p, Place(p, share.row, i));
}
