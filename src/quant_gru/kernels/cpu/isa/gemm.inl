// The float32 products of the backward. The number of rows that are multiplied together does not
// change the order of the terms of a sum. Results are therefore bit-equal for any number of
// threads. Included inside the namespace of an instruction set, which defines Floats and
//   kPanelVectors       vectors of a panel of weights,
//   kFloatRows          maximum number of rows of a call of `tile`,
//   panels_at_once(n)   panels per call of `tile` with n rows,
//   kFeatures           features of codes that are adjacent in memory.

constexpr int kPanel = kPanelVectors * Floats::n;

inline Floats multiplied(Floats a, Floats b, Floats sum) {
    // Without the instruction, a fused multiply-add is slow. These products need not be exact.
    if (Floats::kScales) return Floats::multiply_add(a, b, sum);
    return Floats::add(sum, Floats::mul(a, b));
}

// sum[row][v] += sum over k of a[row * a_row + k * a_step] * b[k][v]. A panel has kBeside vectors;
// further vectors belong to the next panels.
template <int R, int V, int kBeside>
inline void tile(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
                 int64_t panel, int64_t terms, Floats (&sum)[R][V]) {
    for (int64_t k = 0; k < terms; ++k, a += a_step, b += b_step) {
        Floats weights[V];
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v)
            weights[v] = Floats::load(b + (v / kBeside) * panel + (v % kBeside) * Floats::n);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Floats operand = Floats::set(a[r * a_row]);
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) sum[r][v] = multiplied(operand, weights[v], sum[r][v]);
        }
    }
}

// Gradients of a projection in the layout of a chunk: the items of a group are contiguous.
struct Gradients {
    const float *data;
    int64_t stride;  // floats from group to group
    Gradients at(int64_t item) const { return {data + item * 3 * kGroup, stride}; }
};

// to[row][column] += a (rows, channels) times P panels, starting at panel `first`.
template <int R, int P>
inline void panel_tile(Gradients a, const Panels &w, int first, float *to, int64_t to_row) {
    constexpr int V = P * kPanelVectors;
    Floats sum[R][V];
    to += static_cast<int64_t>(first) * kPanel;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[r][v] = Floats::load(to + r * to_row + v * Floats::n);
    const int64_t panel = w.channels * kPanel;
    const float *weights = w.data + first * panel, *const end = weights + panel;
    for (; weights < end; weights += 3 * kGroup * kPanel, a.data += a.stride)
        tile<R, V, kPanelVectors>(a.data, 3 * kGroup, 1, weights, kPanel, panel, 3 * kGroup, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[r][v].store(to + r * to_row + v * Floats::n);
}

template <int R, int P = panels_at_once(R)>
inline void few_panels(int panels, Gradients a, const Panels &w, int first, float *to,
                       int64_t to_row) {
    if constexpr (P > 1) {
        if (panels < P) return few_panels<R, P - 1>(panels, a, w, first, to, to_row);
    }
    panel_tile<R, P>(a, w, first, to, to_row);
}

template <int R = kFloatRows>
inline void few_rows(int rows, Gradients a, const Panels &w, float *to, int64_t to_row) {
    if constexpr (R > 1) {
        if (rows < R) return few_rows<R - 1>(rows, a, w, to, to_row);
    }
    constexpr int P = panels_at_once(R);
    for (int first = 0; first < w.count; first += P)
        few_panels<R>(w.count - first, a, w, first, to, to_row);
}

// The panel `index` of w.
inline Panels panel_of(const Panels &w, int index) {
    return {w.data + index * w.channels * kPanel, 1, w.channels};
}

// to (rows, panels * kPanel) += a (rows, channels) times all panels.
void add_product(int64_t rows, Gradients a, const Panels &w, float *to, int64_t to_row) {
    if (rows <= kFloatRows) return few_rows(static_cast<int>(rows), a, w, to, to_row);
    // Tiles have about the same size, because a small remainder would not hide latency.
    const int64_t tiles = (rows + kFloatRows - 1) / kFloatRows;
    // Each panel stays in a near cache while it is multiplied with all rows.
    for (int index = 0; index < w.count; ++index) {
        const Panels one = panel_of(w, index);
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = rows * t / tiles, end = rows * (t + 1) / tiles;
            few_rows(static_cast<int>(end - row), a.at(row), one,
                     to + row * to_row + int64_t{index} * kPanel, to_row);
        }
    }
}

// Takes one row through one step. Derivatives become gradients of the projections. dh becomes the
// part of dL/dh that goes directly to the state before the step.
inline void turn_derivatives(const Chunk &c, int64_t item, float *dh) {
    for (int g = 0; g < c.groups; ++g) {
        float *Wx = c.Wx + g * c.stride + item * 3 * kGroup;
        float *Rh = c.Rh + g * c.stride + item * 3 * kGroup;
        const float *direct = c.direct + g * c.direct_stride + item * kGroup;
        for (int i = 0; i < kGroup; i += Floats::n) {
            const Floats d = Floats::load(dh + g * kGroup + i);
            for (int j = i; j < 3 * kGroup; j += kGroup) {
                Floats::mul(Floats::load(Wx + j), d).store(Wx + j);
                Floats::mul(Floats::load(Rh + j), d).store(Rh + j);
            }
            Floats::mul(Floats::load(direct + i), d).store(dh + g * kGroup + i);
        }
    }
}

