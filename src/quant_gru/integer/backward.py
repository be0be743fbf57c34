"""The straight-through backward of the integer GRU: the yardstick of all faster ones.

The gradient is that of the real-valued cell at the dequantized codes, in float64: sigmoid and tanh
have the derivatives z(1-z) and max(0, 1-g^2) at their dequantized outputs, and a gradient stops
where the integer forward was clamped. Scales, bias rounding and multipliers are constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.cell import Recorder, states_before, trace
from quant_gru.integer.plan import ZONEOUT_SHIFT, CellPlan
from quant_gru.integer.quantizer import Quantizer


@dataclass(eq=False)
class Kept:
    """What a forward of all layers keeps, beside its input and output, for its backward.

    Attributes:
        out: Codes of output.h (T, N, H) of each layer and direction.
        nan: float32 (layers * directions, N): 0, or NaN where a row became NaN; None where that is
            to be seen in the last states.
    """

    out: list[Tensor] = field(default_factory=list)
    nan: Tensor | None = None


@dataclass(eq=False)
class Tape:
    """What is known of one layer and direction after its forward: all that its backward needs.

    `complete` makes codes and tensors of what may stand for them.

    Attributes:
        plan: The plan of the forward.
        x: Codes of input.x (T, N, C), or the float32 values that are quantized to them.
        h0: Codes of output.h before the first step (N, H), or None for zeros.
        out: Codes of output.h after each step (T, N, H).
        lengths: As for the forward: int64 (N,), or None.
        reverse: As for the forward.
        held: bool (T, N, H): units that kept their state in a step (zoneout), or None.
        nan: float32 (N,): 0, or NaN where a row became NaN, as all its gradients do; or None.
    """

    plan: CellPlan
    x: Tensor
    h0: Tensor | None
    out: Tensor
    lengths: Tensor | None = None
    reverse: bool = False
    held: Tensor | None = None
    nan: Tensor | None = None


@dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for, beside that of the state before the first step."""

    x: bool = True
    W: bool = True
    R: bool = True
    bw: bool = True
    br: bool = True
    h: bool = False


def union(wanted: Sequence[Wanted]) -> Wanted:
    """What any of several directions wants."""
    first = wanted[0]
    if all(each == first for each in wanted):
        return first
    return Wanted(*(any(flags) for flags in zip(*map(astuple, wanted), strict=True)))


@dataclass(eq=False)
class Gradients:
    """Gradients of one layer and direction; weights in PyTorch's row order; None: not wanted.

    Attributes:
        x: (T, N, C), before the mask of the input quantizer.
        h0: (N, H), before the mask of the state quantizer.
        W: (3H, C).
        R: (3H, H).
        bw: (3H,).
        br: (3H,).
        h: Of the states after each step (T, N, H), that of the output in it.
    """

    x: Tensor | None
    h0: Tensor
    W: Tensor | None
    R: Tensor | None
    bw: Tensor | None
    br: Tensor | None
    h: Tensor | None = None

    def in_float32(self) -> Gradients:
        """The same in float32."""
        single: dict[str, Any] = {k: v if v is None else v.float() for k, v in vars(self).items()}
        return Gradients(**single)


def complete(
    tape: Tape, grad_out: Tensor | None, grad_last: Tensor | None
) -> tuple[Tape, Tensor, Tensor]:
    """The same backward with codes for values and tensors for None, as `straight_through` takes it.

    Args:
        tape: What the forward took in and gave.
        grad_out: Gradient of the dequantized outputs (T, N, H), or None for zeros.
        grad_last: Gradient of the dequantized last state (N, H), or None for zeros.

    Returns:
        A tape without `nan`, which has gone into the gradient of the last state; both gradients.
    """
    plan, x, h0, (_, N, H) = tape.plan, tape.x, tape.h0, tape.out.shape
    if x.is_floating_point() and x.numel():
        x = plan.border.quantize(x).to(plan.x.container)
    if h0 is None:
        h0 = torch.full((N, H), plan.h.zero_point, dtype=plan.h.container, device=x.device)
    if grad_out is None:
        grad_out = torch.zeros((), device=x.device).expand(tape.out.shape)
    if tape.nan is not None:
        nan = tape.nan[:, None].expand(N, H)
        grad_last = nan if grad_last is None else grad_last + nan
    elif grad_last is None:
        grad_last = torch.zeros((N, H), device=x.device)
    return Tape(plan, x, h0, tape.out, tape.lengths, tape.reverse, tape.held), grad_out, grad_last


