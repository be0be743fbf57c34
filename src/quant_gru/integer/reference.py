"""The reference executor: runs the cell step by step in PyTorch integers, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.cell import Recorder, gates, input_projection, keep, state_projection
from quant_gru.integer.plan import CellPlan

# Number of steps per input projection. It bounds the memory of the int64 intermediates.
_STEPS_AT_ONCE = 32


def run(
    plan: CellPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None = None,
    reverse: bool = False,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one layer and direction over a whole sequence.

    Args:
        plan: The plan of this layer and direction.
        x: Codes of input.x (T, N, C), any integer dtype.
        h0: Codes of output.h before the first step (N, H).
        lengths: int64 (N,), valid steps of each row. Outside them the state of a row does not
            change. None: all T steps are valid.
        reverse: Whether to run from the last step to the first.
        held: bool (T, N, H), units that keep their state in a step, as zoneout does in training.
            None: with zoneout in the plan, every unit keeps a share of its state.

    Returns:
        Codes of output.h in their container: after each step (T, N, H), indexed by input step;
        and after the last step processed (N, H).
    """
    T, N, _ = x.shape
    container = plan.h.container
    h = h0.to(torch.int64)
    out = torch.empty((T, N, plan.hidden_size), dtype=container, device=x.device)
    for steps in _blocks(T, reverse):
        Wx = input_projection(plan, x[steps.start : steps.stop].to(torch.int64))
        for t in reversed(steps) if reverse else steps:
            new = gates(plan, Wx[t - steps.start], state_projection(plan, h), h)
            new = keep(plan, h, new) if held is None else torch.where(held[t], h, new)
            h = new if lengths is None else torch.where((lengths > t)[:, None], new, h)
            out[t] = h.to(container)
    return out, h.to(container)


def trace(plan: CellPlan, x: Tensor, h_before: Tensor) -> Recorder:
    """Return the codes of all operators at given steps, computed at once from the states before.

    Args:
        plan: The plan of this layer and direction.
        x: Codes of input.x (.., C).
        h_before: Codes of output.h before each step (.., H).

    Returns:
        Codes and clamp masks of every computed operator.
    """
    record = Recorder()
    h = h_before.to(torch.int64)
    Wx = input_projection(plan, x.to(torch.int64), record)
    gates(plan, Wx, state_projection(plan, h, record), h, record)
    return record


def states_before(out: Tensor, h0: Tensor, reverse: bool = False) -> Tensor:
    """Return the state before each step, (T, N, H), from the states after each step.

    Args:
        out: States after each step (T, N, H), constant outside the length of a row.
        h0: State before the first step (N, H).
        reverse: As for `run`.
    """
    first = h0[None].to(out.dtype)
    states = torch.cat((out[1:], first)) if reverse else torch.cat((first, out[:-1]))
    return states[: out.shape[0]]


def _blocks(T: int, reverse: bool) -> list[range]:
    blocks = [range(t, min(t + _STEPS_AT_ONCE, T)) for t in range(0, T, _STEPS_AT_ONCE)]
    return blocks[::-1] if reverse else blocks
