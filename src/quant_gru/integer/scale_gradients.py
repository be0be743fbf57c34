"""Gradients of activation scales from the gradients of states: parallel in time, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru.integer.backward import (
    Gradients,
    Tape,
    autograd,
    follow_scale,
    kept_share,
    real_gates,
    real_weights,
)
from quant_gru.integer.cell import Recorder, states_before, trace
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer

# Steps whose operators are rebuilt at once. This bounds the memory of float64 intermediates.
_STEPS_AT_ONCE = 32


def scale_gradients(
    tape: Tape, grads: Gradients, x: Tensor, h0: Tensor | None, names: Sequence[str]
) -> Tensor:
    """Return the straight-through gradients of the scales of one layer and direction.

    Args:
        tape: The inputs and outputs of the forward, completed.
        grads: Its gradients, including those of x and h.
        x: Real values that input.x quantized (T, N, C).
        h0: Real values that output.h quantized before the first step (N, H); None for zeros.
        names: Operators whose scales are learned.

    Returns:
        float64 (len(names),).
    """
    assert grads.x is not None
    assert grads.h is not None
    plan = tape.plan
    W, R = real_weights(plan)
    assert tape.h0 is not None
    before = states_before(tape.out, tape.h0, tape.reverse)
    total = torch.zeros(len(names), dtype=torch.float64, device=x.device)
    for start in range(0, len(x), _STEPS_AT_ONCE):
        steps = slice(start, start + _STEPS_AT_ONCE)
        record = trace(plan, tape.x[steps], before[steps])
        moved = grads.h[steps].to(torch.float64) * (1 - kept_share(tape, steps))
        with autograd(), torch.enable_grad():
            scales = {name: _leaf(plan.frozen.quantizers[name], x.device) for name in names}
            inputs = plan.x.dequantize(tape.x[steps], torch.float64)
            h = plan.h.dequantize(before[steps], torch.float64)
            Wx = _projection(plan, record, "matmul.Wx", inputs @ W.T, "weight.bw", scales)
            Rh = _projection(plan, record, "matmul.Rh", h @ R.T, "weight.br", scales)
            new = real_gates(plan, record, Wx, Rh, h, scales)
            found = torch.autograd.grad(new, list(scales.values()), moved, allow_unused=True)
        total += torch.stack([total.new_zeros(()) if g is None else g for g in found])
    for name, quantizer, codes, real, grad in (
        ("input.x", plan.x, tape.x, x, grads.x),
        ("output.h", plan.h, tape.h0, h0, grads.h0),
    ):
        if name in names and real is not None:
            total[list(names).index(name)] += _at_the_border(quantizer, codes, real, grad)
    return total


def _leaf(quantizer: Quantizer, device: torch.device) -> Tensor:
    return torch.full((), quantizer.scale, dtype=torch.float64, device=device).requires_grad_()


def _projection(
    plan: CellPlan,
    record: Recorder,
    name: str,
    product: Tensor,
    bias: str,
    scales: dict[str, Tensor],
) -> Tensor:
    """Return the dequantized projection, with the gradient of its scale."""
    w = plan.weights
    codes = w.bw if bias == "weight.bw" else w.br
    real = product + codes.to(torch.float64) * w.scales[bias].to(torch.float64)
    value = plan.frozen.quantizers[name].dequantize(record.codes[name], torch.float64)
    if name not in scales:
        return value
    return follow_scale(plan, record, name, value, real, scales[name])


def _at_the_border(quantizer: Quantizer, codes: Tensor, real: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a scale that divides real values; NaN values contribute zero."""
    wide = torch.nan_to_num(real.to(torch.float64), nan=0.0, posinf=0.0, neginf=0.0)
    slope = (codes.to(torch.int64) - quantizer.zero_point).to(torch.float64)
    slope = slope - quantizer.inside(real) * (wide / quantizer.scale)
    return (slope * grad.to(torch.float64)).sum()
