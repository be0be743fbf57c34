"""Statistics of calibration: a small mergeable state per operator."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from quant_gru.calibration.distributed import merge_ranks
from quant_gru.calibration.histogram import (
    Histogram,
    central_range,
    histogram_of,
    in_memory_order,
    merged,
)
from quant_gru.errors import CalibrationError

METHODS: Mapping[str, str] = MappingProxyType(
    {
        "histogram": "histogram",
        "sqnr": "histogram",
        "minmax": "minmax",
        "percentile": "percentile",
        "ema": "ema",
    }
)
"""Every accepted name of a calibration method, with its canonical name."""

EMA_DECAY = 0.9

_REDUCIBLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Observer(ABC):
    """Statistics of the values of one operator.

    `update` is called for every chunk of a batch, `end_batch` after each batch, and `all_reduce`
    once at the end if several processes calibrate. Observers are picklable; their state is on the
    CPU.

    Attributes:
        method: Canonical name of the calibration method.
        nonfinite: Number of NaN and infinite values seen; the statistics exclude them.
    """

    method: ClassVar[str]

    def __init__(self) -> None:
        self.nonfinite = 0

    @property
    def has_nonfinite(self) -> bool:
        """Whether any NaN or infinity was seen."""
        return self.nonfinite > 0

    @property
    def is_empty(self) -> bool:
        """Whether there are no statistics of finite values yet."""
        return self.minimum > self.maximum

    @property
    @abstractmethod
    def minimum(self) -> float:
        """Lower end of the observed range; +inf while empty."""

    @property
    @abstractmethod
    def maximum(self) -> float:
        """Upper end of the observed range; -inf while empty."""

    def update(self, values: Tensor) -> None:
        """Add `values`: any shape, floating-point dtype and device; may be empty.

        Statistics use the float32 numbers that the quantizer will see.

        Raises:
            CalibrationError: If `values` is not a floating-point tensor.
        """
        if not values.is_floating_point():
            raise CalibrationError(f"Expected values to be floating point, got {values.dtype}")
        if values.numel() == 0:
            return
        values = in_memory_order(values.detach())
        if values.dtype not in _REDUCIBLE:
            values = values.to(torch.float32)
        minimum, maximum = _extremes(values)
        if not (math.isfinite(minimum) and math.isfinite(maximum)):
            values = values.to(torch.float32)
            finite = values[values.isfinite()]
            self.nonfinite += values.numel() - finite.numel()
            if finite.numel() == 0:
                return
            values = finite
            minimum, maximum = _extremes(values)
        self._observe(values, minimum, maximum)

    def end_batch(self, group: Any = None) -> None:  # noqa: B027 - most methods do nothing here
        """Mark the end of a batch; only `ema` uses it, on all ranks of `group` together."""

    def merge(self, other: Observer) -> None:
        """Merge the statistics of `other`, an observer of the same method, in place.

        Raises:
            CalibrationError: If `other` uses another method.
        """
        if type(self) is not type(other):
            raise CalibrationError(
                f"Expected the observer to merge to be of method {self.method!r}, "
                f"got {getattr(other, 'method', type(other).__name__)!r}"
            )
        self._merge(other)
        self.nonfinite += other.nonfinite

    def all_reduce(self, group: Any = None) -> None:
        """Give every rank of `group` the merged statistics of all ranks, in place.

        This is a collective: every rank calls it once, including ranks with empty statistics.
        Without an initialized torch.distributed there is one process, and nothing happens.

        Raises:
            CalibrationError: If the ranks collect with different methods.
        """
        merge_ranks(self, group)

    @abstractmethod
    def _observe(self, values: Tensor, minimum: float, maximum: float) -> None:
        """Add finite values, not empty, with their extremes."""

    @abstractmethod
    def _merge(self, other: Any) -> None:
        """Merge the state of an observer of the same class."""


class MinMaxObserver(Observer):
    """The exact extremes of all values seen."""

    method = "minmax"

    def __init__(self) -> None:
        super().__init__()
        self._minimum, self._maximum = math.inf, -math.inf

    @property
    def minimum(self) -> float:
        """Smallest value seen."""
        return self._minimum

    @property
    def maximum(self) -> float:
        """Largest value seen."""
        return self._maximum

    def _observe(self, values: Tensor, minimum: float, maximum: float) -> None:
        self._minimum, self._maximum = min(self._minimum, minimum), max(self._maximum, maximum)

    def _merge(self, other: MinMaxObserver) -> None:
        self._minimum = min(self._minimum, other._minimum)
        self._maximum = max(self._maximum, other._maximum)


class EmaObserver(Observer):
    """Exponential moving averages of each batch's extremes: `m = 0.9 * m + 0.1 * extreme`.

    The first batch sets m. Values count after the end of their batch. The extremes of a batch are
    those of all ranks, so every rank must call `end_batch` equally often. A moving average depends
    on the order of batches. Merging two averages gives the range that contains both.
    """

    method = "ema"

    def __init__(self) -> None:
        super().__init__()
        self._batch = MinMaxObserver()
        self._average = MinMaxObserver()

    @property
    def minimum(self) -> float:
        """Moving average of the batches' minima."""
        return self._average.minimum

    @property
    def maximum(self) -> float:
        """Moving average of the batches' maxima."""
        return self._average.maximum

    def end_batch(self, group: Any = None) -> None:
        """Add the batch to the average; a collective if torch.distributed is initialized."""
        batch, self._batch = self._batch, MinMaxObserver()
        batch.all_reduce(group)
        if batch.is_empty:
            return
        average = self._average
        if average.is_empty:
            average.merge(batch)
            return
        average._minimum = EMA_DECAY * average.minimum + (1 - EMA_DECAY) * batch.minimum
        average._maximum = EMA_DECAY * average.maximum + (1 - EMA_DECAY) * batch.maximum

    def _observe(self, values: Tensor, minimum: float, maximum: float) -> None:
        self._batch._observe(values, minimum, maximum)

    def _merge(self, other: EmaObserver) -> None:
        self._batch.merge(other._batch)
        self._average.merge(other._average)


