// The instructions that CUDA C++ has no name for.
#ifndef QUANT_GRU_PTX_CUH
#define QUANT_GRU_PTX_CUH

#include "c99/fixed_point.h"
#include "kernel_runtime/cuda/ptx_mma.cuh"

#ifndef QG_HOST  // a host that runs kernels brings its own

inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Copies 16 bytes into shared memory by the time they are waited for, or zeros; `from` is valid
// either way.
inline void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}
// As many as kBytes: 4, 8 or 16.
template <int kBytes>
inline void copy_async(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes)
                 : "memory");
}
inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most this many of the thread's last groups of copies are under way.
template <int kGroups>
inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// A barrier of some warps of a block.
inline void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for warps that go on, which others wait for.
inline void arrive_threads(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 8388608 + an unsigned part of a word: byte `i`, or 16 bits from byte `i` on.
inline float byte_as_float(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7440u + i));
}
inline float half_as_float(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7400u + i + ((i + 1) << 4)));
}

// Bytes i and i + 1 of two words, alternating, the first word's first.
inline uint32_t interleave(uint32_t low, uint32_t high, int i) {
    return __byte_perm(low, high, i ? 0x7362 : 0x5140);
}

// Bytes 0 and 2, or 1 and 3, of two words, the first word's first.
inline uint32_t even_bytes(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x6420);
}
inline uint32_t odd_bytes(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7531);
}

// Two numbers as bytes that stop at their limits, below the low half of a word.
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

// Two numbers as 16 bits each that stop at their limits, the first one low.
inline uint32_t saturated_halves(int first, int second) {
    uint32_t v;
    asm("cvt.pack.sat.u16.s32 %0, %1, %2;" : "=r"(v) : "r"(second), "r"(first));
    return v;
}

inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// threadIdx.x and blockIdx.x, read where they stand: no register keeps them, or what follows from
// them, until then.
inline uint32_t thread_again() {
    uint32_t v;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
    return v;
}
inline uint32_t block_again() {
    uint32_t v;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v));
    return v;
}

inline void cluster_sync() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;" ::
            : "memory");
}

// A barrier of a cluster in two parts, which orders no memory: blocks stay until others are there.
inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// A launch may start before the one ahead of it has ended, see Grid.early: once all blocks of that
// one have started and said so, or ended. Waits until all of it is done and seen.
inline void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
inline void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline void barrier_init(uint64_t *barrier) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;" ::"r"(shared_address(barrier))
        : "memory");
}

// Arrives, and announces how many bytes this phase receives.
inline void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Copies a multiple of 16 bytes into this block, and counts them on its barrier.
inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}
// Waits for such copies: unlike `barrier_wait` it leaves the first cache of global memory alone.
inline void await_copies(uint64_t *barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// What other blocks wrote before they arrived is seen: all of it, at the price of an empty first
// cache of global memory, or what they wrote into shared memory.
template <bool kOnlyShared = false>
inline void barrier_wait(uint64_t *barrier, uint32_t parity) {
#define QG_WAIT(kind, fence)                                            \
    asm volatile(                                                       \
        "{\n"                                                           \
        ".reg .pred done;\n"                                            \
        "again:\n"                                                      \
        "mbarrier.try_wait.parity." kind                                \
        ".cluster.shared::cta.b64 done, [%0], %1;\n"                    \
        "@!done bra again;\n" fence "}" ::"r"(shared_address(barrier)), \
        "r"(parity)                                                     \
        : "memory")
    if (kOnlyShared)
        QG_WAIT("relaxed", "fence.acquire.sync_restrict::shared::cluster.cluster;\n");
    else
        QG_WAIT("acquire", "");
#undef QG_WAIT
}

inline uint32_t address_in(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Writes 16 or 8 bytes into another block of the cluster and counts them on its barrier; `to` and
// `barrier` are this block's addresses of the same things.
inline void send(void *to, uint64_t *barrier, uint32_t rank, const uint4 &v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, "
        "[%5];" ::"r"(address_in(shared_address(to), rank)),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(address_in(shared_address(barrier), rank))
        : "memory");
}
inline void send(void *to, uint64_t *barrier, uint32_t rank, const uint2 &v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(
            address_in(shared_address(to), rank)),
        "r"(v.x), "r"(v.y), "r"(address_in(shared_address(barrier), rank))
        : "memory");
}

