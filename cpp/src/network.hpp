// A frozen GRU on the CPU: its layers, laid out for one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cpu/core/stack.hpp"
#include "frozen_file.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {

class Network {
 public:
    Network(const FrozenGRU &gru, const std::string &instruction_set);

    const Shape &shape() const { return shape_; }
    const char *instruction_set() const { return layers_[0]->variant().name; }

    // As Model::run.
    void run(const float *x, int64_t T, int64_t N, float *y, const RunOptions &options) const;

    // One step of streams; the arguments are those of Stack::step.
    bool step(const float *x, int64_t N, void *const *state, float *y, void *workspace) const {
        return stack_->step(x, N, state, y, workspace);
    }
    int64_t step_workspace(int64_t N) const { return stack_->step_workspace(N); }
    void clear(int64_t N, void *const *state) const { stack_->clear(N, state); }

 private:
    Shape shape_;
    std::vector<std::unique_ptr<Layer>> layers_;  // the directions of a layer are adjacent
    std::unique_ptr<Stack> stack_;
};

// The largest number of threads: `wanted`, or one per processor if it is 0.
int thread_count(int wanted);

// The instruction set that QUANT_GRU_CPU names, otherwise the fastest one of this machine. Throws
// ArgumentError.
std::string chosen_instruction_set();

}  // namespace quant_gru
