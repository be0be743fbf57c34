// The rules of rounding as files name them; their numbers are those of fixed_point.h.
#pragma once

namespace quant_gru {

inline constexpr const char *kRoundings[5] = {"half_even", "half_away", "half_up", "floor",
                                              "double"};

}  // namespace quant_gru
