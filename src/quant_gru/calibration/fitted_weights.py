"""Codes of a weight matrix for which its products change least, rather than its weights.

With the covariance G of the operand, a change D of a row of weights changes the product by D G D^T
on average. Rounding one column after the other, the error of each is made up for by those that are
not rounded yet (Hassibi and Stork's optimal brain surgeon; see docs/credits.md). Then single codes
move as long as that helps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quant_gru.integer.quantizer import code_limits

_ROUNDS = 4
# Of the mean variance: keeps a covariance of few or dependent values invertible.
_DAMPING = 1e-3


def fitted_rows(w: Tensor, scales: Tensor, bits: int, covariance: Tensor) -> Tensor:
    """Return the real values of the chosen codes, float64 (rows, K).

    Args:
        w: Weights (rows, K).
        scales: The scale of each row (rows,).
        bits: Width of a code.
        covariance: Of the operand, (K, K).
    """
    w, s = w.double(), scales.double()[:, None]
    variance = covariance.diagonal()
    damping = _DAMPING * variance.mean().clamp(min=torch.finfo(torch.float32).tiny)
    G = covariance.double() + damping * torch.eye(
        len(variance), dtype=torch.float64, device=w.device
    )
    lo, hi = code_limits(bits, signed=True)

    def rounded(values: Tensor) -> Tensor:
        return torch.round(values / s).clamp(lo, hi) * s

    order = variance.argsort(descending=True)
    left, chosen = w[:, order].clone(), torch.empty_like(w)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(G[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True)
    for k, column in enumerate(order.tolist()):
        now = left[:, k : k + 1]
        code = rounded(now)
        chosen[:, column : column + 1] = code
        left[:, k:] -= (now - code) / factor[k, k] * factor[k : k + 1, k:]
    error = (w - chosen) @ G
    for _ in range(_ROUNDS):
        moved = False
        for k in range(w.shape[1]):
            best = rounded((chosen[:, k] + error[:, k] / G[k, k])[:, None])[:, 0]
            change = best - chosen[:, k]
            if bool(change.any()):
                moved = True
                chosen[:, k] = best
                error -= change[:, None] * G[k]
        if not moved:
            break
    return chosen
