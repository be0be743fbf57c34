// Exchange of the new states of a strip within the cluster.
// Part of the body of a step: persistent.cu includes it, because as a function it would change the
// machine code of layouts with two strips. Uses the stage and the barriers.
if (kBulk) {
    shown_to_copies();
    __syncthreads();
    const uint32_t from = shared_address(to), told = shared_address(received + 1 - parity);
#pragma unroll
    for (int i = 1; i < CL; i += kThreads / 32)
        if (i + kThreads / 32 <= CL || i + sender < CL)
            send_slice(from, told, (uint32_t)(rank + i + sender) % CL, kSlice);
} else {
    __syncwarp();
}
if (!kBulk && (NB > 1 || half == 0)) {
#pragma unroll
    for (int i = lane; i < HP * kOwned * CL; i += 32) {
        const int chunk = i % (HP * kOwned), peer = i / (HP * kOwned);
        const int n = NB == 1 ? 0 : kShared ? chunk % kOwned * 2 + half : chunk % kOwned;
        send(next + chunk / kOwned * kPlane + (strip * NB + n) * kStride + group * 16,
             received + (1 - parity), peer, *(const uint4 *)(to + chunk * 16));
    }
}
