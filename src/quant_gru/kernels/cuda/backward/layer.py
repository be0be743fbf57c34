"""The straight-through backward of a layer on a GPU, parallel over time where possible.

It has three phases:

1. Recompute gates and clamps of all steps from the saved codes, in the integers of the forward.
   They give the derivatives of every element; all that follows is linear in the gradients.
2. Propagate the gradients of the states back, step by step.
3. Compute the gradients of both projections, and the GEMMs with inputs, states and weights, for all
   steps at once.

There are no atomic additions, so equal inputs give equal bits.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.backward import Gradients, Tape, Wanted, complete, straight_through
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.graph_capture import capturing, on
from quant_gru.kernels.cuda import machine as machines
from quant_gru.kernels.cuda.backward.inputs import IN_DOUBLE, PRECISIONS, Call, Precision
from quant_gru.kernels.cuda.backward.launch_plan import VARIABLES, Schedule
from quant_gru.kernels.cuda.backward.time_chunks import Joined, most_steps, pieces

_MOST_SCHEDULES = 64

# schedules live as long as the frozen part of the first direction's plan
_schedules: weakref.WeakKeyDictionary[Any, dict[Any, Schedule]] = weakref.WeakKeyDictionary()


def backward(
    tapes: Sequence[Tape],
    grad_out: Sequence[Tensor | None],
    grad_last: Sequence[Tensor | None],
    wanted: Wanted | None = None,
    precision: str = "bf16",
    machine: Device | None = None,
) -> list[Gradients]:
    """Backpropagate through one layer, with both directions in the same launches if they match.

    The gradients are those of `quant_gru.integer.backward.straight_through`, up to rounding:
    ||error|| / ||gradient|| is below 1e-5 for 'fp32', 1e-3 for 'tf32' and 1e-2 for 'bf16'. Plans
    with operators of more than 16 bits, and calls without steps or rows, use `straight_through`
    itself, in float64.

    Args:
        tapes: The inputs and outputs of the forward of each direction.
        grad_out: Gradient of each direction's dequantized outputs (T, N, H), any strides, or None
            for zeros.
        grad_last: Gradient of each direction's dequantized last state (N, H), or None for zeros.
        wanted: Which gradients to compute; None for all.
        precision: 'fp32', 'tf32' or 'bf16'.
        machine: The machine that runs the kernels; None for the codes' GPU.

    Returns:
        Float32 gradients of each direction.

    Raises:
        QuantGRUError: The precision is unknown, or a kernel is not loaded when a graph is captured.
    """
    wanted = wanted or Wanted()
    chosen = PRECISIONS.get(precision)
    if chosen is None:
        raise QuantGRUError(
            f"Expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}"
        )
    if precision == "fp32" and torch.get_float32_matmul_precision() != "highest":
        # PyTorch may round float32 products with this setting, so use float64
        chosen = IN_DOUBLE
    with on(tapes[0].x.device):
        return _backward(tapes, grad_out, grad_last, wanted, chosen, machine)


def _backward(
    tapes: Sequence[Tape],
    grad_out: Sequence[Tensor | None],
    grad_last: Sequence[Tensor | None],
    wanted: Wanted,
    precision: Precision,
    machine: Device | None,
) -> list[Gradients]:
    given = list(zip(tapes, grad_out, grad_last, strict=True))
    calls = [Call(*each) for each in given]
    if not calls[0].T * calls[0].N or not all(call.form.narrow for call in calls):
        return [straight_through(*complete(*each), wanted).in_float32() for each in given]
    machine = machine or machines.machine_of(tapes[0].x.device)
    if len(calls) == 2 and calls[0].key != calls[1].key:
        return [
            _backward([tape], [out], [last], wanted, precision, machine)[0]
            for tape, out, last in given
        ]
    first = calls[0]
    steps = most_steps(first.N, first.C, first.H, precision, len(calls))
    if steps >= first.T:
        return _schedule_of(calls, wanted, precision, machine).run(calls)
    ends = list(grad_last)
    joined = [Joined(tape) for tape in tapes]
    parts = [pieces(tape, out, steps) for tape, out, _ in given]
    for group in zip(*parts, strict=True):
        calls = [Call(tape, out, grad) for (tape, out), grad in zip(group, ends, strict=True)]
        found = _schedule_of(calls, wanted, precision, machine).run(calls)
        for d, each in enumerate(found):
            joined[d].add(each, calls[d].T)
            ends[d] = each.h0
    return [each.found for each in joined if each.found is not None]


def _schedule_of(
    calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Device
) -> Schedule:
    """Return the schedule of such calls, prepared at the first of them."""
    first = calls[0].plan.frozen
    known = _schedules.get(first)
    if known is None:
        known = _schedules[first] = {}
    key = (
        calls[0].T,
        calls[0].N,
        *[call.details for call in calls],
        wanted,
        precision,
        id(machine),
        *map(os.environ.get, VARIABLES),
    )
    schedule = known.get(key)
    if schedule is None:
        schedule = Schedule(calls, wanted, precision, machine)
        if not capturing(calls[0].device):
            if len(known) >= _MOST_SCHEDULES:
                known.clear()
            known[key] = schedule
    return schedule
