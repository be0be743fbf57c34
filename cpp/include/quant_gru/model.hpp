// A frozen GRU in C++: the codes of the Python package, without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "quant_gru/export.h"

namespace quant_gru {

class Network;

// An argument breaks a rule. The message is "Expected <thing> to be <rule>, got <value>".
class QUANT_GRU_API ArgumentError : public std::invalid_argument {
 public:
    using std::invalid_argument::invalid_argument;
};

// A file cannot be read, or a part of it is wrong.
class QUANT_GRU_API FileError : public std::runtime_error {
 public:
    using std::runtime_error::runtime_error;
};

// The sizes of a model, as its file has them.
struct Shape {
    int64_t input_size = 0;   // C
    int64_t hidden_size = 0;  // H
    int64_t num_layers = 0;
    int64_t directions = 1;    // D: 1 or 2
    bool batch_first = false;  // whether x is (N, T, C) instead of (T, N, C)
};

// Optional arguments of Model::run.
struct RunOptions {
    const float *h0 = nullptr;         // (num_layers * D, N, H); null for zeros
    float *h_n = nullptr;              // receives the last states, same shape; null if not needed
    const int64_t *lengths = nullptr;  // (N), steps of each sequence, 0..T; null if all have T
    int threads = 0;                   // at most so many; 0 for one per processor
};

class Stream;

// A loaded model. Copies share its memory. All functions may run in several threads at once.
class QUANT_GRU_API Model {
 public:
    // Reads a file of FrozenQuantGRU.save. The environment variable QUANT_GRU_CPU selects an
    // instruction set, as in Python; otherwise the fastest one of this machine is used.
    // Throws FileError, or ArgumentError if QUANT_GRU_CPU is none of this machine.
    static Model load(const std::string &path);

    // The same from the bytes of a file. They are not used after the return.
    static Model load(const void *bytes, size_t size);

    const Shape &shape() const;
    // One of the names of QUANT_GRU_CPU, such as "avx2".
    const char *instruction_set() const;

    // Runs all T steps of N sequences. x: (T, N, C); y: (T, N, D * H). With shape().batch_first
    // x: (N, T, C); y: (N, T, D * H). Steps beyond the length of a sequence are 0 in y.
    // A row that NaN reaches becomes NaN. Throws ArgumentError.
    void run(const float *x, int64_t T, int64_t N, float *y, const RunOptions &options = {}) const;

    // A stream of N sequences in the zero state. Throws ArgumentError if the GRU has two directions
    // or N is less than 1.
    Stream stream(int64_t N = 1) const;

 private:
    explicit Model(std::shared_ptr<const Network> network);
    std::shared_ptr<const Network> network_;
};

// N sequences that advance one step per call. Steps give the codes of whole sequences, bit for bit.
// A stream must not run in two threads at once.
class QUANT_GRU_API Stream {
 public:
    Stream(Stream &&) noexcept;
    Stream &operator=(Stream &&) noexcept;
    ~Stream();

    // x: (N, C), y: (N, H). Allocates no memory, takes no lock and throws nothing. Rows that
    // received NaN are NaN until `reset`.
    void step(const float *x, float *y) noexcept;

    // Restores the zero state.
    void reset() noexcept;

 private:
    friend class Model;
    struct QUANT_GRU_HIDDEN State;
    Stream(std::shared_ptr<const Network> network, int64_t N);
    std::unique_ptr<State> state_;
};

}  // namespace quant_gru
