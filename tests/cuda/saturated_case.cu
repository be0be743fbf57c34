// The gates of saturated.cuh by themselves: an element a thread, from codes less their zero points.
#include "gates/saturating.cuh"

struct Numbers {
    const float *Wx, *Rh;  // (3, count)
    const float *h;        // (count)
    int32_t *result;       // (count), less the zero point of the state
    int64_t count;
    Cell<float> cell;
    Saturated saturated;
};

extern "C" __global__ void __launch_bounds__(128)
    saturated_case(const __grid_constant__ Numbers p) {
    QG_SHARED(memory);
    uint32_t place[3];
    const Table *const tables[3] = {&p.cell.z, &p.cell.r, &p.cell.g};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        float *const to = (float *)(memory + i * 1040);
        for (int j = threadIdx.x; j < 257; j += 128) to[j] = tables[i]->direct[j];
        place[i] = shared_address(to) - 4u * kIndexBits;
    }
    __syncthreads();
    const int64_t at = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (at >= p.count) return;
    float Rh[3];
#pragma unroll
    for (int gate = 0; gate < 3; ++gate)
        Rh[gate] = share_of(p.saturated.Rh, p.Rh[gate * p.count + at], 1.f / 256);
    const float next = next_state(p.cell, p.saturated, place[0], place[1], place[2], p.Wx[at],
                                  p.Wx[p.count + at], p.Wx[2 * p.count + at], Rh[0], Rh[1], Rh[2],
                                  p.h[at]);
    p.result[at] = Magic<float>::integer(next);
}
