#include "kernel_runtime/native/parallel_compiler.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace kernel_runtime::cuda {
namespace {

struct Job {
    explicit Job(Kernel of) : kernel(std::move(of)) {}

    const Kernel kernel;
    bool begun = false, done = false, taken = false;
    std::string code;
    std::exception_ptr error;
};

}  // namespace

std::string name_of(const Kernel &kernel) {
    std::string name = kernel.source;
    for (const auto &[macro, value] : kernel.macros) name += " " + macro + "=" + value;
    return name;
}

struct ParallelCompiler::State {
    explicit State(Compile given) : compile(std::move(given)) {}

    bool is_busy() const { return threads >= std::max(1U, std::thread::hardware_concurrency()); }

    void run(Job &job, std::unique_lock<std::mutex> &lock) {
        job.begun = true;
        lock.unlock();
        try {
            job.code = compile(job.kernel);
        } catch (...) {
            job.error = std::current_exception();
        }
        lock.lock();
        job.done = true;
        changed.notify_all();
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex);
        if (is_busy()) return;
        ++threads;
        while (!expected.empty()) {
            const std::shared_ptr<Job> job = expected.front();
            expected.pop_front();
            if (!job->begun) run(*job, lock);
        }
        --threads;
    }

    const Compile compile;
    std::mutex mutex;  // guards everything below
    std::condition_variable changed;
    std::map<std::string, std::shared_ptr<Job>> jobs;  // by name
    std::deque<std::shared_ptr<Job>> expected;
    unsigned threads = 0;
};

ParallelCompiler::ParallelCompiler(Compile compile, StartThread start)
    : state_(std::make_shared<State>(std::move(compile))), start_(std::move(start)) {}

bool ParallelCompiler::expect(const Kernel &kernel) {
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        std::shared_ptr<Job> &job = state_->jobs[name_of(kernel)];
        if (job && !job->error) return false;
        job = std::make_shared<Job>(kernel);
        state_->expected.push_back(job);
        if (!start_ || state_->is_busy()) return true;
    }
    // Without a thread, `take` compiles it.
    start_([state = state_] { state->work(); });
    return true;
}

void ParallelCompiler::work() { state_->work(); }

bool ParallelCompiler::wait(const Kernel &kernel, std::chrono::milliseconds most) {
    std::unique_lock<std::mutex> lock(state_->mutex);
    const auto found = state_->jobs.find(name_of(kernel));
    if (found == state_->jobs.end()) return true;
    const std::shared_ptr<Job> job = found->second;
    return state_->changed.wait_for(lock, most, [&] { return !job->begun || job->done; });
}

std::string ParallelCompiler::take(const Kernel &kernel) {
    const std::string name = name_of(kernel);
    std::unique_lock<std::mutex> lock(state_->mutex);
    std::shared_ptr<Job> &known = state_->jobs[name];
    if (!known || known->taken) known = std::make_shared<Job>(kernel);
    const std::shared_ptr<Job> job = known;
    if (!job->begun)
        state_->run(*job, lock);
    else
        state_->changed.wait(lock, [&] { return job->done; });
    if (job->error) {
        state_->jobs.erase(name);
        std::rethrow_exception(std::exchange(job->error, nullptr));
    }
    job->taken = true;
    return std::move(job->code);
}

}  // namespace kernel_runtime::cuda
