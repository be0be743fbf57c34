// SHA-256 (FIPS 180-4).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kernel_runtime::cuda {

class Sha256 {
 public:
    using Digest = std::array<unsigned char, 32>;

    Sha256 &add(const void *bytes, size_t size);

    // Ends the message. The object must not be used afterwards.
    Digest finish();

 private:
    void take_block();
    std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<unsigned char, 64> block_{};
    uint64_t size_ = 0;
};

std::string hexadecimal(const Sha256::Digest &digest);

}  // namespace kernel_runtime::cuda
