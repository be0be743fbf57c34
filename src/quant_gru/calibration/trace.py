"""All intermediates of a float GRU from its inputs and states, in parallel over time.

The output sequence contains the state before every step, so nothing is sequential: one matrix
product per projection recomputes every operator at every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Values of an operator per block. This bounds the memory and is enough for efficient observers.
_VALUES = 1 << 19


@dataclass(frozen=True)
class FloatWeights:
    """The weights of one layer and direction as PyTorch stores them: rows reset, update, candidate.

    Attributes:
        W: (3H, C).
        R: (3H, H).
        bw: (3H,) or None.
        br: (3H,) or None.
    """

    W: Tensor
    R: Tensor
    bw: Tensor | None
    br: Tensor | None


def trace(weights: FloatWeights, x: Tensor, h_before: Tensor, h_after: Tensor) -> dict[str, Tensor]:
    """Return the real values of every operator at given steps.

    Args:
        weights: The weights of this layer and direction.
        x: Inputs (P, C); P is the number of steps of all sequences.
        h_before: States before each step (P, H).
        h_after: States after each step (P, H).

    Returns:
        Operator name -> values: (P, C) for input.x, (P, 3H) for matmul.Wx and matmul.Rh (rows
        reset, update, candidate), otherwise (P, H).
    """
    Wx = torch.nn.functional.linear(x, weights.W, weights.bw)
    Rh = torch.nn.functional.linear(h_before, weights.R, weights.br)
    Wx_r, Wx_z, Wx_g = Wx.chunk(3, dim=-1)
    Rh_r, Rh_z, Rh_g = Rh.chunk(3, dim=-1)
    z_pre, r_pre = Wx_z + Rh_z, Wx_r + Rh_r
    z, r = torch.sigmoid(z_pre), torch.sigmoid(r_pre)
    rRh = r * Rh_g
    g_pre = Wx_g + rRh
    g = torch.tanh(g_pre)
    return {
        "input.x": x,
        "output.h": h_after,
        "matmul.Wx": Wx,
        "matmul.Rh": Rh,
        "gate.z_pre": z_pre,
        "gate.z_out": z,
        "gate.r_pre": r_pre,
        "gate.r_out": r,
        "gate.g_pre": g_pre,
        "gate.g_out": g,
        "op.rRh": rRh,
        "op.old_contrib": z * h_before,
        "op.new_contrib": (1 - z) * g,
    }


def trace_blocks(
    weights: FloatWeights, x: Tensor, h_before: Tensor, h_after: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Yield the results of `trace` in blocks of rows; same shapes."""
    step = max(1, _VALUES // h_after.shape[1])
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        yield trace(weights, x[rows], h_before[rows], h_after[rows])
