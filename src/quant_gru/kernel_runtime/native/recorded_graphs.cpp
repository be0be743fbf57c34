#include "kernel_runtime/native/recorded_graphs.hpp"

#include <algorithm>

namespace kernel_runtime {
namespace {

// Values of the driver's documentation.
constexpr int kRelaxed = 2;           // CU_STREAM_CAPTURE_MODE_RELAXED
constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
constexpr unsigned long long kNoFlags = 0;

}  // namespace

GraphDriver::Relaxed::Relaxed(const cuda::Driver &driver)
    : driver_(driver), mode_(kRelaxed), holds_(!driver.cuThreadExchangeStreamCaptureMode(&mode_)) {}

GraphDriver::Relaxed::~Relaxed() {
    if (holds_) driver_.cuThreadExchangeStreamCaptureMode(&mode_);
}

bool GraphDriver::is_capturing(cuda::Stream stream) const {
    int status = 0;
    return driver_.cuStreamIsCapturing(stream, &status) || status;
}

bool GraphDriver::begin() {
    if (!stream_ && driver_.cuStreamCreate(&stream_, kNonBlocking)) stream_ = nullptr;
    return stream_ && !driver_.cuStreamBeginCapture(stream_, kRelaxed);
}

void *GraphDriver::end(bool launched, cuda::Stream user) {
    void *graph = nullptr, *found = nullptr;
    if (driver_.cuStreamEndCapture(stream_, &graph) || !graph) return nullptr;
    if (launched && driver_.cuGraphInstantiateWithFlags(&found, graph, kNoFlags)) found = nullptr;
    driver_.cuGraphDestroy(graph);
    // It takes its memory on the GPU here, where its absence is no error.
    if (found && driver_.cuGraphUpload(found, user)) {
        driver_.cuGraphExecDestroy(found);
        return nullptr;
    }
    if (found) ++graphs_;
    return found;
}

int GraphDriver::start(void *graph, cuda::Stream stream) const {
    return driver_.cuGraphLaunch(graph, stream);
}

void GraphDriver::forget(void *graph) {
    const Relaxed relaxed(driver_);
    driver_.cuGraphExecDestroy(graph);
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
