"""One bit per element: boolean tensors, and pointwise operations that keep only a mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from actnn.saving.cuda import executor as cuda


def pack_mask(mask: Tensor) -> Tensor:
    """Return a boolean tensor in storage order as bits, lowest first.

    Args:
        mask: bool, dense, any shape of n elements.

    Returns:
        uint8, (ceil(n / 8),).
    """
    flat = _in_eights(mask.as_strided((mask.numel(),), (1,))).view(torch.uint8)
    # Eight bytes 0 or 1, read as one number: the product brings byte i to bit 56 + i.
    words = flat.view(torch.int64) * 0x0102040810204080
    return words.view(torch.uint8)[7::8].clone()


def fusible_mask(flat: Tensor) -> Tensor:
    """Return what `pack_mask` does for bool (n,), by operations that compilers fuse."""
    eights = _in_eights(flat).view(-1, 8).to(torch.int32)
    places = torch.arange(8, dtype=torch.int32, device=flat.device)
    return (eights << places).sum(-1, dtype=torch.int32).to(torch.uint8)


def _in_eights(flat: Tensor) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % 8)) if len(flat) % 8 else flat


def unpack_mask(bits: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Return the boolean tensor.

    Args:
        bits: What `pack_mask` returned.
        shape: The shape of the mask.
        strides: The strides of the mask.
    """
    return unpack_flat(bits).as_strided(shape, strides)


def unpack_flat(bits: Tensor) -> Tensor:
    """Return the elements in storage order, and up to 7 more."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, None] >> places & 1).ne(0).view(-1)


def rectify(
    x: Tensor, low: float, high: float, slope: float, in_place: bool
) -> tuple[Tensor, Tensor]:
    """Clamp a tensor, or multiply its negative elements by a slope.

    Args:
        x: Dense.
        low: Least result, if the slope is 0.
        high: Largest result, if the slope is 0; may be infinite.
        slope: 0, or the factor of negative elements.
        in_place: Whether x becomes the result.

    Returns:
        The result, and the bits of where the gradient passes.
    """
    y = x if in_place else torch.empty_like(x)
    limited = math.isfinite(high)
    if cuda.available(x):
        bits = torch.empty(-(-x.numel() // 8), dtype=torch.uint8, device=x.device)
        kind, limit = int(slope != 0), high if limited else math.nan
        cuda.run("rectify", x, y, bits=bits, low=low, high=limit, slope=slope, kind=kind)
        return y, bits
    if slope:
        bits = pack_mask(x > 0)  # a NaN counts as negative, as in torch
        torch.ops.aten.leaky_relu.out(x, slope, out=y)
        return y, bits
    outside = x <= low
    if limited:
        outside.logical_or_(x >= high)
    bits = pack_mask(outside.logical_not_())
    torch.clamp(x, low, high if limited else None, out=y)
    return y, bits


def pass_gradient(bits: Tensor, dy: Tensor, strides: tuple[int, ...], slope: float) -> Tensor:
    """Return dy where the bit is set, else slope dy.

    Args:
        bits: Of the result of `rectify`, in the order of its memory.
        dy: The gradient of the result.
        strides: The strides of the result.
        slope: 0, or the factor of negative elements.
    """
    if cuda.available(dy) and not torch.is_grad_enabled():
        dy = in_layout(dy, strides)
        dx = torch.empty_like(dy)
        cuda.run("pass", dy, dx, bits=bits, slope=slope)
        return dx
    inside = unpack_mask(bits, dy.shape, strides)
    return torch.where(inside, dy, dy * slope if slope else dy.new_zeros(()))


def in_layout(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return x if it has these strides, else a copy that has them."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def positive_mask(y: Tensor) -> Tensor:
    """Return the bits of which elements of a dense tensor are above 0."""
    if cuda.available(y):
        bits = torch.empty(-(-y.numel() // 8), dtype=torch.uint8, device=y.device)
        cuda.run("rectify", y, None, bits=bits, high=math.nan)
        return bits
    return pack_mask(y > 0)


def restore_positive(y: Tensor, bits: Tensor) -> Tensor:
    """Make the elements of a dense tensor positive where the bit is set, and 0 elsewhere.

    Args:
        y: At least 0; becomes the result.
        bits: What `positive_mask` returned.
    """
    tiny = torch.finfo(y.dtype).tiny
    if cuda.available(y):
        cuda.run("restore", y, y, bits=bits, low=tiny)
        return y
    return y.clamp_(min=tiny).mul_(unpack_mask(bits, y.shape, y.stride()))
