// Runs kernels on the host: every thread of a cluster is a fiber, and whatever waits for others
// yields. Enough of CUDA for the kernels of this package, instruction wrappers included. What needs
// no inlining stands in host.cpp, which is compiled once for all kernels.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "intrinsics.hpp"

#define PTX_ON_HOST
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define QG_SHARED(name) unsigned char *const name = host::self->block->shared.data()
#define SHARED_MEMORY(name) QG_SHARED(name)

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct Index {
    unsigned x, y;
};

namespace host {

constexpr size_t kStack = 96 << 10;  // of a fiber

struct Barrier {
    int waiting = 0;
    long generation = 0;
};

struct Transfers {  // an mbarrier
    long bytes = 0, expected = 0;
    bool arrived = false;
    long phase = 0;
};

struct Exchange {  // what lanes show each other
    uint32_t a[32][4], b[32][2];
    int64_t values[32];
};
struct Warp {
    Exchange exchanges[2];
    Barrier barrier;
};

struct Cluster;

struct Block {
    Index index;
    int rank;
    Cluster *cluster;
    std::vector<unsigned char> shared;
    Barrier all, named[16];
    std::vector<Warp> warps;
    Transfers transfers[16];  // of barriers in shared memory that stand one after the other

    Transfers &transfers_at(size_t offset) { return transfers[offset / 8 % 16]; }
};

struct Copy {  // zeros, where it comes from nowhere
    unsigned char *to;
    const void *from;
    size_t bytes;
};
struct Cluster {
    std::vector<Block> blocks;
    Barrier barrier;
};

struct Fiber {
    std::vector<std::vector<Copy>> copies{1};  // groups, the last one open
    ucontext_t context;
    void *jump[5];
    long arrived = 0;               // at a generation of the cluster's barrier
    const long *watched = nullptr;  // its turn comes when this is no longer `seen`
    long seen = 0;
    bool started = false;
    unsigned exchanges = 0;
    std::unique_ptr<char[]> stack;
    Block *block;
    unsigned thread;
    bool done = false;
};

extern Fiber *self;
extern Index grid;
extern unsigned block_threads;

void yield();
void await_change(const long &value, long seen);
void arrive(Barrier &b, int count);
void wait(Barrier &b, int count);

inline Warp &warp() { return self->block->warps[self->thread / 32]; }
inline void sync_warp() { wait(warp().barrier, 32); }
// In turns: who writes to one again has met all others, who have read it, at the other one.
inline Exchange &exchange() { return warp().exchanges[self->exchanges++ % 2]; }

inline Cluster &cluster() { return *self->block->cluster; }

// Copies come at once, or as late as they may.
void copy(const Copy &copy);
void copies_commit();
void copies_wait(int groups);

// Instructions of a warp that multiply matrices or load them.
void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool unsigned_a,
              bool unsigned_b);
void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void load_matrices(uint32_t (&v)[4], uint32_t address);
// That of four warps, whose matrices are in lines.
void add_products(int (*d)[4], int columns, uint64_t a, uint64_t b, bool added);

// Clusters one after the other, or all blocks at once where they wait for each other.
void run(void (*kernel)(const void *), const void *arguments, int blocks_x, int blocks_y,
         int threads, int size, size_t shared, bool together);

}  // namespace host

#define threadIdx (Index{host::self->thread, 0})
#define blockIdx (host::self->block->index)
#define blockDim (Index{host::block_threads, 1})
#define gridDim (host::grid)

inline float saturated(float v) { return v > 0 ? v < 1 ? v : 1.f : 0.f; }
inline float fma_saturated(float a, float b, float c) { return saturated(std::fmaf(a, b, c)); }
inline float plus_saturated(float a, float b) { return saturated(a + b); }
inline void __syncthreads() { host::wait(host::self->block->all, int(host::block_threads)); }
inline void __syncwarp() { host::sync_warp(); }

template <bool kUnsignedA, bool kUnsignedB>
inline void mma(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::multiply(d, a, b0, b1, kUnsignedA, kUnsignedB);
}

