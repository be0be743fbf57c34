// Integers in as few bits as they need, src/quant_gru/parameters/columns.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace quant_gru {

// Reads columns one after the other. Throws FileError, which names `name`.
class ColumnReader {
 public:
    ColumnReader(const char *data, int64_t size, std::string name)
        : data_(data), size_(size), name_(std::move(name)) {}

    std::vector<int64_t> column(int64_t count);
    // Throws FileError if bytes are left.
    void finish() const;

 private:
    const unsigned char *take(uint64_t size);

    const char *data_;
    int64_t size_, at_ = 0;
    std::string name_;
};

// The bytes of `count` values of `bits` bits; count < 2^56.
constexpr uint64_t packed_size(uint64_t count, int bits) {
    return count / 8 * static_cast<uint64_t>(bits) +
           (count % 8 * static_cast<uint64_t>(bits) + 7) / 8;
}

// Value i of values of `bits` bits without gaps, 1 to 64.
uint64_t packed_value(const unsigned char *data, uint64_t i, int bits);

// Appends the lowest bits of each value, without gaps.
void pack_bits(const std::vector<int64_t> &values, int bits, std::string &to);

// Appends a column.
void add_column(const std::vector<int64_t> &values, std::string &to);

}  // namespace quant_gru
