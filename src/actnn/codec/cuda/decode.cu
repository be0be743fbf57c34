// Decodes a tensor, see docs/actnn_codec.md.
#include "actnn/codec/cuda/codec.cuh"

struct Decoder {
    const Codec &p;
    float base, step;
    bool marked;

    Decoder(const Codec &p, uint32_t parameters)
        : p(p),
          base(actnn_number(parameters << 16)),
          step(actnn_number(parameters & 0x7FFF0000u)),
          marked(parameters & ACTNN_MARK) {}

    // The product is exact, so one rounding or two give the same number. `code` may have more bits
    // above those of the code.
    float operator()(uint32_t code, int bits) const {
        const uint32_t last = (1u << bits) - 1, magic = (code & last) | ACTNN_MAGIC;
        if (marked && (code & last) == 0) return p.lowest;
        if (marked && (code & last) == last) return p.highest;
        const float first = marked ? 8388609.f : 8388608.f;
        // rounded parameters may lie beyond the largest element, and beyond the bounds
        float v = fmaf(actnn_number(magic) - first, step, base);
        if (REAL == FLOAT16) v = max_or_nan(min_or_nan(v, 65504.f), -65504.f);
        return max_or_nan(min_or_nan(v, p.highest), p.lowest);
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

// Four codes of a run.
inline uint32_t four_codes(const uint32_t *run, int first, int bits) {
    const int bit = first * bits, word = bit / 32, shift = bit % 32;
    if ((bits & (bits - 1)) == 0) return run[word] >> shift;
    const int next = word + 1 < bits ? word + 1 : word;
    return shifted_right(run[word], run[next], shift);
}

struct alignas(16) Doubles {
    double first, second;
};

// kVector numbers to a multiple of 16 bytes.
inline void store(char *to, const float (&v)[kVector]) {
    if (REAL == FLOAT64) {
        for (int i = 0; i < 2; ++i) ((Doubles *)to)[i] = {v[2 * i], v[2 * i + 1]};
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

constexpr int kParts = kVector / 4;

// Decodes the elements of a lane.
inline void decode_all(const Decoder &decoder, const uint32_t (&codes)[kParts], int bits,
                       float (&v)[kVector]) {
    for (int i = 0; i < kVector; ++i) v[i] = decoder(codes[i / 4] >> (i % 4 * bits), bits);
}

// One group by a warp.
inline void decode_group(const Codec &p, const Place &place) {
    const Decoder decoder(p, p.params[place.index]);
    const bool vectors = aligned(p, place);
#pragma unroll 4
    for (int i = set_index() * kRun + first_element(); i < place.count; i += kSets * kRun) {
        uint32_t codes[kParts] = {};
        if (place.stored)
            for (int part = 0; part < kParts; ++part)
                codes[part] = four_codes(place.words + i / kRun * place.bits,
                                         first_element() + 4 * part, place.bits);
        float v[kVector];
        decode_all(decoder, codes, place.bits, v);
        if (vectors && i + kVector <= place.count) {
            store((char *)p.x + (place.at + i) * kElementBytes, v);
        } else {
            for (int j = 0; j < kVector; ++j)
                if (i + j < place.count) store_element(p, place.at + i + j, v[j]);
        }
    }
}

#if CHUNKS
// The groups of a tile by a warp. The first one is at `place`.
inline void decode_tile(const Codec &p, const Place &place) {
    const int run = set_index() * kTileRuns, first = first_element();
    uint32_t codes[kTileRuns][kParts];
#pragma unroll
    for (int k = 0; k < kTileRuns; ++k)
        for (int part = 0; part < kParts; ++part)
            codes[k][part] =
                four_codes(place.words + (run + k) * place.bits, first + 4 * part, place.bits);
    char *const to = (char *)p.x + (place.at + run * kRun + first) * kElementBytes;
#pragma unroll
    for (int j = 0; j < JOINED; ++j) {
        const Decoder decoder(p, p.params[place.index + set_index() * JOINED + j]);
#pragma unroll
        for (int k = j * CHUNKS; k < (j + 1) * CHUNKS; ++k) {
            float v[kVector];
            decode_all(decoder, codes[k], place.bits, v);
            store(to + k * kRun * kElementBytes, v);
        }
    }
}
#endif

extern "C" __global__ void __launch_bounds__(kBlock, 4) decode(const __grid_constant__ Codec p) {
    const Share share(p);
    if (!share.any) return;
    const Place place(p, share.row, share.first);
#if CHUNKS
    if (share.tile && place.stored) return decode_tile(p, place);
#endif
    decode_group(p, place);
    for (int i = 1; i < (share.tile ? kGroups : 1); ++i)
        decode_group(p, Place(p, share.row, share.first + i));
}
