"""The shortest way through a call in training on a GPU: all but numbers is as in the call before.

Weights change from step to step, but not where they are; shapes, dtypes and options do not change
either. What the general way checked and prepared is therefore kept with what tells that it still
holds: the weights' identity, place and shape, and the options. The codes of the weights are made
anew at each call, as everywhere in training.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.autograd.straight_through import Call, straight_through
from quant_gru.kernels.cuda.backward.prepared import PreparedBackward
from quant_gru.kernels.cuda.forward.stack import Stack
from quant_gru.kernels.dispatch import runs_on_gpu, stack_on_gpu

# depends on what PyTorch may round at the moment
_CHANGING = "fp32"


class QuickStep:
    """A plan that follows weights on a GPU, and the weights it follows.

    It belongs to the thread and device of its plan, as `quant_gru.execution.plan_cache` keeps them.

    Args:
        call: How it is run and differentiated.
        stack: What runs its forward.
        weights: All weights of the module, W, R, bw, br of each layer and direction, contiguous
            float32.
        options: All else that it depends on.

    Attributes:
        call: As given.
    """

    def __init__(
        self, call: Call, stack: Stack, weights: Sequence[Tensor], options: tuple[Any, ...]
    ) -> None:
        self.call, self._stack, self._options = call, stack, options
        self._weights = list(weights)
        native = stack.step(self._weights)
        self._holds, self._takes = native.holds, native.takes
        given = [(w.data_ptr(), w.dtype) for w in weights]
        size = 4 if call.bias else 2
        absent = () if call.bias else ((0, None), (0, None))
        assert call.live is not None
        self._live = [
            (live, (*given[i * size : (i + 1) * size], *absent)) for i, live in enumerate(call.live)
        ]

    def holds(self, weights: Collection[Tensor | None], options: tuple[Any, ...]) -> bool:
        """Whether weights and options are those that were given, the weights where they were.

        Args:
            weights: The module's weights now, in the order they were given in.
            options: The options now.
        """
        return options == self._options and self._holds(weights)

    def run(
        self,
        weights: Collection[Tensor | None],
        options: tuple[Any, ...],
        x: Any,
        hx: Tensor | None,
        batch_first: bool,
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call, if it is of the plain kind.

        Args:
            weights: As for `holds`.
            options: As for `holds`.
            x: What was given as input; taken if float32 (T, N, C), (N, T, C) if `batch_first`, on
                the plan's device.
            hx: float32 (states, N, H) or None.
            batch_first: Whether N comes before T.

        Returns:
            As `QuantGRU.forward`; None where the call is of another kind.
        """
        if options != self._options or not self._takes(weights, x, hx, batch_first):
            return None
        for live, given in self._live:
            live.repeat(given)
        if batch_first:
            x = x.transpose(0, 1)
        if torch.is_grad_enabled():
            y, h_n = straight_through(self.call, x, hx, *self._weights)
        else:
            found = self._stack.run(x, hx)
            if found is None:
                return None
            y, h_n = found
        return (y.transpose(0, 1) if batch_first else y), h_n


def quick_step_of(
    call: Call,
    weights: Collection[Tensor | None],
    used: Sequence[Tensor | None],
    options: tuple[Any, ...],
    before: QuickStep | None,
) -> QuickStep | None:
    """The quick way for calls like one that has been run, if there is one.

    Args:
        call: That call.
        weights: All weights of the module.
        used: What the plan was made of; has to be these weights, and not what is computed of them.
        options: All else that calls depend on.
        before: The quick way of the plan so far.
    """
    plan = call.plan
    first = plan.cells[0][0]
    device = first.weights.W.device
    if call.noise is not None or call.scales or call.stash_bits or not runs_on_gpu(device):
        return None
    given = [w for w in used if w is not None]
    if len(given) != len(weights) or any(a is not b for a, b in zip(given, weights, strict=True)):
        return None
    for w in given:
        # others may be made for each call, with a graph behind them that is not to be kept
        if type(w) is not torch.nn.Parameter or w.dtype is not torch.float32 or w.device != device:
            return None
        if w.is_inference() or w.is_neg() or not w.is_contiguous():
            return None
    cells = sum(map(len, plan.cells))
    if len(call.live or ()) != cells or not all(live.repeats for live in call.live or ()):
        return None
    stack = None if capturing(device) else stack_on_gpu(plan)
    if stack is None:
        return None
    back = None
    if before is not None and before.call.plan is plan and before.call.precision == call.precision:
        # weights are no part of it
        back = before.call.back
    elif call.precision != _CHANGING:
        back = PreparedBackward(plan, call.precision, stack.machine)
    again = replace(call, lengths=None, stack=stack, back=back)
    return QuickStep(again, stack, given, options)


def backward_for(call: Call, step: QuickStep | None) -> PreparedBackward | None:
    """What repeats the backwards of a call that is no quick step, such as one with lengths.

    Args:
        call: The call.
        step: The quick way of its plan so far.
    """
    if step is None or call.noise is not None or call.scales or call.stash_bits:
        return None
    kept = step.call
    same = kept.plan is call.plan and kept.precision == call.precision
    return kept.back if same else None
