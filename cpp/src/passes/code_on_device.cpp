#include "passes/code_on_device.hpp"

#include <list>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/host/call.hpp"
#include "cuda/host/gru_backward.hpp"
#include "cuda/host/recurrences.hpp"
#include "frozen_file.hpp"
#include "passes/code_conversions.hpp"
#include "passes/cublas.hpp"
#include "passes/pointers.hpp"
#include "quant_gru/cuda.hpp"

namespace quant_gru {
namespace {

using namespace cuda;

constexpr int64_t kMostItems = int64_t{1} << 26;  // kernels count steps times rows in 32 bits
constexpr BackwardPrecision kPrecision{3, true, false, 1};  // 'fp32' of QuantGRU

// Arrays of a pass besides those of `Block`, after `fixed`: of the caller, and memory beside the
// workspace.
enum Array : size_t { mask = kBlockCount + 1, dh_new, dx, dW, dR, dbx, dbr, dh, own, arrays };
using Addresses = std::array<Address, arrays>;

Place at(size_t array, int64_t offset = 0) { return {static_cast<Block>(array), offset}; }
template <class Number>
Place fixed(Number value) {
    return {Block::fixed, static_cast<int64_t>(value)};
}

Address address_of(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// The work of passes of one size.
struct Prepared {
    std::vector<std::optional<GradientProduct>> products;  // nothing: the launch of this number
    LoadedLaunches launches;
    Memory space, own;
};

// Gathers the work of a pass. CODE is the type of its codes.
class Gatherer {
 public:
    Gatherer(Device &device, const char *code) : device_(device), code_(code) {}

    Place reserve(int64_t bytes) { return at(own, take(own_, bytes)); }
    // Adds a kernel of code_conversions.cu.
    void rearrange(const char *function, Place from, Place to, int64_t m, int64_t n) {
        Draft<RearrangedC> draft;
        draft.point(draft->from, from);
        draft.point(draft->to, to);
        draft->m = m;
        draft->n = n;
        Grid grid;
        grid.threads = 256;
        grid.x = static_cast<unsigned>((m * n + grid.threads - 1) / grid.threads);
        add(launch_of({"passes/code_conversions", function, {{"CODE", code_}}}, grid, draft));
    }
    // The array that `function` makes of another.
    Place rearranged(const char *function, size_t array, int64_t m, int64_t n, int64_t bytes) {
        const Place to = reserve(m * n * bytes);
        rearrange(function, at(array), to, m, n);
        return to;
    }
    void add(Launch launch) {
        launches_.push_back(std::move(launch));
        products_.emplace_back();
    }
    void add(const GradientProduct &product) { products_.emplace_back(product); }

    Prepared prepared(int64_t space) && {
        return {std::move(products_), LoadedLaunches(device_, std::move(launches_)),
                Memory(device_, static_cast<size_t>(space)),
                Memory(device_, static_cast<size_t>(own_))};
    }

 private:
    Device &device_;
    const char *code_;
    std::vector<std::optional<GradientProduct>> products_;
    std::vector<Launch> launches_;
    int64_t own_ = 0;
};

// Copies of arguments on the host.
struct HostCopies {
    explicit HostCopies(cudaStream_t used) : stream(used) {}

    // Replaces an array in memory of a GPU, after the work of the stream.
    template <class V>
    void read(const V *&array, int64_t count) {
        const int place = place_of({{"an array", array}});
        if (place == kHost) return;
        const Device &device = Device::at(place);
        const Driver &d = device.driver();
        const CurrentContext current(device);
        if (all.empty()) d.check(d.cuStreamSynchronize(stream));
        all.emplace_back(static_cast<size_t>(count) * sizeof(V));
        d.check(d.cuMemcpyDtoH(all.back().data(), address_of(array), all.back().size()));
        array = reinterpret_cast<const V *>(all.back().data());
    }

    cudaStream_t stream;
    std::list<std::vector<char>> all;
};

}  // namespace

template <class T>
struct CodeOnDevice<T>::State {
    State(cublasHandle_t given, cudaStream_t used) : blas(given), stream(used) {}

    // Builds the cell, unless the bytes of all arguments equal those of the last call.
    void plan(int index, const PassSizes &sizes, CodeArguments<T> arguments, int64_t steps) {
        const auto [N, C, H] = sizes;
        if (steps > kMostItems / N)
            throw ArgumentError("Expected steps * batch_size to be at most 2^26, got " +
                                std::to_string(steps) + " * " + std::to_string(N));
        HostCopies host(stream);
        host.read(arguments.W, 3 * H * C);
        host.read(arguments.R, 3 * H * H);
        host.read(arguments.bx, 3 * H);
        host.read(arguments.br, 3 * H);
        host.read(arguments.scale, code_scales(H));
        host.read(arguments.zero_point, kCodeOperators);
        std::string bytes = bytes_of(sizes, arguments);
        if (index == device && bytes == last) return;
        last.clear();
        prepared.reset();
        products.reset();
        layers.reset();
        Device &gpu = Device::at(index);
        const std::string file = frozen_codes(sizes, arguments);
        frozen = read_frozen(file.data(), file.size());
        layers.emplace(Layers{C, H, 1, {gpu.arch(), gpu.clusters()}, {}});
        layers->cells.push_back(
            std::make_unique<UploadedCell>(gpu, CellInput{frozen.cells[0].numbers, {}}));
        scales.emplace(gpu);
        for (int which = 0; which < 2; ++which)
            column_scales[which] = scales->add(arguments.column_scales(which, H),
                                               static_cast<size_t>(3 * H) * sizeof(float));
        device = index;
        last = std::move(bytes);
    }

