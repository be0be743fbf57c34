#include "calibration/tied.hpp"

#include "quant_gru/model.hpp"

namespace quant_gru {

Observer tied_observer(const std::vector<std::array<Observer, kOperators>> &observers,
                       const QuantConfig &config, Observer both) {
    const OperatorConfig &x = config[Operator::x], &h = config[Operator::h];
    const auto text = [](const OperatorConfig &c) {
        return "[" + std::to_string(c.bitwidth) + (c.is_symmetric ? ", True" : ", False") +
               (c.is_unsigned ? ", True]" : ", False]");
    };
    if (text(x) != text(h))
        throw ArgumentError(
            "Expected input.x and output.h to have the same bitwidth, is_symmetric, is_unsigned, "
            "because tie_x_and_h gives them one quantizer, got " +
            text(x) + " and " + text(h));
    both.merge(observers[0][static_cast<size_t>(Operator::x)]);
    for (const auto &cell : observers) both.merge(cell[static_cast<size_t>(Operator::h)]);
    return both;
}

}  // namespace quant_gru
