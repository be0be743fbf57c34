// The scheduler of host.hpp's fibers.
#include "host.hpp"

#include <algorithm>

namespace host {

namespace {

std::minstd_rand chance;  // always the same chances
ucontext_t scheduler;
jmp_buf scheduler_jump;
void (*body)(const void *);
const void *body_arguments;

void resume(Fiber &f) {
    self = &f;
    if (_setjmp(scheduler_jump)) return;
    if (f.started) _longjmp(f.jump, 1);
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

}  // namespace

Fiber *self;
Index grid;
unsigned block_threads;

// jumps between fibers: contexts are only switched at a fiber's first turn, as that costs a call
// into the system
void yield() {
    if (!_setjmp(self->jump)) _longjmp(scheduler_jump, 1);
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