    UploadedCell &cell() const { return static_cast<UploadedCell &>(layers->cell(0, 0)); }

    // The work of passes of a kind, which `gather` makes at the first of them.
    template <class Gather>
    const Prepared &work(const std::tuple<int64_t, bool, bool> &wanted, const Gather &gather) {
        if (!prepared || kind != wanted) {
            prepared.reset();
            Gatherer to(Device::at(device), sizeof(T) == 1 ? "int8_t" : "int16_t");
            try {
                const int64_t space = gather(to);
                prepared.emplace(std::move(to).prepared(space));
            } catch (const std::invalid_argument &error) {  // the environment names no shape
                throw ArgumentError(error.what());
            }
            kind = wanted;
        }
        return *prepared;
    }

    void run(const Prepared &work, Addresses &given) {
        given[static_cast<size_t>(Block::space)] = work.space.address();
        given[own] = work.own.address();
        const CurrentContext current(Device::at(device));
        std::optional<Products::Settings> settings;
        size_t launch = 0;
        for (const std::optional<GradientProduct> &each : work.products) {
            if (!each) {
                work.launches.start(launch++, given.data(), stream);
                continue;
            }
            if (!products) products.emplace(blas);
            if (!settings) settings.emplace(*products, stream);
            multiply(*each, given);
        }
    }

    void multiply(const GradientProduct &each, const Addresses &given) const {
        const auto pointer = [&given](const Place &place) {
            return reinterpret_cast<float *>(given[static_cast<size_t>(place.block)] +
                                             static_cast<Address>(place.offset));
        };
        const auto &[left, right, transposed] = each.product;
        Strided<float> A{pointer(left.place()), left.columns, 1};
        int64_t rows = left.rows, terms = left.columns;
        if (transposed) {
            std::swap(A.row, A.column);
            std::swap(rows, terms);
        }
        products->multiply(A, rows, pointer(right.place()), terms, right.columns,
                           pointer(each.result), false);
    }

    // Lists a forward pass, and returns the bytes of its workspace.
    int64_t list_forward(Gatherer &to, const PassSizes &sizes, int64_t steps, bool copies,
                         bool masked) {
        const auto [N, C, H] = sizes;
        const int64_t states = steps * N * H;
        CallForm form;
        form.own_products = true;
        Launches made(*layers, form, steps, N);
        CodeSequence sequence{{Block::x}, {Block::h0}, {Block::y}, {}, false};
        sequence.last = made.reserve(N * H * sizeof(T));
        if (copies) sequence.out = made.reserve(states * sizeof(T));
        if (masked) sequence.held = to.rearranged("hold", mask, 1, states, 1);
        add_code_layer(made, 0, {sequence});
        for (Launch &each : made.all) to.add(std::move(each));
        if (copies) to.rearrange("transpose", sequence.out, {Block::y}, states, 1);
        return made.space;
    }

