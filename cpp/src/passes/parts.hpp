// The work of a pass in parts, one for each thread.
#pragma once

#include <algorithm>

#include "cpu/core/threads.hpp"
#include "network.hpp"
#include "passes/sizes.hpp"

namespace quant_gru {

// The number of parts of a pass of some steps.
inline int64_t pass_parts(int threads, const PassSizes &sizes, int64_t steps) {
    constexpr double kPays = 1e6;  // multiply-accumulates for which a thread pays
    const auto [N, C, H] = sizes;
    const double work = 3.0 * static_cast<double>(H * (H + C + 64)) *
                        static_cast<double>(steps * N) / (kPays * thread_price);
    return std::clamp<int64_t>(static_cast<int64_t>(std::min(work, 1e6)), 1, thread_count(threads));
}

// Runs work(part, parts, barrier) for all parts at once. There may be fewer parts than asked for.
template <class Work>
void in_parts(int64_t parts, const Work &work) {
    in_team(parts, [&](int64_t part, Team &team) {
        work(part, team.size(), [&team] { team.barrier(); });
    });
}

}  // namespace quant_gru