def straight_through(
    tape: Tape, grad_out: Tensor, grad_last: Tensor, wanted: Wanted | None = None
) -> Gradients:
    """Backpropagate through time, in float64.

    A NaN in `grad_last` makes all gradients of its row NaN, and those of the weights.

    Args:
        tape: What the forward took in and gave; see `complete`.
        grad_out: Gradient of the dequantized outputs (T, N, H).
        grad_last: Gradient of the dequantized last state (N, H).
        wanted: Which gradients to compute; None for all.
    """
    wanted = wanted or Wanted()
    plan, x, reverse = tape.plan, tape.x, tape.reverse
    T = x.shape[0]
    assert tape.h0 is not None
    h_before = states_before(tape.out, tape.h0, reverse)
    grad_out = grad_out.to(torch.float64)
    dh = grad_last.to(torch.float64)
    W, R = real_weights(plan)
    dWx = torch.zeros((*x.shape[:2], W.shape[0]), dtype=torch.float64, device=x.device)
    dRh, dh_after = torch.zeros_like(dWx), torch.zeros_like(grad_out)
    for t in range(T) if reverse else reversed(range(T)):
        kept = kept_share(tape, t)
        if tape.lengths is None:
            step = dh + grad_out[t]
        else:
            counts = (tape.lengths > t)[:, None]
            step = torch.where(counts, dh + grad_out[t], dh)
        dh_after[t] = step
        record = trace(plan, x[t], h_before[t])
        dWx[t], dRh[t], direct = _gates_backward(plan, record, h_before[t], step * (1 - kept))
        dh = direct + dRh[t] @ R + step * kept
    flat_dWx, flat_dRh = dWx.flatten(0, 1), dRh.flatten(0, 1)

    def product(wanted: bool, grads: Tensor, quantizer: Quantizer, codes: Tensor) -> Tensor | None:
        if not wanted:
            return None
        return _reset_first(grads.T @ quantizer.dequantize(codes, torch.float64).flatten(0, 1))

    return Gradients(
        dWx @ W if wanted.x else None,
        dh,
        product(wanted.W, flat_dWx, plan.x, x),
        product(wanted.R, flat_dRh, plan.h, h_before),
        _reset_first(flat_dWx.sum(0)) if wanted.bw else None,
        _reset_first(flat_dRh.sum(0)) if wanted.br else None,
        dh_after if wanted.h else None,
    )


def kept_share(tape: Tape, steps: int | slice) -> Tensor | float:
    """The share of its state that a unit keeps in a step, float64 that broadcasts to (.., N, H).

    Args:
        tape: What the forward took in and gave.
        steps: Which step, or steps.
    """
    kept: Tensor | float = 0.0
    zoneout = tape.plan.frozen.zoneout
    if tape.held is not None:
        kept = tape.held[steps].to(torch.float64)
    elif zoneout is not None:
        kept = float(zoneout.multipliers[0]) / (1 << ZONEOUT_SHIFT)
    if tape.lengths is None:
        return kept
    t = torch.arange(len(tape.x), device=tape.x.device)[steps]
    over = (tape.lengths <= t[..., None])[..., None].to(torch.float64)
    return over + (1 - over) * kept


def real_weights(plan: CellPlan) -> tuple[Tensor, Tensor]:
    """s_W * W_code (3H, C) and s_R * R_code (3H, H), float64, rows update, reset, candidate."""
    w = plan.weights
    s_W, s_R = (w.scales[name].to(torch.float64)[:, None] for name in ("weight.W", "weight.R"))
    return w.W.to(torch.float64) * s_W, w.R.to(torch.float64) * s_R


