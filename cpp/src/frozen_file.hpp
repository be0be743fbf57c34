// The numbers in the file of a frozen GRU, checked.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/core/cell_numbers.hpp"
#include "cpu/core/memory.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {

// One layer and direction. `numbers` refers to the arrays.
struct FrozenCell {
    CellNumbers numbers;
    std::vector<SumNumbers> between;  // one for each direction of the layer below
    std::vector<std::vector<int64_t>> arrays;
    std::vector<std::unique_ptr<Aligned>> codes;
};

struct FrozenGRU {
    Shape shape;
    std::vector<FrozenCell> cells;  // the directions of a layer are adjacent
};

// The bytes of a file. Throws FileError.
std::vector<char> read_model_file(const std::string &path);

// Returns load(bytes, size) for a file. A FileError names the file.
template <class Load>
auto from_file(const std::string &path, const Load &load) {
    try {
        const std::vector<char> bytes = read_model_file(path);
        return load(bytes.data(), bytes.size());
    } catch (const FileError &error) {
        throw FileError(std::string(error.what()) + " (file '" + path + "')");
    }
}

// Reads the bytes of a file. Every number is in the range that keeps the kernels exact and within
// their memory. Whether it follows from the parameter document is not checked. Throws FileError.
FrozenGRU read_frozen(const void *bytes, size_t size);

}  // namespace quant_gru
