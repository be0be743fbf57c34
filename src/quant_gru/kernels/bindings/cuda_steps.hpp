// The steps of a call on a GPU: launches, and work of torch between them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "kernel_runtime/native/launch_list.hpp"

namespace quant_gru {

using kernel_runtime::Fields;
using kernel_runtime::Launches;

// Steps that start in order, by one thread at a time.
class Steps {
 public:
    // steps: Launches, or functions of Python, which get the arguments of a start. uses: the
    // addresses that the arguments of each of them follow, of those that a start is given.
    // fields: those that follow each of the addresses that a start is given.
    // fail: raises the error of a status. keep: owns the fields and the memory that they write.
    Steps(const std::vector<nanobind::object> &steps, std::vector<std::vector<size_t>> uses,
          std::vector<Fields *> fields, nanobind::object fail, nanobind::object keep);

    size_t tensors() const { return fields_.size(); }

    // Moves the fields to `bases`, at least one for each of `tensors`, and starts all steps, up to
    // the first that fails. Calls `before` first, which may write arguments that follow from
    // `bases`. `shared` is locked meanwhile if it is not null.
    template <class Before>
    void start(uintptr_t stream, const std::vector<uintptr_t> &bases,
               const nanobind::tuple &arguments, std::mutex *shared, const Before &before) {
        namespace nb = nanobind;
        // Locked without the GIL, which a thread that has the locks may wait for.
        std::unique_lock<std::mutex> outer, own(mutex_, std::defer_lock);
        const auto begin = [&] {
            if (own) return;
            if (shared) outer = std::unique_lock<std::mutex>(*shared);
            own.lock();
            before();
            for (size_t i = 0; i < fields_.size(); ++i) fields_[i]->move(bases[i]);
        };
        int status = 0;
        for (size_t i = 0; i < steps_.size() && !status; ++i) {
            {
                // A full launch queue may wait for a host function that needs the GIL.
                nb::gil_scoped_release release;
                begin();
                if (launches_[i]) status = launches_[i]->start(stream, key_of(i, bases));
            }
            if (!launches_[i]) steps_[i](*arguments);
        }
        if (own) own.unlock();
        if (outer) outer.unlock();
        if (status) raise(status);
    }

 private:
    // All that the arguments of launches depend on: addresses, and what follows them in `bases`.
    std::vector<uintptr_t> key_of(size_t step, const std::vector<uintptr_t> &bases) const {
        std::vector<uintptr_t> key(bases.begin() + static_cast<std::ptrdiff_t>(fields_.size()),
                                   bases.end());
        for (const size_t each : uses_[step]) key.push_back(bases[each]);
        return key;
    }
    [[noreturn]] void raise(int status) const;

    std::vector<nanobind::object> steps_;
    std::vector<Launches *> launches_;  // null for functions
    std::vector<std::vector<size_t>> uses_;
    std::vector<Fields *> fields_;
    nanobind::object fail_, keep_;
    std::mutex mutex_;
};

}  // namespace quant_gru
