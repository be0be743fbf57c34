"""Norms whose backward normalizes decoded numbers again, operation by operation.

`graph_norms` does the same in compiled code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actnn.saving.cuda import executor as cuda

LEAST = 1e-6
"""The least mean square of an exact row after a norm: it is known to the precision of float32."""
MOST = 2.0
"""By how much the mean square of a row may exceed that of an exact one if nothing else is known.

Noise is then as large as the row. That of 2 bits is smaller where all rows have the same variance.
"""
STATISTIC = "statistic of a norm"  # the reason in records
STATISTICS = frozenset({"NativeGroupNormBackward0"})
"""Nodes of which all results but the first are statistics that have a gradient."""
_RUN = 32  # groups of codes are a multiple of it


class _Rows(NamedTuple):
    """What a norm normalizes.

    Attributes:
        x: Its input, in a shape that has the dimensions of a row.
        dims: These dimensions.
        eps: What is added to the variance; 0 if it is not known.
        statistics: Returns the mean of each row, None if it is not subtracted, and
            1 / sqrt(variance + eps); both broadcast to x. The node may hold them as codes.
    """

    x: Tensor
    dims: list[int]
    eps: float
    statistics: Callable[[], tuple[Tensor | None, Tensor]]

    @property
    def most(self) -> float:
        """By how much the mean square of a decoded row may exceed that of an exact one.

        Backward subtracts x mean(g x) from the gradient g of the normalized row x. Noise n has a
        mean of 0, so that most of it averages out in the gradients of weights; a row that is scaled
        down makes them smaller. What remains is mean(g n), which all elements of a row share: in
        a row with this mean square, x mean(g n) is as large as g.
        """
        if not self.eps:  # it is not known, and the row may have no variance at all
            return MOST
        return math.sqrt(math.prod(self.x.shape[dim] for dim in self.dims))


def _of_group_norm(node: Any, x: Tensor) -> _Rows | None:
    if x.dim() < 2:
        return None
    grouped = x.unflatten(1, (node._saved_group, -1))
    shape = [*grouped.shape[:2], *(1 for _ in grouped.shape[2:])]
    dims = list(range(2, grouped.dim()))
    return _Rows(
        grouped,
        dims,
        node._saved_eps,
        lambda: (node._saved_result1.view(shape), node._saved_result2.view(shape)),
    )


def _of_layer_norm(node: Any, x: Tensor) -> _Rows:
    dims = list(range(-len(node._saved_normalized_shape), 0))
    return _Rows(x, dims, 0.0, lambda: (node._saved_result1, node._saved_result2))


def _of_rms_norm(node: Any, x: Tensor) -> _Rows:
    dims = list(range(-len(node._saved_normalized_shape), 0))
    return _Rows(x, dims, node._saved_eps or 0.0, lambda: (None, node._saved_result1))


def _of_batch_norm(node: Any, x: Tensor) -> _Rows | None:
    """Return the rows of a batch norm; instance norms are batch norms of one sample."""
    if x.dim() < 2 or not getattr(node, "_saved_training", True):
        return None
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    return _Rows(
        x,
        [0, *range(2, x.dim())],
        eps,
        lambda: (node._saved_result1.view(shape), node._saved_result2.view(shape)),
    )


ROWS_OF: dict[str, Callable[[Any, Tensor], _Rows | None]] = {
    "NativeGroupNormBackward0": _of_group_norm,
    "NativeLayerNormBackward0": _of_layer_norm,
    "FusedRmsNormBackward0": _of_rms_norm,
    **dict.fromkeys(
        (f"{kind}BatchNormBackward0" for kind in ("Native", "Cudnn", "Miopen")), _of_batch_norm
    ),
}


def limit_normalized(x: Tensor, codes: Any, groups: int, shape: torch.Size) -> Tensor:
    """Return a decoded tensor that the node that runs has saved, as it needs it.

    It may be changed: noise of a row without variance is of no use to others, either.

    A row of almost equal numbers has a tiny deviation, by which the backward of a norm divides the
    noise of codes. So the mean square of rows has a limit, in terms of that of exact rows after the
    norm, variance / (variance + eps) = 1 - eps scale^2.

    Args:
        x: The tensor.
        codes: Its codes and their parameters, in one block or as a pair.
        groups: Of its codes.
        shape: Of the tensor that has the codes, of which x may be a view.
    """
    node: Any = torch._C._current_autograd_node()
    rows_of = None if node is None else ROWS_OF.get(node.name())
    if rows_of is None or not x.numel():
        return x
    rows = rows_of(node, x)
    if rows is None or _have_own_groups(rows, groups, shape.numel()):
        return x
    mean, scale = rows.statistics()
    given = rows.x
    if scale.dim() != given.dim():
        return x
    scale = scale.float()
    parameters = codes[-4 * groups :] if isinstance(codes, Tensor) else codes[1]
    sizes = _sizes_of(rows) if cuda.available(x) else None
    if sizes is not None:
        mean = None if mean is None else mean.float().contiguous()
        limits = cuda.Limits(rows.eps, rows.most, LEAST)
        cuda.limit_rows(x, mean, scale.contiguous(), parameters, groups, sizes, limits)
        return x
    if x.device.type == "cpu" and rows.eps and _are_above_noise(rows, scale, parameters):
        return x  # other devices would have to wait for the answer
    square, center = _moments(rows)
    mean = torch.zeros_like(center) if mean is None else mean.to(center.dtype)
    square = torch.addcmul(square, center - mean, center - mean).mul_(scale.square())
    exact = (1 - rows.eps * scale.square()).clamp_(min=LEAST)
    factor = square.div_(exact.mul_(rows.most)).clamp_(min=1).rsqrt_()
    found = torch.empty_like(given)
    torch.lerp(mean.to(x.dtype), given, factor.to(x.dtype), out=found)
    return found.view(x.shape)


def _have_own_groups(rows: _Rows, groups: int, elements: int) -> bool:
    """Whether no group of codes has numbers of two rows, so that its step suits the row."""
    x = rows.x
    size, rest = divmod(elements, groups)
    # With fewer groups, the last one may be shorter, and the size of others is not known.
    known = not rest and size % _RUN == 0 and groups > size // _RUN + 1
    run = 1  # elements of a row that are neighbours
    for dim in reversed(range(x.dim())):
        if dim not in rows.dims and dim - x.dim() not in rows.dims:
            break
        run *= x.shape[dim]
    return known and x.is_contiguous() and x.numel() == elements and run % size == 0


def _are_above_noise(rows: _Rows, scale: Tensor, parameters: Tensor) -> bool:
    """Whether the variance of all rows is such that noise leaves them below `most`.

    The variance of stochastic rounding is a quarter of the squared step of codes at most.
    """
    step = parameters.view(torch.bfloat16).view(-1, 2)[:, 1].abs().amax().float()  # the sign marks
    least = (scale.pow(-2) - rows.eps).amin()
    return bool(4 * (rows.most - 1) * least >= step * step)


def _sizes_of(rows: _Rows) -> tuple[int, int, int] | None:
    """Return the sizes of a tensor that is (outer, rows, inner) in memory, for the kernels.

    The elements of a row are (outer, inner). None if it is another one.
    """
    x, dims = rows.x, rows.dims
    if dims[0] == 0 and x.movedim(1, -1).is_contiguous():
        return x.numel() // x.shape[1], x.shape[1], 1
    if not x.is_contiguous():
        return None
    inner = math.prod(x.shape[dim] for dim in dims if dim)
    outer = x.shape[0] if dims[0] == 0 else 1
    return outer, x.numel() // (outer * inner), inner


def _moments(rows: _Rows) -> tuple[Tensor, Tensor]:
    """Return variance and mean of each row."""
    x = rows.x if rows.x.dtype in (torch.float32, torch.float64) else rows.x.float()
    if rows.dims[0] != 0 or x.device.type != "cpu":
        return torch.var_mean(x, rows.dims, correction=0, keepdim=True)
    # Faster than var_mean.
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    shape = [1, -1, *(1 for _ in x.shape[2:])]
    return variance.view(shape), mean.view(shape)
