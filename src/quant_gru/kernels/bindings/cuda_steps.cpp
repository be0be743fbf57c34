#include "bindings/cuda_steps.hpp"

#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace quant_gru {

Steps::Steps(const std::vector<nb::object> &steps, std::vector<Fields *> fields, nb::object fail,
             nb::object keep)
    : steps_(steps), fields_(std::move(fields)), fail_(std::move(fail)), keep_(std::move(keep)) {
    for (const nb::object &each : steps_)
        launches_.push_back(nb::isinstance<Launches>(each) ? nb::cast<Launches *>(each) : nullptr);
}

void Steps::raise(int status) const {
    fail_(status);
    throw std::runtime_error("a launch failed");
}

}  // namespace quant_gru
