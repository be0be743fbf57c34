#include <cmath>
#include <cstring>

#include "files.hpp"
#include "quant_gru/model.hpp"
#include "quant_gru/parameters.hpp"
#include "safetensors.hpp"

namespace quant_gru {
namespace {

std::string suffix_of(int64_t layer, bool reverse) {
    return "_l" + std::to_string(layer) + (reverse ? "_reverse" : "");
}

// Reads the tensors of a state_dict.
class StateDict {
 public:
    explicit StateDict(const std::string &bytes)
        : file_(read_safetensors(bytes.data(), bytes.size())) {}

    bool has(const std::string &name) const { return file_.tensors.count(name) > 0; }

    const Tensor &at(const std::string &name) {
        const auto found = file_.tensors.find(name);
        if (found == file_.tensors.end())
            throw FileError("Expected tensor '" + name + "', got none");
        ++used_;
        if (found->second.dtype != Dtype::f32)
            throw FileError("Expected tensor '" + name + "' to contain float32 numbers");
        return found->second;
    }

    std::vector<float> values(const std::string &name, const std::vector<int64_t> &shape) {
        const Tensor &tensor = at(name);
        if (tensor.shape != shape)
            throw FileError("Expected tensor '" + name + "' to fit the GRU, got another shape");
        std::vector<float> found(static_cast<size_t>(tensor.count));
        std::memcpy(found.data(), tensor.data, found.size() * sizeof(float));
        return found;
    }

    void check_all_used() const {
        if (used_ != file_.tensors.size())
            throw FileError("Expected no tensors but those of nn.GRU, got others");
    }

    void forget_uses() { used_ = 0; }

 private:
    Safetensors file_;
    size_t used_ = 0;
};

GRUShape shape_of(StateDict &state) {
    GRUShape shape;
    const Tensor &first = state.at("weight_ih_l0");
    if (first.shape.size() != 2 || first.shape[0] < 3 || first.shape[0] % 3 || first.shape[1] < 1)
        throw FileError("Expected tensor 'weight_ih_l0' to have the shape (3H, C)");
    shape.hidden_size = first.shape[0] / 3;
    shape.input_size = first.shape[1];
    shape.bias = state.has("bias_ih_l0");
    shape.bidirectional = state.has("weight_ih_l0_reverse");
    while (state.has("weight_ih" + suffix_of(shape.num_layers, false))) ++shape.num_layers;
    return shape;
}

}  // namespace

FloatGRU FloatGRU::load(const std::string &path) {
    try {
        const std::string bytes = read_file(path);
        StateDict state(bytes);
        FloatGRU gru;
        gru.shape = shape_of(state);
        state.forget_uses();
        const int64_t H = gru.shape.hidden_size, D = gru.shape.directions();
        for (int64_t layer = 0; layer < gru.shape.num_layers; ++layer)
            for (int64_t d = 0; d < D; ++d) {
                const std::string suffix = suffix_of(layer, d == 1);
                const int64_t C = layer ? D * H : gru.shape.input_size;
                gru.tensors.push_back(state.values("weight_ih" + suffix, {3 * H, C}));
                gru.tensors.push_back(state.values("weight_hh" + suffix, {3 * H, H}));
                for (const char *name : {"bias_ih", "bias_hh"})
                    gru.tensors.push_back(gru.shape.bias ? state.values(name + suffix, {3 * H})
                                                         : std::vector<float>());
            }
        state.check_all_used();
        return gru;
    } catch (const FileError &error) {
        const std::string said = error.what();
        if (said.find("(file '") != std::string::npos) throw;
        throw FileError(said + " (file '" + path + "')");
    }
}

FloatGRU FloatGRU::random(const GRUShape &shape, uint64_t seed) {
    FloatGRU gru;
    gru.shape = shape;
    const int64_t H = shape.hidden_size, D = shape.directions();
    const double bound = 1 / std::sqrt(static_cast<double>(H));
    uint64_t state = seed;
    const auto values = [&](int64_t count) {
        std::vector<float> found;
        for (int64_t i = 0; i < count; ++i) {
            // splitmix64
            uint64_t word = state += 0x9E3779B97F4A7C15u;
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
            word = (word ^ word >> 27) * 0x94D049BB133111EBu;
            word ^= word >> 31;
            found.push_back(
                static_cast<float>(bound * (std::ldexp(static_cast<double>(word >> 11), -52) - 1)));
        }
        return found;
    };
    for (int64_t layer = 0; layer < shape.num_layers; ++layer)
        for (int64_t d = 0; d < D; ++d) {
            gru.tensors.push_back(values(3 * H * (layer ? D * H : shape.input_size)));
            gru.tensors.push_back(values(3 * H * H));
            for (int i = 0; i < 2; ++i) gru.tensors.push_back(values(shape.bias ? 3 * H : 0));
        }
    return gru;
}

std::vector<FloatCell> FloatGRU::cells() const {
    std::vector<FloatCell> found;
    const auto data = [this](size_t i) { return tensors[i].empty() ? nullptr : tensors[i].data(); };
    for (size_t i = 0; i + 3 < tensors.size(); i += 4)
        found.push_back({data(i), data(i + 1), data(i + 2), data(i + 3)});
    return found;
}

}  // namespace quant_gru
