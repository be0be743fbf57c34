#include "kernel_runtime/native/device.hpp"

#include <algorithm>
#include <exception>
#include <future>
#include <thread>
#include <utility>

#include "kernel_runtime/native/embedder.hpp"

namespace kernel_runtime::cuda {
namespace {

constexpr int kOldest = 80;
constexpr int kPortableCluster = 8;
// Clusters are counted for blocks so large that each occupies a whole multiprocessor.
constexpr unsigned kProbeThreads = 256, kProbeBytes = 128 << 10;

}  // namespace

Device::Device(const Driver &d, int index, Compile compile, StartThread start, bool graphs)
    : driver_(d), index_(index), graphs_(d, graphs) {
    int count = 0, device = 0, minor = 0;
    d.check(d.cuDeviceGetCount(&count));
    if (index < 0 || index >= count)
        fail("Expected the index of a GPU to be in [0, " + std::to_string(count) + "), got " +
             std::to_string(index));
    d.check(d.cuDeviceGet(&device, index));
    d.check(d.cuDeviceGetAttribute(&capability_, kCapabilityMajor, device));
    d.check(d.cuDeviceGetAttribute(&minor, kCapabilityMinor, device));
    d.check(d.cuDeviceGetAttribute(&multiprocessors_, kMultiprocessorCount, device));
    capability_ = 10 * capability_ + minor;
    if (capability_ < kOldest)
        fail("Expected compute capability 8.0 or later, got " + std::to_string(capability_ / 10) +
             "." + std::to_string(minor));
    arch_ = "sm_" + std::to_string(capability_) + (capability_ == 90 ? "a" : "");
    d.check(d.cuDevicePrimaryCtxRetain(&context_, device));
    compiler_.emplace([compile = std::move(compile),
                       arch = arch_](const Kernel &kernel) { return compile(kernel, arch); },
                      std::move(start));
}

const std::map<int, int> &Device::clusters() {
    const std::lock_guard<std::mutex> lock(counting_);
    if (clusters_.empty()) clusters_ = counted_clusters();
    return clusters_;
}

std::map<int, int> Device::counted_clusters() {
    std::map<int, int> found{{1, multiprocessors_}};
    if (!has_clusters()) return found;
    for (const int blocks : {2, 4, 8, 16}) {
        const auto size = static_cast<unsigned>(blocks);
        const Grid grid{size, 1, kProbeThreads, size, kProbeBytes};
        const Function function = load({"probe", "probe", {}}, grid);
        const Configured configured(grid, nullptr);
        const CurrentContext current(*this);
        int count = 0;
        if (driver_.cuOccupancyMaxActiveClusters(&count, function.handle, &configured.config))
            count = 0;
        if (count) found[blocks] = count;
    }
    return found;
}

void Device::compile(const std::vector<Kernel> &kernels) {
    size_t count = 0;
    for (const Kernel &each : kernels) count += compiler_->expect(each);
    const size_t most = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::future<void>> workers(std::min(most, count));
    for (auto &each : workers) each = std::async([this] { compiler_->work(); });
    for (auto &each : workers) each.get();
}

Function Device::load(const Kernel &kernel, const Grid &grid) {
    const std::lock_guard<std::mutex> lock(loading_);
    const CurrentContext current(*this);
    const Driver &d = driver_;
    void *&module = modules_[name_of(kernel)];
    if (!module) d.check(d.cuModuleLoadData(&module, compiler_->take(kernel).data()));
    Function function;
    d.check(d.cuModuleGetFunction(&function.handle, module, kernel.function.c_str()));
    // Launches with other cluster sizes share the function, and may need more shared memory.
    unsigned &shared = shared_[function.handle];
    if (grid.shared_bytes > shared) {
        d.check(d.cuFuncSetAttribute(function.handle, kMaxDynamicShared,
                                     static_cast<int>(grid.shared_bytes)));
        shared = grid.shared_bytes;
    }
    if (grid.cluster > kPortableCluster)
        d.check(d.cuFuncSetAttribute(function.handle, kNonPortableCluster, 1));
    return function;
}

void Device::launch(const Function &function, const Grid &grid, void **parameters, Stream stream) {
    const Configured configured(grid, stream);
    driver_.check(in_context([&] {
        return driver_.cuLaunchKernelEx(&configured.config, function.handle, parameters, nullptr);
    }));
}

void Device::launch(const Function &function, const Grid &grid, const void *argument,
                    Stream stream) {
    void *parameters[] = {const_cast<void *>(argument)};
    launch(function, grid, parameters, stream);
}

Memory::Memory(Device &device, size_t bytes) : device_(&device), size_(bytes) {
    const Driver &d = device.driver();
    const CurrentContext current(device);
    if (bytes) d.check(d.cuMemAlloc(&address_, bytes));
}

Memory &Memory::operator=(Memory &&other) noexcept {
    std::swap(device_, other.device_);
    std::swap(address_, other.address_);
    std::swap(size_, other.size_);
    return *this;
}

Memory::~Memory() {
    if (!address_) return;
    try {
        const CurrentContext current(*device_);
        device_->driver().cuMemFree(address_);
    } catch (const std::exception &) {
        // the process ends, and the driver with it
    }
}

void Memory::upload(const void *from, size_t bytes, size_t offset) {
    const Driver &d = device_->driver();
    const CurrentContext current(*device_);
    d.check(d.cuMemcpyHtoD(address_ + offset, from, bytes));
    // pageable memory may still be on its way, and user streams do not wait for it
    d.check(d.cuStreamSynchronize(nullptr));
}

void Memory::download(void *to, size_t bytes, size_t offset) const {
    const Driver &d = device_->driver();
    const CurrentContext current(*device_);
    d.check(d.cuMemcpyDtoH(to, address_ + offset, bytes));
}

}  // namespace kernel_runtime::cuda
