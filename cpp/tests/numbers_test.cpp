// What layer_plan derives: tiers, widths, containers, at the bounds of each.
#include "check.hpp"
#include "cpu/core/cell_numbers.hpp"

using namespace quant_gru;

namespace {

int tier(int64_t k, int64_t M, uint64_t V) { return tier_of({1, k, {M, 0}}, {V, 0}); }

void test_tiers() {
    CHECK(tier(40, 1, (1u << 24) - 1) == 'a');  // float32 needs no room for one half
    CHECK(tier(0, 1, 1u << 24) == 'b');
    CHECK(tier(30, 1, 1u << 29) == 'b');
    CHECK(tier(31, 1, 1u << 30) == 'c');
    CHECK(tier(-5, 1, (1u << 31) - 1) == 'b');
    CHECK(tier(0, 1, uint64_t{1} << 52) == 'c');
    CHECK(tier(0, 1, uint64_t{1} << 53) == 'd');
    CHECK(tier(0, 1, (uint64_t{1} << 62) - 1) == 'd');
    CHECK(tier(0, 1, uint64_t{1} << 62) == 'e');
    CHECK(tier(63, 1, 1u << 24) == 'e');
    CHECK(tier(600, 1, 1u << 24) == 'e');
    CHECK(tier(0, INT64_MAX, UINT64_MAX) == 'e');
    // sums and products beyond 64 bits do not wrap around
    CHECK(tier_of({2, 0, {INT64_MAX, INT64_MAX}}, {2, 2}) == 'e');
    CHECK(tier_of({2, 0, {int64_t{1} << 62, int64_t{1} << 62}}, {2, 2}) == 'e');
    CHECK(tier_of({2, 0, {1 << 23, 1 << 23}}, {1, 1}) == 'b');
    CHECK(tier_of({2, 0, {1 << 23, (1 << 23) - 1}}, {1, 1}) == 'a');
}

void test_quantizers() {
    const struct {
        int bits;
        bool is_signed;
        int64_t lo, hi;
        Container container;
    } cases[] = {
        {1, true, -1, 0, Container::i8},
        {1, false, 0, 1, Container::i8},
        {7, false, 0, 127, Container::i8},
        {8, true, -128, 127, Container::i8},
        {8, false, 0, 255, Container::u8},
        {9, false, 0, 511, Container::i16},
        {16, true, -32768, 32767, Container::i16},
        {16, false, 0, 65535, Container::i32},
        {31, false, 0, INT32_MAX, Container::i32},
        {32, true, INT32_MIN, INT32_MAX, Container::i32},
        {32, false, 0, UINT32_MAX, Container::i64},
    };
    for (const auto &c : cases) {
        const QuantizerNumbers q{c.bits, c.is_signed, 1, 0};
        CHECK(q.lo() == c.lo && q.hi() == c.hi);
        CHECK(q.container() == c.container);
    }
    CHECK((QuantizerNumbers{8, true, 1, 127}.reach() == 255));
    CHECK((QuantizerNumbers{8, true, 1, 0}.reach() == 128));
}

void test_biases() {
    CHECK(significant_bits(16) == 24 && significant_bits(17) == 16);
    CHECK(significant_bits(32) == 16 && significant_bits(33) == 24);
    CHECK(bias_shift(16, 32) == 0 && bias_shift(32, 32) == 16);
    CHECK(bias_limit(8, 8) == 1 << 30);
    CHECK(bias_limit(4, 9) == int64_t{1} << 46 && bias_limit(16, 17) == int64_t{1} << 62);
}

}  // namespace

int main() {
    test_tiers();
    test_quantizers();
    test_biases();
    return failures != 0;
}
