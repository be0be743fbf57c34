#include "actnn/saving/native/records.hpp"

namespace nb = nanobind;

namespace actnn {

nb::object Records::get(int64_t i) {
    const auto count = static_cast<int64_t>(entries_.size());
    if (i < 0) i += count;
    if (i < 0 || i >= count) throw nb::index_error();
    const Entry &e = entries_[static_cast<size_t>(i)];
    return record_(i, e.path, e.shape, e.dtype, e.nbytes, e.held, e.reason, e.choice, e.op);
}

void Records::change(size_t i, int64_t held, nb::object reason, nb::object choice) {
    Entry &entry = entries_.at(i);
    entry.held = held;
    std::swap(entry.reason, reason);
    std::swap(entry.choice, choice);
}

}  // namespace actnn
