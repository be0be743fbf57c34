// Gates of this thread's elements, and the new states as bytes.
// Part of the body of a step: persistent.cu includes it, because as a function it would change the
// machine code of layouts with two strips. Uses Rh, Wx and h.
unsigned char *const next = state + (1 - parity) * kState;
// No other block still fetches the previous contents of this buffer. Each one has since sent states
// that this block waited for.
unsigned char *const to = CL == 1 ? next
                          : kBulk ? next + (strip * CL + rank) * kSlice
                                  : stage + copy * (kGroups * kHalves * kStage);
// Compute all results before the first store, because byte stores may alias any operand.
#pragma unroll
for (int e = 0; e < kElements; ++e) {
    Real Rh_e[3], Wx_e[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate) {
        Rh_e[gate] = kWhole || kSaturated ? Rh[gate][e] : plain(Rh[gate][e]);
        Wx_e[gate] = unpacked(Wx.w[e], gate, p.cell.Wx_offset);
    }
#if SATURATED
    Real h_next = next_state(p.cell, p.saturated, z_of.base, r_of.base, g_of.base, Wx_e[0], Wx_e[1],
                             Wx_e[2], Rh_e[0], Rh_e[1], Rh_e[2], plain(h[strip][e]));
#else
    Real h_next = next_state<Real>(p.cell, z_of, r_of, g_of, Wx_e[0], Wx_e[1], Wx_e[2], Rh_e[0],
                                   Rh_e[1], Rh_e[2], plain(h[strip][e]));
#endif
#if QG_ZONEOUT
    h_next = weighted(p.cell.zoneout, plain(h[strip][e]), plain(h_next));
#endif
#if HELD
    if (held[parity][strip][e]) continue;
#endif
    if (t < length[strip][e / kSame]) h[strip][e] = h_next;
}
if (works(quad, half)) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) {
        const int code = R::integer(h[strip][e]) + raw;
        to[byte_at[e]] = (unsigned char)(code ^ kTop);
        if (HP == 2)
            to[(CL == 1 ? kPlane
                : kBulk ? kNextPlane
                        : kOwned * 16) +
               byte_at[e]] = (unsigned char)(code >> 8);
    }
}
