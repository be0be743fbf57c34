// The float32 products of the backward. Every sum runs over its terms in one order, whatever the
// number of rows that are multiplied together, so that threads change no bit. Included inside the
// namespace of an instruction set, which defines Floats and
//   kPanelVectors       vectors of a panel of weights,
//   kFloatRows          rows that one call of `tile` takes at most,
//   panels_at_once(n)   panels that it takes with n rows,
//   kFeatures           features of codes that stand side by side.

constexpr int kPanel = kPanelVectors * Floats::n;

inline Floats multiplied(Floats a, Floats b, Floats sum) {
    // without the instruction, fused is slow, and nothing here has to be exact
    if (Floats::kScales) return Floats::multiply_add(a, b, sum);
    return Floats::add(sum, Floats::mul(a, b));
}

// sum[row][v] += sum over k of a[row * a_row + k * a_step] * b[k][v]; vectors beyond `kBeside` are
// those of the next panel.
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

// to[row][column] += a (rows, channels) times P panels, from panel `first` on.
template <int R, int P>
inline void panel_tile(const float *a, int64_t a_row, const Panels &w, int first, float *to,
                       int64_t to_row) {
    constexpr int V = P * kPanelVectors;
    Floats sum[R][V];
    to += static_cast<int64_t>(first) * kPanel;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[r][v] = Floats::load(to + r * to_row + v * Floats::n);
    const int64_t panel = w.channels * kPanel;
    tile<R, V, kPanelVectors>(a, a_row, 1, w.data + first * panel, kPanel, panel, w.channels, sum);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) sum[r][v].store(to + r * to_row + v * Floats::n);
}

template <int R, int P = panels_at_once(R)>
inline void few_panels(int panels, const float *a, int64_t a_row, const Panels &w, int first,
                       float *to, int64_t to_row) {
    if constexpr (P > 1) {
        if (panels < P) return few_panels<R, P - 1>(panels, a, a_row, w, first, to, to_row);
    }
    panel_tile<R, P>(a, a_row, w, first, to, to_row);
}

template <int R = kFloatRows>
inline void few_rows(int rows, const float *a, int64_t a_row, const Panels &w, float *to,
                     int64_t to_row) {
    if constexpr (R > 1) {
        if (rows < R) return few_rows<R - 1>(rows, a, a_row, w, to, to_row);
    }
    constexpr int P = panels_at_once(R);
    for (int first = 0; first < w.count; first += P)
        few_panels<R>(w.count - first, a, a_row, w, first, to, to_row);
}

// to (rows, panels * kPanel) += a (rows, channels) times all panels.
void add_product(int rows, const float *a, int64_t a_row, const Panels &w, float *to,
                 int64_t to_row) {
    if (rows <= kFloatRows) return few_rows(rows, a, a_row, w, to, to_row);
    // of about the same size: what is left over would hide no latency
    const int tiles = (rows + kFloatRows - 1) / kFloatRows;
    // each panel stays in the nearest cache while all rows pass by
    for (int first = 0; first < w.count; ++first) {
        Panels one = w;
        one.data += first * w.channels * kPanel;
        one.count = 1;
        for (int t = 0; t < tiles; ++t) {
            const int64_t row = int64_t{rows} * t / tiles, end = int64_t{rows} * (t + 1) / tiles;
            few_rows(static_cast<int>(end - row), a + row * a_row, a_row, one,
                     to + row * to_row + static_cast<int64_t>(first) * kPanel, to_row);
        }
    }
}

// A row's way through one step: slopes become gradients, of which R h's are also put side by side
// at `operand`; dh becomes what goes back directly.
inline void turn_slopes(const Chunk &c, int64_t item, float *dh, float *operand) {
    for (int g = 0; g < c.groups; ++g) {
        float *Wx = c.Wx + g * c.stride + item * 3 * kGroup;
        float *Rh = c.Rh + g * c.stride + item * 3 * kGroup;
        const float *direct = c.direct + g * c.direct_stride + item * kGroup;
        for (int i = 0; i < kGroup; i += Floats::n) {
            const Floats d = Floats::load(dh + g * kGroup + i);
            for (int j = i; j < 3 * kGroup; j += kGroup) {
                Floats::mul(Floats::load(Wx + j), d).store(Wx + j);
                const Floats all = Floats::mul(Floats::load(Rh + j), d);
                all.store(Rh + j);
                all.store(operand + g * 3 * kGroup + j);
            }
            Floats::mul(Floats::load(direct + i), d).store(dh + g * kGroup + i);
        }
    }
}

// Rows of operands do not share the sets of a cache.
inline int64_t operand_row(int64_t channels) { return round_up(channels, 32) + 16; }

