// Compressed tables in shared memory. A linear segment covers 16 input codes, and one bit per code
// adds 0 or 1 to the output. An entry has 8 bytes:
//
//   output = (base + slope * (code % 16) >> 10) + bit
//
// The first word is the base. The second word has the slope in its high half, the bits in its low.
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
        memory += shared_address(memory) % 16;  // aligns 8-byte aligned memory to 16 bytes
        for (int i = threadIdx.x; i < (int)t.line_count / 2; i += kThreads)
            copy_async<16>(memory + 16 * i, (const unsigned char *)t.lines + 16 * i);
        base = shared_address(memory) -
               8u * (uint32_t)(Magic<Real>::raw_zero() / 16 + (int)(t.line_origin / 16));
        if (kRoom) base = kept_number(base);
        return memory + 8 * t.line_count;
    }

    // Return the zero-point-free output code for `sum`, which includes the magic number.
    inline Real operator()(Real sum) const {
        const int code = Magic<Real>::raw(sum);
        const uint2 line = load8(base + 8u * (uint32_t)(code >> 4));
        return (Real)line_output(line, (uint32_t)code);
    }
};

#endif
