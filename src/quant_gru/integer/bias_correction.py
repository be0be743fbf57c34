"""The mean error of quantized weights, moved into the bias: W x is off by (W - s q) mean(x).

All sums are of integers in float64, so their order does not matter: every executor gets the same
bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.weights import block_size, power_of_two

LARGEST_FLOAT = float(torch.finfo(torch.float32).max)

# Partial sums stay below 2^51, where float64 is exact and adding 1.5 * 2^52 rounds to an integer.
_SUM_BITS = 51


@dataclass(frozen=True)
class InputMean:
    """The mean of each feature of a layer's input.

    Attributes:
        values: float32 numbers, one per feature.
    """

    values: tuple[float, ...]
    _kept: dict[tuple[int, torch.device], tuple[Sums, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, integers: Sequence[int], exp2_inv: int) -> InputMean:
        """Return the mean of features that are integers times 2^-exp2_inv."""
        return cls(tuple(math.ldexp(value, -exp2_inv) for value in integers))

    def integers(self) -> tuple[list[int], int]:
        """Return integers and exp2_inv, such that each mean is an integer times 2^-exp2_inv.

        exp2_inv is the smallest that there is, 0 if all means are 0.
        """
        exp2_inv = max((_exp2_inv(value) for value in self.values if value), default=0)
        return [int(math.ldexp(value, exp2_inv)) for value in self.values], exp2_inv

    def __reduce__(self) -> Any:
        # without the copies, which may be on a device
        return InputMean, (self.values,)

    def on(self, device: torch.device, bits: int) -> tuple[Sums, Tensor]:
        """Return the constants for weights of a width, and their factors, float64 (C,).

        A copy is kept for each device: later calls do not synchronize with it.
        """
        found = self._kept.get((bits, device))
        if found is None:
            sums = sums_of(self.values, bits)
            with torch.inference_mode(False):
                factors = torch.tensor(sums.factors, dtype=torch.float64, device=device)
            # native code keeps addresses: the first one stays if threads race
            found = self._kept.setdefault((bits, device), (sums, factors))
        return found


def _exp2_inv(value: float) -> int:
    """Return the smallest n for which `value` is a multiple of 2^-n; not for 0."""
    mantissa, exponent = math.frexp(value)
    whole = int(math.ldexp(mantissa, 53))
    return 53 - exponent - ((whole & -whole).bit_length() - 1)


@dataclass(frozen=True)
class Sums:
    """The constants of the sums over one row: T = sum_k clamp(rint(e[k] / 2^p * factor[k])).

    e is the error of a weight, and 2^p is the smallest power of two that is larger than the scale
    of its row. The correction is T * 2^(p + exponent).

    Attributes:
        factors: One per feature.
        limit: Limit of each term, an integer.
        exponent: Exponent of the unit of T beside the row's.
    """

    factors: tuple[float, ...]
    limit: float
    exponent: int


def sums_of(mean: Sequence[float], bits: int) -> Sums:
    """Return the constants of the correction.

    Args:
        mean: The mean of each feature.
        bits: Width of a weight.
    """
    terms = (len(mean) - 1).bit_length()
    largest = math.frexp(max(map(abs, mean)))[1]
    # A scale that follows the weights clips at most three quarters of a weight: an error is below
    # 2^(bits + 1) scales. A larger one, of a scale set by hand, is clamped.
    resolution = _SUM_BITS - 1 - bits - terms
    factors = tuple(math.ldexp(m, resolution - largest) for m in mean)
    return Sums(factors, math.ldexp(1.0, _SUM_BITS - terms), largest - resolution)


def corrected(
    b: Tensor,
    W: Tensor,
    codes: Tensor,
    scales: Tensor,
    mean: InputMean | None,
    bits: int,
    offset: float = 0.0,
) -> Tensor:
    """Return the bias with the mean error of the weights, float32 (3H,).

    A cell computes with its input less an offset, whose product with the codes is added, too.

    Args:
        b: (3H,), finite float32.
        W: (3H, C), finite float32.
        codes: (3H, C), codes of W.
        scales: float32 (3H,), scales of W.
        mean: The mean of the input; None for no correction.
        bits: Width of a weight.
        offset: What the cell subtracts from its input.
    """
    s = scales.to(torch.float64)
    found = b.to(torch.float64)
    if offset:
        found = found + (s * offset) * codes.sum(dim=1, dtype=torch.int64).to(torch.float64)
    if mean is not None:
        found = found + _mean_errors(W, codes, s, mean, bits)
    return found.clamp(-LARGEST_FLOAT, LARGEST_FLOAT).to(torch.float32)


def _mean_errors(W: Tensor, codes: Tensor, s: Tensor, mean: InputMean, bits: int) -> Tensor:
    """Return the corrections of the rows, float64 (3H,)."""
    sums, factors = mean.on(W.device, bits)
    row = power_of_two(-torch.frexp(s)[1])
    totals = torch.empty_like(s)
    rows = max(block_size(W.device) // W.shape[1], 1)
    for i in range(0, W.shape[0], rows):
        part = slice(i, i + rows)
        error = W[part].to(torch.float64) - s[part, None] * codes[part].to(torch.float64)
        terms = error * row[part, None] * factors
        totals[part] = torch.round(terms).clamp(-sums.limit, sums.limit).sum(dim=1)
    unit = power_of_two(torch.frexp(s)[1].to(torch.int64) + sums.exponent)
    return totals * unit
