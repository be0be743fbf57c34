// The instructions that CUDA C++ has no name for.
#ifndef QUANT_GRU_PTX_CUH
#define QUANT_GRU_PTX_CUH

#include "c99/fixed_point.h"

#ifndef QG_HOST  // a host that runs kernels brings its own

// d += a * b over k = 32, bytes; rows of a: 16, columns of b: 8. The first two flags say which
// operand has unsigned bytes.
template <bool kUnsignedA, bool kUnsignedB>
inline void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define QG_MMA(A, B)                                                          \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." A "." B             \
                 ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
    if (kUnsignedA && kUnsignedB)
        QG_MMA("u8", "u8");
    else if (kUnsignedA)
        QG_MMA("u8", "s8");
    else if (kUnsignedB)
        QG_MMA("s8", "u8");
    else
        QG_MMA("s8", "s8");
#undef QG_MMA
}

// The same of signed bytes, d = a * b + c.
inline void mma_from(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
          "r"(c[2]), "r"(c[3]));
}

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

// Four matrices of 8 rows of 16 bytes; lane i has the address of row i % 8 of matrix i / 8, and
// gets word lane % 4 of row lane / 4 of each.
inline void load_matrices(uint32_t (&v)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(address)
                 : "memory");
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

// Products of matrices in shared memory by the four warps of a group, d += a * b of signed bytes
// over k = 32: 64 rows of a, 8 rows of b for each column of d. They go on while the threads do.
//
// A matrix has lines of 128 bytes, 8 of them from a multiple of 1024 on, the next 8 behind; the 16
// bytes of number i of line j stand in place of those of number i ^ j % 8.
inline uint64_t matrix_in_lines(uint32_t address) {
    const uint64_t apart = 1024 >> 4, turned = 1;
    return (address & 0x3FFFFu) >> 4 | uint64_t(1) << 16 | apart << 32 | turned << 62;
}
// From so many bytes on: features of the first lines, or other lines.
inline uint64_t matrix_from(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }
inline void settled(int &v) { asm volatile("" : "+r"(v)::"memory"); }
inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
inline void products_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
template <int kColumns>
struct GroupProduct;
#define QG_FOUR(v) "+r"(v[0]), "+r"(v[1]), "+r"(v[2]), "+r"(v[3])
// registers, and sums that are in them, of 8 columns, of two more each
#define QG_NAMES_8                                                               \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20," \
    "%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QG_NAMES_10 QG_NAMES_8 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define QG_NAMES_12 QG_NAMES_10 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define QG_NAMES_14 QG_NAMES_12 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define QG_SUMS_8                                                                             \
    QG_FOUR(d[0]), QG_FOUR(d[1]), QG_FOUR(d[2]), QG_FOUR(d[3]), QG_FOUR(d[4]), QG_FOUR(d[5]), \
        QG_FOUR(d[6]), QG_FOUR(d[7])
#define QG_SUMS_10 QG_SUMS_8, QG_FOUR(d[8]), QG_FOUR(d[9])
#define QG_SUMS_12 QG_SUMS_10, QG_FOUR(d[10]), QG_FOUR(d[11])
#define QG_SUMS_14 QG_SUMS_12, QG_FOUR(d[12]), QG_FOUR(d[13])
#define QG_PRODUCT(columns, rows, a_name, b_name, added_name)                              \
    template <>                                                                            \
    struct GroupProduct<columns> {                                                         \
        static inline void add(int (&d)[columns][4], uint64_t a, uint64_t b, bool added) { \
            asm volatile("{ .reg .pred added; setp.ne.b32 added, " added_name              \
                         ", 0; "                                                           \
                         "wgmma.mma_async.sync.aligned.m64" rows                           \
                         "k32.s32.s8.s8 {" QG_NAMES_##columns "}, " a_name ", " b_name     \
                                                              ", added; }"                 \
                         : QG_SUMS_##columns                                               \
                         : "l"(a), "l"(b), "r"((int)added));                               \
        }                                                                                  \
    };
QG_PRODUCT(8, "n64", "%32", "%33", "%34")
QG_PRODUCT(10, "n80", "%40", "%41", "%42")
QG_PRODUCT(12, "n96", "%48", "%49", "%50")
QG_PRODUCT(14, "n112", "%56", "%57", "%58")
#undef QG_PRODUCT
#undef QG_SUMS_14
#undef QG_SUMS_12
#undef QG_SUMS_10
#undef QG_SUMS_8
#undef QG_NAMES_14
#undef QG_NAMES_12
#undef QG_NAMES_10
#undef QG_NAMES_8
#undef QG_FOUR

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

// d += a * b over k = 16, bfloat16; rows of a: 16, columns of b: 8.
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

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

// Of 8 rows that `load_matrices` reads, the one for lane i: as they come, or, `apart`, those that a
// thread has of a product are four apart, rows i and i + 4 in the i-th of four.
inline int row_of_eight(int i, bool apart) { return apart ? i / 2 + i % 2 * 4 : i; }

#endif
