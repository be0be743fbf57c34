// GEMM of R h: weight-stationary fragments times the states of a strip, into acc.
// Part of the body of a step: persistent.cu includes it, because as a function it would change the
// machine code of layouts with two strips. Uses w and the operand addresses.
const int operand_from = parity * kState + strip * NB * kStride * (kBulk ? HP : 1);
const unsigned char *const operand = operands + operand_from;
const uint32_t operand_at = kTight  ? operands_at + operand_from
                            : kBulk ? pinned(shared_address(operand))
                                    : 0;
const auto fragment = [&](int b, int plane) {
    const int from = plane * kNextPlane + b * kNextBlock;
    return kBulk || kTight ? load16(operand_at + from) : *(const uint4 *)(operand + from);
};
const auto multiply = [&](int b, int j, int gate, const uint32_t (&f)[kReads][4]) {
    const int set = kPairs && gate != 2 ? j : j % SETS;
    mma<WP == 2, kReads == 2>(acc[set][gate], w[0][b][j][gate], f[0][2 * j], f[0][2 * j + 1]);
    if (kReads == 2)
        mma<WP == 2, false>(acc[1 % kTerms][gate], w[0][b][j][gate], f[kReads - 1][2 * j],
                            f[kReads - 1][2 * j + 1]);
    if (WP == 2)
        mma<false, HP == 2>(acc[1 % kTerms][gate], w[WP - 1][b][j][gate], f[0][2 * j],
                            f[0][2 * j + 1]);
    if (WP == 2 && HP == 2)
        mma<false, false>(acc[kTerms - 1][gate], w[WP - 1][b][j][gate], f[kReads - 1][2 * j],
                          f[kReads - 1][2 * j + 1]);
};
// The sums of high bytes, times 256, initialize the accumulators of low bytes. Sums may wrap
// around.
constexpr bool kOnTop = kKnown && kWhole && kReads == 2 && !kLate && !kRoom;
if (kOnTop) {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks; ++i) {
        const int b = i % kBlocks, plane = i < kBlocks ? HP - 1 : 0;
        const uint4 v = fragment(b, plane);
#pragma unroll
        for (int j = 0; j < 12 && i == kBlocks; ++j)
            acc[0][j / 4][j % 4] = (int)((uint32_t)acc[0][j / 4][j % 4] * 256u);
#pragma unroll
        for (int j = 0; j < 6; ++j) {
            const int gate = j % 3, second = j / 3;
            const uint32_t b0 = second ? v.z : v.x, b1 = second ? v.w : v.y;
            if (plane == 0)
                mma<false, true>(acc[0][gate], w[0][b][second][gate], b0, b1);
            else
                mma<false, false>(acc[0][gate], w[0][b][second][gate], b0, b1);
        }
    }
}
uint32_t f[kKept][kReads][4];
#pragma unroll
for (int b = 0; b < kBlocks && !kOnTop; ++b) {
    uint32_t (&to)[kReads][4] = f[b % kKept];
#pragma unroll
    for (int plane = 0; plane < kReads; ++plane) {
        const uint4 v = fragment(b, plane);
        to[plane][0] = v.x;
        to[plane][1] = v.y;
        to[plane][2] = v.z;
        to[plane][3] = v.w;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        multiply(b, j, 1, to);
        multiply(b, j, 2, to);
        if (!kLate) multiply(b, j, 0, to);
    }
}
// The update gate is needed last. Its GEMM overlaps with the computation of the reset gate.
if (kLate) {
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int plane = 0; plane < kReads && kKept < kBlocks; ++plane) {
            const uint4 v = load16(shared_address(operand + plane * kNextPlane + b * kNextBlock));
            f[0][plane][0] = v.x;
            f[0][plane][1] = v.y;
            f[0][plane][2] = v.z;
            f[0][plane][3] = v.w;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) multiply(b, j, 0, f[b % kKept]);
    }
}
