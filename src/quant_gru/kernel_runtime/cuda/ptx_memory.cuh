// Shared and global memory: asynchronous copies, stores to other blocks of a cluster, loads and
// stores by address.
#ifndef KERNEL_RUNTIME_PTX_MEMORY_CUH
#define KERNEL_RUNTIME_PTX_MEMORY_CUH

#include <stdint.h>

#ifndef PTX_ON_HOST  // tests that run kernels on the host define these functions

// The shared memory of a block, as an array of bytes whose size the launch determines.
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

inline uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// Starts a copy of 16 bytes, or of zeros if not `there`, to shared memory. `from` must be a valid
// address in both cases.
inline void copy_async(uint32_t to, const void *from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
                 "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
                 : "memory");
}

// Starts a copy of kBytes (4, 8 or 16) to shared memory.
template <int kBytes>
inline void copy_async(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from),
                 "n"(kBytes)
                 : "memory");
}

inline void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kGroups of the thread's most recent groups of copies are pending.
template <int kGroups>
inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

inline uint32_t address_in(uint32_t address, uint32_t rank) {
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Writes 16 or 8 bytes to another block of the cluster and counts them on that block's barrier.
// `to` and `barrier` are the corresponding addresses in this block.
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

// Makes this thread's writes to shared memory, and those that it waited for, visible to
// asynchronous copies after a barrier.
inline void shown_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Like `send`, for many bytes of shared memory, to the same place in another block. The bytes must
// be visible through `shown_to_copies`. All lanes of a warp call it with the same arguments.
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

// Keeps an address of shared memory in a register; the compiler would recompute it at each use.
inline uint32_t pinned(uint32_t address) {
    asm volatile("" : "+r"(address));
    return address;
}

// A predicated store to global memory, without a branch.
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

inline float load_float(uint32_t address) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
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

// Like `send`, for addresses from `address_in`.
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

// Access to global memory that other blocks write or read during the launch. In 16 bytes, each word
// is atomic (old or new), but not the whole.
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

// Adds to a counter with release semantics. A thread that reads the new count and then calls
// `acquire` sees all that this thread wrote or had seen.
inline void add_released(uint32_t *to, uint32_t v) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)),
                 "r"(v)
                 : "memory");
}

inline void acquire() { asm volatile("fence.acquire.gpu;" ::: "memory"); }

// 16 bytes of global memory that nobody writes during the launch, and that are read once.
inline uint4 load_once(const void *from) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(__cvta_generic_to_global(from)));
    return v;
}

inline void prefetch(const void *from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)));
}

#endif

#endif
