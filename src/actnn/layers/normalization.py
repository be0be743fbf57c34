"""Layer and RMS norms keep codes of their normalized input.

Beside large tokens, a small one would vanish in the range of its group, and its norm would enlarge
the noise. A linear layer after a norm saves the norm's result: it is made again from the same
codes, by the norm's weight and bias, so that one tensor is held instead of two. Where tokens have
groups of their own and bits are equal, the norm's input is as good, and saves a pass over the
tensor.

A norm is what has the result of one, whatever its class: those of other libraries, also of channels
before the last dimensions, are recognized by their values for a small input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from actnn.saving.active import step_for
from actnn.saving.dense import is_dense
from actnn.saving.module_classes import Swapped
from actnn.saving.step import Step

_aten = torch.ops.aten
# Errors of a module that does not take such an input: it is no norm of it.
_NOT_TAKEN = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)


class _Settings(NamedTuple):
    """What a norm normalizes.

    Attributes:
        shape: Of the weight: the last dimensions, or those from `axis` on.
        eps: What is added to the variance.
        centred: Whether the mean is subtracted.
        axis: -1, or 1 for channels that are not the last dimension.
        by_hand: Whether autograd sees its operations one by one, and saves several tensors.
    """

    shape: list[int]
    eps: float
    centred: bool
    axis: int = -1
    by_hand: bool = False


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
        normalized, mean, inverse = _normalized(wide.movedim(settings.axis, -1), settings)
        made = y if settings.axis == -1 else None
        step.promise(normalized, x, made, weight, bias)
        # bits that adapt may be so few that the projection must be corrected
        ctx.corrected = settings.centred and step.saving.adapts
        ctx.settings = settings
        ctx.save_for_backward(normalized, mean, inverse, weight)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normalized, mean, inverse, weight = ctx.saved_tensors
        settings, needed = ctx.settings, ctx.needs_input_grad[:3]
        if weight is not None and weight.dtype != dy.dtype:
            weight = weight.to(dy.dtype)  # on a CPU, autocast leaves it in float32
        dy = dy.movedim(settings.axis, -1)
        if mean is None or ctx.corrected:
            dx, dweight = _of_norm(
                dy, normalized, inverse, weight, settings, needed[1], ctx.corrected
            )
            dbias = dy.sum_to_size(settings.shape) if needed[2] else None
        else:
            # the input again, but for rounding
            x = torch.addcdiv(mean, normalized, inverse, out=torch.empty_like(normalized))
            bias = weight  # of a bias only the shape matters
            dx, dweight, dbias = _aten.native_layer_norm_backward(
                dy, x, settings.shape, mean, inverse, weight, bias, list(needed)
            )
        return dx.movedim(-1, settings.axis), dweight, dbias, None, None, None


def _normalized(x: Tensor, settings: _Settings) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the normalized tensor, the mean if it is subtracted, and 1 / deviation."""
    if settings.centred:
        return torch.native_layer_norm(x, settings.shape, None, None, settings.eps)
    dims = tuple(range(-len(settings.shape), 0))
    wide = x if x.dtype == torch.float64 else x.float()
    inverse = wide.square().mean(dims, keepdim=True).add_(settings.eps).rsqrt_()
    return (wide * inverse).to(x.dtype), None, inverse


