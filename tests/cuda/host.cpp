// The scheduler of host.hpp's fibers, and what multiplies matrices. Compiled once, and optimized.
#include "host.hpp"

#include <algorithm>

namespace host {

namespace {

std::minstd_rand chance;  // always the same chances
ucontext_t scheduler;
void *scheduler_jump[5];
void (*body)(const void *);
const void *body_arguments;

// Those of the C library take more time: they look for what to clean up. A function does not both
// set a place and jump.
[[noreturn, gnu::noinline]] void jump(void **to) { __builtin_longjmp(to, 1); }

[[gnu::noinline]] void resume(Fiber &f) {
    self = &f;
    if (__builtin_setjmp(scheduler_jump)) return;
    if (f.started) jump(f.jump);
    f.started = true;
    swapcontext(&scheduler, &f.context);
}

void entry() {
    for (;;) {  // the next turn is that of another thread
        body(body_arguments);
        self->done = true;
        yield();
    }
}

// Fibers that have no thread at the moment, or had none yet; they keep their stacks.
std::vector<std::unique_ptr<Fiber>> fibers;

Fiber &fiber(size_t i) {
    if (i == fibers.size()) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber &f = *fibers.back();
        f.stack.reset(new char[kStack]);  // not cleared: most of it is never used
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.get();
        f.context.uc_stack.ss_size = kStack;
        f.context.uc_link = nullptr;
        makecontext(&f.context, entry, 0);
    }
    return *fibers[i];
}

void arrive(const Copy &copy) {
    if (copy.from)
        std::memcpy(copy.to, copy.from, copy.bytes);
    else
        std::memset(copy.to, 0, copy.bytes);
}

int lane() { return int(self->thread % 32); }

Exchange &exchanged(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Exchange &w = exchange();
    for (int i = 0; i < 4; ++i) w.a[lane()][i] = a[i];
    w.b[lane()][0] = b0;
    w.b[lane()][1] = b1;
    sync_warp();
    return w;
}

constexpr int kDepth = 32;  // of a product of bytes

void widen(int16_t (&to)[kDepth], const uint32_t (&words)[kDepth / 4], bool is_unsigned) {
    unsigned char bytes[kDepth];
    std::memcpy(bytes, words, kDepth);
    for (int k = 0; k < kDepth; ++k)
        to[k] = is_unsigned ? int16_t(bytes[k]) : int16_t(int8_t(bytes[k]));
}

int dot(const int16_t (&x)[kDepth], const int16_t (&y)[kDepth]) {
    int sum = 0;
    for (int k = 0; k < kDepth; ++k) sum += int(x[k]) * int(y[k]);
    return sum;
}

// Bytes of a line of a matrix in lines, whose pieces of 16 bytes are in an order of the line.
void read_line(int16_t (&to)[kDepth], uint64_t matrix, int line) {
    uint32_t words[kDepth / 4];
    for (int piece = 0; piece < 2; ++piece) {
        const uint32_t at = uint32_t(matrix) + line * 128 + 16 * piece;
        if (at % 16) std::abort();
        std::memcpy(words + 4 * piece, place_at(at ^ (at >> 7 & 7) << 4), 16);
    }
    widen(to, words, false);
}

}  // namespace

Fiber *self;
Index grid;
unsigned block_threads;

// jumps between fibers: contexts are only switched at a fiber's first turn, as that costs a call
// into the system
[[gnu::noinline]] void yield() {
    if (!__builtin_setjmp(self->jump)) jump(scheduler_jump);
}

// The scheduler looks at the value, which costs less than a turn.
void await_change(const long &value, long seen) {
    if (value != seen) return;
    self->watched = &value;
    self->seen = seen;
    yield();
    self->watched = nullptr;
}

void arrive(Barrier &b, int count) {
    if (++b.waiting < count) return;
    b.waiting = 0;
    ++b.generation;
}

void wait(Barrier &b, int count) {
    const long mine = b.generation;
    arrive(b, count);
    await_change(b.generation, mine);
}

void copy(const Copy &copy) {
    if (chance() % 2)
        arrive(copy);
    else
        self->copies.back().push_back(copy);
}

void copies_commit() { self->copies.emplace_back(); }

void copies_wait(int kept) {
    auto &groups = self->copies;
    while (groups.size() > size_t(kept) + 1) {
        for (const Copy &each : groups.front()) arrive(each);
        groups.erase(groups.begin());
    }
}

