"""Norms in the graphs of AOTAutograd, whose backward normalizes decoded numbers again."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx

from actnn.saving.exclusions import bounds_of
from actnn.saving.graph_views import past_inputs
from actnn.saving.norm_limits import LEAST, LOG_SOFTMAX, MOST

_aten = torch.ops.aten
_SUMS = _aten.add.Tensor, _aten.add.Scalar
_CASTS = torch.ops.prims.convert_element_type.default, _aten._to_copy.default
_IN_ORDER = {  # what keeps the order of elements
    *_CASTS,
    _aten.view.default,
    _aten._unsafe_view.default,
    _aten.reshape.default,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.unsqueeze.default,
    _aten.alias.default,
    _aten.detach.default,
}
# of GPUs, in newer versions of PyTorch
_RMS_NORM = getattr(getattr(_aten, "_fused_rms_norm_backward", None), "default", None)
_LIMIT = "actnn_limit"
_ROUNDING = 1e-5  # by which the mean square of a row without noise may be off


class _Norm(NamedTuple):
    """A norm in a forward graph.

    Attributes:
        x: What is normalized.
        mean: Its mean; None if that is not subtracted.
        scale: 1 / sqrt(variance + eps).
        eps: What is added to the variance.
        dims: The dimensions of a row, in order.
    """

    x: fx.Node
    mean: fx.Node | None
    scale: fx.Node
    eps: float
    dims: list[int]


def limit_normalized(forward: fx.Graph, backward: fx.Graph) -> None:
    """Limit the mean square of rows that a backward graph normalizes again.

    It is at most `MOST` times that of exact rows after the norm. A row of almost equal numbers
    has a tiny deviation, by which backward divides the noise of codes. Functions of the rows may
    be computed again, too, in which noise does not average out.

    Exponentials of a log_softmax get a row that sums to 1.

    Args:
        forward: The forward graph.
        backward: The backward graph; what it reads or computes again has the names of the forward
            graph.
    """
    made = {node.name: node for node in forward.nodes}
    again = _Again(forward, backward)  # before names of new nodes are among those of others
    for node in list(backward.nodes):
        _limit_operator(node, made)
        _normalize_logarithms(node, made)
    for node in forward.nodes:
        for norm in _norms_of(node):
            again.limit(norm)


def is_limit(node: fx.Node) -> bool:
    """Whether a node is a part of the scale of `limit_normalized`."""
    return _LIMIT in node.meta


def _limit_operator(node: fx.Node, made: dict[str, fx.Node]) -> None:
    """Limit what a node reads if it is the backward of a norm as one operator.

    Args:
        node: A node of the backward graph.
        made: Name -> node of the forward graph.
    """
    given: Any = node.args
    others: list[int] = []  # dimensions that statistics lack
    eps = 0.0  # that of layer norms is not known where operators run one by one, either
    if node.target is _aten.native_layer_norm_backward.default:
        x, shape, mean, scale = given[1:5]
        rows, size = x, x.meta["val"].dim()
        dims = list(range(size - len(shape), size))
    elif node.target is _RMS_NORM:
        x, shape, scale = given[1:4]
        rows, mean, size = x, None, x.meta["val"].dim()
        eps = _eps_of(made.get(scale.name), torch.finfo(x.meta["val"].dtype).eps)
        dims = list(range(size - len(shape), size))
    elif node.target is _aten.native_group_norm_backward.default:
        x, mean, scale, _, samples, _, _, groups = given[1:9]
        before = [each for each in (x, samples, groups) if isinstance(each, fx.Node)]
        rows = _add(node.graph, before, _aten.reshape.default, x, [samples, groups, -1])
        eps = _eps_of(made.get(mean.name), 0.0)
        dims, others = [2], [2]
    elif node.target is _aten.native_batch_norm_backward.default and given[7]:
        x, (mean, scale), eps = given[1], given[5:7], given[8]
        rows = x
        dims = others = [0, *range(2, x.meta["val"].dim())]
    else:
        return
    for dim in others:
        mean = _add(node.graph, [mean], _aten.unsqueeze.default, mean, dim)
        scale = _add(node.graph, [scale], _aten.unsqueeze.default, scale, dim)
    _Limited(rows, scale, mean, _Norm(rows, mean, scale, eps, dims)).replace([node], x)


def _eps_of(statistic: fx.Node | None, default: float) -> float:
    """Return the last argument of the norm that makes a statistic; the default if it is None."""
    norm: Any = None if statistic is None else _first_of(statistic).args[0]
    return (default if norm.args[-1] is None else norm.args[-1]) if norm else 0.0


def _normalize_logarithms(node: fx.Node, made: dict[str, fx.Node]) -> None:
    """Let the exponentials of a log_softmax that a node needs sum to 1.

    Args:
        node: A node of the backward graph.
        made: Name -> node of the forward graph.
    """
    x: Any
    if node.target is _aten._log_softmax_backward_data.default:
        x, dim = node.args[1:3]
    elif node.target is _aten.exp.default:
        x = node.args[0]
        first = _first_of(x)
        same = made.get(first.name)
        total = None if same is None else _log_of_sum(same)
        if total is None or first.target not in (same.target, same.name):  # type: ignore[union-attr]
            return
        while not (_has_shape(x, same) and _ordered(x) is first):  # type: ignore[arg-type]
            node, x = x, x.args[0]
        dim = total.args[1][0]  # type: ignore[index]
    else:
        return
    graph, dtype = node.graph, x.meta["val"].dtype
    wide = x if dtype.itemsize >= 4 else _add(graph, [x], _CASTS[0], x, torch.float32)
    exponentials = _add(graph, [wide], _aten.exp.default, wide)
    total = _add(graph, [exponentials], _aten.sum.dim_IntList, exponentials, [dim], True)
    excess = _add(graph, [total], _aten.log.default, total)
    size = _add(graph, [excess], _aten.abs.default, excess)
    is_beyond = _add(graph, [size], _aten.gt.Scalar, size, _ROUNDING)  # else there is no noise
    excess = _add(graph, [is_beyond], _aten.mul.Tensor, excess, is_beyond)
    counts = _add(graph, [wide], _aten.gt.Scalar, wide, bounds_of(LOG_SOFTMAX, torch.float32)[0])
    excess = _add(graph, [excess, counts], _aten.mul.Tensor, counts, excess)
    found = _add(graph, [excess], _aten.sub.Tensor, wide, excess)  # in the strides of the first
    form = found if wide is x else _add(graph, [found], _CASTS[0], found, dtype)
    for each in {wide, found, form}:  # who looks for divisions goes from x to the node
        each.meta.pop(_LIMIT, None)
    node.replace_input_with(x, form)


def softmax_dim(node: fx.Node) -> int | None:
    """Return the dimension of a softmax if a node is the exponential of a log_softmax."""
    x = _argument(node, _aten.exp.default)
    total = None if x is None else _log_of_sum(_ordered(x))
    if x is None or total is None or not _has_shape(x, _ordered(x)):
        return None
    return int(total.args[1][0])  # type: ignore[index, arg-type]


def _log_of_sum(node: fx.Node) -> fx.Node | None:
    """Return the sum of exponentials if a node is x - log(sum(exp(x))) over one dimension."""
    x, log = (*node.args, None, None)[:2] if node.target is _aten.sub.Tensor else (None, None)
    total = _argument(log, _aten.log.default)
    exponential = _argument(total, _aten.sum.dim_IntList)
    if total is None or _argument(exponential, _aten.exp.default) is not x or not _has_dims(total):
        return None
    return total if len(total.args[1]) == 1 else None  # type: ignore[arg-type]


class _Again:
    """What a backward graph reads and computes again of a forward graph.

    Args:
        forward: The forward graph.
        backward: The backward graph.
    """

    def __init__(self, forward: fx.Graph, backward: fx.Graph) -> None:
        self._made = {node.name: node for node in forward.nodes}
        # of the elements of a forward node in their order, in any shape or type
        self._forms: dict[str, list[fx.Node]] = {}
        for node in backward.nodes:
            if (name := self._elements(node)) is not None:
                self._forms.setdefault(name, []).append(node)

    def limit(self, norm: _Norm) -> None:
        """Limit what the backward of a norm reads."""
        scale = self._statistic(norm.scale, norm)
        if scale is None:
            return
        if norm.mean is None:
            for rows in self._same(norm.x):
                _Limited(rows, scale, None, norm).replace(list(rows.users))
            return
        centered = self._centered(norm)
        for rows in centered:
            _Limited(rows, scale, None, norm).replace(list(rows.users))
        mean = None if centered else self._statistic(norm.mean, norm)
        forms = self._forms_of(norm.x)
        found = next((each for each in forms if _is_like(each, norm.x)), None)
        if mean is not None and found is not None:  # as group norms, which read x itself
            _hoist(found, forms[0])
            limited = _Limited(found, scale, mean, norm)
            for form in forms:
                limited.replace([user for user in form.users if _is_product(user)], form)

    def _elements(self, node: fx.Node) -> str | None:
        """Return the name of the node whose elements a node has, in the same order.

        Returns:
            None if a node of the backward graph has nothing of the forward graph.
        """
        of_forward = self._made.get(node.name) is node
        while True:
            same = self._made.get(node.name)
            if not of_forward and same is not None and node.target in (same.target, same.name):
                node, of_forward = same, True
            if node.target not in _IN_ORDER:
                return node.name if of_forward else None
            node = node.args[0]  # type: ignore[assignment]

    def _forms_of(self, node: fx.Node) -> list[fx.Node]:
        """Return what has the elements of a forward node in their order, in any shape or type."""
        return self._forms.get(self._elements(node) or "", [])

    def _same(self, node: fx.Node) -> list[fx.Node]:
        """Return what has the elements of a forward node in its shape, in any type."""
        return [form for form in self._forms_of(node) if _has_shape(form, node)]

    def _centered(self, norm: _Norm) -> list[fx.Node]:
        """Return what is x - mean."""
        assert norm.mean is not None
        xs, means = set(self._same(norm.x)), set(self._forms_of(norm.mean))
        again = [
            user
            for x in xs
            for user in x.users
            if user.target is _aten.sub.Tensor and user.args[0] in xs and user.args[1] in means
        ]
        saved = [
            each
            for user in norm.x.users
            if user.target is _aten.sub.Tensor and user.args == (norm.x, norm.mean)
            for each in self._same(user)
            if each.op == "placeholder"
        ]
        return list(dict.fromkeys(again + saved))

    def _statistic(self, node: fx.Node, norm: _Norm) -> fx.Node | None:
        """Return a statistic of rows in the shape that it has beside them."""
        size = len(norm.x.meta["val"].shape) - len(norm.dims)
        for each in self._forms_of(node):
            if _is_like(each, node):
                return each
            if each.meta["val"].dim() == size:
                for dim in norm.dims:
                    each = _add(each.graph, [each], _aten.unsqueeze.default, each, dim)
                return each
        return None


class _Limited:
    """Rows with a limited mean square.

    Args:
        rows: The rows.
        scale: That of the norm.
        mean: Their mean, or None if it is subtracted from them.
        norm: The norm.
    """

    def __init__(self, rows: fx.Node, scale: fx.Node, mean: fx.Node | None, norm: _Norm) -> None:
        self._graph, self._rows = rows.graph, rows
        self._last = [rows, scale, *([] if mean is None else [mean])]
        centered = rows if mean is None else self._add(_aten.sub.Tensor, rows, mean)
        normalized = self._add(_aten.mul.Tensor, centered, scale)
        square = self._add(_aten.mul.Tensor, normalized, normalized)
        found = self._add(_aten.mean.dim, square, norm.dims, True)
        share = self._add(_aten.mul.Tensor, self._add(_aten.mul.Tensor, scale, scale), -norm.eps)
        exact = self._add(_aten.clamp_min.default, self._add(_aten.add.Tensor, share, 1), LEAST)
        most = self._add(_aten.mul.Tensor, exact, MOST)
        excess = self._add(_aten.clamp_min.default, self._add(_aten.div.Tensor, found, most), 1)
        limited = self._add(_aten.mul.Tensor, centered, self._add(_aten.rsqrt.default, excess))
        if mean is not None:
            limited = self._add(_aten.add.Tensor, limited, mean)
        if limited.meta["val"].dtype != rows.meta["val"].dtype:
            rows = self._add(_CASTS[0], rows, limited.meta["val"].dtype)
        # Rows without noise keep their bits.
        is_beyond = self._add(_aten.gt.Scalar, excess, 1 + _ROUNDING)
        self._found = self._add(_aten.where.self, is_beyond, limited, rows)
        del self._found.meta[_LIMIT]

    def _add(self, target: Any, *arguments: Any) -> fx.Node:
        made = _add(self._graph, self._last, target, *arguments)
        self._last = [made]
        return made

    def replace(self, users: list[fx.Node], form: fx.Node | None = None) -> None:
        """Let users read the limited rows, in the shape and type of a form of the rows."""
        users = [user for user in users if self._last[0] < user]
        form = self._rows if form is None else form
        if not users:
            return
        found = self._found
        shape, dtype = form.meta["val"].shape, form.meta["val"].dtype
        if _sizes(form.meta["val"]) != _sizes(self._rows.meta["val"]):
            sizes = [
                self._add(_aten.sym_size.int, form, i) if isinstance(n, SymInt) else n
                for i, n in enumerate(shape)
            ]
            found = self._add(_aten.reshape.default, found, sizes)
        if dtype != found.meta["val"].dtype:
            found = self._add(torch.ops.prims.convert_element_type.default, found, dtype)
        found.meta.pop(_LIMIT, None)
        for user in users:
            user.replace_input_with(form, found)


def _add(graph: fx.Graph, after: list[fx.Node], target: Any, *arguments: Any) -> fx.Node:
    """Add a call behind nodes."""
    with graph.inserting_after(past_inputs(max(after))):
        made = graph.call_function(target, arguments)
    given = fx.node.map_arg(arguments, lambda node: node.meta["val"])
    made.meta = {"val": target(*given), _LIMIT: True}
    return made


def _hoist(node: fx.Node, first: fx.Node) -> None:
    """Move a view of a node, and the sizes that it needs, to where that is made."""
    if first < node and node.op != "placeholder":
        for each in node.all_input_nodes:
            _hoist(each, first)
        past_inputs(max(first, *node.all_input_nodes)).append(node)


def _norms_of(node: fx.Node) -> Iterator[_Norm]:
    """Yield the norm of which a node is the rsqrt(variance + eps)."""
    total = _argument(node, _aten.rsqrt.default)
    variance = _argument(total, *_SUMS)
    if total is None or variance is None or not isinstance(total.args[1], float | int):
        return
    made: Any = variance
    if variance.target is operator.getitem and variance.args[1] == 0:
        made = variance.args[0]
    if made.target not in (_aten.var_mean.correction, _aten.mean.dim) or not _has_dims(made):
        return
    x, mean = made.args[0], None
    if made is not variance:
        mean = next((user for user in made.users if user.args == (made, 1)), None)
        if mean is None:
            return
    elif x.target is _aten.pow.Tensor_Scalar and x.args[1] == 2:
        x = x.args[0]
    elif x.target is _aten.mul.Tensor and x.args[0] is x.args[1]:
        x = x.args[0]
    else:
        return
    shape = x.meta["val"].shape
    dims = sorted(dim % len(shape) for dim in made.args[1])
    yield _Norm(x, mean, node, float(total.args[1]), dims)


def _has_dims(node: fx.Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], list | tuple)


def _argument(node: Any, *targets: object) -> fx.Node | None:
    """Return the first argument of a node if that has one of some targets."""
    if not isinstance(node, fx.Node) or node.target not in targets:
        return None
    found = node.args[0]
    return found if isinstance(found, fx.Node) else None


def _first_of(node: fx.Node) -> fx.Node:
    """Return the node of which a node is a view or another type."""
    while node.target in _CASTS or getattr(node.target, "is_view", False):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _ordered(node: fx.Node) -> fx.Node:
    """Return the node whose elements a node has in the same order; a transposed one has not."""
    while node.target in _IN_ORDER:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _has_shape(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have tensors of one shape."""
    a = node.meta.get("val")
    return isinstance(a, Tensor) and _sizes(a) == _sizes(other.meta["val"])


def _is_like(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes have tensors of one shape and type."""
    return _has_shape(node, other) and node.meta["val"].dtype == other.meta["val"].dtype


def _sizes(x: Tensor) -> list[str]:
    return [str(size) for size in x.shape]  # to compare symbols themselves would be a guard


def _is_product(node: fx.Node) -> bool:
    return node.target is _aten.mul.Tensor
