// What encode.cu and decode.cu share: arguments, dtypes, and the order of elements in a warp.
//
// Macros: REAL, the dtype (0 float32, 1 float16, 2 bfloat16, 3 float64); BITS, bits of a code, or 0
// for bits per row; CHUNKS, runs of 32 elements in a group, or 0 if all groups take the general
// path; JOINED, groups of a tile that a lane has elements of.
//
// A warp has kSets sets of kLanes lanes. A set holds a run; a lane holds the kVector elements that
// begin at its place times kVector.
// General path: a warp handles one group, two neighbouring runs of it in each set.
// Tiles: a warp handles kGroups whole groups of a row, JOINED in each set. Every row begins at a
// multiple of 16 bytes, and of two runs. There are fewer than 2^32 blocks of noise.
#pragma once

#include <stdint.h>

#include "kernel_runtime/cuda/ptx.cuh"

#define PHILOX_PRODUCT wide_product
#include "actnn/codec/c99/group.h"

#define FLOAT32 0
#define FLOAT16 1
#define BFLOAT16 2
#define FLOAT64 3

constexpr int kRun = 32, kBlock = 256;
constexpr int kElementBytes = REAL == FLOAT32 ? 4 : REAL == FLOAT64 ? 8 : 2;
constexpr int kVector = kElementBytes == 2 ? 8 : 4, kLanes = kRun / kVector;
constexpr int kSets = 32 / kLanes, kGroups = kSets * JOINED;
constexpr int kTileRuns = CHUNKS * JOINED;  // of a set

struct Codec {
    void *x;  // (rows, m)
    uint32_t *data;
    uint32_t *params;      // (rows, groups): base and step in bfloat16, the base in the low half
    const int64_t *state;  // seed and step
    const int64_t *bits, *ends;  // of each row, and their inclusive sums, if BITS is 0
    int64_t rows, m, groups, tiles, group, capacity, tensor;  // groups and tiles of a row
    float lowest, highest;                                    // the bounds of the elements

    int64_t runs() const { return (m + kRun - 1) / kRun; }
};

inline int lane_index() { return int(threadIdx.x % 32); }

// The groups of a warp: a tile, or one group.
struct Share {
    int64_t row, first;
    bool any, tile;

    Share(const Codec &p) {
        const int64_t warp = (int64_t)blockIdx.x * (kBlock / 32) + threadIdx.x / 32;
        const int64_t alone = p.groups - p.tiles * kGroups, shares = p.tiles + alone;
        row = BITS ? 0 : warp / shares;  // equal bits are one row
        const int64_t index = warp - row * shares;
        tile = CHUNKS && index < p.tiles;
        first = tile ? index * kGroups : p.tiles * kGroups + index - p.tiles;
        any = row < p.rows && index < shares;
    }
};

// A group, the first one of a tile.
struct Place {
    int64_t at, run, index;  // of all rows: its first element, its first run, the group
    int count, bits;
    uint32_t *words;  // those of the first run
    bool stored;

    Place(const Codec &p, int64_t row, int64_t group) {
        const int64_t size = CHUNKS ? CHUNKS * kRun : p.group;
        const int64_t first = group * size, first_run = group * (size / kRun);
        at = row * p.m + first;
        run = row * p.runs() + first_run;
        index = row * p.groups + group;
        count = (int)(p.m - first < size ? p.m - first : size);
        bits = BITS ? BITS : (int)p.bits[row];
        stored = BITS || p.ends[row] <= p.capacity;
        const int64_t before = BITS ? 0 : p.ends[row] - bits;
        words = p.data + before * p.runs() + first_run * bits;
    }
};

// The place of a lane in its set.
inline int set_index() { return lane_index() / kLanes; }
inline int first_element() { return lane_index() % kLanes * kVector; }

// Whether a lane can access its elements of a group as vectors.
inline bool aligned(const Codec &p, const Place &place) {
    return ((uintptr_t)p.x + place.at * kElementBytes) % 16 == 0;
}

// The index-th 16 bits of a word, 0 or 2 bytes from its start, as 2^23 + a number below 2^fraction.
inline float noise_number(uint32_t word, int index, int fraction) {
    return half_as_float(fraction < 16 ? word & 0x7FFF7FFFu : word, index);
}
