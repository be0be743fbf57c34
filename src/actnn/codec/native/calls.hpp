// Calls of the codec for tensors of one size, without frames of Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "actnn/codec/native/codec.hpp"
#include "kernel_runtime/native/tensor_view.hpp"

namespace actnn {

// Encodes or decodes on a CPU. Takes what a kernel_runtime::TensorLaunch of the codec takes.
class Call {
 public:
    // run: `encode` or `decode`. bits: of a code, or 0 for bits per row. threads: returns how many
    // may run. type: torch.Tensor.
    Call(void (*run)(const Codec &, int), Real real, int64_t bits, int64_t group, bool stochastic,
         int64_t rows, int64_t m, float lowest, float highest, nanobind::object threads,
         const nanobind::handle &type);
    // Values are those of Tensors::argument. state: seed and step.
    void start(const nanobind::handle &x, const nanobind::handle &data,
               const nanobind::handle &params, const nanobind::handle &state,
               const nanobind::handle &bits, const nanobind::handle &ends, int64_t capacity,
               int64_t tensor) const;

 private:
    template <class Pointer>
    void point(Pointer *&to, const nanobind::handle &value) const;

    void (*run_)(const Codec &, int);
    int64_t bits_;
    Codec codec_;
    nanobind::object threads_;
    kernel_runtime::Tensors tensors_;
};

// Encodes and decodes tensors of one size and layout with equal bits. What it encodes to is one
// block of memory, the codes and then the parameters.
class Coder {
 public:
    // device: the GPU, which must be the current one, or below 0 for the CPU. make_codes,
    // make_tensor: allocate. codes_bytes: of the codes. encode, decode: start it. encode_slowly,
    // decode_slowly: what runs where a mode must see the tensors that are made, or if another GPU
    // is the current one.
    Coder(int64_t device, nanobind::object make_codes, nanobind::object make_tensor,
          int64_t codes_bytes, nanobind::object encode, nanobind::object decode,
          nanobind::object encode_slowly, nanobind::object decode_slowly,
          const nanobind::handle &type);
    // tensor: the id of x.
    nanobind::object encode(const nanobind::handle &x, const nanobind::handle &state,
                            int64_t tensor) const;
    // codes: what `encode` returned.
    nanobind::object decode(const nanobind::handle &codes) const;

 private:
    bool is_alone() const;
    int64_t address_of(const nanobind::handle &codes) const;

    int64_t device_, codes_bytes_;
    kernel_runtime::Maker make_codes_, make_tensor_;
    nanobind::object encode_, decode_, encode_slowly_, decode_slowly_, modes_, current_;
    kernel_runtime::Tensors tensors_;
};

}  // namespace actnn