    // The same for a backward pass.
    int64_t list_backward(Gatherer &to, const PassSizes &sizes, int64_t steps, bool is_step,
                          bool masked) {
        const auto [N, C, H] = sizes;
        std::vector<BackwardDirection> directions(1);
        BackwardDirection &only = directions[0];
        only.reverse = false;
        only.weight_kinds.fill(static_cast<int64_t>(frozen.cells[0].numbers.W.kind));
        only.at.fill(fixed(0));
        const auto slot = [&only](Slot each) -> Place & {
            return only.at[static_cast<size_t>(each)];
        };
        constexpr auto x = static_cast<size_t>(Block::x), h = static_cast<size_t>(Block::h0);
        slot(Slot::x) = to.rearranged("transpose", x, C, steps * N, sizeof(T));
        slot(Slot::x_step) = fixed(N * C);
        slot(Slot::x_next) = fixed(C);
        slot(Slot::h0) = is_step ? to.rearranged("transpose", h, H, N, sizeof(T)) : at(h);
        // the state after the only step is not read
        slot(Slot::out) = is_step ? slot(Slot::h0) : at(h, N * H * int64_t{sizeof(T)});
        if (masked) slot(Slot::held) = to.rearranged("hold", mask, 1, steps * N * H, 1);
        slot(Slot::grad_out) = at(dh_new, is_step ? 0 : N * H * int64_t{sizeof(float)});
        slot(Slot::grad_step) = fixed(N * H);
        slot(Slot::grad_next) = fixed(H);
        slot(Slot::grad_unit) = fixed(1);
        slot(Slot::grad_last) = slot(Slot::dh0) = at(dh);
        const Place bw = slot(Slot::bw) = to.reserve(3 * H * int64_t{sizeof(float)});
        const Place br = slot(Slot::br) = to.reserve(3 * H * int64_t{sizeof(float)});
        const MatrixC W = cell().W(), R = cell().R();
        const Address weights[] = {
            W.codes, R.codes, column_scales[0], column_scales[1], W.bias, R.bias, W.M, R.M,
            W.k,     R.k};
        for (size_t i = 0; i < std::size(weights); ++i)
            only.at[static_cast<size_t>(Slot::W) + i] = fixed(weights[i]);
        only.cell = &cell();
        const LayerBackward made =
            layer_backward(directions, steps, N, {true, true, true, true, true}, kPrecision,
                           layers->chip.clusters);
        for (const BackwardStep &each : made.steps) {
            if (each.launch) {
                to.add(*each.launch);
                continue;
            }
            const cuda::Matrix &left = each.matrices[0], &right = each.matrices[1];
            const Place result = each.matrices[2].place();
            if (left.element == Element::int8)
                to.add(byte_product(left.place(), right.place(), result, left.rows, left.rows, 0,
                                    left.columns, right.rows));
            else
                to.add({{left, right, false}, result});
        }
        const auto &found = made.directions[0];
        const auto add = [&to, H = H](const std::optional<LastProduct> &product, Array columns,
                                      int64_t K) {
            const Place rows = to.reserve(3 * H * K * int64_t{sizeof(float)});
            to.add({*product, rows});
            to.rearrange("add_columns", rows, at(columns), 3 * H, K);
        };
        to.add({*found.x, at(dx)});
        add(found.W, dW, C);
        add(found.R, dR, H);
        to.rearrange("add_columns", bw, at(dbx), 3 * H, 1);
        to.rearrange("add_columns", br, at(dbr), 3 * H, 1);
        return made.space;
    }

    cublasHandle_t blas;
    cudaStream_t stream;
    int device = kHost;
    std::string last;  // all bytes that the cell follows from
    FrozenGRU frozen;
    std::optional<Layers> layers;
    std::optional<Arrays> scales;
    Address column_scales[2] = {0, 0};
    std::optional<Products> products;
    std::optional<Prepared> prepared;
    std::tuple<int64_t, bool, bool> kind;
};

template <class T>
CodeOnDevice<T>::CodeOnDevice(cublasHandle_t blas, cudaStream_t stream)
    : state_(new State(blas, stream)) {}

template <class T>
CodeOnDevice<T>::~CodeOnDevice() = default;

template <class T>
void CodeOnDevice<T>::forward(int device, const PassSizes &sizes, const CodeForward<T> &c) {
    State &s = *state_;
    s.plan(device, sizes, c.arguments, c.steps);
    // kernels read a state while others write, and write 16 bytes at once
    const bool copies = c.in_place || address_of(c.after) % 16, masked = c.mask;
    Addresses given{};
    given[static_cast<size_t>(Block::x)] = address_of(c.x);
    given[static_cast<size_t>(Block::h0)] = address_of(c.before);
    given[static_cast<size_t>(Block::y)] = address_of(c.after);
    given[mask] = address_of(c.mask);
    s.run(s.work({c.steps, copies, masked},
                 [&](Gatherer &to) { return s.list_forward(to, sizes, c.steps, copies, masked); }),
          given);
}

template <class T>
void CodeOnDevice<T>::backward(int device, const PassSizes &sizes, const CodeBackward<T> &c) {
    State &s = *state_;
    s.plan(device, sizes, c.arguments, c.steps);
    const bool masked = c.mask;
    Addresses given{};
    given[static_cast<size_t>(Block::x)] = address_of(c.x_t);
    given[static_cast<size_t>(Block::h0)] = address_of(c.h);
    const void *const rest[] = {c.mask, c.dh_new, c.dx, c.dW, c.dR, c.dbx, c.dbr, c.dh};
    for (size_t i = 0; i < std::size(rest); ++i) given[mask + i] = address_of(rest[i]);
    s.run(s.work(
              {c.steps, c.is_step, masked},
              [&](Gatherer &to) { return s.list_backward(to, sizes, c.steps, c.is_step, masked); }),
          given);
}

template <class T>
int device_of(const CodeForward<T> &c) {
    return place_of({{"h", c.before}, {"x", c.x}, {"h_out", c.after}, {"zoneout_mask", c.mask}});
}

template <class T>
int device_of(const CodeBackward<T> &c) {
    return place_of({{"h", c.h},
                     {"x_t", c.x_t},
                     {"dh_new", c.dh_new},
                     {"dx", c.dx},
                     {"dW", c.dW},
                     {"dR", c.dR},
                     {"dbx", c.dbx},
                     {"dbr", c.dbr},
                     {"dh", c.dh},
                     {"zoneout_mask", c.mask}});
}

template int device_of(const CodeForward<int8_t> &);
template int device_of(const CodeForward<int16_t> &);
template int device_of(const CodeBackward<int8_t> &);
template int device_of(const CodeBackward<int16_t> &);
template class CodeOnDevice<int8_t>;
template class CodeOnDevice<int16_t>;

}  // namespace quant_gru
