// Whether a call of a module is nothing but that: what torch.nn.Module.__call__ and the forward of
// a quantized GRU look at before they run, in one go.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

namespace quant_gru {

class Quiet {
 public:
    // false_names, empty_names, absent_names: attributes of a module that have to be False, empty
    // dictionaries, and None or not its own. true_name: one that has to be True. hooks:
    // dictionaries that have to be empty. compiler: a namespace whose `_is_compiling_flag` has to
    // be False. counts: functions that have to give 0. states: functions that have to give None.
    Quiet(nanobind::tuple false_names, nanobind::tuple empty_names, nanobind::tuple absent_names,
          nanobind::str true_name, nanobind::tuple hooks, nanobind::dict compiler,
          nanobind::tuple counts, nanobind::tuple states);

    // Whether all of this is so; attributes: the module's __dict__.
    bool is(const nanobind::dict &attributes) const;

 private:
    using Objects = std::vector<nanobind::object>;
    Objects false_names_, empty_names_, absent_names_, hooks_, counts_, states_;
    nanobind::object true_name_, compiler_, flag_;
};

}  // namespace quant_gru
