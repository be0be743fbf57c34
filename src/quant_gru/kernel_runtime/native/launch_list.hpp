// Prepared launches, and the addresses in their arguments, which calls update without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernel_runtime/native/device.hpp"

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
    explicit Launches(cuda::Device &device) : device_(device) {}
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

    int start_each(cuda::Stream stream);

    cuda::Device &device_;
    std::vector<One> all_;
    RecordedGraphs graphs_;
    std::mutex mutex_;
};

}  // namespace kernel_runtime