void recurrence_rows(const RecurrenceJob &job) {
    const Chunk &c = job.chunk;
    const int64_t rows = job.end_row - job.first_row;
    float *const first_dh = job.dh + (job.first_row - c.first_row) * job.width;
    for (int64_t s = c.steps - 1; s >= 0; --s) {
        const int64_t step = step_of(c, c.first_step + s);
        float *dh = first_dh;
        for (int64_t row = job.first_row; row < job.end_row; ++row, dh += job.width) {
            if (counts(c, row, step)) {
                const float *grad = job.grad_out + step * job.grad_step + row * job.grad_row;
                for (int i = 0; i < job.H; ++i) dh[i] += grad[i];
            }
            if (job.states)
                __builtin_memcpy(job.states + (step * c.N + row) * job.H, dh,
                                 job.H * sizeof(float));
            turn_derivatives(c, item_of(c, s, row), dh);
        }
        add_product(rows, Gradients{c.Rh, c.stride}.at(item_of(c, s, job.first_row)), job.R,
                    first_dh, job.width);
    }
}

// Computes dx of some items.
void input_gradients(const WeightJob &job) {
    const Chunk &c = job.chunk;
    alignas(64) float result[kProductRows * kPanel];
    for (int64_t first = job.first_item; first < job.end_item; first += kProductRows) {
        const int64_t left = job.end_item - first;
        const int64_t count = left < kProductRows ? left : kProductRows;
        for (int index = 0; index < job.W.count; ++index) {
            for (int64_t i = 0; i < count * kPanel; ++i) result[i] = 0;
            add_product(count, Gradients{c.Wx, c.stride}.at(first), panel_of(job.W, index), result,
                        kPanel);
            const int64_t column = int64_t{index} * kPanel;
            const int64_t width = job.C - column < kPanel ? job.C - column : kPanel;
            for (int64_t i = 0; i < count; ++i) {
                const int64_t step = step_of(c, c.first_step + (first + i) / c.rows);
                const int64_t row = step * c.N + c.first_row + (first + i) % c.rows;
                __builtin_memcpy(job.dx + row * job.C + column, result + i * kPanel,
                                 static_cast<size_t>(width) * sizeof(float));
            }
        }
    }
}

// Adds to the sums of a group: sums[feature][gate][unit] += code of the feature times gradient.
inline void feature_sums(const float *codes, int64_t stride, int blocks, const float *grads,
                         int64_t first, int64_t count, float *sums) {
    constexpr int V = 3 * kGroup / Floats::n;
    for (int block = 0; block < blocks; ++block) {
        Floats sum[kFeatures][V];
        for (int r = 0; r < kFeatures; ++r)
            for (int v = 0; v < V; ++v) sum[r][v] = Floats::set(0);
        tile<kFeatures, V, V>(codes + block * stride + first * kFeatures, 1, kFeatures,
                              grads + first * 3 * kGroup, 3 * kGroup, 0, count, sum);
        float *to = sums + static_cast<int64_t>(block) * kFeatures * 3 * kGroup;
        for (int r = 0; r < kFeatures; ++r)
            for (int v = 0; v < V; ++v) {
                float *at = to + r * 3 * kGroup + v * Floats::n;
                Floats::add(Floats::load(at), sum[r][v]).store(at);
            }
    }
}

inline void bias_sums(const float *grads, int64_t first, int64_t count, double *sums) {
    constexpr int V = 3 * kGroup / Floats::n;
    Floats sum[V];
    for (int v = 0; v < V; ++v) sum[v] = Floats::set(0);
    for (int64_t item = first; item < first + count; ++item)
        for (int v = 0; v < V; ++v)
            sum[v] = Floats::add(sum[v], Floats::load(grads + item * 3 * kGroup + v * Floats::n));
    alignas(64) float part[3 * kGroup];
    for (int v = 0; v < V; ++v) sum[v].store(part + v * Floats::n);
    for (int i = 0; i < 3 * kGroup; ++i) sums[i] += part[i];
}

// Adds the sums over some items to the weight gradients of one group.
inline void group_sums(const WeightJob &job, int group, int64_t first, int64_t count) {
    const Chunk &c = job.chunk;
    const int64_t features = int64_t{kFeatures} * 3 * kGroup;
    const float *Wx = c.Wx + group * c.stride, *Rh = c.Rh + group * c.stride;
    if (job.dW)
        feature_sums(c.x, c.code_stride, job.x_blocks, Wx, first, count,
                     job.dW + group * job.x_blocks * features);
    if (job.dR)
        feature_sums(c.h, c.code_stride, job.h_blocks, Rh, first, count,
                     job.dR + group * job.h_blocks * features);
    if (job.dbw) bias_sums(Wx, first, count, job.dbw + group * 3 * kGroup);
    if (job.dbr) bias_sums(Rh, first, count, job.dbr + group * 3 * kGroup);
}

void weight_sums(const WeightJob &job) {
    const Chunk &c = job.chunk;
    for (int group = job.first_group; group < job.end_group; ++group)
        // From the last step to the first, in blocks of sum_steps: items and order of the partial
        // sums do not depend on the chunk size.
        for (int64_t start = (c.steps - 1) / c.sum_steps * c.sum_steps; start >= 0;
             start -= c.sum_steps) {
            const int64_t end = start + c.sum_steps < c.steps ? start + c.sum_steps : c.steps;
            for (int64_t item = start * c.rows; item < end * c.rows; item += kSumItems) {
                const int64_t left = end * c.rows - item;
                group_sums(job, group, item, left < kSumItems ? left : kSumItems);
            }
        }
    if (job.dx) input_gradients(job);
}
