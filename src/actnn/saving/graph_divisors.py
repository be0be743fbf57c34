"""Divisions in the graphs of AOTAutograd.

While a graph is compiled, nobody knows how near to 0 its numbers are. All divisors are kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, fx

from actnn.saving.divisors import SOLVED
from actnn.saving.graph_norms import is_limit

_DEPTH = 12  # steps from node to node; views and casts are none
_STEEP = set(
    "reciprocal rsqrt log log2 log10 log1p erfinv digamma lgamma polygamma "
    "logit logit_backward binary_cross_entropy binary_cross_entropy_backward".split()
)
_PRODUCTS = {"mm", "bmm"}
_DISTANCES = {"_cdist_forward", "_euclidean_dist"}
_PAIRS = _PRODUCTS | _DISTANCES | {"sub"}
_KERNELS = _DISTANCES | {"exp", "sqrt"}
_NONE, _SOME, _ALL = range(3)
_DIVISIONS = {"div", "true_divide"}
# What hands numbers on element by element, or adds them; views do, too.
_PASSED = set(
    "mul add sub div rsub neg abs pow clone _to_copy convert_element_type sum mean where "
    "masked_fill clamp clamp_min clamp_max maximum minimum cat stack constant_pad_nd slice_scatter "
    "select_scatter gather scatter scatter_add index index_put index_add index_select repeat roll "
    "flip getitem max min topk sort cumsum lerp addcmul avg_pool2d _adaptive_avg_pool2d "
    "upsample_bilinear2d upsample_nearest2d _unsafe_index pixel_shuffle nan_to_num take complex "
    "view_as_real view_as_complex _conj _conj_physical real imag".split()
)
# Functions whose derivative is near 0 where their result is at its end.
_ENDS = set(
    "sigmoid tanh _softmax _safe_softmax exp exp2 expm1 softplus elu log_sigmoid_forward log1p erf "
    "erfc".split()
)
_FORMS = {"clone", "_to_copy", "convert_element_type", "expand"}
Makers = dict[str, fx.Node]


def is_divided(saved: fx.Node, made_by: Makers) -> bool:
    """Return whether backward divides by an input of its graph, or divides products with it.

    Where numbers are divided by those near 0, the gradient is large, so that the operands of the
    products from which the numbers come have to be exact, too.

    Args:
        saved: The input of the backward graph.
        made_by: Name of an input -> the node of the forward graph that makes it.
    """
    if name_of(made_by[saved.name]) in _STEEP:
        return True
    left, found = [(saved, True)], {saved}
    steep = {name for name, node in made_by.items() if _reciprocals(node, saved)}
    for _ in range(_DEPTH):
        now, left = left, []
        for node, is_saved in now:  # which grows
            for user in node.users:
                if is_limit(user):
                    continue
                if (
                    _divides(user, node, is_saved, made_by)
                    or _meets_quotient(user, node, steep, made_by)
                    or _is_exponent(user, made_by)
                ):
                    return True
                if user not in found and (_passes(user) or name_of(user) == "exp"):
                    found.add(user)
                    (now if _is_same(user) else left).append((user, is_saved and _is_view(user)))
    return False


def solved_in(graph: fx.Graph, ends: Iterable[fx.Node]) -> set[fx.Node]:
    """Return what equations are solved with in a forward graph, and operands of its products.

    Args:
        graph: The graph.
        ends: Its results: a loss may solve equations with those that are covariances.
    """
    found = {node for node in graph.nodes if name_of(node) in SOLVED}
    matrices = [node for node in ends if len(_shape_of(node) or ()) > 1]
    makers = _walk(matrices, _operands_of)
    found |= {node for node in makers if _is_square(node) or _is_kernel(node)}
    operands = _walk([each for node in found for each in node.all_input_nodes], _covariances_of)
    products = [
        each for node in operands if name_of(node) in _PRODUCTS for each in node.all_input_nodes
    ]
    results = _walk(found, lambda node: filter(_is_form, node.users))
    return results | operands | _walk(products, _operands_of)


def _is_square(node: fx.Node) -> bool:
    """Whether a node is the product of a tensor with itself, as covariances are."""
    return name_of(node) in _PRODUCTS and _is_of_one(node)


def _is_kernel(node: fx.Node) -> bool:
    """Whether a node makes exponentials of distances within a tensor, which are covariances."""
    if name_of(node) != "exp":
        return False
    makers = _walk(node.all_input_nodes, _covariances_of)
    return any(name_of(each) in _PAIRS and _is_of_one(each) for each in makers)


def _is_of_one(node: fx.Node) -> bool:
    """Whether both operands of a node are forms of one tensor."""
    operands = [each for each in node.args[:2] if isinstance(each, fx.Node)]
    if len(operands) != 2:
        return False
    a, b = (_walk([each], _forms_of) for each in operands)
    return bool(a & b)


def _forms_of(node: fx.Node) -> list[fx.Node]:
    scales = name_of(node) in ("mul", "div") and len(node.all_input_nodes) == 1
    return node.all_input_nodes[:1] if scales or _is_same(node) else []


def ends_of(results: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that have to be exact if a loss divides by results of a forward graph.

    These are functions such as sigmoid, from which clamp, cat, mean and the like make results, and
    what they are made from and what is made from them: backward takes one of these.
    """
    left, seen, made = [(each, _DEPTH) for each in results], set[fx.Node](), dict[fx.Node, int]()
    if left:
        made = _made_of_ends(left[0][0].graph)
    while left:
        node, depth = left.pop()
        if made[node] != _NONE and node not in seen and depth:
            seen.add(node)
            if name_of(node) not in _ENDS:
                step = made[node] == _SOME and not _is_same(node)
                left += [(each, depth - step) for each in node.all_input_nodes]
    found = _sources_of(seen) | {node for node in seen if made[node] == _ALL}
    for end in [each for each in found if name_of(each) in _ENDS]:
        found |= _walk([end], lambda node: filter(_passes, node.users))
    return found


