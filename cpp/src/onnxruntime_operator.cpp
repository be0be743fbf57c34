// The operator GRU of domain quant_gru.operators for ONNX Runtime: a frozen GRU as one node.
//
// Its attribute `model` has the bytes of FrozenQuantGRU.save in base64, as strings of ONNX are
// UTF-8. Inputs are x (T, N, C), or (N, T, C) if the file says batch_first, and, where they are
// given, h0 (layers * D, N, H) and lengths int64 (N), clamped to 0..T. Outputs are y (T, N, D * H),
// or (N, T, D * H), and h_n (layers * D, N, H). A call runs in the thread that ONNX Runtime calls
// it in.
#include <algorithm>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "onnxruntime_api.hpp"
#include "quant_gru/model.hpp"

namespace quant_gru {
namespace {

// A failed call of ONNX Runtime, whose status goes back to it.
struct Failed {
    ort::Status *status;
};

void check(ort::Status *status) {
    if (status) throw Failed{status};
}

// Returns the status of a function: of what it throws, or null.
template <class Body>
ort::Status *status_of(const ort::Api &api, const Body &body) noexcept {
    try {
        body();
        return nullptr;
    } catch (const Failed &failed) {
        return failed.status;
    } catch (const std::exception &error) {
        return api.create_status(error.what());
    }
}

struct Tensor {
    const void *data = nullptr;
    std::vector<int64_t> shape;

