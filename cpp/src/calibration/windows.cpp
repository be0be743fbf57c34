#include "calibration/windows.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace quant_gru {
namespace {

constexpr int64_t kSteps = 32;
// Kept steps: as many as give this many values of one operator, and at least kLeast.
constexpr int64_t kValues = 1 << 16, kLeast = 512;
// Fewer steps say too little of other data.
constexpr int64_t kFewest = 32;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

int64_t length(const FloatInput &input, int64_t n) {
    return input.lengths ? input.lengths[n] : input.T;
}

// The sum of all words times odd numbers, modulo 2^64, is mixed like in SplitMix64.
uint64_t hash(const std::vector<float> &x) {
    uint64_t sum = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        int32_t word;
        std::memcpy(&word, &x[i], sizeof word);
        sum += static_cast<uint64_t>(int64_t{word} + 1) * ((2 * uint64_t{i} + 1) * kGolden);
    }
    uint64_t z = sum + kGolden;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

}  // namespace

Windows::Windows(int64_t H) : H_(H), limit_(std::max(kLeast, kValues / H)) {}

bool Windows::is_enough() const { return steps_ >= kFewest; }

void Windows::add(const FloatInput &input, int64_t C,
                  const std::vector<std::vector<float>> &starts) {
    const int64_t N = input.N;
    for (int64_t first = 0; first < input.T; first += kSteps)
        for (int64_t n = 0; n < N; ++n) {
            Window window;
            window.steps = std::min(kSteps, length(input, n) - first);
            if (window.steps <= 0) continue;
            for (int64_t t = first; t < first + window.steps; ++t) {
                const float *from = input.x + (t * N + n) * C;
                window.x.insert(window.x.end(), from, from + C);
            }
            const Order order(hash(window.x), window.steps);
            if (!takes(order)) continue;
            for (const std::vector<float> &cell : starts) {
                const auto from = cell.begin() + (first / kSteps * N + n) * H_;
                window.h0.insert(window.h0.end(), from, from + H_);
            }
            insert(order, std::move(window));
        }
}

void Windows::insert(const Order &order, Window window) {
    const auto [place, is_new] =
        kept_.try_emplace(order, std::move(window));  // moves only what is new
    if (!is_new) {
        // not the first one to come: the order of the data must not matter
        if (window.h0 < place->second.h0) place->second = std::move(window);
        return;
    }
    steps_ += place->second.steps;
    for (; steps_ > limit_; kept_.erase(*dropped_)) {
        const auto last = std::prev(kept_.end());
        steps_ -= last->second.steps;
        dropped_ = last->first;
    }
}

std::vector<float> window_starts(const FloatInput &input, const FloatRun &run, int64_t H,
                                 bool reverse) {
    const int64_t N = input.N, windows = (input.T + kSteps - 1) / kSteps;
    std::vector<float> found(static_cast<size_t>(windows * N * H));
    for (int64_t i = 0; i < windows; ++i)
        for (int64_t n = 0; n < N; ++n) {
            const int64_t first = i * kSteps, steps = std::min(kSteps, length(input, n) - first);
            if (steps <= 0) continue;
            const int64_t processed = reverse ? length(input, n) - first - steps : first;
            const double *from = run.states + (processed * N + n) * H;
            std::copy_n(from, H, found.begin() + (i * N + n) * H);
        }
    return found;
}

}  // namespace quant_gru
