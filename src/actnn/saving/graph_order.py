"""Order of the operations that hooks add to the graphs of AOTAutograd.

AOTAutograd puts all that packs at the end of a forward graph, and all that unpacks at the beginning
of a backward graph. Compilers keep the order of kernels that they call, so that all exact tensors
would be alive at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from actnn.saving.attention import repeat_attention
from actnn.saving.graph_comparisons import Comparisons
from actnn.saving.graph_divisors import ends_of, is_divided, solved_in
from actnn.saving.graph_norms import limit_normalized
from actnn.saving.graph_views import (
    ALIASES,
    constants_of,
    inputs_of,
    made_by,
    name_random_states,
    results_of,
    saved_alone,
    share_views,
)

_arranged: WeakKeyDictionary[fx.Graph, set[fx.Node]] = WeakKeyDictionary()
_comparisons: WeakKeyDictionary[fx.Graph, Comparisons] = WeakKeyDictionary()
_ends: WeakKeyDictionary[fx.Graph, set[fx.Node]] = WeakKeyDictionary()
_constants: WeakKeyDictionary[fx.Graph, set[str]] = WeakKeyDictionary()


def traced_node() -> fx.Node | None:
    """Return the node of the saved tensor for which a hook is being compiled."""
    context = _hook_context()()
    return None if context is None else context["_node"]


def is_read() -> bool:
    """Whether backward reads the saved tensor for which a hook is being compiled."""
    context = _hook_context()()
    return context is None or bool(inputs_of(context["_bw_graph"])[context["_node"].name].users)


def is_compared() -> bool:
    """Whether backward compares the saved tensor for which a hook is being compiled with another.

    Backward of `amax` and its like gives the gradient to the elements that are equal to the result.
    Of rounded elements, and of what is made from them, none is.
    """
    context = _hook_context()()
    if context is None:
        return False
    left = [inputs_of(context["_bw_graph"])[context["_node"].name]]
    found = set(left)
    while left:
        node = left.pop()
        if node.target is torch.ops.aten.eq.Tensor:
            return True
        new = set(node.users) - found
        found |= new
        left += new
    return False


def has_gradient() -> bool:
    """Whether the saved tensor for which a hook is being compiled has a gradient, or may.

    Angles of rotary embeddings have none: noise that is small beside them is not small in a sine.
    """
    context = _hook_context()()
    return context is None or context["_node"].name not in _constants[context["_fw_graph"]]


def divides_by() -> bool:
    """Whether backward divides by the saved tensor for which a hook is being compiled, or may."""
    context = _hook_context()()
    if context is None:
        return False
    saved, node = inputs_of(context["_bw_graph"]), context["_node"]
    makers = {n.name: made_by(n) for n in context["_fw_graph"].nodes if n.name in saved}
    makers[node.name] = made_by(node)  # with dynamic shapes, not all are nodes of this graph
    return made_by(node) in _ends[context["_fw_graph"]] or is_divided(saved[node.name], makers)


def bits_beside() -> list[int]:
    """Return the bytes of each tensor of bits that is saved beside the tensor of a hook."""
    context = _hook_context()()
    if context is None:
        return []
    found = _comparisons.get(context["_fw_graph"])
    return found.sizes if found is not None and found.carrier is context["_node"] else []


def arrange(*, rounds: bool = True) -> None:
    """Move what hooks have added to the graphs that are being compiled.

    Then exact tensors live shortly: in the forward graph additions follow what they read, in the
    backward graph they precede what reads them, all but those of the last tensor. At the first
    look, views of one tensor become one saved tensor, attention runs again in backward, what norms
    make again has a limit, and what forward compares is not compared again.

    Args:
        rounds: Whether tensors may be rounded.
    """
    context = _hook_context()()
    if context is None:
        return
    forward, backward = context["_fw_graph"], context["_bw_graph"]
    if forward not in _arranged:
        name_random_states(forward, backward)
        results = results_of(forward, backward)
        _constants[forward] = constants_of(forward, backward)
        _ends[forward] = ends_of(results) | solved_in(forward, results)
        share_views(forward, backward, context["_node"])
        if rounds:
            repeat_attention(forward, backward)
            limit_normalized(forward, backward)
            alone = saved_alone(forward, backward)
            found = Comparisons(forward, backward, context["_node"], alone)
            _comparisons[forward] = found
            _ends[forward] |= found.inexact
    added = _added(forward)
    for node in added:
        _behind_inputs(node)
    if forward in _comparisons:
        _comparisons[forward].connect(added)
    for node in reversed(_added(backward)):
        if node.users:
            min(node.users).prepend(node)
        else:
            backward.erase_node(node)


def _added(graph: fx.Graph) -> list[fx.Node]:
    """Return the calls that are new since the last look at a graph, none at the first one."""
    known = _arranged.get(graph)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    _arranged[graph] = set(nodes)
    return [] if known is None else [node for node in nodes if node not in known]


def _behind_inputs(node: fx.Node) -> None:
    for each in node.all_input_nodes:
        if each.target in ALIASES:  # of a result, made where the graph ends
            _behind_inputs(each)
    inputs = [each for each in node.all_input_nodes if each.op != "placeholder"]
    if inputs:
        max(inputs).append(node)
    else:  # of inputs of the graph, or of none
        next(each for each in node.graph.nodes if each.op != "placeholder").prepend(node)


@cache
def _hook_context() -> Callable[[], dict[str, Any] | None]:
    try:
        from torch._functorch._aot_autograd.graph_compile import _get_saved_tensor_hook_context
    except ImportError:  # this version of torch inlines no hooks
        return lambda: None
    return _get_saved_tensor_hook_context
