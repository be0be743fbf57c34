"""What the tests of the CUDA backward share: tapes, and how far gradients are from exact ones."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from quant_gru import QuantConfig, QuantGRU
from quant_gru.integer import cell as reference
from quant_gru.integer.backward import Gradients, Tape, straight_through
from quant_gru.integer.plan import CellPlan

BOUNDS = {"fp32": 1e-5, "tf32": 1e-3, "bf16": 1e-2}


def plans_of(C, H, config=None, weights=1.0, device="cpu", **options):
    """Plans of a calibrated layer, with its own initial weights times a factor."""
    gru = QuantGRU(C, H, config=config or QuantConfig.int8(), **options).eval().to(device)
    with torch.no_grad():
        for each in gru.parameters():
            each.mul_(weights)
    gru.calibrate(torch.randn(12, 8, C, device=device))
    gru.finalize_calibration()
    return gru._plan().cells[0]


def random_tape(plan, T, N, *, lengths=False, reverse=False, held=False, device="cpu"):
    """A tape of random codes, run by the reference."""
    generator = torch.Generator().manual_seed(T * 1000 + N)

    def codes(q, *shape):
        spread = torch.randn(shape, generator=generator) / (3 * q.scale)
        return (spread.round() + q.zero_point).clamp(q.lo, q.hi).to(q.container).to(device)

    x, h0 = codes(plan.x, T, N, plan.input_size), codes(plan.h, N, plan.hidden_size)
    steps = torch.randint(1, T + 1, (N,), generator=generator).to(device) if lengths else None
    stay = None
    if held:
        stay = (torch.rand((T, N, plan.hidden_size), generator=generator) < 0.3).to(device)
    out = outputs(plan, x, h0, steps, reverse, stay)
    return Tape(plan, x, h0, out, steps, reverse, stay)


def both_directions(plans, tape):
    """A tape of each direction, of the same input and states before the first step."""
    return [
        replace(
            tape,
            plan=plan,
            out=outputs(plan, tape.x, tape.h0, tape.lengths, bool(i), tape.held),
            reverse=bool(i),
        )
        for i, plan in enumerate(plans)
    ]


def outputs(plan, x, h0, lengths=None, reverse=False, held=None):
    """States after each step; units in `held` keep theirs."""
    return reference.run(plan, x, h0, lengths, reverse, held)[0]


def random_gradients(tape, seed=0):
    """Gradients of the outputs and of the last state."""
    generator = torch.Generator().manual_seed(seed)
    shape, device = tape.out.shape, tape.out.device
    out = torch.randn(shape, generator=generator).to(device)
    return out, torch.randn(shape[1:], generator=generator).to(device)


def errors(got: Gradients, tape, grad_out, grad_last, wanted=None):
    """||got - exact|| / ||exact|| of each gradient; the largest where a gradient is nothing."""
    exact = straight_through(tape, grad_out, grad_last, wanted)
    found = {}
    for field in fields(Gradients):
        ours, theirs = getattr(got, field.name), getattr(exact, field.name)
        assert (ours is None) == (theirs is None), field.name
        if ours is None:
            continue
        assert ours.dtype == torch.float32, field.name
        assert ours.shape == theirs.shape, field.name
        norm = theirs.norm()
        found[field.name] = float((ours - theirs).norm() / (norm if norm > 0 else 1))
    return found


def moved(plan, device):
    """A plan with its tensors on a device."""

    def there(value):
        return value.to(device) if isinstance(value, torch.Tensor) else value

    def weighted_sum(each):
        multipliers = tuple(there(M) for M in each.multipliers)
        return replace(each, multipliers=multipliers, shift=there(each.shift))

    w = plan.weights
    names = ("W", "R", "bw", "br", "Bw", "Br", "finite")
    weights = replace(
        w,
        Wx=weighted_sum(w.Wx),
        Rh=weighted_sum(w.Rh),
        scales={name: there(scale) for name, scale in w.scales.items()},
        **{name: there(getattr(w, name)) for name in names},
    )
    tables = {name: table.to(device) for name, table in plan.frozen.tables.items()}
    return CellPlan(replace(plan.frozen, tables=tables), weights)
