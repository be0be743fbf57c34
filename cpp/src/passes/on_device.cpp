#include "passes/on_device.hpp"

#include <algorithm>
#include <optional>
#include <type_traits>

#include "cuda/host/runtime.hpp"
#include "passes/cublas.hpp"
#include "passes/pointers.hpp"
#include "passes/units.hpp"

namespace quant_gru {
namespace {

constexpr unsigned kThreads = 128, kColumnThreads = 1024, kColumns = 32;
constexpr int64_t kMostBlocks = 65535;  // in y
// Bytes of R that the blocks of a fused step read at most.
constexpr int64_t kFusedBytes = 16 << 20;

unsigned blocks(int64_t count, unsigned each) {
    return static_cast<unsigned>((count + each - 1) / each);
}

// What a pass needs of one GPU.
template <class T>
struct Machine {
    Machine(int index_, const PassSizes &sizes, cublasHandle_t blas)
        : index(index_),
          step_rows(sizes.N == 1 ? 1 : kStepWarps),
          device(cuda::Device::at(index_)) {
        const cuda::CurrentContext current(device);
        products.emplace(blas);
        const std::string real = std::is_same_v<T, float> ? "float" : "double";
        const auto load = [&](const char *name) {
            return device.load(
                {"passes/units", name, {{"REAL", real}, {"STEP_ROWS", std::to_string(step_rows)}}});
        };
        forward = load("forward_units");
        backward = load("backward_units");
        forward_step = load("forward_step");
        backward_step = load("backward_step");
        columns = load("add_columns");
    }

    int index, step_rows;
    cuda::Device &device;
    std::optional<Products> products;
    cuda::Function forward, backward, forward_step, backward_step, columns;

    // Whether a step and its product with R are one launch.
    bool fuses(const PassSizes &sizes) const {
        const int64_t bytes = 3 * sizes.H * sizes.H * static_cast<int64_t>(sizeof(T));
        const int64_t parts = blocks(sizes.N, step_rows);
        return parts <= kMostBlocks && parts * bytes <= kFusedBytes;
    }

    // Whether blocks of a fused step may start before the previous step ends.
    bool overlaps() const { return device.capability() >= 90; }

    // The launch of a fused step.
    cuda::Grid step_grid(const PassSizes &sizes, int gates) const {
        cuda::Grid grid{blocks(sizes.H, kStepUnits), blocks(sizes.N, step_rows),
                        kStepWarps * kStepUnits};
        const int64_t sums = int64_t{kStepWarps} * gates * step_rows * kStepUnits;
        const int64_t operands = int64_t{kStepChunk} * step_rows;
        grid.shared_bytes = static_cast<unsigned>(std::max(sums, operands) * int64_t{sizeof(T)});
        return grid;
    }
};

}  // namespace

template <class T>
struct OnDevice<T>::State {
    Machine<T> &machine(int index, const PassSizes &sizes) {
        if (!machine_ || machine_->index != index)
            machine_ = std::make_unique<Machine<T>>(index, sizes, blas);
        return *machine_;
    }