def _of_norm(
    dy: Tensor,
    normalized: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    settings: _Settings,
    needed: bool,
    corrected: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the input, and of the weight if needed."""
    dims = tuple(range(-len(settings.shape), 0))
    dweight = (dy * normalized).sum_to_size(settings.shape) if needed else None
    scaled = dy if weight is None else dy * weight
    if settings.centred:
        scaled = scaled - scaled.mean(dims, keepdim=True)
    mean = (scaled * normalized).mean(dims, keepdim=True)
    if corrected:
        variance = normalized.float().var(dims, correction=0, keepdim=True)
        mean = mean / excess(variance, inverse, settings.eps).square().to(mean.dtype)
    return torch.addcmul(scaled, normalized, mean, value=-1).mul_(inverse), dweight


def excess(variance: Tensor, inverse: Tensor, eps: float) -> Tensor:
    """Return by which factor noise has enlarged the variance of a normalized tensor.

    A norm's backward subtracts x mean(g x). With noise e in x, the gain of x x^T is 1 + var(e)
    instead of 1, so that errors can grow from layer to layer: the term is divided by the square of
    this factor. RMS norms leave it: for a gradient that knows nothing of the noise, the term is
    right on average as it is, and what the gradients of a T5 have along x is so much that the bias
    doubles the error.

    Args:
        variance: That of the decoded tensor.
        inverse: 1 / deviation of the exact input.
        eps: What was added to its variance.
    """
    exact = (1 - eps * inverse.float().square()).clamp_(min=1e-6)
    return (variance / exact).clamp_(min=1)


class Normalization(Swapped):
    """nn.LayerNorm or nn.RMSNorm."""

    weight: Tensor | None
    normalized_shape: tuple[int, ...]
    eps: float | None

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the module's own forward."""
        step, run = step_for(x), super().forward  # type: ignore[misc]
        settings = _stated(self, x)
        if step is None or settings is None:
            return run(x)  # type: ignore[no-any-return]
        return _run(cast(nn.Module, self), x, run, settings, step)


def _stated(module: Any, x: Tensor) -> _Settings | None:
    """Return what nn.LayerNorm or nn.RMSNorm normalizes; None if only PyTorch knows."""
    eps = module.eps
    if eps is None and x.dtype in (torch.float32, torch.float64):
        eps = torch.finfo(x.dtype).eps  # of other dtypes, versions of torch differ
    if eps is None:
        return None
    return _Settings(list(module.normalized_shape), eps, isinstance(module, nn.LayerNorm))


def _run(
    module: nn.Module,
    x: Tensor,
    run: Callable[[Tensor], Tensor],
    settings: _Settings,
    step: Step,
) -> Tensor:
    """Run a norm; its backward is that of `_Normalization` where this is worth it."""
    worth = step.saving.adapts or _is_worth(settings, step.saving.group)
    if not worth or not is_dense(x) or not step.rounds(x):
        return run(x)
    bias = getattr(module, "bias", None)
    return _Normalization.apply(x, module.weight, bias, run, settings, step)  # type: ignore[no-any-return]


def _is_worth(settings: _Settings, group: int) -> bool:
    """Whether codes of the normalized input are better than codes of what the norm saves."""
    return settings.by_hand or math.prod(settings.shape) % group != 0


def statistics_of(
    module: nn.Module, mixin: type[Swapped] | None, x: Tensor, group: int = 256
) -> tuple[int, bool] | None:
    """Say what a module will hold beside codes of its normalized input, once it is compressed.

    Args:
        module: The module.
        mixin: Its class in front once it is compressed: `Normalization` or `Recognized`.
        x: Its input; of one without data only the shape, dtype and device matter.
        group: Elements of a group of codes.

    Returns:
        The number of statistics, and whether its result is made from the same codes; None if it
        holds what PyTorch does.
    """
    if mixin is Normalization:
        settings = _stated(module, x)
    else:
        with unset_fake_temporarily():
            settings = _recognized(module, module.forward, x)
        if settings is not None and x.shape[settings.axis] != settings.shape[0]:
            settings = None
    if settings is None or not _is_worth(settings, group) or not is_dense(x):
        return None
    rows = x.numel() // math.prod(settings.shape)
    return rows * (1 + settings.centred), settings.axis == -1


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module that is not of torch.nn has the parameters of a norm."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        not type(module).__module__.startswith("torch.nn.")
        and next(module.children(), None) is None
        and not any(True for _ in module.buffers(recurse=False))
        and set(parameters) in ({"weight"}, {"weight", "bias"})
        and len({tuple(each.shape) for each in parameters.values()}) == 1
        and parameters["weight"].ndim == 1
    )


class Recognized(Swapped):
    """A module that may be a norm; its first forward tells."""

    _actnn_norm: _Settings | None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Return the result of the module's own forward."""
        run = super().forward  # type: ignore[misc]
        x = arguments[0] if len(arguments) == 1 and not named else None
        step = step_for(x) if isinstance(x, Tensor) else None
        if step is None or x is None or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            return run(*arguments, **named)
        module = cast(nn.Module, self)
        if "_actnn_norm" not in module.__dict__:
            self._actnn_norm = _recognized(module, run, x)
        settings = self._actnn_norm
        if settings is None or x.shape[settings.axis] != settings.shape[0]:
            return run(x)
        return _run(module, x, run, settings, step)


def _recognized(module: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> _Settings | None:
    """Return what a module normalizes, if it has the values of a norm for random parameters."""
    kept, random = dict(module._parameters), torch.Generator().manual_seed(0)
    size = cast(Tensor, module.weight).numel()
    axes = [-1] if x.ndim > 1 and x.shape[-1] == size else []
    axes += [1] if x.ndim > 2 and x.shape[1] == size else []
    rates = {v for v in vars(module).values() if type(v) is float and 0 < v < 0.1}
    kinds = [
        _Settings([size], eps, centred, axis)
        for axis in axes
        for eps in sorted(rates)
        for centred in (True, False)
        if centred or kept.get("bias") is None
    ]

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(x.device)

    try:
        for name, each in kept.items():
            module._parameters[name] = None if each is None else nn.Parameter(drawn(size))
        weight, bias = module._parameters["weight"], module._parameters.get("bias")
        assert weight is not None
        plain = saved_tensors_hooks(lambda each: each, lambda each: each)  # no part of the step
        with torch.enable_grad(), torch.autocast(x.device.type, enabled=False), plain:
            for axis in axes:
                # so small that eps matters
                probe = drawn(*(2 for _ in x.shape[1:]), size).mul_(0.01) + 0.003
                try:
                    found = run(probe.movedim(-1, axis).requires_grad_())
                except _NOT_TAKEN:
                    continue
                if not isinstance(found, Tensor) or found.shape != probe.movedim(-1, axis).shape:
                    continue
                for kind in (each for each in kinds if each.axis == axis):
                    normalized = _normalized(probe, kind)[0].detach()
                    expected = normalized * weight + (0 if bias is None else bias)
                    close = torch.allclose(found.movedim(axis, -1), expected, 1e-4, 1e-5)
                    if close:
                        name = "" if found.grad_fn is None else found.grad_fn.name()
                        fused = "Norm" in name or "Permute" in name
                        return kind._replace(by_hand=not fused)
    finally:
        module._parameters.update(kept)
    return None
