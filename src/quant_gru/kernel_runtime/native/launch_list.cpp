#include "kernel_runtime/native/launch_list.hpp"

namespace kernel_runtime {
namespace {

int multiply(uintptr_t function, uintptr_t parameters) {
    using Multiply = int (*)(void *, void *, const void *, const void *, void *, const void *,
                             void *, const void *, const void *, void *, void *, void *,
                             const void *, void *, size_t, void *);
    const Product &p = *reinterpret_cast<const Product *>(parameters);
    return -reinterpret_cast<Multiply>(function)(
        p.handle, p.operation, p.alpha, p.a, p.a_layout, p.b, p.b_layout, p.beta, p.c, p.c_layout,
        p.d, p.d_layout, p.algorithm, p.workspace, p.workspace_size, p.stream);
}

}  // namespace

void Fields::move(uintptr_t base) {
    if (base == base_) return;
    base_ = base;
    for (const auto &[field, offset] : fields_)
        *field = base ? base + static_cast<uint64_t>(offset) : 0;
}

int Driver::launch(uintptr_t config, uintptr_t function, uintptr_t parameters) const {
    return launch_(reinterpret_cast<void *>(config), reinterpret_cast<void *>(function),
                   reinterpret_cast<void **>(parameters), nullptr);
}

int Launches::start_locked(uintptr_t stream) const {
    return driver_.in_context([&] {
        for (const One &each : all_) {
            *each.stream = stream;
            const int status = each.config
                                   ? driver_.launch(each.config, each.function, each.parameters)
                                   : multiply(each.function, each.parameters);
            if (status) return status;
        }
        return 0;
    });
}

int Launches::start(uintptr_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return start_locked(stream);
}

int Launches::start_at(uintptr_t stream, const std::vector<uintptr_t> &bases) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < fields_.size() && i < bases.size(); ++i) fields_[i]->move(bases[i]);
    return start_locked(stream);
}

}  // namespace kernel_runtime
