#include "kernel_runtime/native/sha256.hpp"

#include <algorithm>
#include <cstring>

namespace kernel_runtime::cuda {
namespace {

constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t turned(uint32_t v, int bits) { return v >> bits | v << (32 - bits); }

}  // namespace

void Sha256::take_block() {
    uint32_t w[64];
    for (size_t i = 0; i < 16; ++i)
        w[i] = uint32_t{block_[4 * i]} << 24 | uint32_t{block_[4 * i + 1]} << 16 |
               uint32_t{block_[4 * i + 2]} << 8 | block_[4 * i + 3];
    for (size_t i = 16; i < 64; ++i) {
        const uint32_t a = w[i - 15], b = w[i - 2];
        w[i] = w[i - 16] + (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[i - 7] +
               (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
    }
    auto [a, b, c, d, e, f, g, h] = state_;
    for (size_t i = 0; i < 64; ++i) {
        const uint32_t first = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) +
                               ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
        const uint32_t second =
            (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + first;
        d = c, c = b, b = a, a = first + second;
    }
    const uint32_t sums[] = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state_[i] += sums[i];
}

Sha256 &Sha256::add(const void *bytes, size_t size) {
    const auto *from = static_cast<const unsigned char *>(bytes);
    while (size) {
        const size_t at = size_ % 64, part = std::min(size, 64 - at);
        std::memcpy(block_.data() + at, from, part);
        size_ += part, from += part, size -= part;
        if (size_ % 64 == 0) take_block();
    }
    return *this;
}

Sha256::Digest Sha256::finish() {
    const uint64_t bits = 8 * size_;
    const unsigned char one = 0x80, zero = 0;
    add(&one, 1);
    while (size_ % 64 != 56) add(&zero, 1);
    unsigned char length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(bits >> (56 - 8 * i));
    add(length, sizeof length);
    Digest digest;
    for (size_t i = 0; i < 32; ++i)
        digest[i] = static_cast<unsigned char>(state_[i / 4] >> (24 - i % 4 * 8));
    return digest;
}

std::string hexadecimal(const Sha256::Digest &digest) {
    std::string text;
    for (const unsigned char byte : digest)
        for (const int nibble : {byte >> 4, byte & 15}) text += "0123456789abcdef"[nibble];
    return text;
}

}  // namespace kernel_runtime::cuda
