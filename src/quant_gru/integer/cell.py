"""The integer GRU: the definition that every executor must match code for code.

In the cell each operator is one line, with the names of the configuration: update gate z, reset
gate r, candidate g. All values are int64 codes, and zero points are subtracted before each sum. The
functions of the cell accept one step (N, ..) or all steps at once (T, N, ..). `run` is the
reference executor: it runs the cell step by step in PyTorch integers, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.weighted_sum import (
    Term,
    WeightedSum,
    WideIntegers,
    exact_matmul,
    python_integers,
)

# Number of steps per input projection. It bounds the memory of the int64 intermediates.
_STEPS_AT_ONCE = 32


class Recorder:
    """Keeps the results of a cell: the codes of each operator and its clamp masks.

    Attributes:
        codes: Operator name -> codes.
        inside: Operator name -> bool, True where the value before the clamp was inside [lo, hi].
    """

    def __init__(self) -> None:
        self.codes: dict[str, Tensor] = {}
        self.inside: dict[str, Tensor] = {}


def input_projection(plan: CellPlan, x: Tensor, record: Recorder | None = None) -> Tensor:
    """Wx = weighted_sum(sum_k W[c,k] * (x[k] - z_x) + Bw[c]): codes (.., C) -> (.., 3H)."""
    w = plan.weights
    accumulator = exact_matmul(x - plan.x.zero_point, w.W, w.bound_Wx)
    return _apply("matmul.Wx", w.Wx, (_add_bias(accumulator, w.Bw, plan.shift_Bw),), record)


def state_projection(plan: CellPlan, h: Tensor, record: Recorder | None = None) -> Tensor:
    """Rh = weighted_sum(sum_k R[c,k] * (h[k] - z_h) + Br[c]): codes (.., H) -> (.., 3H)."""
    w = plan.weights
    accumulator = exact_matmul(h - plan.h.zero_point, w.R, w.bound_Rh)
    return _apply("matmul.Rh", w.Rh, (_add_bias(accumulator, w.Br, plan.shift_Br),), record)


def gates(
    plan: CellPlan, Wx: Tensor, Rh: Tensor, h: Tensor, record: Recorder | None = None
) -> Tensor:
    """Return the next state h' from the two projections and the state.

    Args:
        plan: The plan of this layer and direction.
        Wx: Codes of matmul.Wx (.., 3H).
        Rh: Codes of matmul.Rh (.., 3H).
        h: Codes of output.h (.., H).
        record: Receives the codes of all operators.

    Returns:
        Codes of output.h (.., H), int64.
    """
    zero = {name: quantizer.zero_point for name, quantizer in plan.frozen.quantizers.items()}
    sums, tables, one = plan.frozen.sums, plan.frozen.tables, plan.frozen.one

    def weighted_sum(name: str, *terms: Term) -> Tensor:
        return _apply(name, sums[name], terms, record)

    def table(name: str, codes: Tensor) -> Tensor:
        y = tables[name](codes)
        if record is not None:
            record.codes[name] = y
        return y

    def product(name: str, a: Tensor, b: Tensor) -> Term:
        """Return the product as its own code minus its zero point, or unrounded if fused."""
        return weighted_sum(name, (a, b)) - zero[name] if name in sums else (a, b)

    Wx_z, Wx_r, Wx_g = (Wx - zero["matmul.Wx"]).chunk(3, dim=-1)
    Rh_z, Rh_r, Rh_g = (Rh - zero["matmul.Rh"]).chunk(3, dim=-1)
    h = h - zero["output.h"]

    z_pre = weighted_sum("gate.z_pre", Wx_z, Rh_z)
    z = table("gate.z_out", z_pre) - zero["gate.z_out"]
    r_pre = weighted_sum("gate.r_pre", Wx_r, Rh_r)
    r = table("gate.r_out", r_pre) - zero["gate.r_out"]
    rRh = product("op.rRh", r, Rh_g)
    g_pre = weighted_sum("gate.g_pre", Wx_g, rRh)
    g = table("gate.g_out", g_pre) - zero["gate.g_out"]
    old = product("op.old_contrib", z, h)
    new = product("op.new_contrib", one - z, g)
    return weighted_sum("output.h", old, new)


def keep(plan: CellPlan, h: Tensor, new: Tensor) -> Tensor:
    """Return the state after a step, of which zoneout keeps a share: codes (.., H), int64.

    Args:
        plan: The plan of this layer and direction.
        h: Codes of output.h before the step (.., H).
        new: Codes of output.h computed by the gates (.., H).
    """
    zoneout, z_h = plan.frozen.zoneout, plan.h.zero_point
    return new if zoneout is None else zoneout(h - z_h, new - z_h)


def _apply(
    name: str, weighted_sum: WeightedSum, terms: tuple[Term, ...], record: Recorder | None
) -> Tensor:
    if record is None:
        return weighted_sum(*terms)
    unclamped = weighted_sum.unclamped(*terms)
    codes = unclamped.clamp(weighted_sum.lo, weighted_sum.hi)
    record.codes[name] = codes
    record.inside[name] = unclamped == codes
    return codes


def _add_bias(accumulator: Tensor | WideIntegers, bias: Tensor, shift: int) -> Term:
    if isinstance(accumulator, Tensor) and not shift:
        return accumulator + bias
    total: WideIntegers = python_integers(accumulator) + (python_integers(bias) << shift)
    return total


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
