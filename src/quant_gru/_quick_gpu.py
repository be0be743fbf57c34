"""The shortest way through an inference call on a GPU: nothing changed since the last one.

What `quant_gru._quick` is for the CPU: launches are prepared, and what was built once is kept with
what tells that it still holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from quant_gru._quick import KeptWeights, kept_weights
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.cuda.numbers import capturing
from quant_gru.kernels.cuda.stack import Stack
from quant_gru.kernels.ops import runs_on_gpu, stack_on_gpu


class QuickGPU:
    """A stack on a GPU, and the weights it was made of.

    Args:
        stack: The stack.
        weights: All weights of the module.
    """

    def __init__(self, stack: Stack, weights: KeptWeights) -> None:
        self._stack = stack
        self._weights = weights
        self._device = stack.device
        self._states = stack.states
        self._C, self._H = stack.input_size, stack.hidden_size
        self.holds = weights.hold
        """holds(weights now) -> whether they are still those that were given, unchanged."""

    def run(
        self, weights: Collection[Tensor | None], x: object, hx: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call, if it is of the plain kind.

        Args:
            weights: The module's weights now, in the order they were given in.
            x: What was given as input; taken if float32 (T, N, C), (N, T, C) if `batch_first`, on
                the weights' device.
            hx: float32 (states, N, H) or None.
            batch_first: Whether N comes before T.

        Returns:
            As `QuantGRU.forward`; None where the call is of another kind, a weight changed, a
            gradient may be asked for, or weights fit no registers.
        """
        if (
            type(x) is not Tensor
            or x.dtype is not torch.float32
            or x.device != self._device
            or x.dim() != 3
        ):
            return None
        if batch_first:
            x = x.transpose(0, 1)
        if x.shape[2] != self._C or not x.shape[0]:
            return None
        if hx is not None and (
            type(hx) is not Tensor
            or hx.dtype is not torch.float32
            or hx.device != self._device
            or hx.shape != (self._states, x.shape[1], self._H)
        ):
            return None
        if not self.holds(weights):
            return None
        if torch.is_grad_enabled() and (
            x.requires_grad
            or (hx is not None and hx.requires_grad)
            or self._weights.ask_for_gradient()
        ):
            return None
        result = self._stack.run(x, hx)
        if result is None or not batch_first:
            return result
        return result[0].transpose(0, 1), result[1]


def quick_gpu_of(
    plan: GRUPlan, weights: Collection[Tensor | None], used: Iterable[Tensor | None]
) -> QuickGPU | None:
    """The quick way for a plan on a GPU, if there is one.

    Args:
        plan: The plan.
        weights: All weights of the module.
        used: What the plan was made of.
    """
    device = plan.cells[0][0].weights.W.device
    if not runs_on_gpu(device) or capturing(device):
        return None
    kept = kept_weights(weights, used, device)
    if kept is None:
        return None
    stack = stack_on_gpu(plan)
    return None if stack is None else QuickGPU(stack, kept)
