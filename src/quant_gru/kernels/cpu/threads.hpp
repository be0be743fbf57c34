// A few threads for one piece of work.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace quant_gru {

// work(0) .. work(count - 1), each in a thread of its own where there are threads to be had.
template <class Work>
void in_threads(int64_t count, Work work) {
    std::vector<std::thread> others;
    int64_t started = 1;
    others.reserve(static_cast<size_t>(count));
    try {
        for (; started < count; ++started) others.emplace_back(work, started);
    } catch (const std::system_error &) {
        // this thread does the rest
    }
    work(0);
    for (int64_t i = started; i < count; ++i) work(i);
    for (std::thread &other : others) other.join();
}

}  // namespace quant_gru
