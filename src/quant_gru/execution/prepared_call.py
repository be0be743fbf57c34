"""Shared state of the calls of one plan, with a guard that detects changes.

A call of a single step takes a few microseconds, less than building or even comparing a plan.
Checks and builds are therefore done once, and their results are kept with a guard. If the guard
holds, the call runs. Otherwise a new call is prepared.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import QuantGRUWarning, caller_stacklevel
from quant_gru.execution.layers import run_real
from quant_gru.execution.sequence_layout import packing_on
from quant_gru.execution.weight_guard import WeightGuard, guard_of
from quant_gru.integer.call_form import Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernels.cuda.weights.contents import Contents
from quant_gru.kernels.dispatch import Stack, executor_of
from quant_gru.kernels.live_weights import LiveWeights, all_live, launched_updates, native_update

SILENT_WRITE = (
    "Expected writes to weights that PyTorch records, got one that it does not, such as a "
    "collective, or a write to parameter.data or to a shared vector. Earlier calls may have used "
    "the former weights: call eval() or train() after such writes"
)


LOOKS, SECONDS_BETWEEN_LOOKS = 5, 4e-3  # until a write of another thread has its version


class PreparedCall:
    """A plan and the state that its calls share.

    Args:
        plan: The plan.
        guard: Detects changes of the plan's weights; None if changes cannot be detected.
        cells: The tensors that the plan was built from: W, R, bw, br of each layer and direction
            if it follows them.
        dtype: dtype of the outputs; None for the dtype of the input.
        contents: Finds writes to weights on a GPU that no version records, or None.

    Attributes:
        plan: As given.
        weights: The tensors that the plan was built from, in one list.
        live: The objects that rewrite the plan's parts that follow weights, one per cell; empty
            if the plan belongs to one state of the weights.
        differentiated: The object that differentiates its calls, set by the caller.
        captured: Whether a call was captured in a CUDA graph, whose replays read this state.
    """

    def __init__(
        self,
        plan: GRUPlan,
        guard: WeightGuard | None,
        cells: Sequence[Sequence[Tensor | None]],
        dtype: torch.dtype | None,
        contents: Contents | None = None,
    ) -> None:
        self.plan, self._guard, self._cells, self._dtype = plan, guard, cells, dtype
        self.weights = [w for cell in cells for w in cell if w is not None]
        self.live: tuple[LiveWeights, ...] = all_live(plan)
        self.differentiated: Any = None
        self.captured = False
        self._device = plan.cells[0][0].weights.W.device
        self._packing_of = packing_on(self._device)
        self._thread = threading.get_ident()
        self._stack: Stack | None = None
        self._native: Any = None
        self._prepare_step: Callable[..., None] | None = None
        self._updates: list[Callable[[], None]] = []
        if self.live:
            self._follow_weights()
        elif guard is not None:
            if contents is not None:
                contents.watch(guard.native)
            self._stack = executor_of(self._device).stack_of(plan)
            if self._stack is not None:
                self._native = self._stack.prepared(guard.native, dtype)

    def _follow_weights(self) -> None:
        """Prepare updates of the live parts."""
        update = native_update(self.live, self._cells)
        if update is not None:
            self._updates = [update]
        else:
            pairs = zip(self.live, self._cells, strict=True)
            self._updates = [live.update_again(*cell) for live, cell in pairs]
        # learned scales are other weights, which a plan does not follow
        if self._guard is not None and len(self._guard.weights) == len(self.weights):
            executor = executor_of(self._device)
            step = executor.prepared_step(self.plan, self._guard.native, self._dtype, update)
            self._native, self._prepare_step = (None, None) if step is None else step

    @property
    def is_kept(self) -> bool:
        """Whether later calls may reuse it."""
        return self._guard is not None

    def holds(self, weights: Collection[Tensor | None]) -> bool:
        """Return whether it belongs to these weights; live parts follow changed numbers.

        Args:
            weights: All weights of the module now.
        """
        if self._guard is None:
            return False
        if self.live:
            return self._guard.in_place(weights)
        if self._guard.unchanged(weights):
            self._look()
            return True
        if self._found_silent_write():
            warnings.warn(QuantGRUWarning(SILENT_WRITE), stacklevel=caller_stacklevel())
        return False

    def _found_silent_write(self) -> bool:
        """Return whether a weight has other contents that no version records.

        PyTorch counts up the version after it has written. Another thread may be in between.
        """
        assert self._guard is not None
        looks = LOOKS if threading.active_count() > 1 else 0
        for _ in range(looks):
            if not self._guard.native.found_silent_write():
                return False
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return self._guard.native.found_silent_write()

    def _look(self) -> None:
        """Compare weights on a GPU with their former contents, if that is due."""
        assert self._guard is not None
        if not capturing(self._device):
            self._guard.native.look()

    def start(
        self,
        weights: Collection[Tensor | None],
        x: object,
        hx: Tensor | None,
        lengths: Tensor | None,
        batch_first: bool,
        packing: Packing | None = None,
    ) -> tuple[Any, Tensor] | None:
        """Run a whole call in native code, if only its tensors need checks.

        Args:
            weights: All weights of the module now.
            x: The input of the call. Accepted are tensors (T, N, C), (N, T, C) if `batch_first`, or
                (rows, C) if packed, on the plan's device, with a dtype of `FLOATS`, and a
                PackedSequence of such rows.
            hx: (states, N, H), likewise, or None.
            lengths: int64 (N,), contiguous on the plan's device, or None.
            batch_first: Whether N comes before T; False if rows are packed.
            packing: How rows are packed; None for padded sequences.

        Returns:
            Output in the form of the input, and last states. None if a weight or `QUANT_GRU_CPU`
            changed, a gradient may be needed of a plan that does not follow the weights, or native
            code does not support the call.
        """
        if self._native is None:
            return None
        if type(x) is PackedSequence:
            packing = self._packing_of(x)
            found = packing and self.start(weights, x.data, hx, None, False, packing)
            return found and (PackedSequence._make((found[0], *x[1:])), found[1])
        if self.live and not self._may_update():
            return None
        rows_first = batch_first
        if self.live and batch_first and isinstance(x, Tensor) and x.dim() == 3:
            # autograd records the transposed input
            x, rows_first = x.transpose(0, 1), False
        result = self._native.run(weights, x, hx, lengths, rows_first, packing)
        if result is None or (type(result) is tuple and not self.live):
            return result
        assert isinstance(x, Tensor)
        if self.live:
            found = self._run_live(x, hx, lengths, packing, result)
        else:
            found = self._lay_out(x.transpose(0, 1) if batch_first else x, hx, lengths, packing)
        if found is None or not batch_first:
            return found
        return found[0].transpose(0, 1), found[1]

    def _run_live(
        self,
        x: Tensor,
        hx: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None,
        made: Any,
    ) -> tuple[Tensor, Tensor] | None:
        """Run a call that reads the current weights, if it is as a call before it.

        Args:
            x: As for `start`.
            hx: As for `start`.
            lengths: As for `start`.
            packing: As for `start`.
            made: The results of native code, with data for a backward if it is differentiable; or
                whether the call must be differentiable.
        """
        how, dtype = self.differentiated, self._dtype or x.dtype
        if type(made) is tuple:
            if self._prepare_step is not None:  # launches of updates do not count themselves
                for each in self.live:
                    each.epoch += 1
            if len(made) == 2:
                return made
            if how is None:
                return None
            return how.run(x, hx, packing, dtype, self.weights, made)  # type: ignore[no-any-return]
        if lengths is not None or (made and how is None):
            return None
        self.update()
        if made:
            found: tuple[Tensor, Tensor] = how.run(x, hx, packing, dtype, self.weights)
        else:
            found = run_real(self.plan, x, hx, None, None, None, packing, dtype)
        if self._prepare_step is not None and not capturing(self._device):
            updates = launched_updates(self.live, self._cells)
            if updates is not None:
                self._prepare_step(self._native, x, hx, None, packing, dtype, made, updates)
        return found

    def _may_update(self) -> bool:
        """Return whether this is the plan's thread, and does not interrupt an update."""
        if self._thread != threading.get_ident():
            return False
        for each in self.live:
            if each.lock.locked():
                return False
        return True

    def _lay_out(
        self,
        x: Tensor,
        hx: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run a call whose layout native code does not accept, or whose size is new to it."""
        self.captured |= capturing(self._device)
        assert self._stack is not None
        dtype = self._dtype or x.dtype
        result = self._stack.run(x, hx, lengths, None, packing, dtype)
        if result is None:
            return None
        self._stack.prepare(self._native, x, hx, lengths, packing, dtype)
        self._look()
        return result

    def update(self, dropped: Sequence[Tensor | None] | None = None, p: float = 0.0) -> None:
        """Update the live parts from the current weights.

        Args:
            dropped: bool (3H, H) of each cell in turn, codes of R that become 0, or None.
            p: Drop probability.
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
    live: bool = False,
) -> PreparedCall:
    """Build a plan, and prepare the shared state of its calls.

    The guard and the hashes of contents are created before the plan. If another thread changes
    weights while the plan is built, a later call detects the change.

    Args:
        build: build() -> the plan.
        cells: Its tensors: W, R, bw, br of each layer and direction if it follows them.
        own: All weights of the module.
        dtype: dtype of the outputs; None for the dtype of the input.
        live: Whether the plan follows the weights at every call, so that no change is missed.
    """
    used = [w for cell in cells for w in cell]
    device = cells[0][0].device  # type: ignore[union-attr]
    # results of a captured graph exist only after it has run
    guard = None if capturing(device) else guard_of(own, used, device)
    contents = None if guard is None or live else executor_of(device).contents_of(guard.weights)
    return PreparedCall(build(), guard, cells, dtype, contents)
