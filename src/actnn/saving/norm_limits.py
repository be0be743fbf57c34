"""Norms whose backward normalizes decoded numbers again, operation by operation.

`graph_norms` does the same in compiled code. A log_softmax normalizes, too: see `LOG_SOFTMAX`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor

from actnn.saving.cuda import executor as cuda
from actnn.saving.cuda.executor import Limits, RowSizes
from actnn.saving.exclusions import bounds_of

LEAST = 1e-6
"""The least mean square of an exact row after a norm: it is known to the precision of float32."""
MOST = 2.0
"""By how much the mean square of a row may exceed that of an exact one if nothing else is known.

Noise is then as large as the row. That of 2 bits is smaller where all rows have the same variance.
"""
STATISTIC = "statistic of a norm"  # the reason in records
STATISTICS = frozenset({"NativeGroupNormBackward0", "FusedRmsNormBackward0"})
"""Nodes of which all results but the first are statistics that have a gradient."""
LOG_SOFTMAX = "LogSoftmaxBackward0"
"""Its decoded result is normalized again, so that the exponentials of a row sum to 1.

The gradient of a confident prediction is 1 - p, which is less than the noise of p. Made from the
others, it has the relative error of theirs.
"""
_RUN = 32  # groups of codes are a multiple of it
_PART = 1 << 24  # elements that are normalized at once
_Shape = tuple[tuple[int, ...], list[int], float]


class _Norm(NamedTuple):
    """A kind of norm.

    Attributes:
        settings: Returns what a node says about its rows, hashable.
        rows: Returns the shape of x that has the dimensions of a row, these dimensions, and what is
            added to the variance (0 if it is not known), from the shape of x and the settings; None
            if nothing is normalized.
        has_mean: Whether the mean of a row is subtracted.
    """

    settings: Callable[[Any], Any]
    rows: Callable[[Size, Any], _Shape | None]
    has_mean: bool = True

    def statistics(self, node: Any) -> tuple[Tensor | None, Tensor]:
        """Return mean and 1 / sqrt(variance + eps) of each row. The node may hold them as codes."""
        if self.has_mean:
            return node._saved_result1, node._saved_result2
        return None, node._saved_result1


def _rows_of_groups(shape: Size, settings: Any) -> _Shape | None:
    groups, eps = settings
    if len(shape) < 2:
        return None
    return (shape[0], groups, shape[1] // groups, *shape[2:]), list(range(2, len(shape) + 1)), eps


def _dimensions(node: Any) -> tuple[int, float]:
    """Return how many dimensions a node has normalized. It does not know eps."""
    return len(node._saved_normalized_shape), 0.0


def _last_rows(shape: Size, settings: Any) -> _Shape:
    normalized, eps = settings
    return tuple(shape), list(range(len(shape) - normalized, len(shape))), eps


def _rows_of_channels(shape: Size, settings: Any) -> _Shape | None:
    """Return the rows of a batch norm; instance norms are batch norms of one sample."""
    training, eps = settings
    if len(shape) < 2 or not training:
        return None
    return tuple(shape), [0, *range(2, len(shape))], eps


_BATCH = _Norm(
    lambda node: (
        getattr(node, "_saved_training", True),
        node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon,
    ),
    _rows_of_channels,
)
NORMS: dict[str, _Norm] = {
    "NativeGroupNormBackward0": _Norm(
        lambda node: (node._saved_group, node._saved_eps), _rows_of_groups
    ),
    "NativeLayerNormBackward0": _Norm(_dimensions, _last_rows),
    "FusedRmsNormBackward0": _Norm(_dimensions, _last_rows, False),
    **dict.fromkeys(
        (f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen")), _BATCH
    ),
}


class _Rows(NamedTuple):
    """The rows of a tensor.

    Attributes:
        shape: One of the tensor that has the dimensions of a row.
        dims: These dimensions, in order.
        number: How many there are.
        limits: The limit of their mean square.
        sizes: Those of the tensor for the kernels; None if it is another one.
    """

    shape: tuple[int, ...]
    dims: list[int]
    number: int
    limits: Limits
    sizes: RowSizes | None

    def beside(self, statistic: Tensor) -> Tensor:
        """Return a statistic of each row in a shape that broadcasts to the tensor."""
        dims = self.dims
        return statistic.view([1 if i in dims else n for i, n in enumerate(self.shape)])


def limit_normalized(node: Any, x: Tensor, codes: Any, groups: int, shape: Size) -> Tensor:
    """Return a decoded tensor that the node that runs has saved, as it needs it.

    A row of almost equal numbers has a tiny deviation, by which the backward of a norm divides the
    noise of codes. So the mean square of rows has a limit, in terms of that of exact rows after the
    norm, variance / (variance + eps) = 1 - eps scale^2.

    A log_softmax gets a result whose exponentials sum to 1.

    The tensor may be changed: noise of a row without variance is of no use to others, either.

    Args:
        node: The node, one of `NORMS` or of a log_softmax.
        x: The tensor.
        codes: Its codes and their parameters, in one block or as a pair.
        groups: Of its codes.
        shape: Of the tensor that has the codes, of which x may be a view.
    """
    name = node.name()
    if name == LOG_SOFTMAX:
        _normalize_logarithms(x, _signed(node._saved_dim))
        return x
    norm = NORMS.get(name)
    if norm is None or not x.numel():
        return x
    rows = _limited_rows(norm, norm.settings(node), x.shape, x.stride(), groups, shape.numel())
    if rows is None:
        return x
    mean, scale = norm.statistics(node)
    if scale.numel() != rows.number:
        return x
    parameters = codes[-4 * groups :] if isinstance(codes, Tensor) else codes[1]
    if rows.sizes is not None and cuda.available(x):
        mean = None if mean is None else mean.float().contiguous()
        scale = scale.float().contiguous()
        cuda.limit_rows(x, mean, scale, parameters, groups, rows.sizes, rows.limits)
        return x
    eps, most, least = rows.limits
    scale = rows.beside(scale.float())
    if x.device.type == "cpu" and eps and _are_above_noise(rows, scale, parameters):
        return x  # other devices would have to wait for the answer
    given = x.view(rows.shape)
    square, center = _moments(given, rows.dims)
    mean = torch.zeros_like(center) if mean is None else rows.beside(mean).to(center.dtype)
    square = torch.addcmul(square, center - mean, center - mean).mul_(scale.square())
    exact = (1 - eps * scale.square()).clamp_(min=least)
    factor = square.div_(exact.mul_(most)).clamp_(min=1).rsqrt_()
    found = torch.empty_like(given)
    torch.lerp(mean.to(x.dtype), given, factor.to(x.dtype), out=found)
    return found.view(x.shape)


def _normalize_logarithms(x: Tensor, dim: int) -> None:
    """Let the exponentials of a tensor sum to 1; those that are 0 stay 0.

    Logits of language models are the largest tensors of a step. So this goes part by part.
    """
    vanished = bounds_of(LOG_SOFTMAX, x.dtype)[0]
    rows = x.movedim(dim, -1) if x.dim() > 1 else x.view(1, -1)
    for part in rows.split(max(1, rows.shape[0] * _PART // max(1, rows.numel()))):
        part.copy_(torch.where(part > vanished, part.log_softmax(-1), vanished))


def _signed(dim: int) -> int:
    """Return a dimension that a node shows as an unsigned number."""
    return dim - (1 << 64) if dim >= 1 << 63 else dim


@lru_cache(maxsize=4096)
def _limited_rows(
    norm: _Norm,
    settings: Any,
    shape: Size,
    strides: tuple[int, ...],
    groups: int,
    elements: int,
) -> _Rows | None:
    """Return the rows of a tensor; None if they need no limit.

    Args:
        norm: The kind of norm.
        settings: Those of its node.
        shape: Of the tensor.
        strides: Of the tensor.
        groups: Of the codes.
        elements: That have these codes.
    """
    found = norm.rows(shape, settings)
    if found is None:
        return None
    split, dims, eps = found
    x = torch.empty_strided(shape, strides, device="meta").view(split)
    if _have_own_groups(x, dims, groups, elements):
        return None
    row = math.prod(x.shape[dim] for dim in dims)
    limits = Limits(eps, _most_of(row, eps), LEAST)
    return _Rows(split, dims, x.numel() // row, limits, _sizes_of(x, dims))


def _most_of(elements: int, eps: float) -> float:
    """Return by how much the mean square of a decoded row may exceed that of an exact one.

    Backward subtracts x mean(g x) from the gradient g of the normalized row x. Noise n has a mean
    of 0, so that most of it averages out in the gradients of weights; a row that is scaled down
    makes them smaller. What remains is mean(g n), which all elements of a row share: in a row with
    this mean square, x mean(g n) is as large as g.

    Args:
        elements: Of a row.
        eps: What is added to the variance; 0 if it is not known: the row may have none at all.
    """
    return math.sqrt(elements) if eps else MOST


def _have_own_groups(x: Tensor, dims: list[int], groups: int, elements: int) -> bool:
    """Whether no group of codes has numbers of two rows, so that its step suits the row."""
    if x.numel() == elements == math.prod(x.shape[dim] for dim in dims):
        return True
    size, rest = divmod(elements, groups)
    # With fewer groups, the last one may be shorter, and the size of others is not known.
    known = not rest and size % _RUN == 0 and groups > size // _RUN + 1
    run = 1  # elements of a row that are neighbours
    for dim in reversed(range(x.dim())):
        if dim not in dims:
            break
        run *= x.shape[dim]
    return known and x.is_contiguous() and x.numel() == elements and run % size == 0


def _are_by_channel(x: Tensor, dims: list[int]) -> bool:
    """Whether the rows of a tensor are its channels."""
    return x.dim() > 1 and dims == [0, *range(2, x.dim())]


def _sizes_of(x: Tensor, dims: list[int]) -> RowSizes | None:
    """Return the sizes of a tensor for the kernels; None if it is not in their order in memory."""
    by_channel = _are_by_channel(x, dims)
    if by_channel and x.movedim(1, -1).is_contiguous():
        return RowSizes(x.numel() // x.shape[1], x.shape[1], 1)
    if not x.is_contiguous():
        return None
    outer = x.shape[0] if by_channel else 1
    inner = math.prod(x.shape[dim] for dim in dims) // outer
    return RowSizes(outer, x.numel() // (outer * inner), inner)


def _are_above_noise(rows: _Rows, scale: Tensor, parameters: Tensor) -> bool:
    """Whether the variance of all rows is such that noise leaves them below the limit.

    The variance of stochastic rounding is a quarter of the squared step of codes at most.
    """
    step = parameters.view(torch.bfloat16).view(-1, 2)[:, 1].abs().amax().float()  # the sign marks
    least = (scale.pow(-2) - rows.limits.eps).amin()
    return bool(4 * (rows.limits.most - 1) * least >= step * step)


def _moments(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Return variance and mean of each row."""
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if x.device.type != "cpu" or not _are_by_channel(x, dims):
        return torch.var_mean(x, dims, correction=0, keepdim=True)
    # Faster than var_mean.
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    return variance.view(shape), mean.view(shape)
