"""Comparisons in the backward graphs of AOTAutograd, such as those of ReLU and clamp.

Decoded numbers, and what backward makes of them again, may lie on the other side of a bound. So
forward compares, and one bit per element is saved. A hook can only add to what is saved for its own
tensor: the first one carries the bits of all comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import SymInt, Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from actnn.codec.memory_order import order_of
from actnn.saving.bit_masks import fusible_mask, unpack_flat
from actnn.saving.graph_norms import is_limit
from actnn.saving.graph_views import ALIASES, inputs_of, made_by, past_inputs, source_of

_aten = torch.ops.aten
_COMPARING = {_aten.le, _aten.lt, _aten.ge, _aten.gt}
_JOINING = {
    getattr(_aten, f"{kind}_{name}")
    for kind in ("bitwise", "logical")
    for name in ("and", "or", "xor", "not")
}
_SIGNS = {_aten.sign.default, _aten.sgn.default}
_EMPTY = {_aten.new_empty.default, _aten.empty.memory_format}


class Comparisons:
    """The comparisons of a backward graph whose outcomes forward saves.

    Args:
        forward: The forward graph.
        backward: The backward graph; what it reads or computes again has the names of the forward
            graph.
        carrier: The first saved tensor for which a hook is compiled.
        saved: The tensors that may be saved for this backward graph alone.

    Attributes:
        carrier: The same.
        inexact: What has to be exact, because no bits can be saved for a comparison.
    """

    def __init__(
        self, forward: fx.Graph, backward: fx.Graph, carrier: fx.Node, saved: list[fx.Node]
    ) -> None:
        self._backward, self.carrier = backward, carrier
        self._carried: list[fx.Node] = []  # what the hook of the carrier returns for the bits
        self._found: list[tuple[fx.Node, fx.Node]] = []  # in forward, in backward
        self.inexact: set[fx.Node] = set()
        made = {node.name: node for node in forward.nodes}
        for node in list(backward.nodes):
            if node.target in _SIGNS and node.meta["val"].is_floating_point():
                sign = _insert_behind(node, node.all_input_nodes[0], _sign_of)
                node.replace_all_uses_with(sign)
                backward.erase_node(node)
        # Backward is told to read bits by a later hook than that of the carrier.
        is_followed = any(node is not carrier for node in saved)
        for node in list(backward.nodes):
            if not _is_outcome(node) or all(map(_is_outcome, node.users)) or is_limit(node):
                continue
            operands = _operands_of(node)
            if any(each.name not in made for each in operands) or not _are_rounded(operands, made):
                continue
            if is_followed and not any(isinstance(n, SymInt) for n in node.meta["val"].shape):
                self._found.append((_copied(node, made), node))
            else:
                self.inexact |= {made[each.name] for each in _inputs_of(operands)}

    @property
    def sizes(self) -> list[int]:
        """Bytes of the bits of each comparison."""
        return [-(-math.prod(node.meta["val"].shape) // 8) for node, _ in self._found]

    def connect(self, added: list[fx.Node]) -> None:
        """Let forward save the bits, and backward read them, as soon as both graphs have them.

        Args:
            added: Nodes that are new in the forward graph.
        """
        self._carried = self._carried or [node for node in added if node.target in _EMPTY]
        inputs = inputs_of(self._backward)
        if not self._found or not self._carried or self._carried[0].name not in inputs:
            return
        for held, (before, after) in zip(self._carried, self._found, strict=True):
            bits = _insert_behind(before, before, _bits_of)
            held.target, held.args, held.kwargs = ALIASES[0], (bits,), {}
            bits.append(held)
            outcome = partial(_outcome_of, like=after.meta["val"])
            after.replace_all_uses_with(_insert_behind(after, inputs[held.name], outcome))
        self._found = []
        self._backward.eliminate_dead_code()


def _is_outcome(node: fx.Node) -> bool:
    """Whether a node compares, or joins what comparisons have found."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _COMPARING:
        return True
    return packet in _JOINING and all(map(_is_outcome, node.all_input_nodes))


def _operands_of(node: fx.Node) -> list[fx.Node]:
    """Return what is compared, without views."""
    if _is_outcome(node):
        return [operand for each in node.all_input_nodes for operand in _operands_of(each)]
    return [_without_copies(node)]


def _without_copies(node: fx.Node) -> fx.Node:
    """Return what a node is a view or a copy of; autograd copies what is changed in place."""
    while (node := source_of(node)).target is _aten.clone.default:
        node = node.all_input_nodes[0]
    return node


def _are_rounded(operands: list[fx.Node], made: dict[str, fx.Node]) -> bool:
    """Whether operands are or depend on what hooks may round, but results of ReLU alone.

    Their codes have bits of their own for the sign.
    """
    if all(
        each.op == "placeholder" and made_by(made[each.name]).target is _aten.relu.default
        for each in operands
    ):
        return False
    inputs = [made[each.name] for each in _inputs_of(operands)]
    return any(each.op != "placeholder" and each.meta["val"].is_floating_point() for each in inputs)


def _inputs_of(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the inputs of the graph that nodes are made from."""
    left, seen = list(nodes), set[fx.Node]()
    while left:
        node = left.pop()
        if node not in seen:
            seen.add(node)
            left += node.all_input_nodes
    return {
        each
        for each in seen
        if each.op == "placeholder" and isinstance(each.meta.get("val"), Tensor)
    }


def _copied(node: fx.Node, made: dict[str, fx.Node]) -> fx.Node:
    """Return a node of a backward graph in the forward graph; it is added if it is not there."""
    if node.name not in made and node.target is _aten.clone.default:
        return _copied(node.all_input_nodes[0], made)
    if node.name not in made:
        inputs = {each: _copied(each, made) for each in node.all_input_nodes}
        last = max(inputs.values())
        with last.graph.inserting_after(past_inputs(last)):
            made[node.name] = last.graph.node_copy(node, inputs.__getitem__)
    return made[node.name]


def _insert_behind(
    node: fx.Node, operand: fx.Node, function: Callable[[Tensor], Tensor]
) -> fx.Node:
    """Add the operations of a function of one tensor to a graph, and return the result."""
    # half as long to import as torch itself, and only graphs with comparisons need it
    from torch._inductor.decomposition import select_decomp_table

    traced = make_fx(function, select_decomp_table())(operand.meta["val"])
    last, found = node, {}
    for each in traced.graph.nodes:
        if each.op == "placeholder":
            found[each] = operand
        elif each.op == "call_function":
            with node.graph.inserting_after(last):
                last = found[each] = node.graph.node_copy(each, found.__getitem__)
    return last


def _sign_of(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


def _bits_of(outcome: Tensor) -> Tensor:
    return fusible_mask(outcome.permute(order_of(outcome)).reshape(-1))


def _outcome_of(bits: Tensor, like: Tensor) -> Tensor:
    order = order_of(like)
    ordered = unpack_flat(bits)[: like.numel()].view([like.shape[dim] for dim in order])
    return ordered.permute([order.index(dim) for dim in range(like.dim())])
