#include "kernel_runtime/native/device.hpp"

#include <algorithm>
#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <utility>

#include "kernel_runtime/native/embedder.hpp"

namespace kernel_runtime::cuda {
namespace {

constexpr int kOldest = 80;
constexpr int kPortableCluster = 8;
// Clusters are counted for blocks so large that each occupies a whole multiprocessor.
constexpr unsigned kProbeThreads = 256, kProbeBytes = 128 << 10;

// What a module depends on. Functions of a source share its module.
std::string name_of(const Kernel &kernel) {
    std::string name = kernel.source;
    for (const auto &[macro, value] : kernel.macros) name += " " + macro + "=" + value;
    return name;
}

}  // namespace

Device &Device::at(int index) {
    static std::mutex mutex;
    static std::map<int, std::unique_ptr<Device>> *const all =
        new std::map<int, std::unique_ptr<Device>>;  // outlives every static object
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Device> &found = (*all)[index];
    if (!found) found.reset(new Device(index));
    return *found;
}

Device::Device(int index) : index_(index) {
    const Driver &d = driver();
    int count = 0, device = 0, minor = 0;
    check(d.cuDeviceGetCount(&count));
    if (index < 0 || index >= count)
        fail("Expected the index of a GPU to be in [0, " + std::to_string(count) + "), got " +
             std::to_string(index));
    check(d.cuDeviceGet(&device, index));
    check(d.cuDeviceGetAttribute(&capability_, kCapabilityMajor, device));
    check(d.cuDeviceGetAttribute(&minor, kCapabilityMinor, device));
    check(d.cuDeviceGetAttribute(&multiprocessors_, kMultiprocessorCount, device));
    capability_ = 10 * capability_ + minor;
    if (capability_ < kOldest)
        fail("Expected compute capability 8.0 or later, got " + std::to_string(capability_ / 10) +
             "." + std::to_string(minor));
    arch_ = "sm_" + std::to_string(capability_) + (capability_ == 90 ? "a" : "");
    context_ = primary_context(index);
}

const std::map<int, int> &Device::clusters() {
    std::call_once(counted_, [this] { clusters_ = counted_clusters(); });
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
        const CurrentContext current(context_);
        int count = 0;
        if (driver().cuOccupancyMaxActiveClusters(&count, function.handle, &configured.config))
            count = 0;
        if (count) found[blocks] = count;
    }
    return found;
}

std::string Device::code_of(const Kernel &kernel) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = compiled_.find(name_of(kernel));
        if (found != compiled_.end()) return found->second;
    }
    return machine_code(kernel, arch_);
}

void Device::compile(const std::vector<Kernel> &kernels) {
    std::map<std::string, const Kernel *> missing;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const Kernel &each : kernels) {
            const std::string name = name_of(each);
            if (!modules_.count(name) && !compiled_.count(name)) missing[name] = &each;
        }
    }
    auto next = missing.cbegin();
    const auto work = [&] {
        for (std::unique_lock<std::mutex> lock(mutex_); next != missing.cend();) {
            const auto &[name, kernel] = *next++;
            lock.unlock();
            std::string code = machine_code(*kernel, arch_);
            lock.lock();
            compiled_[name] = std::move(code);
        }
    };
    const size_t most = std::max(1U, std::thread::hardware_concurrency());
    std::vector<std::future<void>> workers(std::min(most, missing.size()));
    for (auto &each : workers) each = std::async(work);
    for (auto &each : workers) each.get();
}

Function Device::load(const Kernel &kernel, const Grid &grid) {
    const std::string name = name_of(kernel);
    const Driver &d = driver();
    const CurrentContext current(context_);
    std::unique_lock<std::mutex> lock(mutex_);
    if (!modules_.count(name)) {
        lock.unlock();
        const std::string code = code_of(kernel);
        lock.lock();
        if (!modules_.count(name)) {
            void *loaded = nullptr;
            check(d.cuModuleLoadData(&loaded, code.data()));
            modules_[name] = loaded;
            compiled_.erase(name);
        }
    }
    Function function;
    check(d.cuModuleGetFunction(&function.handle, modules_[name], kernel.function.c_str()));
    unsigned &shared = shared_[function.handle];
    if (grid.shared_bytes > shared) {
        check(d.cuFuncSetAttribute(function.handle, kMaxDynamicShared,
                                   static_cast<int>(grid.shared_bytes)));
        shared = grid.shared_bytes;
    }
    if (grid.cluster > kPortableCluster)
        check(d.cuFuncSetAttribute(function.handle, kNonPortableCluster, 1));
    return function;
}

void Device::launch(const Function &function, const Grid &grid, void **parameters, Stream stream) {
    const Configured configured(grid, stream);
    const CurrentContext current(context_);
    check(driver().cuLaunchKernelEx(&configured.config, function.handle, parameters, nullptr));
}

void Device::launch(const Function &function, const Grid &grid, const void *argument,
                    Stream stream) {
    void *parameters[] = {const_cast<void *>(argument)};
    launch(function, grid, parameters, stream);
}

Memory::Memory(Device &device, size_t bytes) : device_(&device), size_(bytes) {
    const CurrentContext current(device.context_);
    if (bytes) check(driver().cuMemAlloc(&address_, bytes));
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
        const CurrentContext current(device_->context_);
        driver().cuMemFree(address_);
    } catch (const std::exception &) {
        // the process ends, and the driver with it
    }
}

void Memory::upload(const void *from, size_t bytes, size_t offset) {
    const CurrentContext current(device_->context_);
    check(driver().cuMemcpyHtoD(address_ + offset, from, bytes));
    // pageable memory may still be on its way, and user streams do not wait for it
    check(driver().cuStreamSynchronize(nullptr));
}

void Memory::download(void *to, size_t bytes, size_t offset) const {
    const CurrentContext current(device_->context_);
    check(driver().cuMemcpyDtoH(to, address_ + offset, bytes));
}

}  // namespace kernel_runtime::cuda
