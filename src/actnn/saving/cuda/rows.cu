// Limits the mean square of normalized rows whose numbers are decoded, in place.
//
// Macros: REAL, the dtype (0 float32, 1 float16, 2 bfloat16); ROWS, the rows of a block: 32 where
// the elements of a row are `rows` apart, else 1.
#define ALIGNED 0
#include "actnn/saving/cuda/pointwise.cuh"

constexpr int kStep = kThreads / ROWS;  // elements of a row that a block reads at once
constexpr int kSteps = 64;              // blocks that find the largest step of codes

// Elements of a row are (outer, inner) apart: the tensor is (outer, rows, inner) in memory. Block
// (i, k) has part k of `parts` of the elements of some rows.
struct Rows {
    void *x;
    const float *mean, *scale;   // of each row; mean may be null
    const uint32_t *parameters;  // of groups of codes: bfloat16 base, step
    float *scratch;              // kSteps steps, and (parts, rows) sums if there are several parts
    int64_t groups, outer, rows, inner, parts;
    float eps, most, least;
};

inline int64_t row_index() { return (int64_t)blockIdx.x * ROWS + threadIdx.x % ROWS; }

// What the threads have of one of kOf rows, combined.
template <int kOf, class Combine>
inline float of_threads(float v, const Combine &combine) {
    SHARED_MEMORY(memory);
    float *const values = (float *)memory;
    values[threadIdx.x] = v;
    __syncthreads();
    for (int half = kThreads / 2; half >= kOf; half /= 2) {
        if (threadIdx.x < half)
            values[threadIdx.x] = combine(values[threadIdx.x], values[threadIdx.x + half]);
        __syncthreads();
    }
    return values[threadIdx.x % kOf];
}

inline float sum_of_row(float v) {
    return of_threads<ROWS>(v, [](float a, float b) { return a + b; });
}

// Finds the largest step of the groups of a block.
extern "C" __global__ void __launch_bounds__(kThreads)
    largest_steps(const __grid_constant__ Rows p) {
    float largest = 0.f;
#pragma unroll 8
    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < p.groups;
         i += kSteps * kThreads)
        largest = fmaxf(largest, bits_as_float(p.parameters[i] & 0x7FFF0000u));
    largest = of_threads<1>(largest, [](float a, float b) { return fmaxf(a, b); });
    if (threadIdx.x == 0) p.scratch[blockIdx.x] = largest;
}

// Whether noise leaves a row below the limit, so that its elements need not be read. The variance
// of stochastic rounding is a quarter of the squared step at most. Without eps, that of the row is
// not known.
inline bool is_above_noise(const Rows &p) {
    if (p.parts == 1 || !(p.eps > 0.f)) return false;
    const int lane = threadIdx.x % 32;
    float step = fmaxf(p.scratch[lane], p.scratch[lane + 32]);
    for (int mask = 1; mask < 32; mask *= 2)
        step = fmaxf(step, bits_as_float(shuffled(float_bits(step), mask)));
    if (row_index() >= p.rows) return true;
    const float scale = p.scale[row_index()];
    return 4.f * (p.most - 1.f) * (1.f / (scale * scale) - p.eps) >= step * step;
}

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

// Writes the sums of a part.
extern "C" __global__ void __launch_bounds__(kThreads) row_squares(const __grid_constant__ Rows p) {
    const float total = sum_of_row(is_above_noise(p) ? 0.f : squares(p));
    if (threadIdx.x < ROWS && row_index() < p.rows)
        p.scratch[kSteps + blockIdx.y * p.rows + row_index()] = total;
}

// Scales the differences from the mean of rows whose mean square is more than `most` times that of
// an exact row after the norm, 1 - eps scale^2.
extern "C" __global__ void __launch_bounds__(kThreads) limit_rows(const __grid_constant__ Rows p) {
    float total = 0.f;
    const bool calm = is_above_noise(p);
    if (!calm && p.parts == 1)
        total = squares(p);
    else if (!calm && row_index() < p.rows)
        for (int64_t part = threadIdx.x / ROWS; part < p.parts; part += kStep)
            total += p.scratch[kSteps + part * p.rows + row_index()];
    total = sum_of_row(total);
    if (calm || row_index() >= p.rows) return;
    const float scale = p.scale[row_index()], mean = mean_of(p);
    const float square = total / (float)(p.outer * p.inner) * scale * scale;
    const float exact = fmaxf(1.f - p.eps * scale * scale, p.least);
    const float excess = square / (exact * p.most);
    if (!(excess > 1.f)) return;
    const float factor = 1.f / sqrtf(excess);
    for_members(
        p, [&](int64_t at) { set_element(p.x, at, fmaf(element(p.x, at) - mean, factor, mean)); });
}
