// The plan that passes over codes run. It follows from codes, scales and zero points.
#pragma once

#include <optional>
#include <string>

#include "cpu/core/layer.hpp"
#include "passes/sizes.hpp"
#include "quant_gru/gru_interface.hpp"

namespace quant_gru {

// The arguments that a plan follows from. W and R have columns (C, 3H) and (H, 3H), or rows
// (3H, C) and (3H, H) if they are transposed.
template <class T>
struct CodeArguments {
    const T *W, *R;
    bool transposed;
    const int32_t *bx, *br;
    float zoneout;
    const float *scale, *zero_point;

    float scale_of(CodeOperator op) const { return scale[static_cast<int>(op)]; }
    // Scales of the columns of W, R, bx and br: `index` 0 to 3.
    const float *column_scales(int index, int64_t H) const {
        return scale + kCodeOperators + index * 3 * H;
    }
};

// All bytes that a plan follows from.
template <class T>
std::string bytes_of(const PassSizes &sizes, const CodeArguments<T> &arguments);

// The file of the frozen GRU. Throws ArgumentError.
template <class T>
std::string frozen_codes(const PassSizes &sizes, const CodeArguments<T> &arguments);

template <class T>
class CodeLayer {
 public:
    // The layer of the arguments. It is built unless their bytes equal those of the last call.
    // Throws ArgumentError.
    const Layer &of(const PassSizes &sizes, const CodeArguments<T> &arguments);

 private:
    std::string last_;  // all bytes that the layer follows from
    std::optional<Layer> layer_;
};

}  // namespace quant_gru
