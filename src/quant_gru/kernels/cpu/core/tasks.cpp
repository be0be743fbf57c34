#include "cpu/core/tasks.hpp"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

#include "cpu/core/threads.hpp"

namespace quant_gru {

bool run_tasks(const std::vector<Task> &tasks, int threads, Scratch &scratch) {
    // A thread pays if it has a few hundred microseconds of work.
    const double pays = 2e7 * thread_price;
    double all = 0;
    int64_t most = 0;
    for (const Task &task : tasks) {
        const Job &job = task.job;
        all += task.layer->work() * static_cast<double>(job.N) * static_cast<double>(job.T);
        most = std::max(most, task.layer->workspace(job.N, job.T));
    }
    if (threads <= 1 || all <= pays) {
        Scratch::Lease lease(scratch, static_cast<size_t>(most));
        bool nan = false;
        for (const Task &task : tasks) {
            Job job = task.job;
            job.first_row = 0;
            job.end_row = job.N;
            job.workspace = lease.data;
            nan = task.layer->run(job) || nan;
        }
        return nan;
    }
    std::vector<Task> parts;
    for (const Task &task : tasks) {
        const int64_t N = task.job.N;
        const double work = task.layer->work() * static_cast<double>(N) *
                            static_cast<double>(std::max<int64_t>(task.job.T, 1));
        int64_t count = threads / static_cast<int>(tasks.size());
        count = std::min({count, N, static_cast<int64_t>(std::min(work / pays, 1e6))});
        count = std::max<int64_t>(count, 1);
        for (int64_t i = 0; i < count; ++i) {
            parts.push_back(task);
            parts.back().job.first_row = N * i / count;
            parts.back().job.end_row = N * (i + 1) / count;
        }
    }
    int64_t bytes = 0;
    for (const Task &part : parts)
        bytes +=
            cache_lines(part.layer->workspace(part.job.end_row - part.job.first_row, part.job.T));
    Scratch::Lease lease(scratch, static_cast<size_t>(bytes));
    char *space = static_cast<char *>(lease.data);
    for (Task &part : parts) {
        part.job.workspace = space;
        space +=
            cache_lines(part.layer->workspace(part.job.end_row - part.job.first_row, part.job.T));
    }
    std::atomic<bool> nan{false};
    auto run = [&](size_t i) {
        if (parts[i].layer->run(parts[i].job)) nan = true;
    };
    std::vector<std::thread> others;
    size_t started = 1;
    others.reserve(parts.size());
    try {
        for (; started < parts.size(); ++started) others.emplace_back(run, started);
    } catch (const std::system_error &) {
        // The system has no more threads: this thread runs the remaining parts.
    }
    threads_started += static_cast<int64_t>(started) - 1;
    run(0);
    for (size_t i = started; i < parts.size(); ++i) run(i);
    for (std::thread &other : others) other.join();
    return nan;
}

}  // namespace quant_gru
