// Threads that process one piece of work together, with barriers between its phases.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace quant_gru {

// Factor on the amount of work that pays for a thread. Tests set a small factor, so that small work
// is divided, too.
inline std::atomic<double> thread_price{1.};
// Number of threads started so far.
inline std::atomic<int64_t> threads_started{0};

class Team {
 public:
    // Number of threads. Waits until all of them have been started.
    int64_t size() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return size_ != 0; });
        return size_;
    }

    // Returns when all threads have called it.
    void barrier() {
        const int64_t round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            arrived_.store(0, std::memory_order_relaxed);
            {
                std::lock_guard<std::mutex> lock(mutex_);
                round_.store(round + 1, std::memory_order_release);
            }
            changed_.notify_all();
            return;
        }
        // The others often arrive soon; sleeping would take longer.
        for (int i = 0; i < kYields; ++i) {
            if (round_.load(std::memory_order_acquire) != round) return;
            std::this_thread::yield();
        }
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != round; });
    }

 private:
    template <class Work>
    friend void in_team(int64_t most, Work work);
    static constexpr int kYields = 200;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int64_t> arrived_{0}, round_{0};
    int64_t size_ = 0;
};

// Runs work(index, team) in at most `most` threads, including this one. There are fewer threads if
// the system has no more.
template <class Work>
void in_team(int64_t most, Work work) {
    Team team;
    std::vector<std::thread> others;
    others.reserve(static_cast<size_t>(most));
    try {
        for (int64_t i = 1; i < most; ++i) others.emplace_back([&, i] { work(i, team); });
    } catch (const std::system_error &) {
        // The threads that were started do all the work.
    }
    {
        std::lock_guard<std::mutex> lock(team.mutex_);
        team.size_ = static_cast<int64_t>(others.size()) + 1;
    }
    team.changed_.notify_all();
    threads_started += static_cast<int64_t>(others.size());
    work(0, team);
    for (std::thread &other : others) other.join();
}

}  // namespace quant_gru
