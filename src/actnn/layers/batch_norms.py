"""Batch norms whose input may have few bits: the projection of their backward is corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from actnn.saving.active import innermost_step, step_for
from actnn.saving.module_classes import Swapped

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_LEAST = 1e-6  # of the variance of a channel that is constant, in terms of eps
_TINY = 1e-30  # added to a variance: of 0, there is no 1 / deviation


class _Call(NamedTuple):
    """The arguments of `torch.nn.functional.batch_norm`."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, call: _Call
    ) -> Tensor:
        y, mean, inverse, _, _ = torch._batch_norm_impl_index(
            x,
            weight,
            bias,
            call.running_mean,
            call.running_var,
            True,
            call.momentum,
            call.eps,
            torch.backends.cudnn.enabled,
        )
        ctx.eps = call.eps
        ctx.save_for_backward(x, mean, inverse, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse, weight = ctx.saved_tensors
        # In terms of the input: variance of the decoded one around the exact mean, over the exact
        # variance.
        variance, center = _moments(x)
        mean, inverse = mean.to(center.dtype), inverse.to(center.dtype)
        off = center.sub_(mean)
        variance = torch.addcmul(variance, off, off)
        exact = inverse.pow(-2).sub_(ctx.eps).clamp_(min=_LEAST * ctx.eps)
        factor = variance.div_(exact).clamp_(min=1)
        # The kernel has the square of 1 / deviation in the term to correct, and 1 / deviation and
        # the weight as factors of all.
        scaled = factor if weight is None else weight * factor
        dx, dweight, dbias = _aten.native_batch_norm_backward(
            dy.contiguous(memory_format=_format(x)),
            x,
            scaled,
            None,
            None,
            mean,
            inverse / factor,
            True,
            ctx.eps,
            [True, weight is not None, ctx.needs_input_grad[2]],
        )
        return dx, dweight * factor if weight is not None else None, dbias, None


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return variance and mean of each channel."""
    if x.is_cuda:
        mean, inverse = torch.batch_norm_stats(x, _TINY)
        return inverse.pow_(-2), mean
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x.float() if x.dtype in _HALF else x, dims, correction=0)
    return variance, mean


def _format(x: Tensor) -> torch.memory_format:
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


class _Corrected(TorchFunctionMode):
    """Runs batch norms in training with `_BatchNorm`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.batch_norm:
            call = _Call(*args, **(kwargs or {}))
            x = call.input
            step = step_for(x) if call.training else None
            if step is not None and step.rounds(x) and x.numel() > x.shape[1]:
                return _BatchNorm.apply(x, call.weight, call.bias, call)
        return func(*args, **(kwargs or {}))


class BatchNorm(Swapped):
    """A batch norm, also of a class that is made from one and does more."""

    def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Any:
        """Return the result of the module's own forward."""
        step, run = innermost_step(), super().forward  # type: ignore[misc]
        adaptive = None if step is None else step.saving.adaptive
        if adaptive is None or not adaptive.corrects or step_for(x) is None:
            return run(x, *arguments, **named)
        with _Corrected():
            return run(x, *arguments, **named)
