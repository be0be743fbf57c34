"""Divisions in the graphs of AOTAutograd.

While a graph is compiled, nobody knows how near to 0 its numbers are. All divisors are kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx

_DEPTH = 12
_STEEP = set(
    "reciprocal rsqrt log log2 log10 log1p erfinv digamma lgamma polygamma "
    "logit logit_backward binary_cross_entropy binary_cross_entropy_backward".split()
)
_DIVISIONS = {"div", "true_divide"}
# What hands numbers on element by element, or adds them; views do, too.
_PASSED = set(
    "mul add sub div rsub neg abs pow clone _to_copy convert_element_type sum mean where "
    "masked_fill clamp clamp_min clamp_max maximum minimum cat stack constant_pad_nd slice_scatter "
    "select_scatter gather scatter scatter_add index index_put index_add index_select repeat roll "
    "flip getitem max min topk sort cumsum lerp addcmul avg_pool2d _adaptive_avg_pool2d "
    "upsample_bilinear2d upsample_nearest2d _unsafe_index pixel_shuffle nan_to_num take".split()
)
# Functions whose derivative is near 0 where their result is at its end.
_ENDS = set(
    "sigmoid tanh _softmax _safe_softmax exp exp2 expm1 softplus elu log_sigmoid_forward log1p erf "
    "erfc".split()
)
Makers = dict[str, fx.Node]


def is_divided(saved: fx.Node, made_by: Makers) -> bool:
    """Return whether backward divides by an input of its graph, or divides products with it.

    Where numbers are divided by those near 0, the gradient is large, so that the operands of the
    products from which the numbers come have to be exact, too.

    Args:
        saved: The input of the backward graph.
        made_by: Name of an input -> the node of the forward graph that makes it.
    """
    if _name(made_by[saved.name]) in _STEEP:
        return True
    left, found = [(saved, True)], {saved}
    steep = {name for name, node in made_by.items() if _reciprocals(node, saved)}
    for _ in range(_DEPTH):
        now, left = left, []
        for node, is_saved in now:
            for user in node.users:
                if _divides(user, node, is_saved, made_by) or (
                    _meets_quotient(user, node, steep, made_by)
                ):
                    return True
                if user not in found and _passes(user):
                    found.add(user)
                    left.append((user, is_saved and _is_view(user)))
    return False


def ends_of(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that have to be exact if a loss divides by results of a forward graph.

    These are functions such as sigmoid, from which clamp, cat, mean and the like make results, and
    what they are made from and what is made from them: backward takes one of these.
    """
    found = _sources_of(_walk(results, _makers_of))
    for end in [each for each in found if _name(each) in _ENDS]:
        found |= _walk([end], lambda node: filter(_passes, node.users))
    return found


def _sources_of(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the functions such as sigmoid among nodes, and what they are made from."""
    return _walk([each for each in nodes if _name(each) in _ENDS], _operands_of_end)


def _operands_of_end(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if _passes(node) or _name(node) in _ENDS else []


def _walk(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Return nodes, and those that follow on them."""
    left = found = set(nodes)
    for _ in range(_DEPTH):
        left = {each for node in left for each in following(node)} - found
        found = found | left
    return found


def _makers_of(node: fx.Node) -> list[fx.Node]:
    """Return the operands whose numbers a node hands on; of x sigmoid(x), there are none."""
    operands = node.all_input_nodes
    if _name(node) in ("mm", "bmm"):  # of attention, only one operand is a result of softmax
        makers = [_walk([each], _operands_of) for each in operands]
        return operands if all(map(_sources_of, makers)) else []
    if _name(node) in ("mul", "div") and len(operands) == 2:
        a, b = (_walk([each], _operands_of) for each in operands)
        if a & (_sources_of(b) - b) or b & (_sources_of(a) - a):
            return []
    return _operands_of(node)


def _operands_of(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if _passes(node) else []


def _divides(user: fx.Node, node: fx.Node, is_saved: bool, made_by: Makers) -> bool:
    """Whether a node divides by another, or divides a saved tensor by a tensor."""
    name = _name(user)
    if _divisor_of(user, made_by) is not None:
        return is_saved or user.args[1] is node
    if name == "pow":
        exponent = user.args[1]
        return isinstance(exponent, fx.Node) or float(exponent) < 0  # type: ignore[arg-type]
    return name in _STEEP


def _divisor_of(node: fx.Node, made_by: Makers) -> fx.Node | None:
    """Return the tensor by which a node divides, if numbers of it may be near 0 beside others."""
    if _name(node) not in _DIVISIONS or not isinstance(node.args[1], fx.Node):
        return None
    by = node.args[1]
    value = by.meta.get("val")
    if isinstance(value, Tensor) and value.dim() == 0:  # it changes all numbers alike
        return None
    return None if _is_above_1(by, made_by) else by


def _is_above_1(node: fx.Node, made_by: Makers) -> bool:
    """Whether a node is 1 + exp(x), or a sum of exp(x - amax(x)), as those of softmax are."""
    node = _source(node, made_by)
    if _name(node) == "add":
        a, b = (_source(each, made_by) if isinstance(each, fx.Node) else each for each in node.args)
        return bool(b == 1) and isinstance(a, fx.Node) and _name(a) == "exp"
    power = _operand(node, "sum", 0, made_by)
    difference = _operand(power, "exp", 0, made_by)
    largest = _operand(difference, "sub", 1, made_by)
    return largest is not None and _name(largest) in ("amax", "max", "getitem")


def _operand(node: fx.Node | None, name: str, index: int, made_by: Makers) -> fx.Node | None:
    """Return an operand of a node if that has a name."""
    if node is None or _name(node) != name or not isinstance(node.args[index], fx.Node):
        return None
    return _source(node.args[index], made_by)  # type: ignore[arg-type]


def _source(node: fx.Node, made_by: Makers) -> fx.Node:
    """Return what a node is a view or another type of, in the forward graph if it is saved."""
    while True:
        if node.op == "placeholder" and node.name in made_by and made_by[node.name] is not node:
            node = made_by[node.name]
        elif _is_view(node) or _name(node) in ("convert_element_type", "_to_copy", "clone"):
            node = node.all_input_nodes[0]
        else:
            return node


def _reciprocals(node: fx.Node, like: fx.Node) -> bool:
    """Whether a node makes as many reciprocals as a tensor has elements; norms make few."""
    if _name(node) not in _STEEP:
        return False
    made, other = node.meta.get("val"), like.meta.get("val")
    if not isinstance(made, Tensor) or not isinstance(other, Tensor):
        return True
    return bool(made.shape == other.shape)


def _meets_quotient(product: fx.Node, saved: fx.Node, steep: set[str], made_by: Makers) -> bool:
    """Whether a node takes a saved tensor and what was divided by a tensor."""
    left, found = [each for each in product.all_input_nodes if each is not saved], set[fx.Node]()
    for _ in range(_DEPTH):
        now, left = left, []
        for node in now:
            if _divisor_of(node, made_by) is not None:
                return True
            if node.op == "placeholder" and node.name in steep:
                return True
            if node not in found and _passes(node):
                found.add(node)
                left += node.all_input_nodes
    return False


def _name(node: fx.Node) -> str:
    """Return the name of an operator without its overload; '' if it is none."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return "getitem" if target is operator.getitem else ""


def _passes(node: fx.Node) -> bool:
    return _is_view(node) or _name(node) in _PASSED


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        target.is_view or target is torch.ops.aten._unsafe_view.default
    )
