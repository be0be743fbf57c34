"""Warnings about biases that are clipped where they are added to sums of products."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from quant_gru.errors import QuantGRUWarning, caller_stacklevel
from quant_gru.execution.layers import Weights
from quant_gru.integer.plan import GRUPlan, WeightPart, bias_limit, build_frozen
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.live_weights import quantize_weights


@torch.no_grad()
def warn_of_cut_biases(
    scales: Sequence[Sequence[QParams]], weights: Sequence[Sequence[Weights]]
) -> None:
    """Warn about biases beyond the limit of their sums, if values or weights are too small.

    Weights without values (on the meta device) or with NaN or infinity are left to their first use.

    Args:
        scales: [layer][direction] -> quantizers.
        weights: [layer][direction] -> W, R, bw, br.
    """
    for layer, cells in enumerate(zip(scales, weights, strict=True)):
        for direction, (qparams, own) in enumerate(zip(*cells, strict=True)):
            if any(w is not None and w.is_meta for w in own):
                continue
            part = quantize_weights(qparams, build_frozen(qparams, own[0].device), *own)
            x, h = (qparams.quantizers[name] for name in ("input.x", "output.h"))
            _warn(layer, direction, part, x, h)


def warn_of_cut_biases_of(plan: GRUPlan) -> None:
    """Warn like `warn_of_cut_biases`, about the integers of a plan."""
    for layer, cells in enumerate(plan.cells):
        for direction, cell in enumerate(cells):
            _warn(layer, direction, cell.weights, cell.x, cell.h)


def _warn(layer: int, direction: int, part: WeightPart, x: Quantizer, h: Quantizer) -> None:
    """Warn about a layer and direction."""
    if part.W.is_meta or not part.finite:
        return
    sums = (
        ("weight.bw", part.Bw, "weight.W", part.bits_W, "input.x", x),
        ("weight.br", part.Br, "weight.R", part.bits_R, "output.h", h),
    )
    for name, biases, weight, bits, operand, values in sums:
        cut = int((biases.long().abs() >= bias_limit(bits, values.bits)).sum())
        if cut:
            text = (
                f"Expected biases that sums of {weight} times {operand} can hold, got {cut} of "
                f"{biases.numel()} in {name} of layer {layer}{' reverse' if direction else ''} "
                f"that are too large, and are cut off: values of {operand} (scale "
                f"{values.scale:g}) or weights are very small; a larger scale of {operand} keeps "
                "biases, see adjust_quant_config"
            )
            warnings.warn(QuantGRUWarning(text), stacklevel=caller_stacklevel())
