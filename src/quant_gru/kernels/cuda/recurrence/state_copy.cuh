// Copies of the states' codes from shared memory to the output, COPY bytes per thread.
// Part of the body of persistent.cu, because as functions these lambdas would change its machine
// code.
auto copy_load = [&](int parity) {
    const unsigned char *const from = copied + parity * kState;
    uint4 v = {0, 0, 0, 0};
#if COPY == 16 && HP == 1
    v = *(const uint4 *)from;
#elif COPY == 16
    const uint2 low = *(const uint2 *)from, high = *(const uint2 *)(from + kNextPlane);
    v.x = low.x;
    v.y = low.y;
    v.z = high.x;
    v.w = high.y;
#elif COPY == 4
    v.x = *(const uint32_t *)from;
#endif
    return v;
};
auto copy_store = [&](bool now, uint4 v) {
#if COPY == 16 && HP == 1
    v.x ^= flip;
    v.y ^= flip;
    v.z ^= flip;
    v.w ^= flip;
    store_where(now, copied_to, v);
#elif COPY == 16
    v.x ^= kTop * 0x01010101u;
    v.y ^= kTop * 0x01010101u;
    v.z ^= flip;
    v.w ^= flip;
    uint4 both;
    both.x = interleave(v.x, v.z, 0);
    both.y = interleave(v.x, v.z, 2);
    both.z = interleave(v.y, v.w, 0);
    both.w = interleave(v.y, v.w, 2);
    store_where(now, copied_to, both);
#elif COPY == 4
    store_where(now, copied_to, v.x ^ flip);
#endif
};
