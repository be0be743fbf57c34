// Detects writes to memory that no version records.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace quant_gru {

// Small contents are compared whole. Of larger ones, each look compares some fixed lines, which a
// write to the whole tensor changes, and a window that moves on, which finds every other write
// after some looks.
class ContentSample {
 public:
    // data: bytes that stay allocated while `unchanged` is called; null for nothing to compare.
    ContentSample(const void *data, size_t bytes)
        : data_(static_cast<const unsigned char *>(data)), bytes_(data ? bytes : 0) {
        if (is_whole()) {
            kept_.assign(data_, data_ + bytes_);
            return;
        }
        for (size_t i = 0; i < kLines; ++i) kept_.insert(kept_.end(), line(i), line(i) + kLine);
        for (size_t at = 0; at < bytes_; at += kWindow) hashes_.push_back(hash(at));
    }

    // Whether every look compares all bytes.
    bool is_whole() const { return bytes_ <= kSmall; }

    // Whether no look has found a change. A look takes about 40 ns.
    bool unchanged() const {
        if (!changed_) changed_ = !look();
        return !changed_;
    }

    // Whether a look has found a change.
    bool changed() const { return changed_; }

 private:
    static constexpr size_t kSmall = 2048, kLines = 4, kLine = 64, kWindow = 512;

    const unsigned char *line(size_t i) const {
        return data_ + (bytes_ - kLine) / (kLines - 1) * i;
    }

    bool look() const {
        if (is_whole()) return !bytes_ || !std::memcmp(data_, kept_.data(), bytes_);
        for (size_t i = 0; i < kLines; ++i)
            if (std::memcmp(line(i), kept_.data() + kLine * i, kLine)) return false;
        const size_t window = next_++ % hashes_.size();
        return hash(window * kWindow) == hashes_[window];
    }

    // Returns a hash of a window, from four words at a time.
    uint64_t hash(size_t begin) const {
        constexpr uint64_t kFactor = 0x9E3779B97F4A7C15ull;
        const size_t size = bytes_ - begin < kWindow ? bytes_ - begin : kWindow;
        unsigned char padded[kWindow] = {};
        const unsigned char *from = data_ + begin;
        if (size < kWindow) from = static_cast<unsigned char *>(std::memcpy(padded, from, size));
        uint64_t lanes[4] = {1, 2, 3, 4};
        for (size_t i = 0; i < kWindow; i += sizeof(lanes)) {
            uint64_t words[4];
            std::memcpy(words, from + i, sizeof(words));
            for (int j = 0; j < 4; ++j) {
                lanes[j] = (lanes[j] ^ words[j]) * kFactor;
                lanes[j] ^= lanes[j] >> 32;
            }
        }
        uint64_t found = 0;
        for (uint64_t lane : lanes) found = (found ^ lane) * kFactor ^ found >> 29;
        return found;
    }

    const unsigned char *data_;
    size_t bytes_;
    std::vector<unsigned char> kept_;
    std::vector<uint64_t> hashes_;
    mutable size_t next_ = 0;
    mutable bool changed_ = false;
};

}  // namespace quant_gru
