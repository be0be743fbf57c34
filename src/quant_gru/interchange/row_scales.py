"""The scales of the rows of a plan's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan

ROWS = {
    "weight.W": ("input.x", "matmul.Wx"),
    "weight.R": ("output.h", "matmul.Rh"),
}


def row_scales(plan: CellPlan, name: str) -> Tensor:
    """Return the scales of the rows of 'weight.W' or 'weight.R', float32 (3H,).

    A frozen GRU keeps them in its multipliers alone, with 16 significant bits or more.
    """
    if name in plan.weights.scales:
        return plan.weights.scales[name].cpu()
    x = plan.frozen.quantizers[ROWS[name][0]]
    return (_units(plan, name) / x.scale).to(torch.float32)


def _units(plan: CellPlan, name: str) -> Tensor:
    """Return the real value of 1 in accumulators, float64 (3H,)."""
    total = plan.weights.Wx if name == "weight.W" else plan.weights.Rh
    (M,), k = total.multipliers, total.shift
    assert isinstance(M, Tensor)
    assert isinstance(k, Tensor)
    out = plan.frozen.quantizers[ROWS[name][1]]
    return torch.ldexp(M.cpu().double(), -k.cpu().to(torch.int32)) * out.scale
