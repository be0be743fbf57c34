// Prepared launches, and the addresses in their arguments, which calls update without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_runtime/native/launch_config.hpp"
#include "kernel_runtime/native/recorded_graphs.hpp"

namespace kernel_runtime {

// Fields of arguments that point into one block of memory.
class Fields {
 public:
    // Adds a field of 8 bytes. The caller keeps its memory alive longer than this object.
    void add(uintptr_t field, int64_t offset) {
        fields_.emplace_back(reinterpret_cast<uint64_t *>(field), offset);
    }
    // Sets all fields for a new address of the block. If it is 0, all fields become null.
    void move(uintptr_t base);

 private:
    uintptr_t base_ = 0;
    std::vector<std::pair<uint64_t *, int64_t>> fields_;
};

// The CUDA driver, called through function addresses, so that no CUDA headers are needed.
class Driver {
 public:
    // cuLaunchKernelEx, cuCtxGetCurrent and cuCtxSetCurrent, the context to launch in, and the
    // functions of a GraphDriver.
    Driver(uintptr_t launch, uintptr_t get_current, uintptr_t set_current, uintptr_t context,
           std::vector<uintptr_t> graphs)
        : launch_(reinterpret_cast<Launch>(launch)),
          get_current_(reinterpret_cast<GetCurrent>(get_current)),
          set_current_(reinterpret_cast<SetCurrent>(set_current)),
          context_(reinterpret_cast<void *>(context)),
          graphs_(std::move(graphs)) {}
    // Starts a kernel that takes one struct. Returns the driver's status, 0 for success. The
    // context must be current.
    int launch(const cuda::LaunchConfig &config, uintptr_t function, uintptr_t argument) const;
    // Calls `action` with the context current, then restores the previous context, from which other
    // libraries derive the current device. Returns the first status that is not 0.
    template <class Action>
    int in_context(const Action &action) const {
        void *before = nullptr;
        if (const int status = get_current_(&before)) return status;
        if (before == context_) return action();
        if (const int status = set_current_(context_)) return status;
        const int status = action(), back = set_current_(before);
        return status ? status : back;
    }
    GraphDriver &graphs() { return graphs_; }

 private:
    using Launch = int (*)(const cuda::LaunchConfig *config, void *function, void **parameters,
                           void **extra);
    using GetCurrent = int (*)(void **context);
    using SetCurrent = int (*)(void *context);
    Launch launch_;
    GetCurrent get_current_;
    SetCurrent set_current_;
    void *context_;
    GraphDriver graphs_;
};

// The arguments of cublasLtMatmul, in its order, so that no header of cuBLASLt is needed.
struct Product {
    void *handle, *operation;
    const void *alpha, *a;
    void *a_layout;
    const void *b;
    void *b_layout;
    const void *beta, *c;
    void *c_layout, *d, *d_layout;
    const void *algorithm;
    void *workspace;
    size_t workspace_size;
    void *stream;
};

// A list of launches that start in order, by one thread at a time.
class Launches {
 public:
    explicit Launches(Driver &driver) : driver_(driver) {}
    // Adds a launch of a kernel, and the address of the struct that it takes.
    void add(uintptr_t function, const cuda::Grid &grid, uintptr_t argument) {
        all_.push_back({function, argument, std::make_unique<cuda::Configured>(grid, nullptr)});
    }
    // Adds a product by the address of cublasLtMatmul.
    void add_product(uintptr_t function, Product *product) {
        all_.push_back({function, reinterpret_cast<uintptr_t>(product), nullptr});
    }
    // Starts all launches, up to the first that fails. Returns 0 or its status; the status of a
    // product is negated.
    int start(uintptr_t stream);
    // The same; if the key repeats, as a graph. All arguments must follow from the key.
    int start(uintptr_t stream, const RecordedGraphs::Key &key);

 private:
    struct One {
        uintptr_t function, argument;
        std::unique_ptr<cuda::Configured> configured;  // null for a product
    };
    // Fewer launches take the host no longer than a graph.
    static constexpr size_t kLeast = 2;

    int start_each(uintptr_t stream);

    Driver &driver_;
    std::vector<One> all_;
    RecordedGraphs graphs_;
    std::mutex mutex_;
};

}  // namespace kernel_runtime
