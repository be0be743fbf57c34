"""The mean of a layer's input, for the correction of its bias."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quant_gru.calibration.distributed import merge_ranks
from quant_gru.integer.bias_correction import InputMean

# A mean has this many bits below the largest input. Float64 sums in another order differ far below.
_BITS = 16
_LEAST_EXPONENT = -149  # of float32


class MeanObserver:
    """The sums of the features of a layer's input; picklable, with its state on the CPU."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._count = 0
        self._largest = 0.0

    def update(self, x: Tensor) -> None:
        """Add values, float64 (P, C)."""
        if x.numel():
            low, high = x.aminmax()
            largest = float(torch.maximum(-low, high).to(torch.float32))
            self._add(x.sum(dim=0).cpu(), x.shape[0], largest)

    def _add(self, sums: Tensor | None, count: int, largest: float) -> None:
        if sums is not None:
            self._sums = sums if self._sums is None else self._sums + sums
            self._count += count
            self._largest = max(self._largest, largest)

    def merge(self, other: MeanObserver) -> None:
        """Add the sums of another process, in place."""
        self._add(other._sums, other._count, other._largest)

    def all_reduce(self, group: Any = None) -> None:
        """Give every rank the sums of all ranks; a collective."""
        merge_ranks(self, group)

    def mean(self) -> InputMean | None:
        """Return the mean of each feature; None if there are no values, or all means are 0.

        Each is rounded, half-even, to a multiple of 2^(e - 16). 2^e is the smallest power of two
        that is larger than the largest magnitude of all features.
        """
        if self._sums is None or not math.isfinite(self._largest):
            return None
        unit = max(math.frexp(self._largest)[1] - _BITS, _LEAST_EXPONENT)
        means = (self._sums / self._count).tolist()
        integers = [round(math.ldexp(mean, -unit)) for mean in means]
        return InputMean.of(integers, -unit) if any(integers) else None
