#include "passes/host_arrays.hpp"

#include "cuda/host/runtime.hpp"
#include "passes/on_device.hpp"
#include "passes/pointers.hpp"

namespace quant_gru {

struct HostArrays::Copy {
    uint64_t address;
    std::vector<char> bytes;
    bool back;
    void *context;
};

HostArrays::HostArrays(void *stream) : stream_(stream) {}

HostArrays::~HostArrays() = default;

void *HostArrays::on_host(const void *array, size_t bytes, bool back) {
    const int place = place_of({{"an array", array}});
    if (place == kHost) return const_cast<void *>(array);
    auto copy = std::make_unique<Copy>();
    copy->address = reinterpret_cast<uintptr_t>(array);
    copy->bytes.resize(bytes);
    copy->back = back;
    copy->context = cuda::primary_context(place);
    const cuda::CurrentContext current(copy->context);
    if (copies_.empty()) cuda::check(cuda::driver().cuStreamSynchronize(stream_));
    cuda::check(cuda::driver().cuMemcpyDtoH(copy->bytes.data(), copy->address, bytes));
    copies_.push_back(std::move(copy));
    return copies_.back()->bytes.data();
}

void HostArrays::finish() {
    for (const auto &copy : copies_) {
        if (!copy->back) continue;
        const cuda::CurrentContext current(copy->context);
        cuda::check(
            cuda::driver().cuMemcpyHtoD(copy->address, copy->bytes.data(), copy->bytes.size()));
        cuda::check(cuda::driver().cuStreamSynchronize(nullptr));
    }
}

}  // namespace quant_gru