inline void mma_from(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     const int (&c)[4]) {
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    mma<false, false>(d, a, b0, b1);
}
inline void sync_threads(int id, int threads) { host::wait(host::self->block->named[id], threads); }
inline void arrive_threads(int id, int threads) {
    host::arrive(host::self->block->named[id], threads);
}
inline float byte_as_float(uint32_t word, int i) {
    return 8388608.f + float(word >> (8 * i) & 255);
}
inline float half_as_float(uint32_t word, int i) {
    return 8388608.f + float(word >> (8 * i) & 65535);
}
inline uint32_t interleave(uint32_t low, uint32_t high, int i) {
    const auto byte = [](uint32_t v, int at) { return v >> (8 * at) & 255; };
    return byte(low, i) | byte(high, i) << 8 | byte(low, i + 1) << 16 | byte(high, i + 1) << 24;
}
inline uint32_t even_bytes(uint32_t first, uint32_t second) {
    const auto pair = [](uint32_t v) { return (v & 255) | (v >> 8 & 0xFF00); };
    return pair(first) | pair(second) << 16;
}
inline uint32_t odd_bytes(uint32_t first, uint32_t second) {
    return even_bytes(first >> 8, second >> 8);
}
template <bool kSigned = false>
inline uint32_t saturated_bytes(int first, int second, uint32_t above) {
    const int lo = kSigned ? -128 : 0, hi = lo + 255;
    const auto byte = [=](int v) { return uint32_t(std::max(std::min(v, hi), lo)) & 255; };
    return byte(first) | byte(second) << 8 | above << 16;
}
inline int __float2int_rn(float v) {
    if (v != v) return 0;
    return int(std::nearbyint(std::max(std::min(double(v), 2147483647.), -2147483648.)));
}
inline int __float2int_rd(float v) { return __float2int_rn(std::floor(v)); }
inline int __float2int_rz(float v) { return __float2int_rn(std::trunc(v)); }
inline uint32_t saturated_halves(int first, int second) {
    const auto half = [](int v) { return uint32_t(v < 0 ? 0 : v > 65535 ? 65535 : v); };
    return half(first) | half(second) << 16;
}
inline uint32_t cluster_rank() { return uint32_t(host::self->block->rank); }
inline void cluster_arrive() {
    host::Cluster &home = host::cluster();
    host::Barrier &b = home.barrier;
    host::self->arrived = b.generation;
    if (++b.waiting < int(home.blocks.size() * host::block_threads)) return;
    b.waiting = 0;
    ++b.generation;
}
inline void cluster_wait() {
    host::await_change(host::cluster().barrier.generation, host::self->arrived);
}
inline void await_launches() {}
inline void let_next_start() {}
inline uint32_t thread_again() { return threadIdx.x; }
inline uint32_t block_again() { return blockIdx.x; }
inline void cluster_sync() {
    host::Cluster &home = host::cluster();
    host::wait(home.barrier, int(home.blocks.size() * host::block_threads));
}

