"""Smooth activations keep codes of their derivative: the gradient is unbiased at any width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from actnn import codec
from actnn.errors import ActNNError
from actnn.saving.active import step_for
from actnn.saving.bit_masks import in_layout
from actnn.saving.cuda import executor as cuda
from actnn.saving.dense import is_batched, is_dense
from actnn.saving.divisors import DIVIDED, Slope
from actnn.saving.held import refuse_second_derivative
from actnn.saving.module_classes import Swapped
from actnn.saving.step import SLOPES, Step

_aten = torch.ops.aten


class _Rule(NamedTuple):
    """How one kind of activation is differentiated.

    Attributes:
        backward: (dy, input or output, module) -> dx.
        of_output: Whether it takes the output.
        kind: Its number in saving/cuda/slopes.cu, or None.
        least: The least derivative.
        largest: The largest derivative.
        vanishes: Whether the derivative is near 0 where the result is at its end, so that a
            logarithm or a division of the result needs it exact.
    """

    backward: Callable[[Tensor, Tensor, Any], Tensor]
    of_output: bool = False
    kind: int | None = None
    least: float = 0.0
    largest: float = 1.0
    vanishes: bool = False


RULES: dict[type[nn.Module], _Rule] = {
    nn.GELU: _Rule(
        lambda dy, x, m: _aten.gelu_backward(dy, x, approximate=m.approximate),
        kind=0,
        least=-0.1291,
        largest=1.1291,
    ),
    nn.SiLU: _Rule(
        lambda dy, x, m: _aten.silu_backward(dy, x), kind=2, least=-0.0999, largest=1.0999
    ),
    nn.Mish: _Rule(
        lambda dy, x, m: _aten.mish_backward(dy, x), kind=3, least=-0.1126, largest=1.0886
    ),
    nn.Hardswish: _Rule(
        lambda dy, x, m: _aten.hardswish_backward(dy, x), kind=4, least=-0.5, largest=1.5
    ),
    nn.Softplus: _Rule(
        lambda dy, x, m: _aten.softplus_backward(dy, x, m.beta, m.threshold), vanishes=True
    ),
    nn.Sigmoid: _Rule(
        lambda dy, y, m: _aten.sigmoid_backward(dy, y),
        of_output=True,
        kind=5,
        largest=0.25,
        vanishes=True,
    ),
    nn.Tanh: _Rule(
        lambda dy, y, m: _aten.tanh_backward(dy, y), of_output=True, kind=6, vanishes=True
    ),
}


def kind_of(module: Any, rule: _Rule) -> int:
    """Return the number of an activation in saving/cuda/slopes.cu."""
    if isinstance(module, nn.GELU) and module.approximate == "tanh":
        return 1
    assert rule.kind is not None
    return rule.kind


class _Fixed(NamedTuple):
    """Codes of a fixed range, made by a kernel in one pass over the input or output."""

    data: Tensor
    bits: int
    least: float
    step: float
    strides: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor, rule: _Rule, module: Any, bits: int, step: Step) -> _Fixed:
        size = (rule.largest - rule.least) / ((1 << bits) - 1)
        data = torch.empty(-(-x.numel() // 8) * bits, dtype=torch.uint8, device=x.device)
        key = step.key(x.device)
        cuda.run(
            "slopes",
            x,
            None,
            bits=data,
            seed=key.state,
            tensor=key.tensor,
            low=rule.least,
            high=1 / size,
            kind=kind_of(module, rule),
            width=bits,
        )
        return cls(data, bits, rule.least, size, x.stride())

    def times(self, data: Tensor, dy: Tensor) -> Tensor:
        dy = in_layout(dy, self.strides)
        dx = torch.empty_like(dy)
        cuda.run("times", dy, dx, bits=data, low=self.least, slope=self.step, width=self.bits)
        return dx


class _Derivative(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        run: Callable[[Tensor], Tensor],
        rule: _Rule,
        module: Any,
        step: Step,
        bits: int | None,
    ) -> Tensor:
        ctx.codes, ctx.fixed, ctx.slope = None, None, None
        ctx.differentiate = rule.backward, module
        fixed = rule.kind is not None and cuda.available(x) and is_dense(x)
        y = run(x) if rule.of_output else None
        source = x if y is None else y
        if bits is None:
            step.keep_exact(source, DIVIDED)
            ctx.save_for_backward(source)
            return run(x) if y is None else y
        if rule.vanishes and step.is_first:
            ctx.slope = Slope(module, source, step.saving.divided)
        if fixed:
            found = _Fixed.of(source, rule, module, bits, step)
            step.claim(found.data, SLOPES, source, bits)
            ctx.save_for_backward(found.data)
            ctx.fixed = found._replace(data=found.data.new_empty(0))
        else:
            one = torch.ones((), dtype=x.dtype, device=x.device).expand_as(x)
            codes = step.encode(rule.backward(one, source, module), bits)
            step.claim(codes.data, SLOPES, source, bits)
            ctx.save_for_backward(codes.data, codes.params)
            empty = codes.data.new_empty(0)
            ctx.codes = replace(codes, data=empty, params=empty)
        if getattr(module, "inplace", False):
            ctx.mark_dirty(x)
        return run(x) if y is None else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        data, *params = ctx.saved_tensors
        backward, module = ctx.differentiate
        if ctx.slope is not None and ctx.slope.held is not None:
            dx = backward(dy, ctx.slope.held.unpack(), module)
        elif not params and ctx.fixed is None:
            dx = backward(dy, data, module)
        elif ctx.fixed is not None:
            if is_batched(dy):
                raise ActNNError(
                    "Expected backward on a GPU to be without is_grads_batched, got "
                    "is_grads_batched=True; batched gradients need bits=32"
                )
            dx = ctx.fixed.times(data, dy)
        else:
            slope = codec.decode(replace(ctx.codes, data=data, params=params[0]))
            dx = slope * dy if is_batched(dy) else slope.mul_(dy)
        return dx, None, None, None, None, None


class Smooth(Swapped):
    """GELU, SiLU, Mish, Hardswish, Softplus, sigmoid or tanh."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the module's own forward."""
        step = step_for(x)
        run = super().forward  # type: ignore[misc]
        bits = None if step is None else step.bits_for(x)
        if step is None or bits is None:
            return run(x)  # type: ignore[no-any-return]
        rule = next(rule for kind, rule in RULES.items() if isinstance(self, kind))
        if rule.vanishes and step.divides_by(cast(nn.Module, self), x):
            bits = None
        y: Tensor = _Derivative.apply(x, run, rule, self, step, bits)
        slope = getattr(y.grad_fn, "slope", None)
        if slope is not None:
            step.watch_slope(y, slope)
        return y
