"""Views of one tensor in the graphs of AOTAutograd, such as queries, keys and values of a layer.

AOTAutograd saves each of them as a tensor of its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from actnn.saving.dense import is_dense

_aten = torch.ops.aten
ALIASES = _aten.alias.default, _aten.detach.default
_NO_VIEWS = {_aten.as_strided.default, _aten.view.dtype}  # of memory, not of elements


def source_of(node: fx.Node) -> fx.Node:
    """Return the node of which a node is a view; itself if it is none."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a node or a view of it."""
    for user in node.users:
        if _is_view(user):
            yield from readers_of(user)
        else:
            yield user


def made_by(node: fx.Node) -> fx.Node:
    """Return the node of which a node is another name; itself if it is none."""
    while node.target in ALIASES:
        node = node.all_input_nodes[0]
    return node


def inputs_of(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return name -> input of a graph."""
    return {node.name: node for node in graph.find_nodes(op="placeholder")}


def name_random_states(forward: fx.Graph, backward: fx.Graph) -> None:
    """Give saved states of random numbers one name in both graphs, as AOTAutograd requires.

    It looks for what is saved by name, but its partitioner names these states anew: those of random
    operators in checkpointed code, to which attention belongs.
    """
    made, inputs = forward.output_node().all_input_nodes, inputs_of(backward)
    states = [node for name, node in inputs.items() if name.startswith("rng_state_output")]
    saved = [
        node
        for node in made
        if node.target is operator.getitem
        and node.args[1] == 0
        and str(node.args[0].target) == "run_and_save_rng_state"  # type: ignore[union-attr]
    ]
    if len(states) != len(saved):  # another version of PyTorch, which says what it lacks
        return
    for state, node in zip(states, saved, strict=True):
        for other in backward.nodes:
            if other.name == node.name and other is not state:
                other._rename(f"{node.name}_again")
        state.name = node.name


def past_inputs(node: fx.Node) -> fx.Node:
    """Return the last input of a graph instead of any other input; other nodes as they are.

    Calls that read the node are inserted behind it, so that none is among the inputs.
    """
    return node.graph.find_nodes(op="placeholder")[-1] if node.op == "placeholder" else node


def results_of(forward: fx.Graph, backward: fx.Graph) -> set[fx.Node]:
    """Return the outputs of a forward graph that are not, or not only, saved for backward."""
    return set(Counter(_outputs_of(forward)) - Counter(_saved_of(forward, backward)))


def constants_of(forward: fx.Graph, backward: fx.Graph) -> set[str]:
    """Return the names of what is made of inputs without a gradient, and of nothing else.

    Backward returns the gradient of each input that forward has, or None.
    """
    inputs = [node for node in inputs_of(forward).values() if node.name.startswith("primals")]
    gradients: Any = backward.output_node().args[0]
    if len(gradients) < len(inputs):
        return set()
    moving = {node for node, gradient in zip(inputs, gradients, strict=False) if gradient}
    for node in forward.nodes:
        if not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
    return {node.name for node in forward.nodes if node not in moving}


def saved_alone(forward: fx.Graph, backward: fx.Graph) -> list[fx.Node]:
    """Return what is saved for backward and neither a view of an input nor of a result."""
    results = {source_of(node) for node in results_of(forward, backward)}
    saved = _saved_of(forward, backward)
    return [
        node
        for node in saved
        if isinstance(node.meta.get("val"), Tensor)
        and source_of(node).op != "placeholder"
        and source_of(node) not in results
    ]


def _outputs_of(graph: fx.Graph) -> list[fx.Node]:
    outputs = graph.output_node().args[0]
    return [node for node in outputs if isinstance(node, fx.Node)]  # type: ignore[union-attr]


def _saved_of(forward: fx.Graph, backward: fx.Graph) -> list[fx.Node]:
    """Return the outputs of a forward graph that are saved for backward, each once, in order."""
    places = inputs_of(backward)
    return [node for node in dict.fromkeys(_outputs_of(forward)) if node.name in places]


def share_views(forward: fx.Graph, backward: fx.Graph, current: fx.Node) -> None:
    """Let one saved tensor stand for the tensor of which several are views.

    Backward makes the views from it, and reads none of the others any more.

    Args:
        forward: The forward graph; its last outputs are saved.
        backward: The backward graph; its inputs have the names of what is saved.
        current: A saved tensor that stays as it is, since its hook is running.
    """
    places = inputs_of(backward)
    saved = _saved_of(forward, backward)
    results = {source_of(node) for node in results_of(forward, backward)}
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in (each for each in saved if places[each.name].users):
        groups.setdefault(source_of(node), []).append(node)
    for source, members in groups.items():
        if source not in results and _is_worth_sharing(source, members):
            # The tensor stands for itself if it is saved, too.
            others = sorted(members, key=lambda member: member is not source)
            whole = next(member for member in others if member is not current)
            _view_in_backward(source, places[whole.name], [(m, places[m.name]) for m in members])
            if whole is not source:
                _save_instead(source, whole)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:  # of the views that a split returns
        return _is_view(node.all_input_nodes[0])
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (target.is_view or target is _aten._unsafe_view.default)
        and target not in _NO_VIEWS
        and len(node.all_input_nodes) == 1
    )


def _is_worth_sharing(source: fx.Node, views: list[fx.Node]) -> bool:
    """Whether a tensor can stand for views of it, and is no larger than they are together.

    Sizes that are known only when the graph runs cannot be compared.
    """
    whole, parts = source.meta.get("val"), [view.meta["val"] for view in views]
    return (
        len(views) > 1
        and source.op == "call_function"
        and isinstance(whole, Tensor)
        and not any(isinstance(n, torch.SymInt) for each in (whole, *parts) for n in each.shape)
        and all(part.dtype == whole.dtype for part in parts)
        and sum(part.numel() for part in parts) >= whole.numel()
        and is_dense(whole)
    )


def _view_in_backward(
    source: fx.Node, whole: fx.Node, views: list[tuple[fx.Node, fx.Node]]
) -> None:
    """Make views from one input of a backward graph instead of reading an input for each.

    Args:
        source: In the forward graph, the tensor of which all are views.
        whole: The input that is this tensor from now on.
        views: Those in the forward graph, and their inputs in the backward graph.
    """
    readers = [(node, place, list(place.users)) for node, place in views]
    made = {source: whole}

    def view(node: fx.Node) -> fx.Node:
        if node not in made:
            operand = view(node.all_input_nodes[0])
            made[node] = whole.graph.node_copy(node, lambda _: operand)
        return made[node]

    with whole.graph.inserting_before(min(user for _, _, users in readers for user in users)):
        for node, place, users in readers:
            found = view(node)
            place.replace_all_uses_with(found, delete_user_cb=users.__contains__)
    whole.meta["val"] = source.meta["val"]


def _save_instead(source: fx.Node, saved: fx.Node) -> None:
    """Save a tensor under the name of a view of it."""
    with saved.graph.inserting_before(saved):
        view = saved.graph.node_copy(saved)
    saved.replace_all_uses_with(view, delete_user_cb=lambda user: user.op != "output")
    saved.target, saved.args, saved.kwargs = ALIASES[0], (source,), {}
    saved.meta.pop("tensor_meta", None)
    saved.meta["val"] = source.meta["val"]
