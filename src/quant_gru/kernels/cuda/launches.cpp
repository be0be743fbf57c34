#include "launches.hpp"

namespace quant_gru {

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

int Launches::start(uintptr_t stream) const {
    return driver_.in_context([&] {
        for (const One &each : all_) {
            *each.stream = stream;
            if (const int status = driver_.launch(each.config, each.function, each.parameters))
                return status;
        }
        return 0;
    });
}

}  // namespace quant_gru
