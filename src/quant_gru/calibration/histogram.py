"""Histograms whose state depends only on the values, not on their order of arrival.

Three rules ensure this. First, the bin width is a power of two, 2^e, and every edge is an integer
multiple of it. `bin = floor(v / 2^e)` is then exact in float32, and doubling the width merges two
neighboring bins, `bin >> 1`. Second, e is a function of the exact extremes: the smallest exponent
for which the range, including 0, spans at most 2048 bins. Third, counts are int64. Any order of
updates and merges, over any split into chunks, batches and processes, gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BINS = 2048

# The finest scale is 2^-126 (the smallest normal float32), so finer bins would not help. 2^126,
# the factor that converts values to bin numbers, is still a float32.
MIN_EXPONENT = -126

# Elements per pass: temporaries of a block fit a CPU's cache, and a GPU needs few launches.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 17, 1 << 24


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of values in bins `[k * 2^exponent, (k + 1) * 2^exponent)`.

    Attributes:
        exponent: e, the binary logarithm of the bin width.
        first: Number k of the first bin, `floor(min(0, minimum) / 2^e)`.
        counts: `(bins,)` int64 on the CPU, up to bin `floor(max(0, maximum) / 2^e)`.
        minimum: Smallest value seen, exact.
        maximum: Largest value seen, exact.
    """

    exponent: int
    first: int
    counts: Tensor
    minimum: float
    maximum: float


def bin_window(minimum: float, maximum: float) -> tuple[int, int, int]:
    """Return `(exponent, first, last)`: the bins of every histogram with these extremes."""
    low, high = min(0.0, minimum), max(0.0, maximum)
    exponent = MIN_EXPONENT
    if high > low:
        # 2^12 bins or more: start with too fine an exponent
        exponent = max(exponent, math.frexp(high - low)[1] - 13)
    while True:
        first = math.floor(math.ldexp(low, -exponent))
        last = math.floor(math.ldexp(high, -exponent))
        if last - first < MAX_BINS:
            return exponent, first, last
        exponent += 1


def histogram_of(values: Tensor, minimum: float, maximum: float) -> Histogram:
    """Return the histogram of `values` (any shape, finite, not empty), given their exact extremes.

    Values are converted to float32 like in the quantizer. The computation runs on their device.
    """
    exponent, first, last = bin_window(minimum, maximum)
    bins = last - first + 1
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    for block in _blocks(values):
        scaled = torch.mul(block.to(torch.float32), 2.0**-exponent).floor_()
        if exponent > 0:
            # Scaling down may flush a negative value to -0, but its bin is -1.
            scaled.masked_fill_((scaled == 0) & (block < 0), -1.0)
        # bincount is memory-bound, and int16 is the smallest dtype for all bin numbers.
        counts += torch.bincount(scaled.sub_(first).to(torch.int16).reshape(-1), minlength=bins)
    return Histogram(exponent, first, counts.cpu(), minimum, maximum)


def merged(a: Histogram, b: Histogram) -> Histogram:
    """Return the histogram of the values of both."""
    minimum, maximum = min(a.minimum, b.minimum), max(a.maximum, b.maximum)
    exponent, first, last = bin_window(minimum, maximum)
    counts = torch.zeros(last - first + 1, dtype=torch.int64, device="cpu")
    for part in (a, b):
        if part.exponent == exponent:
            begin = part.first - first
            counts[begin : begin + part.counts.numel()] += part.counts
            continue
        bins = torch.arange(part.first, part.first + part.counts.numel(), device="cpu")
        # Bin numbers have 12 bits; a shift by 63 or more would be undefined.
        bins >>= min(exponent - part.exponent, 62)
        counts.index_add_(0, bins - first, part.counts)
    return Histogram(exponent, first, counts, minimum, maximum)


def occupied_bins(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Return edges `(n + 1,)`, float64, and counts `(n,)` between the minimum and the maximum.

    The outer edges are the exact extremes, so that no mass lies outside the observed values.
    """
    width = math.ldexp(1.0, histogram.exponent)
    begin = math.floor(histogram.minimum / width)
    end = math.floor(histogram.maximum / width) + 1
    edges = torch.arange(begin, end + 1, dtype=torch.float64, device="cpu") * width
    edges.clamp_(histogram.minimum, histogram.maximum)
    return edges, histogram.counts[begin - histogram.first : end - histogram.first]


def central_range(histogram: Histogram, percent: float) -> tuple[float, float]:
    """Return the range of the central `percent` percent: `(100 - percent) / 2` is cut on each side.

    Linear interpolation inside a bin; 100 gives the exact extremes.
    """
    edges, counts = occupied_bins(histogram)
    tail = (100.0 - percent) / 200.0 * float(counts.sum())
    low = _value_at_rank(edges, counts, tail)
    high = -_value_at_rank(-edges.flip(0), counts.flip(0), tail)
    return low, max(low, high)


def _value_at_rank(edges: Tensor, counts: Tensor, rank: float) -> float:
    cumulative = counts.cumsum(0)
    index = int((cumulative <= rank).sum())
    inside = rank - float(cumulative[index] - counts[index])
    left, right = float(edges[index]), float(edges[index + 1])
    return left + (right - left) * (inside / float(counts[index]))


def in_memory_order(values: Tensor) -> Tensor:
    """Sort the dimensions by stride, which makes a permuted dense tensor contiguous."""
    return values.permute(
        sorted(range(values.dim()), key=values.stride().__getitem__, reverse=True)
    )


def _blocks(values: Tensor) -> Iterator[Tensor]:
    """Split values into blocks of bounded size, without copying slices of a larger tensor first."""
    size = _CPU_BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    if values.is_contiguous():
        return iter(values.view(-1).split(size))
    rows = max(1, size * values.shape[0] // values.numel())
    return iter(values.split(rows))
