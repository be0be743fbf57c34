"""Where precision is lost: signal-to-noise ratios of every operator."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def sqnr(real: Tensor, quantized: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB: 10 log10(sum(real^2) / sum((real-quantized)^2)).

    Args:
        real: Reference values, any shape.
        quantized: Values of the same shape.

    Returns:
        inf where both are equal, nan where there is nothing to compare.
    """
    return decibels(*energies(real, quantized))


def energies(real: Tensor, quantized: Tensor) -> tuple[float, float]:
    """Sums of squares of a signal and of its noise; of tensors as for `sqnr`."""
    signal = real.to(torch.float64).square().sum().item()
    return signal, (real.to(torch.float64) - quantized.to(torch.float64)).square().sum().item()


def decibels(signal: float, noise: float) -> float:
    """A ratio of energies in dB, as `sqnr` gives it."""
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def sqnr_per_operator(
    real: Mapping[str, Tensor], quantized: Mapping[str, Tensor]
) -> dict[str, float]:
    """`sqnr` of every operator that both mappings name, in the order of `real`."""
    return {name: sqnr(real[name], quantized[name]) for name in real if name in quantized}