// dx of all items of some rows.
inline void input_products(const DescentJob &job, float *operand, float *result) {
    const Chunk &c = job.chunk;
    const int64_t a_row = operand_row(job.W.channels), width = job.W.count * int64_t{kPanel};
    const int64_t rows = job.end_row - job.first_row, all = c.steps * rows;
    for (int64_t start = 0; start < all; start += kProductRows) {
        const int count = static_cast<int>(all - start < kProductRows ? all - start : kProductRows);
        for (int i = 0; i < count; ++i) {
            const int64_t step = (start + i) / rows, row = job.first_row + (start + i) % rows;
            const float *from = c.Wx + (step * c.N + row) * 3 * kGroup;
            for (int g = 0; g < c.groups; ++g)
                __builtin_memcpy(operand + i * a_row + g * 3 * kGroup, from + g * c.stride,
                                 3 * kGroup * sizeof(float));
        }
        for (int64_t i = 0; i < count * width; ++i) result[i] = 0;
        add_product(count, operand, a_row, job.W, result, width);
        for (int i = 0; i < count; ++i) {
            const int64_t step = (start + i) / rows, row = job.first_row + (start + i) % rows;
            const int64_t at = step_of(c, c.first_step + step) * c.N + row;
            __builtin_memcpy(job.dx + at * job.C, result + i * width, job.C * sizeof(float));
        }
    }
}

void descend_rows(const DescentJob &job) {
    const Chunk &c = job.chunk;
    const int64_t rows = job.end_row - job.first_row, a_row = operand_row(job.R.channels);
    Space space{static_cast<char *>(job.workspace)};
    const int64_t most = rows > kProductRows ? rows : kProductRows;
    float *operand = static_cast<float *>(space.take(most * a_row * sizeof(float)));
    float *result = static_cast<float *>(
        space.take(kProductRows * job.W.count * int64_t{kPanel} * sizeof(float)));
    for (int64_t s = c.steps - 1; s >= 0; --s) {
        const int64_t step = step_of(c, c.first_step + s);
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t row = job.first_row + r;
            float *dh = job.dh + row * job.width;
            if (counts(c, row, step)) {
                const float *grad = job.grad_out + step * job.grad_step + row * job.grad_row;
                for (int i = 0; i < job.H; ++i) dh[i] += grad[i];
            }
            if (job.states)
                __builtin_memcpy(job.states + (step * c.N + row) * job.H, dh,
                                 job.H * sizeof(float));
            turn_slopes(c, s * c.N + row, dh, operand + r * a_row);
        }
        add_product(static_cast<int>(rows), operand, a_row, job.R,
                    job.dh + job.first_row * job.width, job.width);
    }
    if (job.dx) input_products(job, operand, result);
}

int64_t descend_bytes(const DescentJob &job) {
    const int64_t rows = job.end_row - job.first_row;
    const int64_t most = rows > kProductRows ? rows : kProductRows;
    return round_up(most * operand_row(job.R.channels) * 4, 64) +
           round_up(kProductRows * job.W.count * int64_t{kPanel} * 4, 64);
}

// Sums of a group: sums[feature][gate][unit] += code of the feature times gradient.
inline void feature_sums(const float *codes, int64_t items, int blocks, const float *grads,
                         int64_t first, int64_t count, float *sums) {
    constexpr int V = 3 * kGroup / Floats::n;
    for (int block = 0; block < blocks; ++block) {
        Floats sum[kFeatures][V];
        for (int r = 0; r < kFeatures; ++r)
            for (int v = 0; v < V; ++v) sum[r][v] = Floats::set(0);
        tile<kFeatures, V, V>(codes + (block * items + first) * kFeatures, 1, kFeatures,
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

void weight_sums(const WeightJob &job) {
    // items whose gradients of a group stay in the nearest cache; sums of them stay short, too
    constexpr int64_t kItemsAtOnce = 128;
    const Chunk &c = job.chunk;
    const int64_t items = c.steps * c.N;
    for (int g = job.first_group; g < job.end_group; ++g) {
        const float *Wx = c.Wx + g * c.stride, *Rh = c.Rh + g * c.stride;
        for (int64_t first = 0; first < items; first += kItemsAtOnce) {
            const int64_t count = items - first < kItemsAtOnce ? items - first : kItemsAtOnce;
            if (job.dW)
                feature_sums(c.x, c.items, job.x_blocks, Wx, first, count,
                             job.dW + g * int64_t{job.x_blocks} * kFeatures * 3 * kGroup);
            if (job.dR)
                feature_sums(c.h, c.items, job.h_blocks, Rh, first, count,
                             job.dR + g * int64_t{job.h_blocks} * kFeatures * 3 * kGroup);
            if (job.dbw) bias_sums(Wx, first, count, job.dbw + g * 3 * kGroup);
            if (job.dbr) bias_sums(Rh, first, count, job.dbr + g * 3 * kGroup);
        }
    }
}
