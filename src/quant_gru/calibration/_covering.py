"""The smallest scale that clips nothing, exactly as the quantizer's float32 division rounds."""

from __future__ import annotations

import bisect
import math
import struct
from typing import Literal

from quant_gru._errors import CalibrationError
from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, Quantizer, code_limits

ScaleKind = Literal["pot", "free"]

MIN_EXP2_INV, MAX_EXP2_INV = -127, 126

# Positive float32 numbers are ordered as their bit patterns, read as integers, are.
_MIN_BITS, _MAX_BITS = 0x00800000, 0x7F000000


def as_float32(x: float) -> float:
    """`x` rounded to float32; its magnitude must not round to infinity."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def rounded_quotient(v: float, s: float) -> int:
    """`rint(v / s)` of float32 numbers with the division in float32, as an integer."""
    quotient = v / s
    # Beyond 2^64 no code range reaches. Below, rounding the double quotient once more gives the
    # float32 quotient, since 53 >= 2 * 24 + 2 bits make double rounding harmless.
    return round(quotient if abs(quotient) > 2.0**64 else as_float32(quotient))


def reachable_range(
    minimum: float, maximum: float, *, bits: int, signed: bool, symmetric: bool
) -> tuple[float, float]:
    """The float32 range with 0 in it, less a side for which symmetric codes have no values.

    Symmetric unsigned codes have no negative ones; symmetric signed codes of 1 bit, [-1, 0], no
    positive ones.
    """
    lo, hi = code_limits(bits, signed)
    low = 0.0 if symmetric and lo == 0 else as_float32(min(0.0, minimum))
    high = 0.0 if symmetric and hi == 0 else as_float32(max(0.0, maximum))
    return low, high


def covering_scale(
    low: float, high: float, *, bits: int, signed: bool, symmetric: bool, scale_kind: ScaleKind
) -> float:
    """Smallest scale s for which the codes of `low <= 0 <= high` fit their limits.

    `lo <= rint(low/s)` and `rint(high/s) <= hi` when symmetric (z = 0), else
    `rint(high/s) - rint(low/s) <= hi - lo`, for then a zero point exists. Both sides of each
    condition are monotone in s, so a bisection over all scales finds the smallest: over exponents
    for 'pot', over float32 bit patterns for 'free'. Clamped to [2^-126, 2^127].
    """
    lo, hi = code_limits(bits, signed)

    def covers(s: float) -> bool:
        first, last = rounded_quotient(low, s), rounded_quotient(high, s)
        return (lo <= first and last <= hi) if symmetric else last - first <= hi - lo

    if scale_kind == "pot":
        exponents = range(-MAX_EXP2_INV, -MIN_EXP2_INV + 1)
        found = bisect.bisect_left(exponents, True, key=lambda e: covers(math.ldexp(1.0, e)))
        return math.ldexp(1.0, exponents[min(found, len(exponents) - 1)])
    patterns = range(_MIN_BITS, _MAX_BITS + 1)
    found = bisect.bisect_left(patterns, True, key=lambda b: covers(_from_bits(b)))
    return min(MAX_SCALE, max(MIN_SCALE, _from_bits(_MIN_BITS + found)))


def covering_quantizer(
    minimum: float,
    maximum: float,
    *,
    bits: int,
    signed: bool,
    symmetric: bool,
    scale_kind: ScaleKind,
) -> Quantizer:
    """The quantizer with the smallest scale that clips neither `minimum`, `maximum` nor 0.

    Sides without codes (see `reachable_range`) are clipped nevertheless. A scale that leaves codes
    to spare (`pot` mostly does) leaves them on both sides of the range; a range that begins or
    ends at 0 has 0 at that end of the codes. A range of 0 alone has scale 1 and zero point 0.

    Args:
        minimum: Lower end of the values.
        maximum: Upper end of the values, not below `minimum`.
        bits: Width of a code, 1..32.
        signed: Whether codes are signed.
        symmetric: Whether the zero point is 0.
        scale_kind: 'pot' for powers of two, 'free' for any float32 number.

    Raises:
        CalibrationError: If `scale_kind` is neither.
    """
    check_scale_kind(scale_kind)
    low, high = reachable_range(minimum, maximum, bits=bits, signed=signed, symmetric=symmetric)
    if low == high:
        return Quantizer(bits, signed, 1.0)
    scale = covering_scale(
        low, high, bits=bits, signed=signed, symmetric=symmetric, scale_kind=scale_kind
    )
    if symmetric:
        return Quantizer(bits, signed, scale)
    lo, hi = code_limits(bits, signed)
    fit_low = lo - rounded_quotient(low, scale)
    fit_high = hi - rounded_quotient(high, scale)
    zero_point = fit_low if low == 0 else fit_high if high == 0 else (fit_low + fit_high) // 2
    return Quantizer(bits, signed, scale, min(hi, max(lo, zero_point)))


def check_scale_kind(scale_kind: str) -> None:
    """Raises CalibrationError unless `scale_kind` is 'pot' or 'free'."""
    if scale_kind not in ("pot", "free"):
        raise CalibrationError(f"Expected scale_kind to be 'pot' or 'free', got {scale_kind!r}")


def _from_bits(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])
