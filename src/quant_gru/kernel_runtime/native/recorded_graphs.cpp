#include "kernel_runtime/native/recorded_graphs.hpp"

#include <algorithm>

namespace kernel_runtime {
namespace {

// Values of the driver's documentation.
constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned long long kNoFlags = 0;

}  // namespace

GraphDriver::Relaxed::Relaxed(const GraphDriver &driver)
    : driver_(driver),
      mode_(kRelaxed),
      holds_(!driver.call(thread_exchange_capture_mode, &mode_)) {}

GraphDriver::Relaxed::~Relaxed() {
    if (holds_) driver_.call(thread_exchange_capture_mode, &mode_);
}

bool GraphDriver::is_capturing(uintptr_t stream) const {
    int status = 0;
    return call(stream_is_capturing, stream, &status) || status;
}

bool GraphDriver::begin() {
    if (!stream_ && call(stream_create, &stream_, kNonBlocking)) stream_ = 0;
    return stream_ && !call(stream_begin_capture, stream_, kRelaxed);
}

void *GraphDriver::end(bool launched, uintptr_t user) {
    void *graph = nullptr, *found = nullptr;
    if (call(stream_end_capture, stream_, &graph) || !graph) return nullptr;
    if (launched && call(graph_instantiate, &found, graph, kNoFlags)) found = nullptr;
    call(graph_destroy, graph);
    // It takes its memory on the GPU here, where its absence is no error.
    if (found && call(graph_upload, found, user)) {
        call(graph_exec_destroy, found);
        return nullptr;
    }
    if (found) ++graphs_;
    return found;
}

int GraphDriver::start(void *graph, uintptr_t stream) const {
    return call(graph_launch, graph, stream);
}

void GraphDriver::forget(void *graph) {
    const Relaxed relaxed(*this);
    call(graph_exec_destroy, graph);
    --graphs_;
}

RecordedGraphs::~RecordedGraphs() {
    for (const Entry &each : entries_)
        if (each.graph) driver_->forget(each.graph);
}

RecordedGraphs::Entry &RecordedGraphs::entry_of(const Key &key) {
    ++clock_;
    Entry *oldest = entries_.data();
    for (Entry &each : entries_) {
        if (each.starts && each.key == key) {
            ++each.starts;
            each.latest = clock_;
            if (credit_ != kNever) credit_ = std::min(credit_ + 1, kMostCredit);
            return each;
        }
        if (each.latest < oldest->latest) oldest = &each;
    }
    if (oldest->graph) driver_->forget(oldest->graph);
    *oldest = {key, 1, clock_, nullptr};
    return *oldest;
}

}  // namespace kernel_runtime
