"""Layer and RMS norms whose tokens share groups keep codes of their normalized input.

Beside large tokens, a small one would vanish in the range of its group, and its norm would enlarge
the noise. A linear layer after a norm saves the norm's result: it is made again from the same
codes, by the norm's weight and bias, so that one tensor is held instead of two. Where tokens have
groups of their own, the norm's input is as good, and saves a pass over the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from actnn.saving.active import step_for
from actnn.saving.dense import is_dense
from actnn.saving.step import Step
from actnn.saving.swapping import Swapped

_aten = torch.ops.aten


class _Settings(NamedTuple):
    """What a norm normalizes: the last dimensions, by mean and deviation or by the latter alone."""

    shape: list[int]
    eps: float
    centred: bool


class _Normalization(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        run: Callable[[Tensor], Tensor],
        settings: _Settings,
        step: Step,
    ) -> Tensor:
        y = run(x)
        wide = x if x.dtype == y.dtype else x.to(y.dtype)
        normalized, mean, inverse = _normalized(wide, settings)
        step.promise(normalized, x, y, weight, bias)
        ctx.settings = settings
        ctx.save_for_backward(normalized, mean, inverse, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normalized, mean, inverse, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if weight is not None and weight.dtype != dy.dtype:
            weight = weight.to(dy.dtype)  # on a CPU, autocast leaves it in float32
        if mean is None:
            dx, dweight = _of_rms_norm(dy, normalized, inverse, weight, ctx.settings, needed[1])
            return dx, dweight, None, None, None, None
        # the input again, but for rounding
        x = torch.addcdiv(mean, normalized, inverse, out=torch.empty_like(normalized))
        shape, bias = ctx.settings.shape, weight  # of a bias only the shape matters
        dx, dweight, dbias = _aten.native_layer_norm_backward(
            dy, x, shape, mean, inverse, weight, bias, list(needed)
        )
        return dx, dweight, dbias, None, None, None


def _normalized(x: Tensor, settings: _Settings) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the normalized tensor, the mean if it is subtracted, and 1 / deviation."""
    if settings.centred:
        return torch.native_layer_norm(x, settings.shape, None, None, settings.eps)
    dims = tuple(range(-len(settings.shape), 0))
    wide = x if x.dtype == torch.float64 else x.float()
    inverse = wide.square().mean(dims, keepdim=True).add_(settings.eps).rsqrt_()
    return (wide * inverse).to(x.dtype), None, inverse


def _of_rms_norm(
    dy: Tensor,
    normalized: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    settings: _Settings,
    needed: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the input, and of the weight if needed."""
    dims = tuple(range(-len(settings.shape), 0))
    product = dy * normalized
    dweight = product.sum_to_size(settings.shape) if needed else None
    scaled = dy if weight is None else dy * weight
    mean = (product if weight is None else product * weight).mean(dims, keepdim=True)
    return torch.addcmul(scaled, normalized, mean, value=-1).mul_(inverse), dweight


class Normalization(Swapped):
    """nn.LayerNorm or nn.RMSNorm."""

    weight: Tensor | None
    normalized_shape: tuple[int, ...]
    eps: float | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the module's own forward."""
        step, run = step_for(x), super().forward  # type: ignore[misc]
        eps = self.eps
        if eps is None and x.dtype in (torch.float32, torch.float64):
            eps = torch.finfo(x.dtype).eps  # of other dtypes, versions of torch differ
        shares = math.prod(self.normalized_shape) % (step.saving.group if step else 1) != 0
        if step is None or eps is None or not shares or not is_dense(x) or not step.rounds(x):
            return run(x)  # type: ignore[no-any-return]
        bias = getattr(self, "bias", None)
        settings = _Settings(list(self.normalized_shape), eps, isinstance(self, nn.LayerNorm))
        return _Normalization.apply(x, self.weight, bias, run, settings, step)  # type: ignore[no-any-return]
