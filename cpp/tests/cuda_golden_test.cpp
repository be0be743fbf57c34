// Runs golden files on a GPU and compares every bit with Python's results.
//
//     cuda_golden_test FILE [--first I] [--count N] [--prepare-only]
//
// Without a GPU the result is 77. With --prepare-only nothing is compared: kernels are prepared and
// launched, by a stand-in for the driver that only checks launches.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "cuda/host/runtime.hpp"
#include "golden.hpp"
#include "quant_gru/cuda.hpp"

namespace {

using golden::Case;
using golden::Floats;
using quant_gru::cuda::Device;
using quant_gru::cuda::Memory;

template <class T>
Memory on_gpu(Device &device, const std::vector<T> &values) {
    Memory memory(device, values.size() * sizeof(T));
    if (!values.empty()) memory.upload(values.data(), values.size() * sizeof(T));
    return memory;
}

template <class T>
T *pointer(const Memory &memory) {
    return reinterpret_cast<T *>(static_cast<uintptr_t>(memory.address()));
}

// The first index at which bits differ, NaN in both counting as equal; -1 if none.
long first_difference(const Floats &a, const Floats &b) {
    for (size_t i = 0; i < b.size(); ++i) {
        const bool both_nan = a[i] != a[i] && b[i] != b[i];
        if (!both_nan && std::memcmp(&a[i], &b[i], sizeof a[i]) != 0) return static_cast<long>(i);
    }
    return -1;
}

bool report(const char *what, size_t index, const Floats &got, const Floats &expected) {
    const long at = first_difference(got, expected);
    if (at < 0) return true;
    std::printf("case %zu: %s differs first at %ld of %zu: expected %g, got %g\n", index, what, at,
                expected.size(), expected[static_cast<size_t>(at)], got[static_cast<size_t>(at)]);
    return false;
}

bool run_case(size_t index, const Case &c, bool compares) {
    Device &device = Device::at(0);
    const auto model = quant_gru::cuda::Model::load(c.file.data(), c.file.size(), 0);
    const quant_gru::cuda::Call call = model.prepare(c.T, c.N);
    const Memory x = on_gpu(device, c.x), h0 = on_gpu(device, c.h0);
    const Memory lengths = on_gpu(device, c.lengths);
    const Memory y = on_gpu(device, Floats(c.y.size(), -1.f));
    const Memory h_n = on_gpu(device, Floats(c.h_n.size(), -1.f));
    quant_gru::cuda::RunOptions options;
    options.h0 = pointer<float>(h0);
    options.h_n = pointer<float>(h_n);
    options.lengths = pointer<int64_t>(lengths);
    bool good = true;
    for (int pass = 0; pass < 2; ++pass) {  // the second one finds what the first one left behind
        call.run(pointer<float>(x), pointer<float>(y), options);
        Floats results(c.y.size()), last(c.h_n.size());
        y.download(results.data(), results.size() * sizeof(float));
        h_n.download(last.data(), last.size() * sizeof(float));
        if (compares)
            good = report("y", index, results, c.y) && report("h_n", index, last, c.h_n) && good;
    }
    if (!good) std::printf("T %ld, N %ld\n%s\n", long(c.T), long(c.N), call.description().c_str());
    return good;
}

}  // namespace

int main(int count, char **arguments) {
    try {
        Device::at(0);
    } catch (const quant_gru::cuda::DeviceError &error) {
        std::printf("%s\n", error.what());
        return 77;
    }
    std::string path;
    size_t first = 0, most = SIZE_MAX;
    bool compares = true;
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        if (argument == "--first")
            first = std::stoul(arguments[++i]);
        else if (argument == "--count")
            most = std::stoul(arguments[++i]);
        else if (argument == "--prepare-only")
            compares = false;
        else
            path = argument;
    }
    try {
        const std::vector<Case> cases = golden::read_cases(path);
        size_t wrong = 0, done = 0;
        for (size_t i = first; i < cases.size() && done < most; ++i, ++done) {
            try {
                wrong += !run_case(i, cases[i], compares);
            } catch (const std::exception &error) {
                std::printf("case %zu: %s\n", i, error.what());
                ++wrong;
            }
        }
        std::printf("%s: %zu of %zu cases differ\n", path.c_str(), wrong, done);
        return wrong != 0;
    } catch (const std::exception &error) {
        std::printf("%s\n", error.what());
        return 1;
    }
}
