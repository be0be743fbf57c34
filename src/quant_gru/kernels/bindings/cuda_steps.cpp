#include "bindings/cuda_steps.hpp"

#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {

Steps::Steps(const std::vector<nb::object> &steps, std::vector<std::vector<size_t>> uses,
             std::vector<Fields *> fields, nb::object fail, nb::object keep)
    : steps_(steps),
      uses_(std::move(uses)),
      fields_(std::move(fields)),
      fail_(std::move(fail)),
      keep_(std::move(keep)) {
    if (uses_.size() != steps_.size()) throw std::invalid_argument("addresses for each step");
    for (const auto &each : uses_)
        for (const size_t use : each)
            if (use >= fields_.size()) throw std::out_of_range("an address that a start is given");
    for (const nb::object &each : steps_)
        launches_.push_back(nb::isinstance<Launches>(each) ? nb::cast<Launches *>(each) : nullptr);
}

void Steps::raise(int status) const {
    fail_(status);
    throw std::runtime_error("a launch failed");
}

}  // namespace quant_gru
