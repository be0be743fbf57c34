// Parameter files of quant-gru-pytorch.
#pragma once

#include <string>

#include "json.hpp"
#include "quant_gru/parameters.hpp"

namespace quant_gru {

bool is_of_quant_gru_pytorch(const Json &document);

// Such a file has `model_info` and, for each direction, `operators` with `dtype`, `symmetric`,
// `scale` or `n`, and `zero_point`. Tables are made as after a calibration. Throws FileError, which
// names `where`.
Parameters read_quant_gru_pytorch(const Json &document, const std::string &where);

}  // namespace quant_gru
