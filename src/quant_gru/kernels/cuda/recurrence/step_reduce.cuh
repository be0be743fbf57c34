// Reduction of the accumulators over state bytes and halves of the features, into sum and other.
// Part of the body of a step: persistent.cu includes it, because as a function it would change the
// machine code of layouts with two strips. Uses acc and the factors.
int bias_now[kRows][3], times_now[kRows][3];
Real m_now[kRows][3];
#pragma unroll
for (int row = 0; row < kRows; ++row)
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        uint2 factor = {(uint32_t)bias[row][gate], (uint32_t)times[row][gate]};
        if (kTight) factor = load8(factor_at(row, gate));
        bias_now[row][gate] = (int)factor.x;
        times_now[row][gate] = (int)factor.y;
        m_now[row][gate] = kTight ? (Real)bits_as_float(factor.y) : m[row][gate];
    }
// the sum of two accumulators and a bias is one instruction
constexpr bool kBiased = KS == 1 && kSets == 1;
const auto in_pairs = [](int gate) { return SETS == 2 || (kPairs && gate < 2); };
#pragma unroll
for (int i = 0; i < 12; ++i)
    if (in_pairs(i / 4))
        acc[0][i / 4][i % 4] += acc[kAccumulators - 1][i / 4][i % 4] +
                                (kBiased ? bias_now[i % 4 / 2 % kRows][i / 4] : 0);

// sums of this thread's unit: [low byte, high byte][gate][column]
int both[2][3][2];
if (kPacked) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) apart(both[0][gate], both[1][gate], acc[0][gate], quad);
}

// add the sums of both state bytes if int32 holds the total; they may wrap around
constexpr int kParts = kWhole && kKnown ? 1 : kSets;
if (kParts < kSets && !kOnTop) {
#pragma unroll
    for (int i = 0; i < 12; ++i) {
        const int gate = i / 4, at = i % 4;
        if (kPacked && at < 2)
            both[0][gate][at % 2] =
                (int)((uint32_t)both[1][gate][at % 2] * 256u + (uint32_t)both[0][gate][at % 2]);
        if (!kPacked)
            acc[0][gate][at] = (int)((uint32_t)acc[kAccumulators - 1][gate][at] * 256u +
                                     (uint32_t)acc[0][gate][at]);
    }
}
const auto sum_at = [&](int set, int gate, int slot) {
    if (kPacked) return slot & 1 ? both[set % 2][gate][1] : both[set % 2][gate][0];
    return pick(acc[set % kAccumulators][gate], slot);
};

// Sums of this thread's elements. `other` has the sums over the other half of the features if the
// total may need 64 bits.
constexpr bool kApart = KS == 2 && kWhole && kKnown;
int sum[kParts][3][kElements], other[3][kElements];
#pragma unroll
for (int set = 0; set < kParts; ++set)
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
        for (int e = 0; e < kElements; ++e)
            sum[set][gate][e] = sum_at(set, gate, place_of(e, quad, half).slot);
if (KS == 2) {
    constexpr int kCount = kSets * 3 * kElements * 32;
    const int base = (copy * kGroups + local) * 2;
    int *const given = exchange + (base + half) * kCount + lane;
    const int *const taken = exchange + (base + 1 - half) * kCount + lane;
#pragma unroll
    for (int set = 0; set < kParts; ++set)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int e = 0; e < kElements; ++e)
                given[((set * 3 + gate) * kElements + e) * 32] =
                    sum_at(set, gate, place_of(e, quad, 1 - half).slot);
    sync_threads(1 + local, 64);
#pragma unroll
    for (int set = 0; set < kParts; ++set)
#pragma unroll
        for (int gate = 0; gate < 3; ++gate)
#pragma unroll
            for (int e = 0; e < kElements; ++e) {
                const int v = taken[((set * 3 + gate) * kElements + e) * 32];
                if (kApart)
                    other[gate][e] = v;
                else
                    sum[set][gate][e] = (int)((uint32_t)sum[set][gate][e] + (uint32_t)v);
            }
}
