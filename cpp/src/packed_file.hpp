// Files of version 2: what they have in columns, as the tensors that files of version 1 have.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "json.hpp"
#include "quant_gru/model.hpp"
#include "safetensors.hpp"

namespace quant_gru {

// A table, with the numbers that files of version 1 have.
struct TableColumns {
    std::vector<int64_t> bounds, coefficients, numbers;
    int64_t degree = 0;
};

// The tensors of a file. Their data are those of the file, or in the other members.
struct Expanded {
    Safetensors file;
    std::vector<std::array<int, 2>> weight_bits;  // of W and R of each cell
    std::deque<std::vector<int64_t>> integers;
    std::vector<TableColumns> tables;
    std::deque<float> reals;
    std::deque<std::vector<char>> codes;
};

// Throws FileError.
Expanded expanded(const Safetensors &file, const Json &document, const Shape &shape);

}  // namespace quant_gru
