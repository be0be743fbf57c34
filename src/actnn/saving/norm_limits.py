"""Norms whose backward normalizes decoded numbers again, operation by operation.

`graph_norms` does the same in compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

LEAST = 1e-6
"""The least mean square of an exact row after a norm: it is known to the precision of float32."""
STATISTIC = "statistic of a norm"  # the reason in records
STATISTICS = frozenset({"NativeGroupNormBackward0"})
"""Nodes of which all results but the first are statistics that have a gradient."""
_RUN = 32  # groups of codes are a multiple of it
_INSIDE = local()  # what norms save may itself be codes, which are decoded meanwhile


class _Rows(NamedTuple):
    """What a norm normalizes.

    Attributes:
        x: Its input, in a shape that has the dimensions of a row.
        dims: These dimensions.
        mean: The mean of each row, of the same number of dimensions; None if it is not subtracted.
        scale: 1 / sqrt(variance + eps), likewise.
        eps: What is added to the variance; 0 if it is not known.
    """

    x: Tensor
    dims: list[int]
    mean: Tensor | None
    scale: Tensor
    eps: float


def _of_group_norm(node: Any, x: Tensor) -> _Rows | None:
    if x.dim() < 2:
        return None
    grouped = x.unflatten(1, (node._saved_group, -1))
    shape = [*grouped.shape[:2], *(1 for _ in grouped.shape[2:])]
    mean, scale = (each.view(shape) for each in (node._saved_result1, node._saved_result2))
    return _Rows(grouped, list(range(2, grouped.dim())), mean, scale, node._saved_eps)


def _of_layer_norm(node: Any, x: Tensor) -> _Rows | None:
    dims = list(range(-len(node._saved_normalized_shape), 0))
    mean, scale = node._saved_result1, node._saved_result2
    return _Rows(x, dims, mean, scale, 0.0) if x.dim() == mean.dim() else None


def _of_rms_norm(node: Any, x: Tensor) -> _Rows | None:
    dims, scale = list(range(-len(node._saved_normalized_shape), 0)), node._saved_result1
    return _Rows(x, dims, None, scale, node._saved_eps or 0.0) if x.dim() == scale.dim() else None


def _of_instance_norm(node: Any, x: Tensor) -> _Rows | None:
    """Return the rows of a batch norm of one sample, which instance norms are.

    Others have long rows, rarely without variance, and a pass over them takes time.
    """
    if x.dim() < 2 or x.shape[0] != 1 or not getattr(node, "_saved_training", True):
        return None
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    mean, scale = (each.view(shape) for each in (node._saved_result1, node._saved_result2))
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    return _Rows(x, [0, *range(2, x.dim())], mean, scale, eps)


ROWS_OF: dict[str, Callable[[Any, Tensor], _Rows | None]] = {
    "NativeGroupNormBackward0": _of_group_norm,
    "NativeLayerNormBackward0": _of_layer_norm,
    "FusedRmsNormBackward0": _of_rms_norm,
    **dict.fromkeys(
        (f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen")), _of_instance_norm
    ),
}


def limit_normalized(x: Tensor, groups: int, shape: torch.Size) -> Tensor:
    """Return a decoded tensor as the node that runs needs it.

    If that is a norm, rows have at most the mean square of exact rows after the norm:
    variance / (variance + eps) = 1 - eps scale^2. A row of almost equal numbers has a tiny
    deviation, by which backward divides the noise of codes.

    Args:
        x: The tensor.
        groups: Of its codes.
        shape: Of the tensor that has the codes, of which x may be a view.
    """
    node: Any = torch._C._current_autograd_node()
    rows_of = None if node is None else ROWS_OF.get(node.name())
    if rows_of is None or not x.numel() or getattr(_INSIDE, "now", False):
        return x
    _INSIDE.now = True
    try:
        rows = rows_of(node, x)
    finally:
        _INSIDE.now = False
    if rows is None or _have_own_groups(rows, groups, shape.numel()):
        return x
    given, scale = rows.x, rows.scale.float()
    wide = given if given.dtype in (torch.float32, torch.float64) else given.float()
    square, center = torch.var_mean(wide, rows.dims, correction=0, keepdim=True)
    mean = torch.zeros_like(center) if rows.mean is None else rows.mean.to(center.dtype)
    square = torch.addcmul(square, center - mean, center - mean).mul_(scale.square())
    exact = (1 - rows.eps * scale.square()).clamp_(min=LEAST)
    factor = (square / exact).clamp_(min=1).rsqrt_()
    found = torch.empty_like(given)
    torch.lerp(mean.to(x.dtype), given, factor.to(x.dtype), out=found)
    return found.view(x.shape)


def _have_own_groups(rows: _Rows, groups: int, elements: int) -> bool:
    """Whether no group of codes has numbers of two rows, so that its step suits the row."""
    x = rows.x
    size, rest = divmod(elements, groups)
    # With fewer groups, the last one may be shorter, and the size of others is not known.
    known = not rest and size % _RUN == 0 and groups > size // _RUN + 1
    row = math.prod(x.shape[dim] for dim in rows.dims)
    return known and x.is_contiguous() and x.numel() == elements and row % size == 0
