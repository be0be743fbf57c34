"""Divisions in the graphs of AOTAutograd.

While a graph is compiled, nobody knows how near to 0 its numbers are. All divisors are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_aten = torch.ops.aten
_DEPTH = 12
_STEEP = {
    getattr(_aten, name).default
    for name in "reciprocal rsqrt log log2 log10 log1p erfinv "
    "logit logit_backward binary_cross_entropy binary_cross_entropy_backward".split()
} | {_aten.pow.Tensor_Tensor}
_DIVISIONS = {_aten.div.Tensor, _aten.div.Tensor_mode, _aten.true_divide.Tensor}
# What hands numbers on element by element, or adds them; views do, too.
_PASSED = {
    *(getattr(_aten, name).Tensor for name in "mul add sub".split()),
    *(getattr(_aten, name).Scalar for name in "mul add sub div rsub".split()),
    *(getattr(_aten, name).default for name in "neg clone _to_copy sum abs".split()),
    _aten.where.self,
    _aten.pow.Tensor_Scalar,
    _aten.sum.dim_IntList,
    _aten.mean.dim,
}


def is_divided(saved: fx.Node, made_by: dict[str, fx.Node]) -> bool:
    """Return whether backward divides by an input of its graph, or divides products with it.

    Where numbers are divided by those near 0, the gradient is large, so that the operands of the
    products from which the numbers come have to be exact, too.

    Args:
        saved: The input of the backward graph.
        made_by: Name of an input -> the node of the forward graph that makes it.
    """
    if made_by[saved.name].target in _STEEP:
        return True
    steep = {name for name, node in made_by.items() if _is_as_large(node, saved)}
    left, found = [(saved, True)], {saved}
    for _ in range(_DEPTH):
        now, left = left, []
        for node, is_saved in now:
            for user in node.users:
                if _divides(user, node, is_saved) or _meets_quotient(user, node, steep):
                    return True
                if user not in found and (_is_view(user) or user.target in _PASSED):
                    found.add(user)
                    left.append((user, is_saved and _is_view(user)))
    return False


def _divides(user: fx.Node, node: fx.Node, is_saved: bool) -> bool:
    """Whether a node divides by another, or divides a saved tensor by a tensor."""
    if user.target in _DIVISIONS:
        by = user.args[1]
        return by is node or (is_saved and isinstance(by, fx.Node))
    if user.target is _aten.pow.Tensor_Scalar:
        exponent = user.args[1]
        return isinstance(exponent, (int, float)) and exponent < 0
    return user.target in _STEEP


def _is_as_large(node: fx.Node, saved: fx.Node) -> bool:
    """Whether a node makes as many reciprocals as a saved tensor has elements; norms make few."""
    if node.target not in _STEEP:
        return False
    made, other = node.meta.get("val"), saved.meta.get("val")
    if not isinstance(made, Tensor) or not isinstance(other, Tensor):
        return True
    return bool(made.shape == other.shape)


def _meets_quotient(product: fx.Node, saved: fx.Node, steep: set[str]) -> bool:
    """Whether a node takes a saved tensor and what was divided by a tensor."""
    left, found = [each for each in product.all_input_nodes if each is not saved], set[fx.Node]()
    for _ in range(_DEPTH):
        now, left = left, []
        for node in now:
            if node.target in _DIVISIONS and isinstance(node.args[1], fx.Node):
                return True
            if node.op == "placeholder" and node.name in steep:
                return True
            if node not in found and (_is_view(node) or node.target in _PASSED):
                found.add(node)
                left += node.all_input_nodes
    return False


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        target.is_view or target is _aten._unsafe_view.default
    )