def _gates_backward(
    plan: CellPlan, record: Recorder, h: Tensor, dh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of both projections (N, 3H) and of the state's direct path (N, H), by autograd."""
    with autograd(), torch.enable_grad():
        Wx = _real(plan, record, "matmul.Wx").requires_grad_()
        Rh = _real(plan, record, "matmul.Rh").requires_grad_()
        h_real = plan.h.dequantize(h, torch.float64).requires_grad_()
        new = real_gates(plan, record, Wx, Rh, h_real)
        dWx, dRh, direct = torch.autograd.grad(new, (Wx, Rh, h_real), dh)
    return dWx * record.inside["matmul.Wx"], dRh * record.inside["matmul.Rh"], direct


def autograd() -> AbstractContextManager[None]:
    """Autograd, also inside an operator, below which the dispatcher turns it off."""
    guard: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.AutogradFunctionality, False
    )
    return guard


def real_gates(
    plan: CellPlan,
    record: Recorder,
    Wx: Tensor,
    Rh: Tensor,
    h: Tensor,
    scales: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """The cell's real-valued equations, with every value replaced by its dequantized code.

    Args:
        plan: The plan.
        record: Codes and masks of the same steps.
        Wx: Dequantized matmul.Wx (N, 3H), float64.
        Rh: Dequantized matmul.Rh (N, 3H), float64.
        h: Dequantized state before the step (N, H), float64.
        scales: Operator name -> its scale, float64 scalar, where a gradient is to go; or None.

    Returns:
        The dequantized state after the step (N, H), differentiable in Wx, Rh, h and scales.
    """

    def through(name: str, real: Tensor) -> Tensor:
        if name not in plan.frozen.quantizers:
            return real
        value = _pass(_real(plan, record, name), real, record.inside[name])
        scale = scales.get(name) if scales else None
        return value if scale is None else follow_scale(plan, record, name, value, real, scale)

    Wx_z, Wx_r, Wx_g = Wx.chunk(3, dim=-1)
    Rh_z, Rh_r, Rh_g = Rh.chunk(3, dim=-1)
    z_pre = through("gate.z_pre", Wx_z + Rh_z)
    z_out = _real(plan, record, "gate.z_out")
    z = _pass(z_out, z_pre, z_out * (1 - z_out))
    r_pre = through("gate.r_pre", Wx_r + Rh_r)
    r_out = _real(plan, record, "gate.r_out")
    r = _pass(r_out, r_pre, r_out * (1 - r_out))
    rRh = through("op.rRh", r * Rh_g)
    g_pre = through("gate.g_pre", Wx_g + rRh)
    g_out = _real(plan, record, "gate.g_out")
    g = _pass(g_out, g_pre, (1 - g_out**2).clamp(min=0))
    old = through("op.old_contrib", z * h)
    new = through("op.new_contrib", (1 - z) * g)
    return through("output.h", old + new)


def follow_scale(
    plan: CellPlan, record: Recorder, name: str, value: Tensor, real: Tensor, scale: Tensor
) -> Tensor:
    """`value` of an operator, with the gradient that its scale has (Esser et al., LSQ, 2020).

    Where the value was not clamped it is s * rint(v / s), else s * (lo - z) or s * (hi - z).

    Args:
        plan: The plan.
        record: Codes and masks.
        name: The operator.
        value: Its dequantized codes.
        real: What it quantizes.
        scale: Its scale, float64 scalar.
    """
    quantizer = plan.frozen.quantizers[name]
    codes = (record.codes[name] - quantizer.zero_point).to(torch.float64)
    slope = codes - record.inside[name] * (real.detach() / quantizer.scale)
    return value + (scale - scale.detach()) * slope


def _real(plan: CellPlan, record: Recorder, name: str) -> Tensor:
    return plan.frozen.quantizers[name].dequantize(record.codes[name], torch.float64)


def _pass(value: Tensor, real: Tensor, slope: Tensor) -> Tensor:
    """`value`, with the gradient `slope` towards `real`."""
    return value + (real - real.detach()) * slope


def _reset_first(w: Tensor) -> Tensor:
    """Rows update, reset, candidate (the plan) -> reset, update, candidate (PyTorch)."""
    update, reset, candidate = w.chunk(3)
    return torch.cat((reset, update, candidate))
