"""How far gradients in float32 are from the float64 definition, in units of what they sum up."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quant_gru.integer.backward import Gradients, Tape, Wanted, straight_through
from quant_gru.integer.cell import states_before

SUMS = ("W", "R", "bw", "br")


def error(name: str, ours: Tensor, expected: Gradients, tape: Tape, limit: float) -> float:
    """The distance of one gradient over its norm.

    Where that is above `limit` and the gradient is a sum over rows and steps, its terms may have
    cancelled: the distance over their norm counts then.

    Args:
        name: A field of `Gradients`.
        ours: The gradient.
        expected: All gradients of `tape` by the definition, those of the states among them.
        tape: What the forward took in and gave.
        limit: What the caller allows.
    """
    theirs = getattr(expected, name)
    distance = float((ours.to(torch.float64) - theirs).norm())
    size = float(theirs.norm())
    if name in SUMS and distance > limit * size:
        size = float(torch.stack(terms(name, expected, tape)).norm())
    return distance / size if distance else 0.0


def terms(name: str, expected: Gradients, tape: Tape) -> list[Tensor]:
    """What each step of each row adds to a gradient.

    On its own, a step of a row is a sequence whose last state has the gradient of that state.

    Args:
        name: One of `SUMS`.
        expected: The gradients of the states at least.
        tape: What the forward took in and gave.
    """
    before = states_before(tape.out, tape.h0, tape.reverse)
    T, N, H = tape.out.shape
    wanted = replace(Wanted(False, False, False, False, False), **{name: True})
    found = []
    for t, n in ((t, n) for n in range(N) for t in range(T)):
        if tape.lengths is not None and tape.lengths[n] <= t:
            continue
        step = replace(
            tape,
            x=tape.x[t, n].expand(1, 1, -1),
            h0=before[t, n][None],
            out=tape.out[t, n].expand(1, 1, -1),
            lengths=None,
            held=None if tape.held is None else tape.held[t, n].expand(1, 1, -1),
        )
        last = expected.h[t, n][None]
        found.append(getattr(straight_through(step, torch.zeros(1, 1, H), last, wanted), name))
    return found
