"""Quantizers from statistics: cover the observed range, or minimize the squared error."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quant_gru.calibration.covering import (
    MAX_EXP2_INV,
    MIN_EXP2_INV,
    ScaleKind,
    check_scale_kind,
    covering_quantizer,
    covering_scale,
    reachable_range,
)
from quant_gru.calibration.histogram import Histogram, occupied_bins
from quant_gru.calibration.observers import HistogramObserver, Observer, PercentileObserver
from quant_gru.errors import CalibrationError
from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, Quantizer, code_limits

__all__ = [
    "choose_quantizer",
    "covering_quantizer",
    "least_squares_quantizer",
    "squared_error",
    "zero_points",
]

POT_COARSER, POT_FINER = 1, 16

FREE_PER_OCTAVE, FREE_OCTAVES_FINER = 16, 12

# Costs this close are a tie: float64 sums of thousands of terms are accurate to about 1e-13.
TIE = 1e-9

# Candidates evaluated together. Their arrays of at most 16 x 2049 x 8 bytes stay in the cache.
_BATCH = 16


def choose_quantizer(
    observer: Observer,
    *,
    operator: str,
    bits: int,
    signed: bool,
    symmetric: bool,
    scale_kind: ScaleKind,
) -> Quantizer:
    """Return the quantizer of an operator, from the statistics of its values.

    'histogram' minimizes the squared error, 'minmax' and 'ema' cover their extremes, and
    'percentile' covers its central range. The range always contains 0.

    Args:
        observer: Statistics, after `all_reduce` if several processes collected them.
        operator: Name of the operator, for errors.
        bits: Width of a code, 1..32.
        signed: Whether codes are signed.
        symmetric: Whether the zero point is 0.
        scale_kind: 'pot' for powers of two, 'free' for any float32 number.

    Raises:
        CalibrationError: If the statistics are empty or contain NaN or infinity; the message
            names the operator.
    """
    if observer.has_nonfinite:
        raise CalibrationError(
            f"Expected values to be finite during calibration, "
            f"got {observer.nonfinite} NaN or infinite (operator {operator!r})"
        )
    if observer.is_empty:
        raise CalibrationError(
            f"Expected statistics of at least one value, got none (operator {operator!r})"
        )
    if isinstance(observer, PercentileObserver):
        minimum, maximum = observer.central_range()
    elif isinstance(observer, HistogramObserver):
        return least_squares_quantizer(
            observer.histogram, bits=bits, signed=signed, symmetric=symmetric, scale_kind=scale_kind
        )
    else:
        minimum, maximum = observer.minimum, observer.maximum
    return covering_quantizer(
        minimum, maximum, bits=bits, signed=signed, symmetric=symmetric, scale_kind=scale_kind
    )


def choose_covering(
    observer: Observer,
    *,
    operator: str,
    bits: int,
    signed: bool,
    symmetric: bool,
    scale_kind: ScaleKind,
) -> Quantizer:
    """Return the smallest quantizer that covers all values; arguments as `choose_quantizer`."""
    return covering_quantizer(
        observer.minimum,
        observer.maximum,
        bits=bits,
        signed=signed,
        symmetric=symmetric,
        scale_kind=scale_kind,
    )


def least_squares_quantizer(
    histogram: Histogram, *, bits: int, signed: bool, symmetric: bool, scale_kind: ScaleKind
) -> Quantizer:
    """Return the candidate around the covering scale with the least `squared_error`.

    'pot' tries every exponent from one coarser to 16 finer than the covering one. 'free' tries the
    same exponents, 16 scales per octave from one octave coarser to 12 octaves finer, and the scale
    whose codes end at the extremes; then it refines around the best one. Each scale is tried with
    the zero points of `zero_points`. Ties prefer scales that do not clip, then smaller scales.

    Raises:
        CalibrationError: If `scale_kind` is neither 'pot' nor 'free'.
    """
    check_scale_kind(scale_kind)
    lo, hi = code_limits(bits, signed)
    low, high = reachable_range(
        histogram.minimum, histogram.maximum, bits=bits, signed=signed, symmetric=symmetric
    )
    if low == high:
        return Quantizer(bits, signed, 1.0)
    covering = covering_scale(
        low, high, bits=bits, signed=signed, symmetric=symmetric, scale_kind=scale_kind
    )

    def best(candidates: list[float]) -> tuple[float, int]:
        scales = torch.tensor(candidates, dtype=torch.float64, device="cpu").clamp(
            MIN_SCALE, MAX_SCALE
        )
        scales = scales.to(torch.float32).unique()
        if symmetric:
            zeros = torch.zeros((1, scales.numel()), dtype=torch.float64, device="cpu")
        else:
            zeros = zero_points(scales, low, high, lo=lo, hi=hi)
        clips = _clips(scales, zeros, low, high, lo=lo, hi=hi).reshape(-1)
        order = torch.arange(zeros.shape[0], device="cpu").repeat_interleave(scales.numel())
        flat_scales, flat_zeros = scales.double().repeat(zeros.shape[0]), zeros.reshape(-1)
        errors = squared_error(histogram, flat_scales, flat_zeros, lo=lo, hi=hi)
        tied = (errors <= errors.min() * (1 + TIE)).nonzero().reshape(-1)
        winner = min(
            tied.tolist(), key=lambda i: (bool(clips[i]), float(flat_scales[i]), int(order[i]))
        )
        return float(flat_scales[winner]), int(flat_zeros[winner])

    # Python computes the powers: torch.exp2 may differ in the last bit between instruction sets.
    exponent = math.frexp(covering)[1] - 1
    exponents = range(
        max(-MAX_EXP2_INV, exponent - POT_FINER), min(-MIN_EXP2_INV, exponent + POT_COARSER) + 1
    )
    powers = [math.ldexp(1.0, e) for e in exponents]
    if scale_kind == "pot":
        scale, zero_point = best(powers)
    else:
        last_codes = max(low / lo if lo else 0.0, high / hi if hi else 0.0)
        fitted = last_codes if symmetric else (high - low) / (hi - lo)
        steps = range(-FREE_OCTAVES_FINER * FREE_PER_OCTAVE, FREE_PER_OCTAVE + 1)
        ladder = (covering * 2.0 ** (k / FREE_PER_OCTAVE) for k in steps)
        scale, _ = best([fitted, *powers, *ladder])
        steps = range(-FREE_PER_OCTAVE, FREE_PER_OCTAVE + 1)
        scale, zero_point = best([scale * 2.0 ** (k / FREE_PER_OCTAVE**2) for k in steps])
    return Quantizer(bits, signed, scale, zero_point)


def zero_points(scales: Tensor, low: float, high: float, *, lo: int, hi: int) -> Tensor:
    """Return candidates `(3, K)` for float32 scales `(K,)`, in order of preference, float64.

    They fit the low end (`lo - rint(low/s)`), fit the high end (`hi - rint(high/s)`), or center the
    range; each is rounded and clamped to [lo, hi]. The center comes first, as it leaves codes for
    unseen values on both sides, unless the range begins or ends at 0.
    """
    first, last = _rounded_quotients(scales, low, high)
    fit_low, fit_high = lo - first, hi - last
    centre = torch.round((lo + hi) / 2 - (low + high) / (2 * scales.double()))
    if low == 0:
        candidates = [fit_low, fit_high, centre]
    elif high == 0:
        candidates = [fit_high, fit_low, centre]
    else:
        candidates = [centre, fit_low, fit_high]
    return torch.stack(candidates).clamp(lo, hi)


def squared_error(
    histogram: Histogram, scales: Tensor, zero_points: Tensor, *, lo: int, hi: int
) -> Tensor:
    """Return the summed squared quantization error `(K,)` of K candidates, float64.

    Values are assumed to be uniform inside a bin; the outer bins end at the exact extremes. Let
    u = v/s, r = clamp(rint(u), lo - z, hi - z) and d = u - r. In code units the error d^2 has the
    antiderivative `r/12 + d^3/3`, both inside and outside the clamp range.

    Args:
        histogram: The values.
        scales: `(K,)` float64.
        zero_points: `(K,)` float64.
        lo: Smallest code.
        hi: Largest code.
    """
    # NumPy: torch would split these small arrays among threads, which then mostly wait
    edges, counts = (each.numpy() for each in occupied_bins(histogram))
    # Empty bins add nothing: those between two others become one, of the count 0.
    kept = np.ones(len(edges), dtype=bool)
    kept[1:-1] = (counts[:-1] > 0) | (counts[1:] > 0)
    edges, counts = edges[kept], counts[kept[:-1]]
    widths = np.diff(edges)
    # A bin whose values are all equal (an extreme on its edge) has zero width: a point mass.
    points = (widths == 0) & (counts > 0)
    masses = counts[points].astype(np.float64)
    density = np.divide(counts, widths, out=np.zeros_like(widths), where=widths > 0)
    errors = np.empty(len(scales))
    for start in range(0, len(scales), _BATCH):
        part = slice(start, start + _BATCH)
        s, z = scales[part].numpy()[:, None], zero_points[part].numpy()[:, None]
        u = edges / s
        r = np.rint(u)
        np.clip(r, lo - z, hi - z, out=r)
        d = u - r
        at_points = np.einsum("ij,j", np.square(d[:, :-1][:, points]), masses)
        # Take differences before adding: r/12 may be so large that adding d^3/3 would lose it.
        integral = np.diff(r) / 12 + np.diff(d * d * d) / 3
        s = s[:, 0]
        errors[part] = s**3 * np.einsum("ij,j", integral, density) + s**2 * at_points
    return torch.from_numpy(errors)


def _rounded_quotients(scales: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return `rint(low/s)` and `rint(high/s)` with the quantizer's float32 division; float64."""
    ends = torch.tensor([[low], [high]], dtype=torch.float32, device="cpu")
    first, last = torch.round(ends / scales).double()
    return first, last


def _clips(scales: Tensor, zeros: Tensor, low: float, high: float, *, lo: int, hi: int) -> Tensor:
    """Return whether each candidate `(Z, K)` clips an end of the range."""
    first, last = _rounded_quotients(scales, low, high)
    return (first < lo - zeros) | (last > hi - zeros)
