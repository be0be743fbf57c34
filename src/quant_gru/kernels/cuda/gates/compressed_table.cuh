// Tables of many codes in shared memory: lines of 16 input codes each and a bit for each code, one
// output code or none more than the line says. An entry is 8 bytes:
//
//   output = (base + slope * (code % 16) >> 10) + bit
//
// base is a word, the slope the high half of the other word, the bits its low half.
#ifndef QUANT_GRU_LINES_CUH
#define QUANT_GRU_LINES_CUH

#include "gates/arithmetic.cuh"
#include "kernel_runtime/cuda/ptx.cuh"

constexpr int kLines = 3;
constexpr int kLineShift = 10;

inline int line_output(uint2 line, uint32_t code) {
    const uint32_t at = code & 15;
    const int sum = (int)line.x + (int)(line.y >> 16) * (int)at;
    return (sum >> kLineShift) + (int)(line.y >> at & 1);
}

template <class Real, int kThreads, bool kRoom>
struct Lines {
    uint32_t base;

    inline unsigned char *open(const Table &t, unsigned char *memory) {
        memory += shared_address(memory) % 16;  // of 8 bytes
        for (int i = threadIdx.x; i < (int)t.line_count / 2; i += kThreads)
            copy_async<16>(memory + 16 * i, (const unsigned char *)t.lines + 16 * i);
        base = shared_address(memory) -
               8u * (uint32_t)(Magic<Real>::raw_zero() / 16 + (int)(t.line_origin / 16));
        if (kRoom) base = kept_number(base);
        return memory + 8 * t.line_count;
    }

    // The zero-point-free output code of a sum that has the magic number inside.
    inline Real operator()(Real sum) const {
        const int code = Magic<Real>::raw(sum);
        const uint2 line = load8(base + 8u * (uint32_t)(code >> 4));
        return (Real)line_output(line, (uint32_t)code);
    }
};

#endif
