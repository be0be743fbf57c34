"""Convolutions decode their input for the gradient of the weight only, and release it then.

On a GPU, cuDNN copies tensors that are not channels_last before it computes. The gradients of
large inputs are therefore computed in parts of the batch, so that only a part is copied at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from actnn.saving.active import step_for
from actnn.saving.module_classes import Swapped

_backward = torch.ops.aten.convolution_backward.default
LARGE, PART = 1 << 29, 1 << 28  # bytes of an input, and of a part of it
# Bytes of an input that matter less than the time to call two kernels from Python.
SMALL = {"cuda": 1 << 26, "cpu": 1 << 20}


class _Convolution(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: tuple[Any, ...],
        parts: int,
    ) -> Tensor:
        ctx.settings, ctx.biases = settings, None if bias is None else list(bias.shape)
        ctx.parts = parts
        ctx.save_for_backward(x, weight)
        stride, padding, dilation, transposed, output_padding, groups = settings
        return torch.convolution(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # for second derivatives; x is exact, or an error already
            mask = [of_x, of_weight, of_bias]
            return *_backward(dy, x, weight, ctx.biases, *ctx.settings, mask), None, None
        dx, dweight, dbias = None, None, None
        if of_weight or of_bias:
            mask = [False, of_weight, of_bias]
            for part, dpart in _in_parts(x, dy, ctx.parts):
                _, *found = _backward(dpart, part, weight, ctx.biases, *ctx.settings, mask)
                dweight, dbias = _sum(dweight, found[0]), _sum(dbias, found[1])
            del part, dpart
        if of_x:
            shape, *layout = x.shape, x.stride(), x.dtype, x.device
            del x  # its memory is free before the gradient is made
            dx = _gradient_of_input(ctx, dy, weight, shape, *layout)
        return dx, dweight, dbias, None, None


def _in_parts(x: Tensor, y: Tensor, parts: int) -> Iterable[tuple[Tensor, Tensor]]:
    return [(x, y)] if parts == 1 else zip(x.chunk(parts), y.chunk(parts), strict=True)


def _sum(total: Tensor | None, term: Tensor | None) -> Tensor | None:
    return term if total is None or term is None else total.add_(term)


def _gradient_of_input(
    ctx: Any,
    dy: Tensor,
    weight: Tensor,
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    def part_of(dpart: Tensor) -> Tensor:
        part = torch.Size((len(dpart), *shape[1:]))
        x = _without_memory(part, strides, dtype, device, weight, ctx.settings)
        mask = [True, False, False]
        return _backward(dpart, x, weight, ctx.biases, *ctx.settings, mask)[0]  # type: ignore[no-any-return]

    if ctx.parts == 1:
        return part_of(dy)
    dx = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    for part, dpart in _in_parts(dx, dy, ctx.parts):
        part.copy_(part_of(dpart))
    return dx


def _without_memory(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    weight: Tensor,
    settings: tuple[Any, ...],
) -> Tensor:
    """Return a tensor without memory. The gradient of an input depends on its shape and layout."""
    x = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    cudnn = torch._C._ConvBackend.Cudnn  # type: ignore[attr-defined]
    if x.is_contiguous() or torch._C._select_conv_backend(x, weight, None, *settings) != cudnn:
        return x.new_empty(1).expand(shape)  # other kernels may copy x
    # cuDNN does not, but it copies the gradient of the output if the layout of x differs from it,
    # and an expanded tensor is in no layout.
    x.untyped_storage().resize_(0)
    return x


def _channels_last(weight: Tensor) -> bool:
    """Whether the strides are those of channels_last, also if the kernel has one position."""
    return weight.stride(1) == 1 and weight.stride(3) == weight.shape[1]


class Convolution(Swapped):
    """nn.Conv2d."""

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    padding_mode: str
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the module's own forward."""
        step = step_for(x, SMALL.get(x.device.type, 0))
        if (
            step is None
            or x.dim() != 4
            or isinstance(self.padding, str)
            or self.padding_mode != "zeros"
            or torch.is_autocast_enabled(x.device.type)
        ):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        weight = self.weight  # once: a parametrization computes it
        # The layout of the gradient must follow from that of the weight.
        if x.dtype != weight.dtype or not (x.is_contiguous() or _channels_last(weight)):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        settings = (self.stride, self.padding, self.dilation, False, (0, 0), self.groups)
        parts = 1
        if x.is_cuda and x.nbytes > LARGE and x.is_contiguous() and step.rounds(x):
            parts = min(x.shape[0], -(-x.nbytes // PART))
        return _Convolution.apply(x, weight, self.bias, settings, parts)  # type: ignore[no-any-return]
