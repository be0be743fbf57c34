#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/core/pack_weights.hpp"
#include "cpu/core/wide.hpp"

namespace quant_gru {
namespace {

// Lets pack instructions clamp the input sum of a table, if they clamp to the same limits.
void saturate(Table &t, const Sum &s) {
    // Conversions of sums to 32 bits must not overflow.
    constexpr double kMost = 0x1p30;
    t.saturates = t.bytes && t.pre_hi - t.pre_lo == 255 && s.lo == t.pre_lo && s.hi == t.pre_hi &&
                  std::ldexp(s.bound, -s.k) < kMost;
    t.lift = static_cast<int32_t>(static_cast<uint32_t>(-t.pre_lo & 0xffff) * 0x10001u);
    t.place = static_cast<int32_t>(static_cast<uint32_t>(t.pre_lo & 0xff) * 0x1010101u);
}

}  // namespace

void copy_segments(Table &t, Arena &arena) {
    const auto segments = static_cast<size_t>(t.segments);
    t.bounds = arena.copy(t.bounds, segments);
    t.coefficients = arena.copy(t.coefficients, segments * static_cast<size_t>(t.degree + 1));
    t.first = t.bounds[0];
}

void tabulate(Table &t, const Sum &pre, Arena &arena) {
    constexpr int64_t kEntries = 4096;
    const int64_t codes = t.pre_hi - t.pre_lo + 1;
    std::vector<int32_t> outputs(static_cast<size_t>(codes));
    int segment = 0;
    for (int64_t i = 0; i < codes; ++i) {
        const int64_t q = qg_clamp(t.pre_lo + i + t.pre_zero, t.first, t.last);
        while (segment + 1 < t.segments && t.bounds[segment + 1] <= q) ++segment;
        outputs[static_cast<size_t>(i)] = static_cast<int32_t>(polynomial(t, segment, q));
    }
    const auto [least, most] = std::minmax_element(outputs.begin(), outputs.end());
    if (codes > kEntries) {
        uint16_t *words = arena.allocate<uint16_t>(static_cast<size_t>(codes) + 2);
        for (int64_t i = 0; i < codes; ++i)
            words[i] = static_cast<uint16_t>(outputs[static_cast<size_t>(i)] - *least);
        t.words = words;
        t.word_base = *least;
        t.even_lo = static_cast<int32_t>(t.pre_lo & -2);
        return;
    }
    // Inputs are consecutive, so they stay distinct modulo a power of two >= their number.
    int64_t size = 256;
    while (size < codes) size *= 2;
    float *entries = arena.allocate<float>(static_cast<size_t>(size));
    uint8_t *bytes = size == 256 && *most - *least < 256 ? arena.allocate<uint8_t>(256) : nullptr;
    for (int64_t i = 0; i < codes; ++i) {
        const int64_t at = (t.pre_lo + i) & (size - 1);
        const int32_t y = outputs[static_cast<size_t>(i)];
        entries[at] = static_cast<float>(y);
        if (bytes) bytes[at] = static_cast<uint8_t>(y - *least);
    }
    t.entries = entries;
    t.mask = static_cast<int32_t>(size - 1);
    t.bytes = bytes;
    if (bytes) {
        uint8_t *steps = arena.allocate<uint8_t>(256);
        for (int i = 0; i < 256; ++i)
            steps[i] = static_cast<uint8_t>(i % 128 < 16 ? bytes[i] : bytes[i] ^ bytes[i - 16]);
        t.steps = steps;
    }
    t.base = static_cast<float>(*least);
    saturate(t, pre);
}

}  // namespace quant_gru
