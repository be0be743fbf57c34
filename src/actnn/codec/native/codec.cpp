#include "actnn/codec/native/codec.hpp"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "kernel_runtime/native/processor.hpp"

namespace actnn {
namespace {

constexpr int64_t kWorth = 1 << 17;  // elements that pay for a thread

const Variant &variant() {
#if defined(__x86_64__) || defined(_M_X64)
    static const bool fast = kernel_runtime::has_avx2();
    if (fast && !only_portable) return avx2;
#endif
    return portable;
}

void run(Part part, const Codec &codec, int threads) {
    const int64_t groups = codec.rows * codec.groups();
    const int64_t count =
        std::max<int64_t>(1, std::min<int64_t>({threads, groups, codec.rows * codec.m / kWorth}));
    std::vector<std::thread> others;
    int64_t done = groups / count;
    for (int64_t i = 1; i < count; ++i) {
        const int64_t last = groups * (i + 1) / count;
        try {
            others.emplace_back(part, std::cref(codec), done, last);
        } catch (const std::system_error &) {
            part(codec, done, last);  // the system has no more threads
        }
        done = last;
    }
    part(codec, 0, groups / count);
    for (std::thread &other : others) other.join();
}

}  // namespace

bool only_portable = false;

void encode(const Codec &codec, int threads) { run(variant().encode, codec, threads); }
void decode(const Codec &codec, int threads) { run(variant().decode, codec, threads); }

}  // namespace actnn
