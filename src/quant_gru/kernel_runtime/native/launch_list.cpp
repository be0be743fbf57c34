#include "kernel_runtime/native/launch_list.hpp"

namespace kernel_runtime {
namespace {

int multiply(uintptr_t function, const Product &p) {
    using Multiply = int (*)(void *, void *, const void *, const void *, void *, const void *,
                             void *, const void *, const void *, void *, void *, void *,
                             const void *, void *, size_t, void *);
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

int Launches::start(uintptr_t given) {
    const auto stream = reinterpret_cast<cuda::Stream>(given);
    const std::lock_guard<std::mutex> lock(mutex_);
    return device_.in_context([&] { return start_each(stream); });
}

int Launches::start(uintptr_t given, const RecordedGraphs::Key &key) {
    const auto stream = reinterpret_cast<cuda::Stream>(given);
    const std::lock_guard<std::mutex> lock(mutex_);
    return device_.in_context([&] {
        GraphDriver &graphs = device_.graphs();
        void *graph = nullptr;
        if (graphs.available() && all_.size() >= kLeast)
            graph =
                graphs_.take(graphs, key, stream, [&](cuda::Stream on) { return start_each(on); });
        return graph ? graphs.start(graph, stream) : start_each(stream);
    });
}

int Launches::start_each(cuda::Stream stream) {
    for (const One &each : all_) {
        int status = 0;
        if (each.configured) {
            each.configured->config.stream = stream;
            status = device_.launch(each.configured->config, each.function, each.argument);
        } else {
            auto &product = *reinterpret_cast<Product *>(each.argument);
            product.stream = stream;
            status = multiply(each.function, product);
        }
        if (status) return status;
    }
    return 0;
}

}  // namespace kernel_runtime
