#include "columns.hpp"

#include <algorithm>

#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

constexpr uint64_t kMostValues = uint64_t{1} << 48;

}  // namespace

std::vector<int64_t> ColumnReader::column(int64_t count) {
    const unsigned char *head = take(9);
    const int bits = head[0];
    if (bits < 1 || bits > 64)
        throw FileError("Expected columns of 1 to 64 bits in " + name_ + ", got " +
                        std::to_string(bits));
    const uint64_t least = packed_value(head + 1, 0, 64), size = static_cast<uint64_t>(count);
    if (size > kMostValues) throw FileError("Expected fewer values in " + name_);
    const unsigned char *values = take(packed_size(size, bits));
    std::vector<int64_t> found(size);
    for (uint64_t i = 0; i < size; ++i)
        found[i] = static_cast<int64_t>(least + packed_value(values, i, bits));
    return found;
}

void ColumnReader::finish() const {
    if (at_ != size_)
        throw FileError("Expected " + std::to_string(at_) + " bytes of columns in " + name_ +
                        ", got " + std::to_string(size_));
}

const unsigned char *ColumnReader::take(uint64_t size) {
    if (size > static_cast<uint64_t>(size_ - at_))
        throw FileError("Expected " + std::to_string(size) + " bytes or more of columns in " +
                        name_ + ", got " + std::to_string(size_ - at_));
    const char *found = data_ + at_;
    at_ += static_cast<int64_t>(size);
    return reinterpret_cast<const unsigned char *>(found);
}

uint64_t packed_value(const unsigned char *data, uint64_t i, int bits) {
    // bits before the value, of the byte in which it begins
    const uint64_t first = i % 8 * static_cast<uint64_t>(bits);
    const unsigned char *byte = data + i / 8 * static_cast<uint64_t>(bits) + first / 8;
    uint64_t value = 0;
    int have = 0;
    for (auto before = static_cast<int>(first % 8); have < bits; before = 0, ++byte) {
        const int some = std::min(8 - before, bits - have);
        const uint64_t part = (uint64_t{*byte} >> before) & ((1u << some) - 1);
        value |= part << have;
        have += some;
    }
    return value;
}

void pack_bits(const std::vector<int64_t> &values, int bits, std::string &to) {
    unsigned byte = 0;
    int used = 0;
    for (int64_t value : values) {
        auto left = static_cast<uint64_t>(value);
        for (int have = 0; have < bits;) {
            const int some = std::min(8 - used, bits - have);
            byte |= static_cast<unsigned>(left & ((1u << some) - 1)) << used;
            left >>= some;
            have += some;
            used += some;
            if (used < 8) continue;
            to += static_cast<char>(byte);
            byte = 0;
            used = 0;
        }
    }
    if (used) to += static_cast<char>(byte);
}

void add_column(const std::vector<int64_t> &values, std::string &to) {
    const auto [lo, hi] = std::minmax_element(values.begin(), values.end());
    const uint64_t least = values.empty() ? 0 : static_cast<uint64_t>(*lo);
    const uint64_t span = values.empty() ? 0 : static_cast<uint64_t>(*hi) - least;
    int bits = 1;
    while (bits < 64 && span >> bits) ++bits;
    to += static_cast<char>(bits);
    pack_bits({static_cast<int64_t>(least)}, 64, to);
    std::vector<int64_t> above(values.size());
    for (size_t i = 0; i < values.size(); ++i)
        above[i] = static_cast<int64_t>(static_cast<uint64_t>(values[i]) - least);
    pack_bits(above, bits, to);
}

}  // namespace quant_gru