def _made_of_ends(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return whether all or some of what nodes hand on was made by ends, such as probabilities.

    Of attention, only one operand of a product is a result of softmax; of layers, none is.
    """
    made: dict[fx.Node, int] = {}
    for node in graph.nodes:
        parts = [made[each] for each in node.all_input_nodes]
        least, most = min(parts, default=_NONE), max(parts, default=_NONE)
        if name_of(node) in _ENDS:
            made[node] = _ALL
        elif name_of(node) in _PRODUCTS:
            made[node] = least
        elif _passes(node) and not _is_gate(node):
            made[node] = least or min(most, _SOME)
        else:
            made[node] = _NONE
    return made


def _sources_of(nodes: set[fx.Node]) -> set[fx.Node]:
    """Return the functions such as sigmoid among nodes, and what they are made from."""
    return _walk([each for each in nodes if name_of(each) in _ENDS], _operands_of_end)


def _operands_of_end(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if _passes(node) or name_of(node) in _ENDS else []


def _walk(
    nodes: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]
) -> set[fx.Node]:
    """Return nodes, and those that follow on them."""
    left = list(nodes)
    found = set(left)
    for _ in range(_DEPTH):
        now, left = left, []
        for node in now:  # which grows
            for each in following(node):
                if each not in found:
                    found.add(each)
                    (now if _is_same(each) else left).append(each)
    return found


def _is_gate(node: fx.Node) -> bool:
    """Whether a node is x sigmoid(x) or the like."""
    if name_of(node) not in ("mul", "div") or len(node.all_input_nodes) != 2:
        return False
    a, b = (_walk([each], _operands_of) for each in node.all_input_nodes)
    return bool(a & (_sources_of(b) - b) or b & (_sources_of(a) - a))


def _operands_of(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if _passes(node) else []


def _covariances_of(node: fx.Node) -> list[fx.Node]:
    """Return what hands numbers on to a matrix, or makes a covariance as kernels do."""
    return node.all_input_nodes if _passes(node) or name_of(node) in _KERNELS else []


def _divides(user: fx.Node, node: fx.Node, is_saved: bool, made_by: Makers) -> bool:
    """Whether a node divides by another, or divides a saved tensor by a tensor."""
    name = name_of(user)
    if _divisor_of(user, made_by) is not None:
        return is_saved or user.args[1] is node
    if name == "pow":
        exponent = user.args[1]
        return isinstance(exponent, fx.Node) or float(exponent) < 0  # type: ignore[arg-type]
    if name == "log1p":
        return name_of(_source(node, made_by)) != "exp"
    return name in _STEEP and not _is_above_1(node, made_by)


def _is_exponent(node: fx.Node, made_by: Makers) -> bool:
    """Whether a node is a difference of tensors of which the exponential is taken.

    They have one shape, or what is subtracted is the logarithm of a sum: operands may be infinite
    or as good as that. What lets exponentials sum to 1 is neither.
    """
    if any(map(is_limit, node.all_input_nodes)):
        return False
    a, b = (*(_shape_of(each) for each in node.all_input_nodes), None, None)[:2]
    if name_of(node) != "sub" or a is None or b is None:
        return False
    if a != b:
        sums = _walk([_source(node.all_input_nodes[1], made_by)], _operands_of)
        if not any(name_of(each) in ("log", "logsumexp") for each in sums):
            return False
    signed = _walk([node], lambda each: (u for u in each.users if name_of(u) in ("neg", "abs")))
    return any(name_of(user) == "exp" for each in signed for user in each.users)


def _divisor_of(node: fx.Node, made_by: Makers) -> fx.Node | None:
    """Return the tensor by which a node divides, if numbers of it may be near 0 beside others."""
    if name_of(node) not in _DIVISIONS or not isinstance(node.args[1], fx.Node):
        return None
    by = node.args[1]
    value = by.meta.get("val")
    if isinstance(value, Tensor) and value.dim() == 0:  # it changes all numbers alike
        return None
    return None if _is_above_1(by, made_by) else by


def _is_above_1(node: fx.Node, made_by: Makers) -> bool:
    """Whether a node is 1 + exp(x), or a sum of exp(x - amax(x)), as those of softmax are."""
    node = _source(node, made_by)
    if name_of(node) == "add":
        a, b = (_source(each, made_by) if isinstance(each, fx.Node) else each for each in node.args)
        return bool(b == 1) and isinstance(a, fx.Node) and name_of(a) == "exp"
    power = _operand(node, "sum", 0, made_by)
    difference = _operand(power, "exp", 0, made_by)
    largest = _operand(difference, "sub", 1, made_by)
    return largest is not None and name_of(largest) in ("amax", "max", "getitem")


def _operand(node: fx.Node | None, name: str, index: int, made_by: Makers) -> fx.Node | None:
    """Return an operand of a node if that has a name."""
    if node is None or name_of(node) != name or not isinstance(node.args[index], fx.Node):
        return None
    return _source(node.args[index], made_by)  # type: ignore[arg-type]


def _source(node: fx.Node, made_by: Makers) -> fx.Node:
    """Return what a node is a view or another type of, in the forward graph if it is saved."""
    while True:
        if node.op == "placeholder" and node.name in made_by and made_by[node.name] is not node:
            node = made_by[node.name]
        elif _is_view(node) or name_of(node) in ("convert_element_type", "_to_copy", "clone"):
            node = node.all_input_nodes[0]
        else:
            return node


def _reciprocals(node: fx.Node, like: fx.Node) -> bool:
    """Whether a node makes as many reciprocals as a tensor has elements; norms make few."""
    if name_of(node) not in _STEEP:
        return False
    made, other = _shape_of(node), _shape_of(like)
    return made is None or other is None or made == other


def _meets_quotient(product: fx.Node, saved: fx.Node, steep: set[str], made_by: Makers) -> bool:
    """Whether a node takes a saved tensor and what was divided by a tensor."""
    left, found = [each for each in product.all_input_nodes if each is not saved], set[fx.Node]()
    for _ in range(_DEPTH):
        now, left = left, []
        for node in now:  # which grows
            if _divisor_of(node, made_by) is not None:
                return True
            if node.op == "placeholder" and node.name in steep:
                return True
            if node not in found and _passes(node):
                found.add(node)
                (now if _is_same(node) else left).extend(node.all_input_nodes)
    return False


def _shape_of(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else None


def name_of(node: fx.Node) -> str:
    """Return the name of an operator without its overload; '' if it is none."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return "getitem" if target is operator.getitem else ""


def _passes(node: fx.Node) -> bool:
    return _is_view(node) or name_of(node) in _PASSED


def _is_form(node: fx.Node) -> bool:
    return _is_view(node) or name_of(node) in ("getitem", "clone")


def _is_same(node: fx.Node) -> bool:
    """Whether a node has the numbers of another one, in another layout or type."""
    return _is_view(node) or name_of(node) in _FORMS


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (
        target.is_view or target is torch.ops.aten._unsafe_view.default
    )
