#include "safetensors.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// The largest header. A parsed one may take 20 times as much memory.
constexpr uint64_t kLargestHeader = uint64_t{1} << 25;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

Dtype dtype_of(const std::string &name, const std::string &tensor) {
    constexpr std::pair<const char *, Dtype> kNames[] = {{"I8", Dtype::i8},   {"U8", Dtype::u8},
                                                         {"I16", Dtype::i16}, {"I32", Dtype::i32},
                                                         {"I64", Dtype::i64}, {"F32", Dtype::f32}};
    for (const auto &[text, dtype] : kNames)
        if (name == text) return dtype;
    throw FileError("Expected the dtype of tensor '" + tensor +
                    "' to be I8, U8, I16, I32, I64 or F32, got " + name);
}

// Offsets of a tensor in the data.
struct Extent {
    int64_t begin, end;
    const std::string *name;
};

Extent read_tensor(const std::string &name, const Json &entry, const char *data, int64_t size,
                   Tensor &tensor) {
    const std::string what = "tensor '" + name + "'";
    for (const auto &member : entry.object(what))
        if (member.first != "dtype" && member.first != "shape" && member.first != "data_offsets")
            throw FileError("Expected " + what + " to have no key '" + member.first + "'");
    tensor.dtype = dtype_of(entry.at("dtype").string("dtype of " + what), name);
    tensor.count = 1;
    for (const Json &each : entry.at("shape").array("shape of " + what)) {
        tensor.shape.push_back(each.integer("shape of " + what, 0, kMost));
        if (__builtin_mul_overflow(tensor.count, tensor.shape.back(), &tensor.count))
            throw FileError("Expected " + what + " to have fewer than 2^63 elements");
    }
    const Json::Array &offsets = entry.at("data_offsets").array("data_offsets of " + what);
    if (offsets.size() != 2) throw FileError("Expected two data_offsets of " + what);
    const int64_t begin = offsets[0].integer("data_offsets of " + what, 0, size);
    const int64_t end = offsets[1].integer("data_offsets of " + what, begin, size);
    int64_t bytes;
    if (__builtin_mul_overflow(tensor.count, static_cast<int64_t>(size_of(tensor.dtype)), &bytes) ||
        bytes != end - begin)
        throw FileError("Expected the data of " + what + " to have the size of its shape, got " +
                        std::to_string(end - begin) + " bytes");
    tensor.data = data + begin;
    return {begin, end, &name};
}

}  // namespace

size_t size_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::i8:
        case Dtype::u8:
            return 1;
        case Dtype::i16:
            return 2;
        case Dtype::i32:
        case Dtype::f32:
            return 4;
        default:
            return 8;
    }
}

Safetensors read_safetensors(const void *bytes, size_t size) {
    const char *file = static_cast<const char *>(bytes);
    uint64_t header = 0;
    if (size < 8)
        throw FileError("Expected a safetensors file, got " + std::to_string(size) + " bytes");
    for (int i = 0; i < 8; ++i) header |= uint64_t{static_cast<unsigned char>(file[i])} << (8 * i);
    if (header > kLargestHeader || header > size - 8)
        throw FileError("Expected a safetensors header of at most " +
                        std::to_string(std::min<uint64_t>(kLargestHeader, size - 8)) +
                        " bytes, got " + std::to_string(header));
    const auto length = static_cast<size_t>(header);
    const char *data = file + 8 + length;
    const auto data_size = static_cast<int64_t>(size - 8 - length);
    Json root = Json::parse(std::string_view(file + 8, length));
    Safetensors found;
    std::vector<Extent> extents;
    for (const auto &[name, entry] : root.object("the header")) {
        if (name == "__metadata__") {
            for (const auto &member : entry.object("__metadata__"))
                member.second.string(member.first);
            found.metadata = entry;
        } else {
            extents.push_back(read_tensor(name, entry, data, data_size, found.tensors[name]));
        }
    }
    std::sort(extents.begin(), extents.end(), [](const Extent &a, const Extent &b) {
        return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
    });
    int64_t end = 0;
    for (const Extent &each : extents) {
        if (each.begin != end)
            throw FileError("Expected tensor '" + *each.name + "' to begin at byte " +
                            std::to_string(end) + " of the data, got " +
                            std::to_string(each.begin));
        end = each.end;
    }
    if (end != data_size)
        throw FileError("Expected " + std::to_string(end) + " bytes of data, got " +
                        std::to_string(data_size));
    return found;
}

}  // namespace quant_gru
