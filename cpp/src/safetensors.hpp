// A strict reader of the safetensors format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "json.hpp"

namespace quant_gru {

enum class Dtype { i8, u8, i16, i32, i64, f32 };

size_t size_of(Dtype dtype);

struct Tensor {
    Dtype dtype = Dtype::i8;
    std::vector<int64_t> shape;
    const char *data = nullptr;  // little-endian, of any alignment
    int64_t count = 0;           // elements
};

struct Safetensors {
    Json metadata;                          // an object of strings; null if there is none
    std::map<std::string, Tensor> tensors;  // their data is that of the file
};

// Reads the bytes of a file. Tensors must cover them without gaps. Throws FileError.
Safetensors read_safetensors(const void *bytes, size_t size);

}  // namespace quant_gru
