// Table lookup for the gates of the persistent recurrence. Macros as in persistent.cu.
#ifndef QUANT_GRU_GATE_TABLES_CUH
#define QUANT_GRU_GATE_TABLES_CUH

#include "gates/compressed_table.cuh"
#include "gates/saturating.cuh"
#include "recurrence/thread_tile.cuh"

// A table of floats in shared memory. Its first entry belongs to the smallest code of a sum.
struct Bits {
    uint32_t base;

    inline unsigned char *open(const Table &t, unsigned char *memory) {
#pragma unroll 1
        for (int i = threadIdx.x; i < (int)t.entries; i += kThreads)
            copy_async<4>(memory + 4 * i, t.direct + i);
        base = shared_address(memory) +
               4u * (uint32_t)(kSaturated ? 0u - kIndexBits : (uint32_t)(t.least - t.pre_lo));
        if (kRoom) base = kept_number(base);
        return memory + (t.entries + 1) / 2 * 8;
    }
};

// Clamps the bits of a sum, magic number included, as an integer. Relative to the lower limit, one
// instruction applies both limits.
inline float gate_of(const Bits &of, const Sum<float> &s, float v1, float v2) {
    const float total = Magic<float>::fma(v2, s.m[1], Magic<float>::times(v1, s.m[0]));
    const int lowest = __float_as_int(s.lo), most = __float_as_int(s.hi) - lowest;
    const int code = __float_as_int(round_sum(total));
    return load_float(of.base + 4u * (uint32_t)limited_sum(code, -lowest, most));
}

template <bool kFromBits, int kMode>
struct Chosen {
    typedef Reader<kMode> type;
};
template <int kMode>
struct Chosen<true, kMode> {
    typedef Bits type;
};
template <>
struct Chosen<false, kLines> {
    typedef Lines<Real, kThreads, kRoom> type;
};

template <bool kValue>
struct Truth {
    static constexpr bool value = kValue;
};

#endif
