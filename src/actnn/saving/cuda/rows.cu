// Limits the mean square of normalized rows, in place.
//
// Macros: REAL, the dtype (0 float32, 1 float16, 2 bfloat16); ROWS, the rows of a block: 32 where
// the elements of a row are `rows` apart, else 1.
#define ALIGNED 0
#include "actnn/saving/cuda/pointwise.cuh"

// Elements of a row are (outer, inner) apart: the tensor is (outer, rows, inner) in memory. Block
// (i, k) has part k of `parts` of the elements of some rows.
struct Rows {
    void *x;
    const float *mean, *scale;  // of each row; mean may be null
    float *partial;             // (parts, rows) sums, or null if there is one part
    int64_t outer, rows, inner, parts;
    float eps, most, least;
};

constexpr int kStep = kThreads / ROWS;  // elements of a row that a block reads at once

inline int64_t row_index() { return (int64_t)blockIdx.x * ROWS + threadIdx.x % ROWS; }

// Calls use(place in memory) for the elements of this thread.
template <class Use>
inline void for_members(const Rows &p, const Use &use) {
    const int64_t n = p.outer * p.inner, share = (n + p.parts - 1) / p.parts;
    const int64_t first = blockIdx.y * share + threadIdx.x / ROWS, row = row_index();
    const int64_t last = (blockIdx.y + 1) * share < n ? (blockIdx.y + 1) * share : n;
    if (row >= p.rows || first >= last) return;
    const int64_t over = kStep / p.inner, rest = kStep % p.inner;
    int64_t o = first / p.inner, i = first % p.inner;
#pragma unroll 8
    for (int64_t member = first; member < last; member += kStep) {
        use((o * p.rows + row) * p.inner + i);
        o += over, i += rest;
        if (i >= p.inner) i -= p.inner, ++o;
    }
}

inline float mean_of(const Rows &p) {
    return p.mean && row_index() < p.rows ? p.mean[row_index()] : 0.f;
}

// The sum of squared differences from the mean of elements of this thread.
inline float squares(const Rows &p) {
    const float mean = mean_of(p);
    float total = 0.f;
    for_members(p, [&](int64_t at) {
        const float v = element(p.x, at) - mean;
        total = fmaf(v, v, total);
    });
    return total;
}

// The sum of what the threads of a row have.
inline float sum_of_row(float v) {
    SHARED_MEMORY(memory);
    float *const sums = (float *)memory;
    sums[threadIdx.x] = v;
    __syncthreads();
    for (int half = kThreads / 2; half >= ROWS; half /= 2) {
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    return sums[threadIdx.x % ROWS];
}

// Writes the sums of a part.
extern "C" __global__ void __launch_bounds__(kThreads) row_squares(const __grid_constant__ Rows p) {
    const float total = sum_of_row(squares(p));
    if (threadIdx.x < ROWS && row_index() < p.rows)
        p.partial[blockIdx.y * p.rows + row_index()] = total;
}

// Scales the differences from the mean of rows whose mean square is more than `most` times that of
// an exact row after the norm, 1 - eps scale^2.
extern "C" __global__ void __launch_bounds__(kThreads) limit_rows(const __grid_constant__ Rows p) {
    float total = 0.f;
    if (!p.partial)
        total = squares(p);
    else if (row_index() < p.rows)
        for (int64_t part = threadIdx.x / ROWS; part < p.parts; part += kStep)
            total += p.partial[part * p.rows + row_index()];
    total = sum_of_row(total);
    if (row_index() >= p.rows) return;
    const float scale = p.scale[row_index()], mean = mean_of(p);
    const float square = total / (float)(p.outer * p.inner) * scale * scale;
    const float exact = fmaxf(1.f - p.eps * scale * scale, p.least);
    const float excess = square / (exact * p.most);
    if (!(excess > 1.f)) return;
    const float factor = 1.f / sqrtf(excess);
    for_members(
        p, [&](int64_t at) { set_element(p.x, at, fmaf(element(p.x, at) - mean, factor, mean)); });
}
