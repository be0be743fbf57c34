"""Warnings about biases that are clipped where they are added to sums of products."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUWarning, caller_stacklevel
from quant_gru.execution.layers import Weights
from quant_gru.integer.plan import bias_limit, build_frozen
from quant_gru.integer.qparams import QParams
from quant_gru.kernels.live_weights import quantize_weights

_ADDED = (("weight.bw", "Bw", "weight.W", "input.x"), ("weight.br", "Br", "weight.R", "output.h"))


@torch.no_grad()
def warn_of_cut_biases(
    scales: Sequence[Sequence[QParams]], weights: Sequence[Sequence[Weights]]
) -> None:
    """Warn about biases beyond the limit of their sums, if values or weights are too small.

    Args:
        scales: [layer][direction] -> quantizers.
        weights: [layer][direction] -> W, R, bw, br.
    """
    for layer, cells in enumerate(zip(scales, weights, strict=True)):
        for direction, cell in enumerate(zip(*cells, strict=True)):
            where = f"layer {layer}{' reverse' if direction else ''}"
            for message in _cut(where, *cell):
                warnings.warn(QuantGRUWarning(message), stacklevel=caller_stacklevel())


def _cut(where: str, qparams: QParams, weights: Weights) -> Iterator[str]:
    """Yield warnings about a layer and direction."""
    W, R, bw, br = weights
    if bw is None and br is None:
        return
    part = quantize_weights(qparams, build_frozen(qparams, W.device), W, R, bw, br)
    for name, added, weight, operand in _ADDED:
        bits = qparams.config[weight].bitwidth
        assert bits is not None
        values = qparams.quantizers[operand]
        biases: Tensor = getattr(part, added)
        cut = int((biases.abs() >= bias_limit(bits, values.bits)).sum())
        if cut:
            yield (
                f"Expected biases that sums of {weight} times {operand} can hold, got {cut} of "
                f"{biases.numel()} in {name} of {where} that are too large, and are cut off: "
                f"values of {operand} (scale {values.scale:g}) or weights are very small; a larger "
                f"scale of {operand} keeps biases, see adjust_quant_config"
            )
