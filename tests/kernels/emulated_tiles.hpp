// The tiles of AMX as arrays of a thread, each of 16 rows by 64 bytes: what the sanitized build
// puts before kernels of tiles on processors that have AVX-512 alone. Those kernels are compiled
// without sanitizers, but whatever is loaded and stored is checked.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace emulated {

// As a call, which AddressSanitizer checks.
inline void copy(void *to, const void *from, size_t size) {
    static void *(*const volatile function)(void *, const void *, size_t) = std::memcpy;
    function(to, from, size);
}

struct Tile {
    alignas(64) uint8_t rows[16][64];
};

inline Tile &tile(int index) {
    static thread_local Tile tiles[8];
    return tiles[index];
}

inline void load(int index, const void *from, int64_t stride) {
    for (int row = 0; row < 16; ++row)
        copy(tile(index).rows[row], static_cast<const char *>(from) + row * stride, 64);
}

inline void store(int index, void *to, int64_t stride) {
    for (int row = 0; row < 16; ++row)
        copy(static_cast<char *>(to) + row * stride, tile(index).rows[row], 64);
}

inline void clear(int index) { std::memset(&tile(index), 0, sizeof(Tile)); }

// Unsigned bytes of `a` times signed ones of `b`: a row of the sums is that of `a` by all of `b`.
inline void multiply(int sums, int a, int b) {
    for (int row = 0; row < 16; ++row) {
        __m512i sum = _mm512_load_si512(tile(sums).rows[row]);
        for (int four = 0; four < 16; ++four) {
            int32_t bytes;
            std::memcpy(&bytes, tile(a).rows[row] + 4 * four, 4);
            const __m512i weights = _mm512_load_si512(tile(b).rows[four]);
            sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(bytes), weights);
        }
        _mm512_store_si512(tile(sums).rows[row], sum);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbusd
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_zero(tile) emulated::clear(tile)
#define _tile_dpbusd(sums, a, b) emulated::multiply(sums, a, b)
