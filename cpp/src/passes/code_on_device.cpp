#include "passes/code_on_device.hpp"

#include <optional>
#include <type_traits>
#include <vector>

#include "cuda/device.hpp"
#include "passes/code_conversions.hpp"
#include "passes/current_context.hpp"
#include "passes/pointers.hpp"
#include "quant_gru/cuda.hpp"

namespace quant_gru {
namespace {

constexpr unsigned kThreads = 256;

// Arguments in memory of the host.
template <class T>
class HostArguments {
 public:
    HostArguments(const CodeArguments<T> &given, const PassSizes &sizes, cuda::Stream stream)
        : stream_(stream), arguments_(given) {
        const int64_t C = sizes.C, H = sizes.H;
        copy(arguments_.W, 3 * H * C, W_);
        copy(arguments_.R, 3 * H * H, R_);
        copy(arguments_.bx, 3 * H, bx_);
        copy(arguments_.br, 3 * H, br_);
        copy(arguments_.scale, code_scales(H), scale_);
        copy(arguments_.zero_point, kCodeOperators, zero_point_);
    }
    HostArguments(const HostArguments &) = delete;
    HostArguments &operator=(const HostArguments &) = delete;

    const CodeArguments<T> &get() const { return arguments_; }

 private:
    template <class V>
    void copy(const V *&from, int64_t count, std::vector<V> &room) {
        const int place = place_of({{"weights", from}});
        if (place == kHost) return;
        const CurrentContext current(primary_context_of(place));
        // work of the stream may still write them
        if (!waited_) cuda::check(cuda::driver().cuStreamSynchronize(stream_));
        waited_ = true;
        room.resize(static_cast<size_t>(count));
        cuda::check(cuda::driver().cuMemcpyDtoH(room.data(), reinterpret_cast<uintptr_t>(from),
                                                room.size() * sizeof(V)));
        from = room.data();
    }

    void *primary_context_of(int place) {
        if (!context_) context_ = primary_context(place);
        return context_;
    }

    cuda::Stream stream_;
    bool waited_ = false;
    void *context_ = nullptr;
    CodeArguments<T> arguments_;
    std::vector<T> W_, R_;
    std::vector<int32_t> bx_, br_;
    std::vector<float> scale_, zero_point_;
};

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
    if (c.mask)
        throw ArgumentError(
            "Expected zoneout_mask to be null for codes in memory of a GPU, got a mask");
    State &s = *state_;
    const HostArguments<T> host(c.arguments, sizes, s.stream);
    const CodeArguments<T> &arguments = host.get();
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

void expect_host(const void *h) {
    if (const int place = place_of({{"h", h}}); place != kHost)
        throw ArgumentError(
            "Expected h of a backward pass over codes to be on the host, got "
            "memory on GPU " +
            std::to_string(place));
}

template int device_of(const CodeCall<int8_t> &);
template int device_of(const CodeCall<int16_t> &);
template class CodeOnDevice<int8_t>;
template class CodeOnDevice<int16_t>;

}  // namespace quant_gru
