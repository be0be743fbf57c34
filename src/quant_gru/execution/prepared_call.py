"""What calls of one plan share: kept while nothing changes that it follows from, and then run.

A call of a single step lasts a few microseconds, less than it takes to build or even to compare a
plan. What was checked and built once is therefore kept with a guard that tells whether it still
holds: it does, and the call runs; or it does not, and a call is prepared anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.execution.weight_guard import WeightGuard, guard_of
from quant_gru.integer.border import Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.dispatch import Stack, stack_of
from quant_gru.kernels.live_weights import LiveWeights, all_live


class PreparedCall:
    """A plan, and all that its calls share.

    Args:
        plan: The plan.
        guard: Tells whether the weights are those the plan was made of; None where nothing can.
        cells: What the plan was made of; W, R, bw, br of each layer and direction where it follows
            them.
        dtype: What outputs are of; None for the dtype of the input.

    Attributes:
        plan: As given.
        weights: What the plan was made of, in one list.
        live: What rewrites the parts of the plan that follow weights, cell after cell; empty where
            the plan is of one state of the weights.
        differentiated: What differentiates its calls, kept by the caller.
        captured: Whether a call went into a CUDA graph, whose replays read what this holds.
    """

    def __init__(
        self,
        plan: GRUPlan,
        guard: WeightGuard | None,
        cells: Sequence[Sequence[Tensor | None]],
        dtype: torch.dtype | None,
    ) -> None:
        self.plan, self._guard, self._cells, self._dtype = plan, guard, cells, dtype
        self.weights = [w for cell in cells for w in cell if w is not None]
        self.live: tuple[LiveWeights, ...] = all_live(plan)
        self.differentiated: Any = None
        self.captured = False
        self._device = plan.cells[0][0].weights.W.device
        self._updates: list[Callable[[], None]] = []
        if self.live:
            pairs = zip(self.live, cells, strict=True)
            self._updates = [live.update_again(*cell) for live, cell in pairs]
        self._stack: Stack | None = None
        self._native: Any = None
        if guard is not None and not self.live:
            self._stack = stack_of(plan)
            if self._stack is not None:
                self._native = self._stack.prepared(guard.native, dtype)

    @property
    def is_kept(self) -> bool:
        """Whether it may be kept for later calls."""
        return self._guard is not None

    def holds(self, weights: Collection[Tensor | None]) -> bool:
        """Whether it is of these weights; what is live follows their numbers.

        Args:
            weights: All weights of the module now.
        """
        if self._guard is None:
            return False
        return self._guard.in_place(weights) if self.live else self._guard.unchanged(weights)

    def start(
        self,
        weights: Collection[Tensor | None],
        x: object,
        hx: Tensor | None,
        lengths: Tensor | None,
        batch_first: bool,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call in native code, where nothing has to be looked at but its tensors.

        Args:
            weights: All weights of the module now.
            x: What was given as input; taken if it is a tensor (T, N, C), (N, T, C) if
                `batch_first`, or (rows, C) where rows are packed, on the plan's device, of one of
                `FLOATS`.
            hx: (states, N, H), likewise, or None.
            lengths: int64 (N,), contiguous on the plan's device, or None.
            batch_first: Whether N comes before T; not where rows are packed.
            packing: How rows are packed; None where they are not.

        Returns:
            Output in the form of the input, and last states; None where a weight or
            `QUANT_GRU_CPU` changed, a gradient may be asked for, or the call is of another kind.
        """
        if self._native is None:
            return None
        result = self._native.run(weights, x, hx, lengths, batch_first, packing)
        if result is not NotImplemented:
            return result  # type: ignore[no-any-return]
        assert isinstance(x, Tensor)
        return self._lay_out(x, hx, lengths, batch_first, packing)

    def _lay_out(
        self,
        x: Tensor,
        hx: Tensor | None,
        lengths: Tensor | None,
        batch_first: bool,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run a call that native code cannot take as it lies, or whose size is new to it."""
        self.captured |= capturing(self._device)
        if batch_first:
            x = x.transpose(0, 1)
        assert self._stack is not None
        dtype = self._dtype or x.dtype
        result = self._stack.run(x, hx, lengths, None, packing, dtype)
        if result is None:
            return None
        self._stack.prepare(self._native, x, hx, lengths, packing, dtype)
        y, h_n = result
        return (y.transpose(0, 1) if batch_first else y), h_n

    def update(self, dropped: Sequence[Tensor | None] | None = None, p: float = 0.0) -> None:
        """Write the numbers of the weights into the parts that are live.

        Args:
            dropped: bool (3H, H) of each cell in turn, codes of R that become 0, or None.
            p: Their probability.
        """
        if dropped is None:
            for update in self._updates:
                update()
            return
        for live, (W, R, bw, br), mask in zip(self.live, self._cells, dropped, strict=True):
            assert W is not None
            assert R is not None
            live.update(W, R, bw, br, mask, p)


def prepare(
    build: Callable[[], GRUPlan],
    cells: Sequence[Sequence[Tensor | None]],
    own: Collection[Tensor | None],
    dtype: torch.dtype | None,
) -> PreparedCall:
    """Build a plan, and what its calls share.

    The guard is made before the plan: if another thread changes weights while the plan is built,
    the guard tells the next call.

    Args:
        build: build() -> the plan.
        cells: What it is made of; W, R, bw, br of each layer and direction where it follows them.
        own: All weights of the module.
        dtype: What outputs are of; None for the dtype of the input.
    """
    used = [w for cell in cells for w in cell]
    device = next(w.device for w in used if w is not None)
    # what a graph computes is there only after it has run
    guard = None if capturing(device) else guard_of(own, used, device)
    return PreparedCall(build(), guard, cells, dtype)
