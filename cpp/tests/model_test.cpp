// Models and streams: arguments, threads, copies, and memory.
//
//     model_test GOLDEN
#include "quant_gru/model.hpp"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "golden.hpp"

namespace {

std::atomic<int64_t> allocations{0};

}  // namespace

// Counts what the library allocates; the tests are linked with the static one.
void *operator new(size_t size) {
    ++allocations;
    if (void *found = std::malloc(size)) return found;
    throw std::bad_alloc();
}
void *operator new(size_t size, std::align_val_t alignment) {
    ++allocations;
    const auto unit = static_cast<size_t>(alignment);
    if (void *found = std::aligned_alloc(unit, (size + unit - 1) / unit * unit)) return found;
    throw std::bad_alloc();
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, size_t) noexcept { std::free(memory); }
void operator delete(void *memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void *memory, size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

using golden::Case;
using quant_gru::ArgumentError;
using quant_gru::Model;
using quant_gru::RunOptions;

Model load(const Case &c) { return Model::load(c.file.data(), c.file.size()); }

void test_arguments(const Case &c) {
    const Model model = load(c);
    std::vector<float> y(c.y.size());
    auto run = [&](int64_t T, int64_t N, const RunOptions &options = {}) {
        model.run(c.x.data(), T, N, y.data(), options);
    };
    CHECK_THROWS(ArgumentError, "Expected T to be at least 1, got 0", run(0, c.N));
    CHECK_THROWS(ArgumentError, "Expected N to be at least 1, got -1", run(c.T, -1));
    CHECK_THROWS(ArgumentError, "T * N to be smaller", run(int64_t{1} << 40, int64_t{1} << 40));
    CHECK_THROWS(ArgumentError, "addresses of x and y", model.run(nullptr, 1, 1, y.data()));
    RunOptions options;
    options.threads = -1;
    CHECK_THROWS(ArgumentError, "threads to be at least 0", run(c.T, c.N, options));
    for (int64_t length : {int64_t{-1}, c.T + 1}) {
        const std::vector<int64_t> lengths(static_cast<size_t>(c.N), length);
        options = {};
        options.lengths = lengths.data();
        CHECK_THROWS(ArgumentError, "lengths to be in [0, ", run(c.T, c.N, options));
    }
    CHECK_THROWS(ArgumentError, model.shape().directions > 1 ? "bidirectional" : "N to be in",
                 model.stream(0));
}

void test_instruction_sets(const Case &c) {
    const char *given = std::getenv("QUANT_GRU_CPU");
    const std::string kept = given ? given : "";
    CHECK(kept.empty() || load(c).instruction_set() == kept);
    setenv("QUANT_GRU_CPU", "none", 1);
    CHECK_THROWS(ArgumentError, "got 'none'", load(c));
    setenv("QUANT_GRU_CPU", kept.c_str(), 1);
}

// Several threads run copies of one model, and streams of it.
void test_threads(const Case &c) {
    const Model model = load(c);
    const auto work = [copy = model, &c] {
        std::vector<float> y(c.y.size());
        for (int i = 0; i < 20; ++i) copy.run(c.x.data(), c.T, c.N, y.data());
        if (copy.shape().directions > 1) return;
        quant_gru::Stream stream = copy.stream(c.N);
        for (int i = 0; i < 20; ++i) stream.step(c.x.data(), y.data());
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back(work);
    for (std::thread &each : threads) each.join();
}

void test_streams(const Case &c) {
    const Model model = load(c);
    if (model.shape().directions > 1) return;
    const auto C = static_cast<size_t>(model.shape().input_size);
    const auto H = static_cast<size_t>(model.shape().hidden_size);
    quant_gru::Stream first = model.stream(2);
    quant_gru::Stream stream = std::move(first);
    std::vector<float> x(2 * C, 0.25f), y(2 * H), again(2 * H), with_nan(2 * H), after(2 * H);
    stream.step(x.data(), y.data());
    const int64_t before = allocations;
    stream.reset();
    stream.step(x.data(), again.data());
    // NaN stays in its row until reset
    x[C] = std::numeric_limits<float>::quiet_NaN();
    stream.step(x.data(), with_nan.data());
    x[C] = 0.25f;
    stream.step(x.data(), after.data());
    CHECK(allocations == before);
    CHECK(y == again);
    for (size_t i = 0; i < H; ++i) {
        CHECK(!std::isnan(with_nan[i]) && std::isnan(with_nan[H + i]));
        CHECK(!std::isnan(after[i]) && std::isnan(after[H + i]));
    }
    stream.reset();
    stream.step(x.data(), again.data());
    CHECK(y == again);
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 2) return 2;
    for (const Case &c : golden::read_cases(arguments[1])) {
        test_arguments(c);
        test_threads(c);
        test_streams(c);
        test_instruction_sets(c);
    }
    return failures != 0;
}
