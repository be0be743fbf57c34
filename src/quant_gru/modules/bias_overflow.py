"""Warnings about biases that are clipped where they are added to sums of products."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from quant_gru.errors import QuantGRUWarning, caller_stacklevel
from quant_gru.execution.layers import Weights
from quant_gru.integer.plan import GRUPlan, WeightPart, bias_limit, build_frozen
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.live_weights import quantize_weights

Key = tuple[int, int, str]
"""Layer, direction and name of biases."""

_ADDED = {"weight.bw": ("weight.W", "input.x"), "weight.br": ("weight.R", "output.h")}


class CutBiases(NamedTuple):
    """Biases of one layer and direction that are cut off.

    Attributes:
        key: Which.
        cut: How many.
        rows: Of how many.
        scale: The scale of the values that the weights multiply.
    """

    key: Key
    cut: int
    rows: int
    scale: float


@torch.no_grad()
def cut_biases(
    scales: Sequence[Sequence[QParams]], weights: Sequence[Sequence[Weights]]
) -> list[CutBiases]:
    """Return the biases beyond the limit of their sums, because values or weights are too small.

    Weights without values (on the meta device) or with NaN or infinity are left to their first use.

    Args:
        scales: [layer][direction] -> quantizers.
        weights: [layer][direction] -> W, R, bw, br.
    """
    found = []
    for layer, cells in enumerate(zip(scales, weights, strict=True)):
        for direction, (qparams, own) in enumerate(zip(*cells, strict=True)):
            if any(w is not None and w.is_meta for w in own):
                continue
            part = quantize_weights(qparams, build_frozen(qparams, own[0].device), *own)
            x, h = (qparams.quantizers[name] for name in ("input.x", "output.h"))
            found += _cut(layer, direction, part, x, h)
    return found


def cut_biases_of(plan: GRUPlan) -> list[CutBiases]:
    """Return the result of `cut_biases` from the integers of a plan."""
    return [
        cut
        for layer, cells in enumerate(plan.cells)
        for direction, cell in enumerate(cells)
        for cut in _cut(layer, direction, cell.weights, cell.x, cell.h)
    ]


def _cut(
    layer: int, direction: int, part: WeightPart, x: Quantizer, h: Quantizer
) -> list[CutBiases]:
    """Return the cut biases of one layer and direction."""
    if part.W.is_meta or not part.finite:
        return []
    found = []
    sums = ((part.Bw, part.bits_W, x), (part.Br, part.bits_R, h))
    for name, (biases, bits, values) in zip(_ADDED, sums, strict=True):
        cut = int((biases.long().abs() >= bias_limit(bits, values.bits)).sum())
        if cut:
            found.append(CutBiases((layer, direction, name), cut, biases.numel(), values.scale))
    return found


def warn_of_cut_biases(found: Sequence[CutBiases], told: Collection[Key] = ()) -> frozenset[Key]:
    """Warn about biases that are cut off.

    Args:
        found: The biases.
        told: Those that need no warning.

    Returns:
        Which biases are cut off.
    """
    for (layer, direction, name), cut, rows, scale in found:
        if (layer, direction, name) in told:
            continue
        weight, operand = _ADDED[name]
        text = (
            f"Expected biases that sums of {weight} times {operand} can hold, got {cut} of "
            f"{rows} in {name} of layer {layer}{' reverse' if direction else ''} "
            f"that are too large, and are cut off: values of {operand} (scale "
            f"{scale:g}) or weights are very small; a larger scale of {operand} keeps "
            "biases, see adjust_quant_config"
        )
        warnings.warn(QuantGRUWarning(text), stacklevel=caller_stacklevel())
    return frozenset(key for key, *_ in found)