    template <class T>
    const T *as() const {
        return static_cast<const T *>(data);
    }
};

std::string text_of(const std::vector<int64_t> &shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

class Kernel {
 public:
    Kernel(const ort::Api &api, const std::string &model)
        : api_(api), model_(Model::load(model.data(), model.size())) {}

    const ort::Api &api() const { return api_; }

    void compute(ort::KernelContext *context) const {
        const Shape &shape = model_.shape();
        const int64_t states = shape.num_layers * shape.directions;
        const Tensor x = input(context, 0, "x", ort::kFloat);
        if (x.shape.size() != 3 || x.shape[2] != shape.input_size)
            fail("x", "(T, N, " + std::to_string(shape.input_size) + ")", x);
        const int64_t T = x.shape[shape.batch_first ? 1 : 0],
                      N = x.shape[shape.batch_first ? 0 : 1];
        const std::vector<int64_t> of_states = {states, N, shape.hidden_size};
        const Tensor h0 = input(context, 1, "h0", ort::kFloat);
        if (h0.data && h0.shape != of_states) fail("h0", text_of(of_states), h0);
        const Tensor lengths = input(context, 2, "lengths", ort::kInt64);
        if (lengths.data && lengths.shape != std::vector<int64_t>{N})
            fail("lengths", text_of({N}), lengths);
        std::vector<int64_t> of_y = x.shape;
        of_y[2] = shape.directions * shape.hidden_size;
        std::vector<int64_t> steps;
        for (int64_t row = 0; lengths.data && row < N; ++row)
            steps.push_back(std::min(std::max<int64_t>(lengths.as<int64_t>()[row], 0), T));
        RunOptions options;
        options.h0 = h0.as<float>();
        options.lengths = lengths.data ? steps.data() : nullptr;
        options.h_n = output(context, 1, of_states);
        options.threads = 1;
        model_.run(x.as<float>(), T, N, output(context, 0, of_y), options);
    }

 private:
    [[noreturn]] static void fail(const char *name, const std::string &wanted, const Tensor &got) {
        throw ArgumentError(std::string("Expected ") + name + " to have the shape " + wanted +
                            ", got " + text_of(got.shape));
    }

    // Returns an input; without data if it is not given.
    Tensor input(const ort::KernelContext *context, size_t index, const char *name,
                 int type) const {
        Tensor found;
        size_t count;
        check(api_.input_count(context, &count));
        const ort::Value *value = nullptr;
        if (index < count) check(api_.input(context, index, &value));
        if (!value) return found;
        ort::TensorInfo *info;
        check(api_.tensor_info(value, &info));
        const auto release = [this](ort::TensorInfo *each) { api_.release_tensor_info(each); };
        const std::unique_ptr<ort::TensorInfo, decltype(release)> owner(info, release);
        int element;
        size_t rank;
        check(api_.element_type(info, &element));
        if (element != type)
            throw ArgumentError(std::string("Expected ") + name + " to be of type " +
                                std::to_string(type) + ", got " + std::to_string(element));
        check(api_.dimension_count(info, &rank));
        found.shape.resize(rank);
        check(api_.dimensions(info, found.shape.data(), rank));
        void *data;
        check(api_.data(const_cast<ort::Value *>(value), &data));
        found.data = data;
        return found;
    }

    float *output(ort::KernelContext *context, size_t index,
                  const std::vector<int64_t> &shape) const {
        ort::Value *value;
        check(api_.output(context, index, shape.data(), shape.size(), &value));
        if (!value) return nullptr;
        void *data;
        check(api_.data(value, &data));
        return static_cast<float *>(data);
    }

    const ort::Api &api_;
    const Model model_;
};

std::string attribute(const ort::Api &api, const ort::KernelInfo *info, const char *name) {
    size_t size = 0;
    check(api.string_attribute(info, name, nullptr, &size));
    std::string value(size, '\0');
    check(api.string_attribute(info, name, &value[0], &size));
    if (size) value.resize(size - 1);  // without the zero at its end
    return value;
}

std::string from_base64(const std::string &text) {
    static const std::string digits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const size_t end = text.find_last_not_of('=') + 1;
    std::string bytes;
    uint32_t value = 0;
    for (size_t i = 0; i < end; ++i) {
        const size_t digit = digits.find(text[i]);
        if (digit == std::string::npos)
            throw FileError("Expected model in base64, got another character");
        value = value << 6 | static_cast<uint32_t>(digit);
        if (i % 4) bytes.push_back(static_cast<char>(value >> (6 - 2 * (i % 4))));
    }
    return bytes;
}

ort::Status *QGRU_ORT_CALL create(const ort::Operator *, const ort::Api *api,
                                  const ort::KernelInfo *info, void **kernel) {
    return status_of(
        *api, [&] { *kernel = new Kernel(*api, from_base64(attribute(*api, info, "model"))); });
}

ort::Status *QGRU_ORT_CALL compute(void *kernel, ort::KernelContext *context) {
    const Kernel &own = *static_cast<Kernel *>(kernel);
    return status_of(own.api(), [&] { own.compute(context); });
}

const ort::Operator &gru_operator() {
    static const ort::Operator found = [] {
        ort::Operator op{};
        op.version = ort::kVersion;
        op.name = [](const ort::Operator *) { return "GRU"; };
        op.provider = [](const ort::Operator *) -> const char * { return nullptr; };
        op.input_type = [](const ort::Operator *, size_t i) {
            return i == 2 ? ort::kInt64 : ort::kFloat;
        };
        op.inputs = [](const ort::Operator *) -> size_t { return 3; };
        op.output_type = [](const ort::Operator *, size_t) -> int { return ort::kFloat; };
        op.outputs = [](const ort::Operator *) -> size_t { return 2; };
        op.destroy = [](void *kernel) { delete static_cast<Kernel *>(kernel); };
        op.input_presence = op.output_presence = [](const ort::Operator *, size_t i) -> int {
            return i ? ort::kOptional : ort::kRequired;  // only the first one
        };
        op.input_memory = [](const ort::Operator *, size_t) { return 0; };
        op.create_with_status = create;
        op.compute = compute;
        return op;
    }();
    return found;
}

}  // namespace
}  // namespace quant_gru

// What SessionOptions.register_custom_ops_library of ONNX Runtime calls.
extern "C" QUANT_GRU_API quant_gru::ort::Status *QGRU_ORT_CALL
RegisterCustomOps(quant_gru::ort::Options *options, const quant_gru::ort::ApiBase *base) {
    using namespace quant_gru;
    const ort::Api *api = base->api(ort::kVersion);
    if (!api) return base->api(1)->create_status("Expected ONNX Runtime 1.16 or newer");
    return status_of(*api, [&] {
        ort::Domain *domain;
        check(api->create_domain("quant_gru.operators", &domain));
        check(api->add_operator(domain, &gru_operator()));
        check(api->add_domain(options, domain));
    });
}