inline host::Transfers &transfers(host::Block &b, uint64_t *barrier) {
    const size_t at = size_t((unsigned char *)barrier - host::self->block->shared.data());
    return b.transfers_at(at);
}
inline void settle(host::Transfers &t) {
    if (t.arrived && t.bytes == t.expected) {
        t.bytes = t.expected = 0;
        t.arrived = false;
        ++t.phase;
    }
}
inline void barrier_init(uint64_t *) {}
inline void barrier_expect(uint64_t *barrier, uint32_t bytes) {
    host::Transfers &t = transfers(*host::self->block, barrier);
    if (t.arrived) std::abort();
    t.expected = bytes;
    t.arrived = true;
    settle(t);
}
template <bool kOnlyShared = false>
inline void barrier_wait(uint64_t *barrier, uint32_t parity) {
    host::Transfers &t = transfers(*host::self->block, barrier);
    if (uint32_t(t.phase & 1) == parity) host::await_change(t.phase, t.phase);
}
inline void await_copies(uint64_t *barrier, uint32_t parity) { barrier_wait(barrier, parity); }
template <class Vector>
inline void send(void *to, uint64_t *barrier, uint32_t rank, const Vector &v) {
    host::Block &mine = *host::self->block, &peer = host::cluster().blocks[rank];
    const size_t at = size_t((unsigned char *)to - mine.shared.data());
    if (at % sizeof(Vector)) std::abort();
    std::memcpy(peer.shared.data() + at, &v, sizeof(Vector));
    host::Transfers &t = transfers(peer, barrier);
    t.bytes += long(sizeof(Vector));
    settle(t);
}
inline void shown_to_copies() {}
inline int limited_sum(int a, int b, int c) { return std::max(std::min(a + b, c), 0); }
inline int64_t times_plus(int a, int b, int64_t c) { return (int64_t)a * b + c; }
// an address: a block's number in its cluster, and a place in its shared memory
inline unsigned char *place_at(uint32_t address) {
    return host::cluster().blocks[address >> 24].shared.data() + (address & 0xFFFFFF);
}
inline uint32_t shared_address(const void *p) {
    host::Block &mine = *host::self->block;
    return uint32_t(mine.rank) << 24 | uint32_t((unsigned char *)p - mine.shared.data());
}
inline void copy_bulk(uint32_t to, const void *from, uint32_t bytes, uint64_t *barrier) {
    if (bytes % 16 || to % 16 || uintptr_t(from) % 16) std::abort();
    std::memcpy(place_at(to), from, bytes);
    host::Transfers &t = transfers(*host::self->block, barrier);
    t.bytes += long(bytes);
    settle(t);
}
inline uint32_t address_in(uint32_t address, uint32_t rank) {
    return (address & 0xFFFFFF) | rank << 24;
}
inline void send_slice(uint32_t slice, uint32_t barrier, uint32_t rank, uint32_t bytes) {
    if (slice % 16 || bytes % 16 || rank == slice >> 24) std::abort();
    if (threadIdx.x % 32) return;
    std::memcpy(place_at(address_in(slice, rank)), place_at(slice), bytes);
    host::Transfers &t = host::cluster().blocks[rank].transfers_at(barrier & 0xFFFFFF);
    t.bytes += long(bytes);
    settle(t);
}
inline uint32_t uniform(uint32_t v) { return v; }
inline uint32_t pinned(uint32_t address) { return address; }
template <class Value>
inline void store_where(bool where, void *to, const Value &v) {
    if (where) std::memcpy(to, &v, sizeof(Value));
}
inline uint32_t kept_number(uint32_t number) { return number; }
inline int64_t kept_number(int64_t number) { return number; }
template <class Value>
inline Value load_at(uint32_t address) {
    Value v;
    if (address % sizeof(Value)) std::abort();
    std::memcpy(&v, place_at(address), sizeof(Value));
    return v;
}
inline uint2 load8(uint32_t address) { return load_at<uint2>(address); }
inline uint4 load16(uint32_t address) { return load_at<uint4>(address); }
inline void copy_async(uint32_t to, const void *from, bool there) {
    if (to % 16 || uintptr_t(from) % 16) std::abort();
    host::copy({place_at(to), there ? from : nullptr, 16});
}
template <int kBytes>
inline void copy_async(void *to, const void *from) {
    if (uintptr_t(to) % kBytes || uintptr_t(from) % kBytes) std::abort();
    host::copy({(unsigned char *)to, from, kBytes});
}
inline void copies_commit() { host::copies_commit(); }
template <int kGroups>
inline void copies_wait() {
    host::copies_wait(kGroups);
}
inline void load_matrices(uint32_t (&v)[4], uint32_t address) { host::load_matrices(v, address); }
// a matrix in lines is its address: places are turned by their own
inline uint64_t matrix_in_lines(uint32_t address) {
    if (address % 1024) std::abort();
    return address;
}
inline uint64_t matrix_from(uint64_t matrix, uint32_t bytes) { return matrix + bytes; }
inline void settled(int &) {}
inline void products_begin() {}
inline void products_commit() {}
inline void products_wait() {}
template <int kColumns>
struct GroupProduct {
    static inline void add(int (&d)[kColumns][4], uint64_t a, uint64_t b, bool added) {
        host::add_products(d, kColumns, a, b, added);
    }
};
inline float load_float(uint32_t address) { return load_at<float>(address); }
inline uint32_t load2(uint32_t address) { return load_at<uint16_t>(address); }
template <class Value>
inline void store_at(uint32_t address, const Value &v) {
    if (address % sizeof(Value)) std::abort();
    std::memcpy(place_at(address), &v, sizeof(Value));
}
inline void store2(uint32_t address, uint32_t v) { store_at(address, uint16_t(v)); }
inline void store(uint32_t address, const uint2 &v) { store_at(address, v); }
inline void store(uint32_t address, const uint4 &v) { store_at(address, v); }
template <class Vector>
inline void send_to(uint32_t to, uint32_t barrier, const Vector &v) {
    store_at(to, v);
    host::Block &peer = host::cluster().blocks[barrier >> 24];
    host::Transfers &t = peer.transfers_at(barrier & 0xFFFFFF);
    t.bytes += long(sizeof(Vector));
    settle(t);
}
inline uint4 load_relaxed(const void *from) {
    uint4 v;
    std::memcpy(&v, from, 16);
    return v;
}
inline void store_relaxed(uint32_t *to, uint32_t v) { std::memcpy(to, &v, 4); }
inline uint32_t load_count(const uint32_t *from) {
    host::yield();
    return *from;
}
inline void add_released(uint32_t *to, uint32_t v) { *to += v; }
inline void acquire() {}
inline void prefetch(const void *) {}
inline int64_t shuffle_xor(int64_t v, int mask) {
    host::Exchange &w = host::exchange();
    const int lane = int(host::self->thread % 32);
    w.values[lane] = v;
    host::sync_warp();
    return w.values[lane ^ mask];
}
inline uint32_t shuffled(uint32_t v, int mask) { return uint32_t(shuffle_xor(v, mask)); }