class HistogramObserver(Observer):
    """A histogram of at most 2048 bins and the exact extremes, independent of any order."""

    method = "histogram"

    def __init__(self) -> None:
        super().__init__()
        self._histogram: Histogram | None = None

    @property
    def histogram(self) -> Histogram:
        """The collected histogram.

        Raises:
            CalibrationError: If no finite value was seen.
        """
        if self._histogram is None:
            raise CalibrationError("Expected a histogram of at least one finite value, got none")
        return self._histogram

    @property
    def minimum(self) -> float:
        """Smallest value seen, exact."""
        return math.inf if self._histogram is None else self._histogram.minimum

    @property
    def maximum(self) -> float:
        """Largest value seen, exact."""
        return -math.inf if self._histogram is None else self._histogram.maximum

    def _observe(self, values: Tensor, minimum: float, maximum: float) -> None:
        self._add(histogram_of(values, minimum, maximum))

    def _merge(self, other: HistogramObserver) -> None:
        if other._histogram is not None:
            self._add(other._histogram)

    def _add(self, histogram: Histogram) -> None:
        known = self._histogram
        self._histogram = histogram if known is None else merged(known, histogram)


class PercentileObserver(HistogramObserver):
    """The same histogram, for covering the central `percentile_value` percent."""

    method = "percentile"

    def __init__(self, percentile_value: float = 99.99) -> None:
        super().__init__()
        number = isinstance(percentile_value, (int, float)) and not isinstance(
            percentile_value, bool
        )
        if not (number and 50.0 < percentile_value <= 100.0):
            raise CalibrationError(
                f"Expected percentile_value to be in (50, 100], got {percentile_value!r}"
            )
        self.percentile_value = float(percentile_value)

    def central_range(self) -> tuple[float, float]:
        """Return the central range: `(100 - percentile_value) / 2` percent cut on each side."""
        return central_range(self.histogram, self.percentile_value)

    def _merge(self, other: HistogramObserver) -> None:
        assert isinstance(other, PercentileObserver)
        if self.percentile_value != other.percentile_value:
            raise CalibrationError(
                f"Expected the observer to merge to have percentile_value "
                f"{self.percentile_value}, got {other.percentile_value}"
            )
        super()._merge(other)


def make_observer(method: str, *, percentile_value: float = 99.99) -> Observer:
    """Return a new observer for a calibration method, by any name in `METHODS`.

    Args:
        method: 'histogram' (also called 'sqnr'), 'minmax', 'percentile' or 'ema'.
        percentile_value: Percentage of values to cover, in (50, 100]; only for 'percentile'.

    Raises:
        CalibrationError: If the method is unknown or the percentage out of range.
    """
    match METHODS.get(method) if isinstance(method, str) else None:
        case "histogram":
            return HistogramObserver()
        case "minmax":
            return MinMaxObserver()
        case "percentile":
            return PercentileObserver(percentile_value)
        case "ema":
            return EmaObserver()
        case _:
            near = difflib.get_close_matches(str(method), METHODS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CalibrationError(
                f"Expected method to be one of {', '.join(METHODS)}, got {method!r}{hint}"
            )


def _extremes(values: Tensor) -> tuple[float, float]:
    """Return minimum and maximum as float32 numbers; NaN if any value is NaN. -0 becomes 0."""
    both: list[float] = torch.stack(torch.aminmax(values)).to(torch.float32).tolist()
    return both[0] + 0.0, both[1] + 0.0
