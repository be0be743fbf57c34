"""Dropout keeps the seed of its mask, and makes the mask again in backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from actnn.saving.active import step_for
from actnn.saving.bit_masks import in_layout
from actnn.saving.cuda import executor as cuda
from actnn.saving.dense import is_dense
from actnn.saving.module_classes import Swapped


def can_regenerate(x: Tensor) -> bool:
    """Whether masks for a tensor can be made again from a seed."""
    return cuda.available(x) or x.device.type == "cpu"


def drawn_seed(x: Tensor) -> Tensor:
    """Return a seed on the device of x, int64 (1,).

    It comes from the generator that torch.manual_seed sets, checkpoints restore and CUDA graphs
    advance.
    """
    return torch.randint(1 << 62, (1,), device=x.device)


def dropped(
    x: Tensor, p: float, seed: Tensor, strides: tuple[int, ...], out: Tensor | None = None
) -> Tensor:
    """Return 0 with probability p, and x / (1 - p) otherwise. Equal seeds drop equal elements.

    Args:
        x: Any shape.
        p: The probability, between 0 and 1.
        seed: What `drawn_seed` returned.
        strides: Dense strides, which give the order in which the generator fills memory.
        out: Becomes the result, with these strides; may be x.
    """
    x = in_layout(x, strides)
    if cuda.available(x):
        out = torch.empty_like(x) if out is None else out
        cuda.run("dropout", x, out, seed=seed, low=p, slope=1 / (1 - p))
        return out
    generator = torch.Generator(x.device).manual_seed(int(seed))
    factors = torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
    factors.bernoulli_(1 - p, generator=generator).div_(1 - p)
    return torch.mul(x, factors, out=factors if out is None else out)


class _Dropout(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, p: float, seed: Tensor, strides: tuple[int, ...], in_place: bool
    ) -> Tensor:
        ctx.settings = p, seed, strides
        if in_place:
            ctx.mark_dirty(x)
        return dropped(x, p, seed, strides, x if in_place else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _Dropout.apply(dy, *ctx.settings, False), None, None, None, None


class SeededDropout(Swapped):
    """nn.Dropout."""

    p: float
    inplace: bool
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return x with elements set to zero, as the module's own forward."""
        step = step_for(x)
        if (
            step is None
            or not step.saving.own_masks
            or not self.training
            or not 0 < self.p < 1
            or not is_dense(x)
            or not can_regenerate(x)
        ):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        step.note(x, "made again from the seed")
        return _Dropout.apply(x, self.p, drawn_seed(x), x.stride(), self.inplace)  # type: ignore[no-any-return]
