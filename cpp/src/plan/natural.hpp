// Natural numbers of any size: the sums that decide about shifts exceed 128 bits.
#pragma once

#include <cstdint>
#include <vector>

namespace quant_gru {

class Natural {
 public:
    Natural(unsigned __int128 value = 0) {
        for (; value; value >>= 32) digits_.push_back(static_cast<uint32_t>(value));
    }

    Natural operator+(const Natural &other) const {
        Natural sum;
        uint64_t carry = 0;
        for (size_t i = 0; i < digits_.size() || i < other.digits_.size() || carry; ++i) {
            carry += uint64_t{digit(i)} + other.digit(i);
            sum.digits_.push_back(static_cast<uint32_t>(carry));
            carry >>= 32;
        }
        return sum;
    }

    Natural operator*(const Natural &other) const {
        Natural product;
        product.digits_.assign(digits_.size() + other.digits_.size(), 0);
        for (size_t i = 0; i < digits_.size(); ++i) {
            uint64_t carry = 0;
            for (size_t j = 0; j < other.digits_.size() || carry; ++j) {
                carry += uint64_t{digits_[i]} * other.digit(j) + product.digits_[i + j];
                product.digits_[i + j] = static_cast<uint32_t>(carry);
                carry >>= 32;
            }
        }
        product.trim();
        return product;
    }

    Natural operator<<(int bits) const {
        Natural power;
        power.digits_.assign(static_cast<size_t>(bits / 32) + 1, 0);
        power.digits_.back() = uint32_t{1} << (bits % 32);
        return *this * power;
    }

    bool operator<(const Natural &other) const {
        if (digits_.size() != other.digits_.size()) return digits_.size() < other.digits_.size();
        for (size_t i = digits_.size(); i-- > 0;)
            if (digits_[i] != other.digits_[i]) return digits_[i] < other.digits_[i];
        return false;
    }

 private:
    uint32_t digit(size_t i) const { return i < digits_.size() ? digits_[i] : 0; }
    void trim() {
        while (!digits_.empty() && digits_.back() == 0) digits_.pop_back();
    }

    std::vector<uint32_t> digits_;  // lowest first, without leading zeros
};

}  // namespace quant_gru
