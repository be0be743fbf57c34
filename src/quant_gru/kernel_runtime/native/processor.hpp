// What an x86-64 processor offers, and the operating system keeps. `__builtin_cpu_supports` is 0
// for everything with some toolchains, such as Zig's.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>

namespace kernel_runtime {

// The registers after CPUID; 0 if the processor does not know the leaf.
struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
    explicit Leaf(unsigned leaf, unsigned part = 0) {
        if (!__get_cpuid_count(leaf, part, &a, &b, &c, &d)) a = b = c = d = 0;
    }
};

inline bool bit(unsigned word, int place) { return (word >> place & 1) != 0; }

// Whether the operating system saves all of these registers when it changes processes.
inline bool saves(unsigned registers) {
    if (!bit(Leaf(1).c, 27)) return false;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & registers) == registers;
}

inline bool has_avx2() {
    const Leaf first(1);
    return bit(first.c, 28) && bit(first.c, 12) && bit(Leaf(7).b, 5) && saves(0x06);  // AVX, FMA
}

// With F, DQ, BW, VL and VNNI.
inline bool has_avx512_vnni() {
    const Leaf leaf(7);
    return has_avx2() && bit(leaf.b, 16) && bit(leaf.b, 17) && bit(leaf.b, 30) && bit(leaf.b, 31) &&
           bit(leaf.c, 11) && saves(0xe6);
}

}  // namespace kernel_runtime
#endif
