"""ReLU, ReLU6, hardtanh and leaky ReLU keep one bit per element; gradients are exact."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

from actnn.saving.active import step_for
from actnn.saving.bit_masks import pass_gradient, rectify
from actnn.saving.dense import is_dense
from actnn.saving.module_classes import Swapped
from actnn.saving.step import Step


class _Rectify(Function):
    """y = x where `inside`, and a constant or slope x elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, step: Step, low: float, high: float, slope: float, in_place: bool
    ) -> Tensor:
        y, bits = rectify(x, low, high, slope, in_place)
        ctx.slope, ctx.strides = slope, y.stride()
        ctx.save_for_backward(step.claim(bits, "1-bit mask", y))
        if in_place:
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        dx = pass_gradient(bits, dy, ctx.strides, ctx.slope)
        return dx, None, None, None, None, None


class Rectifier(Swapped):
    """ReLU, ReLU6, hardtanh or leaky ReLU."""

    inplace: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the module's own forward."""
        step = step_for(x)
        slope = self.negative_slope if isinstance(self, nn.LeakyReLU) else 0.0
        if step is None or not x.is_floating_point() or not is_dense(x) or slope < 0:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        low, high = 0.0, float("inf")
        if isinstance(self, nn.Hardtanh):  # and ReLU6
            low, high = self.min_val, self.max_val
        return _Rectify.apply(x, step, low, high, slope, self.inplace)  # type: ignore[no-any-return]
