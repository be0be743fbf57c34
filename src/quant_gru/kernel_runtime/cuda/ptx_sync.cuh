// Barriers of warps, blocks and clusters, copies counted by barriers, and overlapping launches.
#ifndef KERNEL_RUNTIME_PTX_SYNC_CUH
#define KERNEL_RUNTIME_PTX_SYNC_CUH

#include <stdint.h>

#include "kernel_runtime/cuda/ptx_memory.cuh"

#ifndef PTX_ON_HOST  // tests that run kernels on the host define these functions

// A named barrier of some warps of a block.
inline void sync_threads(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at a named barrier without waiting; other warps wait there for this one.
inline void arrive_threads(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

inline uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// threadIdx.x and blockIdx.x, read at this point, so that no register holds them, or values derived
// from them, until then.
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

// A cluster barrier in two parts, without memory ordering. It keeps blocks resident until the
// others arrive.
inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }

inline void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// A launch may start before the previous launch has ended (Grid.early): as soon as each of its
// blocks has called `let_next_start` or ended. This waits until the previous launch has ended and
// its writes are visible.
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

// Arrives at the barrier and sets the number of bytes that this phase expects.
inline void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

// Copies a multiple of 16 bytes to this block's shared memory and counts them on its barrier.
inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint64_t *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// Waits for such copies. Unlike `barrier_wait`, it does not invalidate the L1 cache.
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

// Waits for a phase of the barrier. Then all writes of other blocks before their arrival are
// visible, at the price of an invalidated L1 cache; with kOnlyShared, only their writes to shared
// memory.
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
