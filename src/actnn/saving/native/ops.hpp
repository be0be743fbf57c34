// The autograd nodes that make tensors, and what Python tells of them.
#pragma once

#include <nanobind/nanobind.h>

namespace actnn {

// A kind of autograd nodes.
struct Op {
    nanobind::object name, type;
    bool is_form;      // whether it only changes the type or the layout of a tensor
    bool may_compare;  // whether its backward may compare the result with the operands
};

// The node that made a tensor; none for a leaf.
const Op *op_of(const nanobind::handle &tensor);

// Tells the choice 'keep', the names of nodes that change only type or layout, and of those whose
// backward may compare.
void set_rules(nanobind::object keep, nanobind::object forms, nanobind::object comparing);
// The choice 'keep'.
const nanobind::object &keep_choice();

}  // namespace actnn