void multiply(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool unsigned_a,
              bool unsigned_b) {
    const Exchange &w = exchanged(a, b0, b1);
    int16_t x[2][kDepth], y[2][kDepth];
    for (int i = 0; i < 2; ++i) {
        const int row = lane() / 4, column = 2 * (lane() % 4) + i;
        uint32_t of_row[8], of_column[8];
        for (int half = 0; half < 2; ++half)
            for (int quad = 0; quad < 4; ++quad) {
                of_row[4 * half + quad] = w.a[row * 4 + quad][i + 2 * half];
                of_column[4 * half + quad] = w.b[column * 4 + quad][half];
            }
        widen(x[i], of_row, unsigned_a);
        widen(y[i], of_column, unsigned_b);
    }
    for (int i = 0; i < 4; ++i)
        d[i] = int(uint32_t(d[i]) + uint32_t(dot(x[i / 2], y[i % 2])));  // wraps around
}

void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const Exchange &w = exchanged(a, b0, b1);
    const auto value = [](uint32_t pair, int i) { return bits_as_float(pair >> (16 * i) << 16); };
    for (int i = 0; i < 4; ++i) {
        const int row = lane() / 4, column = 2 * (lane() % 4) + i % 2;
        for (int k = 0; k < 16; ++k) {
            const int half = k / 8, quad = k % 8 / 2;
            d[i] += value(w.a[row * 4 + quad][i / 2 + 2 * half], k % 2) *
                    value(w.b[column * 4 + quad][half], k % 2);
        }
    }
}

void load_matrices(uint32_t (&v)[4], uint32_t address) {
    Exchange &w = exchange();
    if (address % 16) std::abort();
    w.values[lane()] = address;
    sync_warp();
    for (int i = 0; i < 4; ++i)
        v[i] = load_at<uint32_t>(uint32_t(w.values[8 * i + lane() / 4]) + lane() % 4 * 4);
}

void add_products(int (*d)[4], int columns, uint64_t a, uint64_t b, bool added) {
    const int warp = int(self->thread / 32 % 4);
    int16_t x[2][kDepth], y[kDepth];
    for (int half = 0; half < 2; ++half) read_line(x[half], a, warp * 16 + half * 8 + lane() / 4);
    for (int i = 0; i < 2 * columns; ++i) {
        read_line(y, b, i / 2 * 8 + lane() % 4 * 2 + i % 2);
        for (int half = 0; half < 2; ++half) {
            int &sum = d[i / 2][2 * half + i % 2];
            sum = (added ? sum : 0) + dot(x[half], y);
        }
    }
}

void run(void (*kernel)(const void *), const void *arguments, int blocks_x, int blocks_y,
         int threads, int size, size_t shared, bool together) {
    body = kernel;
    body_arguments = arguments;
    grid = {unsigned(blocks_x), unsigned(blocks_y)};
    block_threads = unsigned(threads);
    const int all = blocks_x / size * blocks_y, at_once = together ? all : 1;
    for (int first = 0; first < all; first += at_once) {
        std::vector<Cluster> clusters(at_once);
        const size_t count = size_t(at_once) * size * threads;
        for (int i = 0; i < at_once * size; ++i) {
            Cluster &home = clusters[i / size];
            if (home.blocks.empty()) home.blocks.resize(size);
            Block &block = home.blocks[i % size];
            const int x = (first + i / size) % (blocks_x / size) * size + i % size;
            block.index = {unsigned(x), unsigned((first + i / size) / (blocks_x / size))};
            block.rank = i % size;
            block.cluster = &home;
            block.shared.assign(shared + 64, 0xA5);  // poison
            block.warps.resize((threads + 31) / 32);
            for (int thread = 0; thread < threads; ++thread) {
                Fiber &f = fiber(size_t(i) * threads + thread);
                f.block = &block;
                f.thread = unsigned(thread);
                f.copies.assign(1, {});
                f.arrived = 0;
                f.watched = nullptr;
                f.exchanges = 0;
                f.done = false;
            }
        }
        // in any order, and some warps get ahead of others: what relies on more than its barriers
        // and waits goes wrong sooner or later
        for (bool running = true; running;) {
            running = false;
            const size_t warps = (count + 31) / 32, begin = chance() % warps;
            for (size_t w = 0; w < warps; ++w) {
                const size_t warp = (begin + w) % warps * 32;
                const bool waits = chance() % 4 == 0;
                const size_t end = std::min(warp + 32, count);
                for (size_t i = warp; i < end; ++i) {
                    Fiber &f = *fibers[i];
                    running = running || !f.done;
                    const bool stays = f.watched && *f.watched == f.seen;
                    if (!f.done && !waits && !stays) resume(f);
                }
            }
        }
    }
}

}  // namespace host
