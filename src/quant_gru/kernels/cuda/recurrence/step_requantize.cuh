// Requantization of the sums to codes of R h, into Rh.
// Part of the body of a step: persistent.cu includes it, because as a function it would change the
// machine code of layouts with two strips. Uses sum, other and the factors.
// Zero-point-free codes of R h, with the magic number added except for kWhole and SATURATED.
Real Rh[3][kElements];
#pragma unroll
for (int gate = 0; gate < 3; ++gate)
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const int row = kRows == 2 ? e & 1 : 0;
        if (kWhole) {
            uint32_t v = (uint32_t)sum[0][gate][e] + (uint32_t)bias_now[row][gate];
            if (kParts == 2) v += (uint32_t)sum[kParts - 1][gate][e] * 256u;
            // round half up, then change a tie to the neighbor that the rule wants
            int64_t product = times_plus((int)v, times_now[row][gate], half_up);
            if (kApart) product = times_plus(other[gate][e], times_now[row][gate], product);
            int rounded = (int)(product >> 32);
            if (QG_RULE == QG_HALF_EVEN && (uint32_t)product == 0) rounded &= ~1;
            if (QG_RULE == QG_HALF_AWAY && (uint32_t)product == 0) rounded -= rounded <= 0;
            const int limited = rounded < Rh_lo ? Rh_lo : rounded;
            Rh[gate][e] = (Real)(limited > Rh_hi ? Rh_hi : limited);
            continue;
        }
#if SATURATED
        Rh[gate][e] = share_of(
            p.saturated.Rh,
            (Real)(sum[0][gate][e] + (kBiased && in_pairs(gate) ? 0 : bias_now[row][gate])),
            m_now[row][gate]);
        continue;
#endif
        Real v;
        if (kSets == 1)
            v = (Real)(sum[0][gate][e] + (kBiased && in_pairs(gate) ? 0 : bias_now[row][gate]));
        else {
            v = R::fma((Real)sum[1 % kParts][gate][e], (Real)256, wide_bias[row][gate]);
            v = R::plus(v, (Real)sum[0][gate][e]);
            if (kSets == 3) v = R::fma((Real)sum[kParts - 1][gate][e], (Real)65536, v);
        }
        Rh[gate][e] = R::limit(round_term(v, m_now[row][gate]), p.cell.Rh_lo, p.cell.Rh_hi);
    }
if (sizeof(Real) == 4 && !kKnown && __builtin_expect(!exact_float, 0)) {
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
            const int row = kRows == 2 ? e & 1 : 0;
            const int unit = group * 16 + lane8 + 8 * place_of(e, quad, half).row8;
            double total = kWhole ? p.bias[gate * UP + unit]
                                  : (double)sum[0][gate][e] +
                                        (kBiased && in_pairs(gate) ? 0 : bias_now[row][gate]);
            if (kWhole)
                total += (double)sum[kParts - 1][gate][e] * 256 + (double)sum[0][gate][e] +
                         (double)missing[gate];
            const double v = round_term(total, p.m[gate * UP + unit]);
            const double low = (double)p.cell.Rh_lo - (double)R::number();
            const double high = (double)p.cell.Rh_hi - (double)R::number();
            const double limited = Magic<double>::limit(plain(v), low, high);
            Rh[gate][e] = (Real)(kSaturated ? (limited - low) / 256
                                 : kWhole   ? limited
                                            : limited + (double)R::number());
        }
}
