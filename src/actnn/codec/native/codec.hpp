// The codec on a CPU; docs/actnn_codec.md defines what it computes.
#pragma once

#include <cstdint>

namespace actnn {

enum Real : int { kFloat32, kFloat16, kBFloat16, kFloat64 };

// A tensor of `rows` rows with `m` elements each, and its encoded form. Each row has its own
// groups.
struct Codec {
    void *x;  // (rows, m)
    uint8_t *data;
    uint32_t *params;  // (rows, groups): base and step in bfloat16, the base in the low half
    const int64_t *bits, *ends;  // of each row, and their inclusive sums
    int64_t rows, m, group, capacity;
    uint64_t seed;
    uint32_t step, tensor;
    Real real;
    bool stochastic;
    float lowest, highest;  // the bounds of the elements

    int64_t groups() const { return (m + group - 1) / group; }
    int64_t runs() const { return (m + 31) / 32; }
};

// Encodes or decodes the groups `first` to `last` - 1 of all rows.
using Part = void (*)(const Codec &codec, int64_t first, int64_t last);

// One implementation, compiled for an instruction set.
struct Variant {
    Part encode, decode;
};

extern const Variant portable;
#if defined(__x86_64__) || defined(_M_X64)
extern const Variant avx2;
#endif

// Whether processors run the portable variant even if they could run a faster one, for tests.
extern bool only_portable;

// Runs the fastest variant for this processor, in at most `threads` threads.
void encode(const Codec &codec, int threads);
void decode(const Codec &codec, int threads);

}  // namespace actnn
