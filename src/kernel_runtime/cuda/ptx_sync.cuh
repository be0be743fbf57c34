// Barriers of warps, blocks and clusters, copies that barriers count, and launches that overlap.
#ifndef KERNEL_RUNTIME_PTX_SYNC_CUH
#define KERNEL_RUNTIME_PTX_SYNC_CUH

#include <stdint.h>

#include "kernel_runtime/cuda/ptx_memory.cuh"

#ifndef PTX_ON_HOST  // a host that runs kernels brings its own

// A barrier of some warps of a block.
inline void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for warps that go on, which others wait for.
inline void arrive_threads(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
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
#define PTX_WAIT(kind, fence)                                           \
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
        PTX_WAIT("relaxed", "fence.acquire.sync_restrict::shared::cluster.cluster;\n");
    else
        PTX_WAIT("acquire", "");
#undef PTX_WAIT
}

#endif

#endif
