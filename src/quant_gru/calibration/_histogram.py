"""Histograms whose state depends on the values alone, never on how they arrived.

Three rules make it so. The bin width is a power of two, 2^e, and every edge an integer multiple of
it, so that `bin = floor(v / 2^e)` is exact in float32 and a twice as wide bin is two neighbours
merged, `bin >> 1`. e is a function of the exact extremes: the smallest one for which the range,
with 0 in it, spans at most 2048 bins. Counts are int64. Hence any order of updates and merges,
over any split into chunks, batches and processes, ends in the same state, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BINS = 2048

# No scale is finer than 2^-126 (the smallest normal float32), so finer bins would tell nothing;
# and 2^126, the factor that turns values into bin numbers, is still a float32.
MIN_EXPONENT = -126

# Elements per pass: a CPU keeps a block's temporaries in its cache, a GPU launches few kernels.
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
    """`(exponent, first, last)`: the bins of every histogram with these extremes."""
    low, high = min(0.0, minimum), max(0.0, maximum)
    exponent = MIN_EXPONENT
    if high > low:
        # 2^12 bins or more: too fine to begin with.
        exponent = max(exponent, math.frexp(high - low)[1] - 13)
    while True:
        first = math.floor(math.ldexp(low, -exponent))
        last = math.floor(math.ldexp(high, -exponent))
        if last - first < MAX_BINS:
            return exponent, first, last
        exponent += 1


def histogram_of(values: Tensor, minimum: float, maximum: float) -> Histogram:
    """Histogram of `values` (any shape, finite, not empty), given their exact extremes.

    Values are taken as float32, as the quantizer takes them; the work is done on their device.
    """
    exponent, first, last = bin_window(minimum, maximum)
    bins = last - first + 1
    counts = torch.zeros(bins, dtype=torch.int64, device=values.device)
    for block in _blocks(values):
        scaled = torch.mul(block.to(torch.float32), 2.0**-exponent).floor_()
        if exponent > 0:
            # Scaling down may flush a negative value to -0, which belongs to bin -1.
            scaled.masked_fill_((scaled == 0) & (block < 0), -1.0)
        # bincount is bound by memory: int16 holds every bin number in the fewest bytes.
        counts += torch.bincount(scaled.sub_(first).to(torch.int16).reshape(-1), minlength=bins)
    return Histogram(exponent, first, counts.cpu(), minimum, maximum)


def merged(a: Histogram, b: Histogram) -> Histogram:
    """The histogram of the values of both."""
    minimum, maximum = min(a.minimum, b.minimum), max(a.maximum, b.maximum)
    exponent, first, last = bin_window(minimum, maximum)
    counts = torch.zeros(last - first + 1, dtype=torch.int64)
    for part in (a, b):
        if part.exponent == exponent:
            begin = part.first - first
            counts[begin : begin + part.counts.numel()] += part.counts
            continue
        bins = torch.arange(part.first, part.first + part.counts.numel())
        # Bin numbers have 12 bits; a shift by 63 or more would be undefined.
        bins >>= min(exponent - part.exponent, 62)
        counts.index_add_(0, bins - first, part.counts)
    return Histogram(exponent, first, counts, minimum, maximum)


def occupied_bins(histogram: Histogram) -> tuple[Tensor, Tensor]:
    """Edges `(n + 1,)` in float64 and counts `(n,)` from the minimum's bin to the maximum's.

    The outer edges are the exact extremes, so that no mass lies where no value was.
    """
    width = math.ldexp(1.0, histogram.exponent)
    begin = math.floor(histogram.minimum / width)
    end = math.floor(histogram.maximum / width) + 1
    edges = torch.arange(begin, end + 1, dtype=torch.float64) * width
    edges.clamp_(histogram.minimum, histogram.maximum)
    return edges, histogram.counts[begin - histogram.first : end - histogram.first]


def central_range(histogram: Histogram, percent: float) -> tuple[float, float]:
    """The values between which the central `percent` percent lie: `(100 - percent) / 2` cut a side.

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
    """The same elements with dimensions sorted by stride: a permuted dense tensor is contiguous."""
    return values.permute(
        sorted(range(values.dim()), key=values.stride().__getitem__, reverse=True)
    )


def _blocks(values: Tensor) -> Iterator[Tensor]:
    """Cuts values into blocks of bounded size, without copying slices of a larger tensor first."""
    size = _CPU_BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    if values.is_contiguous():
        return iter(values.view(-1).split(size))
    rows = max(1, size * values.shape[0] // values.numel())
    return iter(values.split(rows))