    cublasHandle_t blas;
    cuda::Stream stream;
    std::unique_ptr<Machine<T>> machine_;
};

template <class T>
OnDevice<T>::OnDevice(cublasHandle_t blas, cudaStream_t stream)
    : state_(new State{blas, stream, nullptr}) {}

template <class T>
OnDevice<T>::~OnDevice() = default;

template <class T>
void OnDevice<T>::forward(int device, const PassSizes &sizes, Zoneout zoneout,
                          const ForwardArguments<T> &c) {
    Machine<T> &m = state_->machine(device, sizes);
    const cuda::Stream stream = state_->stream;
    const cuda::CurrentContext current(m.device);
    const Products::Settings settings(*m.products, stream);
    const auto [N, C, H] = sizes;
    m.products->multiply({c.x, C, 1}, c.steps * N, c.W, C, 3 * H, c.tmp_Wx, false);
    // blocks of a fused step write states while others read those of the step before
    const bool fused = m.fuses(sizes) && c.h != c.out;
    const cuda::Grid grid{blocks(N * H, kThreads), 1, kThreads};
    cuda::Grid step_grid = m.step_grid(sizes, 3);
    for (int64_t t = 0; t < c.steps; ++t) {
        const int64_t first = t * N;
        const T *const h = t ? c.out + (first - N) * H : c.h;
        const ForwardUnits<T> units{c.tmp_Wx + first * 3 * H,
                                    c.tmp_Rh,
                                    c.bx,
                                    c.br,
                                    h,
                                    c.mask ? c.mask + first * H : nullptr,
                                    c.out + first * H,
                                    c.v ? c.v + first * 4 * H : nullptr,
                                    N * H,
                                    H,
                                    static_cast<T>(c.zoneout_prob),
                                    zoneout};
        if (fused) {
            const ForwardStep<T> step{c.R, N, units};
            m.device.launch(m.forward_step, step_grid, &step, stream);
            step_grid.early = m.overlaps();
            continue;
        }
        m.products->multiply({h, H, 1}, N, c.R, H, 3 * H, c.tmp_Rh, false);
        m.device.launch(m.forward, grid, &units, stream);
    }
}

template <class T>
void OnDevice<T>::backward(int device, const PassSizes &sizes, const BackwardArguments<T> &c) {
    Machine<T> &m = state_->machine(device, sizes);
    const cuda::Stream stream = state_->stream;
    const cuda::CurrentContext current(m.device);
    const Products::Settings settings(*m.products, stream);
    const auto [N, C, H] = sizes;
    const int64_t items = c.steps * N, channels = 3 * H;
    const bool fused = m.fuses(sizes);
    const cuda::Grid grid{blocks(N * H, kThreads), 1, kThreads};
    cuda::Grid step_grid = m.step_grid(sizes, 1);
    const T *dq_after = nullptr;
    for (int64_t t = c.steps - 1; t >= 0; --t) {
        const int64_t first = t * N;
        T *const dq = c.dq + first * channels;
        const BackwardUnits<T> units{c.h + first * H,
                                     c.row,
                                     c.unit,
                                     c.v + first * 4 * H,
                                     c.dh_new + first * H,
                                     c.mask ? c.mask + first * H : nullptr,
                                     c.dh,
                                     c.dp + first * channels,
                                     dq,
                                     N * H,
                                     H};
        if (fused) {
            const BackwardStep<T> step{c.R_t, dq_after, N, units};
            m.device.launch(m.backward_step, step_grid, &step, stream);
            step_grid.early = m.overlaps();
        } else {
            m.device.launch(m.backward, grid, &units, stream);
            m.products->multiply({dq, channels, 1}, N, c.R_t, channels, H, c.dh, true);
        }
        dq_after = dq;
    }
    if (fused) {
        BackwardUnits<T> units{};
        units.dh = c.dh;
        units.H = H;
        const BackwardStep<T> step{c.R_t, dq_after, N, units};
        m.device.launch(m.backward_step, step_grid, &step, stream);
    }
    if (!items) return;
    m.products->multiply({c.dp, channels, 1}, items, c.W_t, channels, C, c.dx, false);
    m.products->multiply({c.x_t, items, 1}, C, c.dp, items, channels, c.dW, true);
    m.products->multiply(c.h_t, H, c.dq, items, channels, c.dR, true);
    const ColumnSums<T> sums{c.dp, c.dq, c.dbx, c.dbr, items, channels};
    cuda::Grid columns{blocks(channels, kColumns), 2, kColumnThreads};
    columns.shared_bytes = kColumns * kColumnStride * sizeof(T);
    m.device.launch(m.columns, columns, &sums, stream);
}

template <class T>
int device_of(const ForwardArguments<T> &c) {
    return place_of({{"h", c.h},
                     {"W", c.W},
                     {"R", c.R},
                     {"bx", c.bx},
                     {"br", c.br},
                     {"x", c.x},
                     {"h_out", c.out},
                     {"v", c.v},
                     {"tmp_Wx", c.tmp_Wx},
                     {"tmp_Rh", c.tmp_Rh},
                     {"zoneout_mask", c.mask}});
}

template <class T>
int device_of(const BackwardArguments<T> &c) {
    return place_of({{"h", c.h},
                     {"W_t", c.W_t},
                     {"R_t", c.R_t},
                     {"x_t", c.x_t},
                     {"v", c.v},
                     {"dh_new", c.dh_new},
                     {"dx", c.dx},
                     {"dW", c.dW},
                     {"dR", c.dR},
                     {"dbx", c.dbx},
                     {"dbr", c.dbr},
                     {"dh", c.dh},
                     {"dp", c.dp},
                     {"dq", c.dq},
                     {"zoneout_mask", c.mask}});
}

template int device_of(const ForwardArguments<float> &);
template int device_of(const ForwardArguments<double> &);
template int device_of(const BackwardArguments<float> &);
template int device_of(const BackwardArguments<double> &);
template class OnDevice<float>;
template class OnDevice<double>;

}  // namespace quant_gru
