// Byte and 16-bit operations, saturating arithmetic, and values hidden from the compiler.
#ifndef KERNEL_RUNTIME_PTX_ARITHMETIC_CUH
#define KERNEL_RUNTIME_PTX_ARITHMETIC_CUH

#include <stdint.h>

#ifndef PTX_ON_HOST  // tests that run kernels on the host define these functions

// 8388608 + an unsigned part of a word: byte `i`, or the 16 bits that start at byte `i`.
inline float byte_as_float(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + i));
}

inline float half_as_float(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7400u + i + ((i + 1) << 4)));
}

// Interleaves bytes 0 and 1 (2 and 3 if i is not 0) of two words, the byte of `low` first.
inline uint32_t interleave(uint32_t low, uint32_t high, int i) {
    return __byte_perm(low, high, i ? 0x7362 : 0x5140);
}

// Bytes 0 and 2, or 1 and 3, of both words; those of the first word are the low bytes.
inline uint32_t even_bytes(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x6420);
}

inline uint32_t odd_bytes(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7531);
}

// Two numbers saturated to bytes, the first one lowest. The upper half is the low half of `above`.
template <bool kSigned = false>
inline uint32_t saturated_bytes(int first, int second, uint32_t above) {
    uint32_t v;
    if (kSigned)
        asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;"
            : "=r"(v)
            : "r"(second), "r"(first), "r"(above));
    else
        asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;"
            : "=r"(v)
            : "r"(second), "r"(first), "r"(above));
    return v;
}

// Two numbers saturated to unsigned 16 bits, the first one low.
inline uint32_t saturated_halves(int first, int second) {
    uint32_t v;
    asm("cvt.pack.sat.u16.s32 %0, %1, %2;" : "=r"(v) : "r"(second), "r"(first));
    return v;
}

// v, which is equal in all lanes of a warp; the shuffle tells the assembler that it is uniform.
inline uint32_t uniform(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }

// v unchanged, for all lanes of a warp. Even the assembler cannot see through the shuffle; it would
// otherwise split sums that were computed in advance.
inline uint32_t kept_number(uint32_t v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }

inline int64_t kept_number(int64_t v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }

// a + b, clamped to 0 .. c.
inline int limited_sum(int a, int b, int c) {
#if __CUDA_ARCH__ >= 900
    int v;
    asm("{.reg .s32 sum; add.s32 sum, %1, %2; min.relu.s32 %0, sum, %3;}"
        : "=r"(v)
        : "r"(a), "r"(b), "r"(c));
    return v;
#else
    const int sum = a + b < c ? a + b : c;
    return sum > 0 ? sum : 0;
#endif
}

// a * b + c in one instruction that the compiler does not combine with other multiply-adds.
inline int64_t times_plus(int a, int b, int64_t c) {
    int64_t v;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(v) : "r"(a), "r"(b), "l"(c));
    return v;
}

// The whole product in one instruction; the compiler needs two if b is a constant above 2^31.
inline uint64_t wide_product(uint32_t a, uint32_t b) {
    uint64_t v;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(v) : "r"(a), "r"(b));
    return v;
}

// Results are clamped to [0, 1] at no extra cost.
inline float fma_saturated(float a, float b, float c) {
    float v;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(v) : "f"(a), "f"(b), "f"(c));
    return v;
}

inline float plus_saturated(float a, float b) {
    float v;
    asm("add.rn.sat.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

// Byte i of the result is the byte of (first, second), 0 to 7, that hexadecimal digit i selects.
inline uint32_t byte_perm(uint32_t first, uint32_t second, uint32_t selector) {
    return __byte_perm(first, second, selector);
}

// The low word of (high, low) shifted right by shift % 32.
inline uint32_t shifted_right(uint32_t low, uint32_t high, int shift) {
    return __funnelshift_r(low, high, shift);
}

// The smaller and the larger number; NaN if one of them is NaN. -0 is smaller than 0.
inline float min_or_nan(float a, float b) {
    float v;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

inline float max_or_nan(float a, float b) {
    float v;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

// The same for two numbers in bfloat16 or half precision.
inline uint32_t min_or_nan_bf16(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

inline uint32_t max_or_nan_bf16(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

inline uint32_t min_or_nan_half(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

inline uint32_t max_or_nan_half(uint32_t a, uint32_t b) {
    uint32_t v;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// The value of the lane whose index is this lane's index ^ mask.
inline int64_t shuffle_xor(int64_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// Two numbers rounded to bfloat16 or half precision, the first in the low bits; and the conversion
// from half precision back to float.
inline uint32_t bf16_pair(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

inline uint32_t half_pair(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

inline float first_half(uint32_t pair) {
    float v;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(v) : "r"(pair));
    return v;
}

inline float second_half(uint32_t pair) {
    float v;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(v) : "r"(pair));
    return v;
}

inline float bits_as_float(uint32_t bits) { return __uint_as_float(bits); }

inline uint32_t float_bits(float v) { return __float_as_uint(v); }

inline double bits_as_double(int64_t bits) { return __longlong_as_double(bits); }

inline uint32_t shuffled(uint32_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// The bitwise or of all lanes of a warp.
inline uint32_t or_of_warp(uint32_t v) { return __reduce_or_sync(0xffffffffu, v); }

// IEEE division, independent of compiler options.
inline float divided(float a, float b) { return __fdiv_rn(a, b); }

// 1 / v and 2^v within 2 units in the last place; a denormal number counts as 0.
inline float reciprocal(float v) {
    float found;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(v));
    return found;
}

inline float power_of_two(float v) {
    float found;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(v));
    return found;
}

inline bool any_lane(bool v) { return __any_sync(0xffffffffu, v); }

#endif

#endif
