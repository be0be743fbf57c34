"""The shortest way through an inference call on a GPU: nothing changed since the last one.

What `quant_gru.execution.prepared_call` is for the CPU: launches are prepared, and what was built
once is kept with what tells that it still holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.execution.prepared_call import KeptWeights, kept_weights
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.cuda.forward.stack import Stack
from quant_gru.kernels.dispatch import runs_on_gpu, stack_on_gpu


class QuickGPU:
    """A stack on a GPU, and the weights it was made of.

    Args:
        stack: The stack.
        weights: All weights of the module.

    Attributes:
        captured: Whether a call went into a CUDA graph, whose replays read what this holds.
    """

    def __init__(self, stack: Stack, weights: KeptWeights) -> None:
        self._stack = stack
        self.captured = False
        # native code knows them by their addresses
        self._weights = weights
        self._native = stack.quick(weights.tensors, weights.count_of_steps)
        self.start = self._native.run
        """As `run`; NotImplemented where native code leaves a call alone."""
        self.holds = weights.hold
        """holds(weights now) -> whether they are still those that were given, unchanged."""

    def run(
        self, weights: Collection[Tensor | None], x: Any, hx: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call, if it is of the plain kind.

        Args:
            weights: The module's weights now, in the order they were given in.
            x: What was given as input; taken if float32 (T, N, C), (N, T, C) if `batch_first`, on
                the plan's device.
            hx: float32 (states, N, H) or None.
            batch_first: Whether N comes before T.

        Returns:
            As `QuantGRU.forward`; None where the call is of another kind, a weight changed, a
            gradient may be asked for, or weights fit no registers.
        """
        result = self.start(weights, x, hx, batch_first)
        if result is not NotImplemented:
            return result
        return self._run_general(x, hx, batch_first)

    def _run_general(
        self, x: Tensor, hx: Tensor | None, batch_first: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Run a call whose size is new, or that native code leaves alone."""
        self.captured |= capturing(self._stack.device)
        if batch_first:
            x = x.transpose(0, 1)
        result = self._stack.run(x, hx)
        if result is None:
            return None
        self._stack.repeat(self._native, x, hx)
        y, h_n = result
        return (y.transpose(0, 1) if batch_first else y), h_n


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
