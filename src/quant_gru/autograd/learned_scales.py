"""Activation scales as parameters: their logarithms, and the quantizers derived from them.

Source: Esser et al., "Learned step size quantization", ICLR 2020; Jain et al., "Trained
quantization thresholds", MLSys 2020 (logarithms, powers of two by straight-through rounding).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quant_gru.config import CALIBRATED
from quant_gru.integer.qparams import PRE_ACTIVATION, QParams, float32
from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE

COUNT = len(CALIBRATED)
"""Number of scales of one layer and direction, in the order of `CALIBRATED`.

Entries of fused operators are unused.
"""


def logarithms(qparams: QParams) -> list[float]:
    """Return log2 of the scales of one layer and direction, 0 for fused operators."""
    found = (qparams.quantizers.get(name) for name in CALIBRATED)
    return [0.0 if quantizer is None else math.log2(quantizer.scale) for quantizer in found]


def follow(qparams: QParams, values: Sequence[float]) -> QParams:
    """Return parameters with scales from logarithms: the same object if no scale changes.

    Args:
        qparams: The current parameters.
        values: log2 of each scale; 'pot' rounds them to integers.

    Returns:
        Parameters with these scales, and with new tables where the scale of the input changed.
    """
    quantizers = dict(qparams.quantizers)
    for name, value in zip(CALIBRATED, values, strict=True):
        if name in quantizers and math.isfinite(value) and not quantizers[name].is_outside:
            old = quantizers[name].scale
            # keep the scale if its logarithm has not moved since it was written as a parameter
            unmoved = value == float32(math.log2(old))
            scale = old if unmoved else _scale(value, qparams.pot)
            if scale != old:
                quantizers[name] = replace(quantizers[name], scale=scale)
    changed = {name for name, q in quantizers.items() if q is not qparams.quantizers[name]}
    if not changed:
        return qparams
    tables = {
        out: table for out, table in qparams.tables.items() if PRE_ACTIVATION[out] not in changed
    }
    return qparams.remade(qparams.config, quantizers, qparams.pinned, tables)


def _scale(value: float, pot: bool) -> float:
    limit = math.log2(MAX_SCALE)
    value = min(max(value, -limit + 1), limit)
    scale = 2.0 ** round(value) if pot else float32(2.0**value)
    return min(max(scale, MIN_SCALE), MAX_SCALE)


def learned_names(qparams: QParams) -> list[str]:
    """Return the operators whose scales are learned."""
    # a zero point outside of the codes moves with its scale, which is therefore not learned
    q = qparams.quantizers
    return [name for name in CALIBRATED if name in q and not q[name].is_outside]


def to_logarithms(
    qparams: QParams, grads: Tensor, rows: int, input_size: int, hidden_size: int
) -> Tensor:
    """Return gradients of the logarithms from those of the scales, with the weights of LSQ.

    Args:
        qparams: The parameters of the layer and direction.
        grads: Gradients of the scales of `learned_names`, float64.
        rows: Steps times batch.
        input_size: Features of the layer's input.
        hidden_size: H.

    Returns:
        float32 (COUNT,).
    """
    widths = dict.fromkeys(("matmul.Wx", "matmul.Rh"), 3 * hidden_size) | {"input.x": input_size}
    factors = torch.zeros(COUNT, dtype=torch.float64, device="cpu")
    places = []
    for name in learned_names(qparams):
        quantizer = qparams.quantizers[name]
        count = max(rows, 1) * widths.get(name, hidden_size)
        weight = 1 / math.sqrt(count * max(quantizer.hi - quantizer.zero_point, 1))
        places.append(CALIBRATED.index(name))
        factors[places[-1]] = quantizer.scale * math.log(2) * weight
    found = grads.new_zeros(COUNT)
    found[places] = grads
    return (found * factors.to(grads.device)).to(torch.float32)
