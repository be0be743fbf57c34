// The autograd nodes that make tensors, and what Python tells of them.
#pragma once

#include <nanobind/nanobind.h>

namespace actnn {

// A kind of autograd nodes.
struct Op {
    nanobind::object name, type;
    bool is_form;     // whether it only changes the type or the layout of a tensor
    bool looks_back;  // whether it depends on the operands how the result is held, or vice versa
};

// The node that made a tensor; none for a leaf.
const Op *op_of(const nanobind::handle &tensor);

// Whether what is packed in a frame is saved by a torch.autograd.Function of the user: nobody knows
// what its backward does with it.
bool in_custom_function(const nanobind::handle &frame);

// Tells the choice 'keep', the names of nodes that change only type or layout, and of those that
// look back.
void set_rules(nanobind::object keep, nanobind::object forms, nanobind::object looking_back);
// The choice 'keep'.
const nanobind::object &keep_choice();

}  // namespace actnn
