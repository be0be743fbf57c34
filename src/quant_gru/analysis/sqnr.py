"""Signal-to-quantization-noise ratios of operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sqnr(real: Tensor, quantized: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB: 10 log10(sum(real^2) / sum((real-quantized)^2)).

    Args:
        real: Reference values, any shape.
        quantized: Values of the same shape.

    Returns:
        inf if both are equal, nan if both are zero or empty, -inf if only `real` is zero.
    """
    return decibels(*energies(real, quantized))


def energies(real: Tensor, quantized: Tensor) -> tuple[float, float]:
    """Return the sums of squares of a signal and of its noise; arguments as for `sqnr`."""
    signal = real.to(torch.float64).square().sum().item()
    return signal, (real.to(torch.float64) - quantized.to(torch.float64)).square().sum().item()


def decibels(signal: float, noise: float) -> float:
    """Return a ratio of energies in dB, as in `sqnr`."""
    if noise == 0:
        return math.inf if signal > 0 else math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def text_of(value: float) -> str:
    """Return decibels as text: 'equal' without noise, 'zeros' if both signals are zero."""
    if math.isnan(value):
        return "zeros"
    return "equal" if value == math.inf else f"{value:.1f}"


def as_json(value: float) -> float | str:
    """Return decibels as JSON has them: those that are not finite as text."""
    return value if math.isfinite(value) else str(value)
