"""Ranges of the GRU's input that exclude 0: quantizers whose zero point may be no code."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quant_gru.calibration.covering import (
    MAX_EXP2_INV,
    MIN_EXP2_INV,
    ScaleKind,
    as_float32,
    covering_scale,
    rounded_quotient,
)
from quant_gru.calibration.observers import HistogramObserver, Observer, PercentileObserver
from quant_gru.calibration.search import (
    FREE_OCTAVES_FINER,
    FREE_PER_OCTAVE,
    POT_COARSER,
    POT_FINER,
    TIE,
    squared_error,
)
from quant_gru.integer.quantizer import FARTHEST, MAX_SCALE, MIN_SCALE, Quantizer, code_limits

_FEW_CODES = 32
_SHARE = 8


def range_of(observer: Observer) -> tuple[float, float]:
    """Return the range that a method covers, float32 numbers."""
    if isinstance(observer, PercentileObserver):
        low, high = observer.central_range()
    else:
        low, high = observer.minimum, observer.maximum
    return as_float32(low), as_float32(high)


def far_quantizer(
    observer: Observer, *, bits: int, signed: bool, scale_kind: ScaleKind
) -> Quantizer | None:
    """Return the asymmetric quantizer of a range that excludes 0; None if it includes 0.

    'histogram' minimizes the squared error, over the candidates of `least_squares_quantizer`. The
    other methods use the smallest scale that clips nothing. Also None if the range is a single
    value, or so narrow and far that the zero point is beyond `FARTHEST`.

    Args:
        observer: Statistics that `choose_quantizer` accepts.
        bits: Width of a code.
        signed: Whether codes are signed.
        scale_kind: 'pot' or 'free'.
    """
    low, high = range_of(observer)
    if low <= 0 <= high or low == high:
        return None
    covering = covering_scale(
        low, high, bits=bits, signed=signed, symmetric=False, scale_kind=scale_kind
    )
    scales = [covering]
    if isinstance(observer, HistogramObserver) and not isinstance(observer, PercentileObserver):
        exponent = math.frexp(covering)[1] - 1
        exponents = range(
            max(-MAX_EXP2_INV, exponent - POT_FINER),
            min(-MIN_EXP2_INV, exponent + POT_COARSER) + 1,
        )
        scales += [math.ldexp(1.0, e) for e in exponents]
        if scale_kind == "free":
            steps = range(-FREE_OCTAVES_FINER * FREE_PER_OCTAVE, FREE_PER_OCTAVE + 1)
            scales += [covering * 2.0 ** (k / FREE_PER_OCTAVE) for k in steps]
    candidates = [
        found
        for scale in dict.fromkeys(scales)
        for found in _candidates(as_float32(scale), low, high, bits, signed)
    ]
    if not candidates:
        return None
    if len(scales) == 1:
        return candidates[0]
    assert isinstance(observer, HistogramObserver)
    lo, hi = code_limits(bits, signed)
    errors = squared_error(
        observer.histogram,
        _float64([q.scale for q in candidates]),
        _float64([float(q.zero_point) for q in candidates]),
        lo=lo,
        hi=hi,
    ).tolist()
    # sums of other orders, as in C++, have other last bits
    most = min(errors) * (1 + TIE)
    return next(q for q, error in zip(candidates, errors, strict=True) if error <= most)


def _candidates(scale: float, low: float, high: float, bits: int, signed: bool) -> list[Quantizer]:
    """Return quantizers that centre the range, fit its low end, or its high end."""
    if not MIN_SCALE <= scale <= MAX_SCALE:
        return []
    lo, hi = code_limits(bits, signed)
    fit_low, fit_high = lo - rounded_quotient(low, scale), hi - rounded_quotient(high, scale)
    found = []
    for zero_point in dict.fromkeys(((fit_low + fit_high) // 2, fit_low, fit_high)):
        if max(abs(lo - zero_point), abs(hi - zero_point)) <= FARTHEST:
            found.append(Quantizer(bits, signed, scale, zero_point, far=True))
    return found


def note_on(observer: Observer, quantizer: Quantizer) -> str | None:
    """Return a text if a range that contains 0 leaves few codes for the values of the input."""
    low, high = range_of(observer)
    span, reach = high - low, max(high, 0.0) - min(low, 0.0)
    used, codes = span / quantizer.scale, quantizer.hi - quantizer.lo + 1
    if quantizer.is_outside or span == 0 or reach < _SHARE * span:
        return None
    if used >= min(_FEW_CODES, codes / _SHARE):
        return None
    return (
        f"values of 'input.x' are in [{low:g}, {high:g}], and its range has to contain 0: only "
        f"about {math.ceil(used) + 1} of {codes} codes are left for them; subtract their mean "
        "before the GRU, give 'input.x' more bits, or set input_excludes_zero in the configuration "
        "(with is_symmetric false)"
    )


def _float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