// What this thread wrote into shared memory, or waited for, is what copies read after a barrier.
inline void shown_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// As `send`, of many bytes at once, to the same place in another block, from shared memory that
// `shown_to_copies` has shown. All lanes of a warp, with the same arguments.
inline void send_slice(uint32_t slice, uint32_t barrier, uint32_t rank, uint32_t bytes) {
    asm volatile(
        "{\n"
        ".reg .pred first;\n"
        "elect.sync _|first, 0xffffffff;\n"
        "@first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        "[%0], [%1], %2, [%3];\n"
        "}" ::"r"(address_in(slice, rank)),
        "r"(slice), "r"(bytes), "r"(address_in(barrier, rank))
        : "memory");
}
// What all lanes of a warp have, as the assembler then knows.
inline uint32_t uniform(uint32_t v) { return __shfl_sync(0xffffffffu, v, 0); }

// Shared memory by its address, which a register keeps: the compiler would work out addresses
// again at each use.
inline uint32_t pinned(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
}
// A store into global memory without a branch around it.
inline void store_where(bool where, void *to, const uint4 &v) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.v4.b32 [%1], {%2,%3,%4,%5};}" ::"r"(
            (int)where),
        "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}
inline void store_where(bool where, void *to, uint32_t v) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %0, 0; @p st.global.b32 [%1], %2;}" ::"r"((int)where),
        "l"(to), "r"(v)
        : "memory");
}

// As it is, through a shuffle, behind which the assembler cannot see either: it would take sums
// apart that are worked out in advance. All lanes of a warp.
inline uint32_t kept_number(uint32_t v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }
inline int64_t kept_number(int64_t v) { return __shfl_sync(0xffffffffu, v, threadIdx.x % 32); }
inline uint4 load16(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
inline uint2 load8(uint32_t address) {
    uint2 v;
    asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(address)
                 : "memory");
    return v;
}
// a + b, at least 0 and at most c.
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
// a * b + c, not put together with other sums of products.
inline int64_t times_plus(int a, int b, int64_t c) {
    int64_t v;
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(v) : "r"(a), "r"(b), "l"(c));
    return v;
}
inline float load_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
}
// Results are limited to [0, 1], which costs nothing.
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
inline uint32_t load2(uint32_t address) {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}
inline void store2(uint32_t address, uint32_t v) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"((uint16_t)v) : "memory");
}
inline void store(uint32_t address, const uint2 &v) {
    asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(v.x), "r"(v.y) : "memory");
}
inline void store(uint32_t address, const uint4 &v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

// As `send`, to addresses that `address_in` gave.
inline void send_to(uint32_t to, uint32_t barrier, const uint4 &v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, "
        "[%5];" ::"r"(to),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
        : "memory");
}
inline void send_to(uint32_t to, uint32_t barrier, const uint2 &v) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1,%2}, [%3];" ::"r"(
            to),
        "r"(v.x), "r"(v.y), "r"(barrier)
        : "memory");
}

// Global memory that other blocks write or read during the launch: 16 bytes, each word of which is
// old or new for itself, and a word.
inline uint4 load_relaxed(const void *from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return v;
}
inline void store_relaxed(uint32_t *to, uint32_t v) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(v)
                 : "memory");
}
inline uint32_t load_count(const uint32_t *from) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];"
                 : "=r"(v)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return v;
}
// Counts on; who sees it, and then calls `acquire`, sees what this thread wrote or had seen.
inline void add_released(uint32_t *to, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(v)
                 : "memory");
}
inline void acquire() { asm volatile("fence.acquire.gpu;" ::: "memory"); }
inline void prefetch(const void *from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

// The value of the lane whose number differs in the bits of `mask`.
inline int64_t shuffle_xor(int64_t v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }

// Two numbers rounded to bfloat16 or to half precision, the first in the low bits; and back.
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

// IEEE division, whatever the options.
inline float divided(float a, float b) { return __fdiv_rn(a, b); }

inline bool any_lane(bool v) { return __any_sync(0xffffffffu, v); }

#endif

#endif