inline float divided(float a, float b) { return a / b; }
inline float reciprocal(float v) { return 1 / v; }
inline float power_of_two(float v) { return std::exp2(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
inline float bits_as_float(uint32_t bits) { return __int_as_float(int32_t(bits)); }
inline uint32_t float_bits(float v) { return uint32_t(__float_as_int(v)); }
inline double bits_as_double(int64_t bits) {
    double v;
    std::memcpy(&v, &bits, 8);
    return v;
}
inline uint32_t bf16_bits(float v) {
    const uint32_t bits = float_bits(v);
    if (v != v) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
inline uint32_t bf16_pair(float first, float second) {
    return bf16_bits(first) | bf16_bits(second) << 16;
}
inline uint32_t half_bits(float v) {
    const _Float16 half = _Float16(v);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline float half_value(uint32_t bits) {
    const uint16_t low = uint16_t(bits);
    _Float16 half;
    std::memcpy(&half, &low, 2);
    return float(half);
}
inline uint32_t half_pair(float first, float second) {
    return half_bits(first) | half_bits(second) << 16;
}
inline float first_half(uint32_t pair) { return half_value(pair & 0xFFFF); }
inline float second_half(uint32_t pair) { return half_value(pair >> 16); }
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    host::multiply_bf16(d, a, b0, b1);
}
inline uint32_t or_of_warp(uint32_t v) {
    host::Exchange &w = host::exchange();
    w.values[host::self->thread % 32] = v;
    host::sync_warp();
    for (const int64_t each : w.values) v |= uint32_t(each);
    return v;
}
inline bool any_lane(bool v) { return or_of_warp(v); }
inline uint64_t wide_product(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
inline uint32_t byte_perm(uint32_t first, uint32_t second, uint32_t selector) {
    const uint64_t both = uint64_t(second) << 32 | first;
    uint32_t v = 0;
    for (int i = 0; i < 4; ++i)
        v |= uint32_t(both >> (selector >> (4 * i) & 7) * 8 & 255) << (8 * i);
    return v;
}
inline uint32_t shifted_right(uint32_t low, uint32_t high, int shift) {
    return uint32_t((uint64_t(high) << 32 | low) >> shift % 32);
}
inline float min_or_nan(float a, float b) {
    if (a != a || b != b) return NAN;
    return a < b || (a == b && std::signbit(a)) ? a : b;
}
inline float max_or_nan(float a, float b) {
    if (a != a || b != b) return NAN;
    return a > b || (a == b && !std::signbit(a)) ? a : b;
}
template <class Choose>
inline uint32_t in_bf16(uint32_t a, uint32_t b, const Choose &choose) {
    return bf16_pair(choose(bits_as_float(a << 16), bits_as_float(b << 16)),
                     choose(bits_as_float(a & 0xFFFF0000), bits_as_float(b & 0xFFFF0000)));
}
inline uint32_t min_or_nan_bf16(uint32_t a, uint32_t b) { return in_bf16(a, b, min_or_nan); }
inline uint32_t max_or_nan_bf16(uint32_t a, uint32_t b) { return in_bf16(a, b, max_or_nan); }
template <class Choose>
inline uint32_t in_half(uint32_t a, uint32_t b, const Choose &choose) {
    return half_pair(choose(first_half(a), first_half(b)), choose(second_half(a), second_half(b)));
}
inline uint32_t min_or_nan_half(uint32_t a, uint32_t b) { return in_half(a, b, min_or_nan); }
inline uint32_t max_or_nan_half(uint32_t a, uint32_t b) { return in_half(a, b, max_or_nan); }
inline uint4 load_once(const void *from) { return load_relaxed(from); }
