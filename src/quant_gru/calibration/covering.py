"""The smallest scale without clipping, for the rounding of the quantizer's float32 division."""

from __future__ import annotations

import bisect
import math
import struct
from typing import Literal

from quant_gru.errors import CalibrationError
from quant_gru.integer.quantizer import MAX_SCALE, MIN_SCALE, Quantizer, code_limits

ScaleKind = Literal["pot", "free"]

MIN_EXP2_INV, MAX_EXP2_INV = -127, 126

# The order of positive float32 numbers is the order of their bit patterns as integers.
_MIN_BITS, _MAX_BITS = 0x00800000, 0x7F000000


def as_float32(x: float) -> float:
    """Return `x` rounded to float32; its magnitude must not round to infinity."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def rounded_quotient(v: float, s: float) -> int:
    """Return `rint(v / s)` of float32 numbers, with a float32 division, as an integer."""
    quotient = v / s
    # No code range exceeds 2^64. Below that, rounding the double quotient to float32 gives the
    # float32 quotient: double rounding is harmless because 53 >= 2 * 24 + 2 bits.
    return round(quotient if abs(quotient) > 2.0**64 else as_float32(quotient))


def reachable_range(
    minimum: float, maximum: float, *, bits: int, signed: bool, symmetric: bool
) -> tuple[float, float]:
    """Return the float32 range including 0, without a side that symmetric codes cannot represent.

    Symmetric unsigned codes have no negative values. Symmetric signed codes of 1 bit, [-1, 0], have
    no positive values.
    """
    lo, hi = code_limits(bits, signed)
    low = 0.0 if symmetric and lo == 0 else as_float32(min(0.0, minimum))
    high = 0.0 if symmetric and hi == 0 else as_float32(max(0.0, maximum))
    return low, high


def covering_scale(
    low: float, high: float, *, bits: int, signed: bool, symmetric: bool, scale_kind: ScaleKind
) -> float:
    """Return the smallest scale s for which the codes of `low <= 0 <= high` fit their limits.

    With symmetric codes (z = 0) the conditions are `lo <= rint(low/s)` and `rint(high/s) <= hi`.
    Otherwise the condition is `rint(high/s) - rint(low/s) <= hi - lo`, which ensures that a zero
    point exists. Both sides of each condition are monotone in s, so bisection finds the smallest
    scale: over exponents for 'pot', over float32 bit patterns for 'free'. The result is clamped to
    [2^-126, 2^127].
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
    """Return the quantizer with the smallest scale that clips neither `minimum`, `maximum` nor 0.

    Sides without codes (see `reachable_range`) are still clipped. Spare codes, which 'pot' scales
    usually leave, are split between both sides of the range. A range that begins or ends at 0 has
    0 at that end of the codes. A range of only 0 has scale 1 and zero point 0.

    Args:
        minimum: Lower end of the values.
        maximum: Upper end of the values, not below `minimum`.
        bits: Width of a code, 1..32.
        signed: Whether codes are signed.
        symmetric: Whether the zero point is 0.
        scale_kind: 'pot' for powers of two, 'free' for any float32 number.

    Raises:
        CalibrationError: If `scale_kind` is invalid.
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
    """Raise CalibrationError unless `scale_kind` is 'pot' or 'free'."""
    if scale_kind not in ("pot", "free"):
        raise CalibrationError(f"Expected scale_kind to be 'pot' or 'free', got {scale_kind!r}")


def _from_bits(pattern: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", pattern))[0])
