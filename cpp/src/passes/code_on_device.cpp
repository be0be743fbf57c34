#include "passes/code_on_device.hpp"

#include <optional>
#include <type_traits>
#include <vector>

#include "cuda/host/runtime.hpp"
#include "passes/code_conversions.hpp"
#include "passes/host_arrays.hpp"
#include "passes/pointers.hpp"
#include "quant_gru/cuda.hpp"

namespace quant_gru {
namespace {

constexpr unsigned kThreads = 256;

// A frozen GRU with real inputs and outputs, prepared for so many steps. Real values of codes are
// quantized to the same codes.
template <class T>
struct Prepared {
    Prepared(const cuda::Model &model, int index, int64_t steps_, const PassSizes &sizes)
        : steps(steps_),
          x(cuda::Device::at(index), reals(steps * sizes.N * sizes.C)),
          h0(cuda::Device::at(index), reals(sizes.N * sizes.H)),
          y(cuda::Device::at(index), reals(steps * sizes.N * sizes.H)),
          call(model.prepare(steps, sizes.N)) {}

    static size_t reals(int64_t count) { return static_cast<size_t>(count) * sizeof(float); }

    int64_t steps;
    cuda::Memory x, h0, y;
    cuda::Call call;  // waits for its runs before their memory is freed
};

float *at(const cuda::Memory &memory) { return reinterpret_cast<float *>(memory.address()); }

}  // namespace

template <class T>
struct CodeOnDevice<T>::State {
    explicit State(cudaStream_t given) : stream(given) {}

    // Builds the model, unless the bytes of all arguments equal those of the last call.
    void prepare(int index, const PassSizes &sizes, const CodeArguments<T> &arguments,
                 int64_t steps) {
        std::string bytes = bytes_of(sizes, arguments);
        if (!model || index != device || bytes != last) {
            prepared.reset();
            const std::string file = frozen_codes(sizes, arguments);
            model = cuda::Model::load(file.data(), file.size(), index);
            const std::string code = sizeof(T) == 1 ? "int8_t" : "int16_t";
            const auto load = [&](const char *name) {
                return cuda::Device::at(index).load(
                    {"passes/code_conversions", name, {{"CODE", code}}});
            };
            to_reals = load("to_reals");
            to_codes = load("to_codes");
            device = index;
            last = std::move(bytes);
        }
        if (!prepared || prepared->steps != steps) {
            prepared.reset();
            prepared.emplace(*model, index, steps, sizes);
        }
    }

    void convert(const cuda::Function &function, T *codes, float *reals, int64_t count, float scale,
                 float zero) const {
        const CodesAndReals<T> arguments{codes, reals, count, scale, zero};
        cuda::Grid grid;
        grid.x = static_cast<unsigned>((count + kThreads - 1) / kThreads);
        grid.threads = kThreads;
        cuda::Device::at(device).launch(function, grid, &arguments, stream);
    }

    cuda::Stream stream;
    int device = kHost;
    std::string last;
    std::optional<cuda::Model> model;
    std::optional<Prepared<T>> prepared;
    cuda::Function to_reals, to_codes;
};

template <class T>
CodeOnDevice<T>::CodeOnDevice(cudaStream_t stream) : state_(new State(stream)) {}

template <class T>
CodeOnDevice<T>::~CodeOnDevice() = default;

template <class T>
void CodeOnDevice<T>::forward(int device, const PassSizes &sizes, const CodeCall<T> &c) {
    State &s = *state_;
    HostArrays host(s.stream);
    CodeArguments<T> arguments = c.arguments;
    host.read(arguments, sizes);
    s.prepare(device, sizes, arguments, c.steps);
    const auto [N, C, H] = sizes;
    const auto convert = [&](const cuda::Function &function, const T *codes,
                             const cuda::Memory &reals, int64_t count, CodeOperator op) {
        const float scale = arguments.scale_of(op);
        const float zero = arguments.zero_point[static_cast<int>(op)];
        s.convert(function, const_cast<T *>(codes), at(reals), count, scale, zero);
    };
    const Prepared<T> &p = *s.prepared;
    convert(s.to_reals, c.x, p.x, c.steps * N * C, CodeOperator::x);
    convert(s.to_reals, c.before, p.h0, N * H, CodeOperator::h);
    cuda::RunOptions options;
    options.stream = s.stream;
    options.h0 = at(p.h0);
    p.call.run(at(p.x), at(p.y), options);
    convert(s.to_codes, c.after, p.y, c.steps * N * H, CodeOperator::h);
}

template <class T>
int device_of(const CodeCall<T> &c) {
    return place_of({{"h", c.before}, {"x", c.x}, {"h_out", c.after}, {"zoneout_mask", c.mask}});
}

template int device_of(const CodeCall<int8_t> &);
template int device_of(const CodeCall<int16_t> &);
template class CodeOnDevice<int8_t>;
template class CodeOnDevice<int16_t>;

}  // namespace quant_gru
