"""nn.GRU's equations step by step, for features that nn.GRU lacks: zoneout, recurrent dropout.

It is much slower than nn.GRU: each step is a handful of PyTorch operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru.execution.layers import Weights
from quant_gru.execution.noise import Noise


def run_float(
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Sequence[Weights]],
    noise: Noise | None,
    zoneout: float,
) -> tuple[Tensor, Tensor]:
    """Run all layers in real numbers.

    Args:
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,) or None.
        weights: [layer][direction] -> W, R, bw, br.
        noise: Random masks (training), or None.
        zoneout: Share of the states that is kept if no mask is drawn.

    Returns:
        Output (T, N, D*H) and last states (layers * directions, N, H).
    """
    last: list[Tensor] = []
    for layer, cells in enumerate(weights):
        if layer and noise and noise.drops:
            T, N, features = x.shape
            x = x * noise.factors(layer, (T, N, features)).to(x.dtype)
        outputs = []
        for direction, cell in enumerate(cells):
            h = h0[len(last)]
            T, N, H = x.shape[0], *h.shape
            held = noise.held(layer, direction, len(cells), (T, N, H)) if noise else None
            factors = noise.weight_factors(layer, direction, H) if noise else None
            if factors is not None:
                W, R, bw, br = cell
                cell = (W, R * factors.to(R.dtype), bw, br)
            keep = held if held is not None else zoneout
            y, h = _direction(cell, x, h, lengths, keep, reverse=direction == 1)
            outputs.append(y)
            last.append(h)
        x = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return x, torch.stack(last)


def _direction(
    cell: Weights,
    x: Tensor,
    h: Tensor,
    lengths: Tensor | None,
    keep: Tensor | float,
    *,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    W, R, bw, br = cell
    T = x.shape[0]
    from_x = torch.nn.functional.linear(x, W, bw)
    outputs: list[Tensor] = [h] * T
    for t in reversed(range(T)) if reverse else range(T):
        x_r, x_z, x_n = from_x[t].chunk(3, dim=-1)
        h_r, h_z, h_n = torch.nn.functional.linear(h, R, br).chunk(3, dim=-1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        new = (1 - z) * n + z * h
        if isinstance(keep, Tensor):
            new = torch.where(keep[t], h, new)
        elif keep:
            new = keep * h + (1 - keep) * new
        h = new if lengths is None else torch.where((lengths > t)[:, None], new, h)
        outputs[t] = h
    return torch.stack(outputs), h
