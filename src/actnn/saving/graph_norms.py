"""Norms in the graphs of AOTAutograd, whose backward normalizes decoded numbers again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_SUMS = _aten.add.Tensor, _aten.add.Scalar
_LIMIT = "actnn_limit"


def limit_normalized(forward: fx.Graph, backward: fx.Graph) -> None:
    """Scale rows that a backward graph normalizes again to what exact rows have at most.

    That is a mean square of 1 after the norm. A row of almost equal numbers has a tiny deviation,
    by which backward divides the noise of codes. Batch norms are left as they are: their rows are
    long and rarely without variance, and a further sum over them takes time.

    Args:
        forward: The forward graph.
        backward: The backward graph; what it reads or computes again has the names of the forward
            graph.
    """
    again = {node.name: node for node in backward.nodes}
    for rows, scale, dims in [found for node in forward.nodes if (found := _norm_of(node))]:
        read, by = again.get(rows.name), again.get(scale.name)
        if read is not None and by is not None and read.target in (rows.target, rows.name):
            _limit(read, by, dims)


def is_limit(node: fx.Node) -> bool:
    """Whether a node is a part of the scale of `limit_normalized`."""
    return _LIMIT in node.meta


def _limit(rows: fx.Node, scale: fx.Node, dims: list[int]) -> None:
    users = list(rows.users)
    after = max(rows, scale)
    if after.op == "placeholder":
        after = next(node for node in reversed(rows.graph.nodes) if node.op == "placeholder")
    if any(user < after for user in users):
        return

    def add(target: Any, *arguments: Any) -> fx.Node:
        nonlocal after
        with rows.graph.inserting_after(after):
            after = rows.graph.call_function(target, arguments)
        values = [each.meta["val"] if isinstance(each, fx.Node) else each for each in arguments]
        after.meta = {"val": target(*values), _LIMIT: True}
        return after

    normalized = add(_aten.mul.Tensor, rows, scale)
    square = add(_aten.mean.dim, add(_aten.mul.Tensor, normalized, normalized), dims, True)
    factor = add(_aten.rsqrt.default, add(_aten.clamp_min.default, square, 1.0))
    limited = add(_aten.mul.Tensor, rows, factor)
    del limited.meta[_LIMIT]
    for user in users:
        user.replace_input_with(rows, limited)


def _norm_of(node: fx.Node) -> tuple[fx.Node, fx.Node, list[int]] | None:
    """Return the rows, their scale and dimensions if a node is (x - mean) * rsqrt(variance)."""
    if node.target is not _aten.mul.Tensor:
        return None
    for rows, scale in (node.args[:2], node.args[1::-1]):
        found = _variance_of(scale)
        if found is None or not isinstance(rows, fx.Node):
            continue
        x, mean, dims = found
        centered = rows.target is _aten.sub.Tensor and rows.args[0] is x
        if rows is x or (centered and _is_mean(rows.args[1], mean)):
            size = x.meta["val"].dim()
            dims = [dim % size for dim in dims]
            return None if 0 in dims else (rows, scale, dims)  # type: ignore[return-value]
    return None


def _variance_of(scale: Any) -> tuple[fx.Node, fx.Node | None, list[int]] | None:
    """Return x, what made its mean and the dimensions if a node is rsqrt(variance(x) + eps)."""
    variance = _argument(_argument(scale, _aten.rsqrt.default), *_SUMS)
    if variance is None:
        return None
    if variance.target is operator.getitem and variance.args[1] == 0:
        made: Any = variance.args[0]
        if made.target is _aten.var_mean.correction and _has_dims(made):
            return made.args[0], made, made.args[1]
    power = _argument(variance, _aten.mean.dim)
    if power is not None and _has_dims(variance):
        square = power.target is _aten.pow.Tensor_Scalar and power.args[1] == 2
        square |= power.target is _aten.mul.Tensor and power.args[0] is power.args[1]
        if square:
            return power.args[0], None, variance.args[1]  # type: ignore[return-value]
    return None


def _has_dims(node: fx.Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], list | tuple)


def _argument(node: Any, *targets: object) -> fx.Node | None:
    """Return the first argument of a node if that has one of some targets."""
    if not isinstance(node, fx.Node) or node.target not in targets:
        return None
    found = node.args[0]
    return found if isinstance(found, fx.Node) else None


def _is_mean(node: Any, made: fx.Node | None) -> bool:
    """Whether a node is the mean that `var_mean` returns."""
    return isinstance(node, fx.Node) and node.target is operator.getitem and node.args == (made, 1)
