"""The one primitive of the integer GRU: a weighted sum, rounded once at its end.

    weighted_sum(v_1..v_n; M_1..M_n; k; z; lo, hi)
        = clamp(round((M_1*v_1 + .. + M_n*v_n) / 2^k) + z, lo, hi)

A term v_i is a zero-point-free code, a product of two such codes, or an accumulator. All arithmetic
is exact: int64 where the plan's bounds permit it, Python integers otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import repeat
from operator import mul, or_, rshift
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.integer.rounding import DEFAULT, shifted, shifted_integers

WideIntegers: TypeAlias = "np.ndarray[Any, np.dtype[np.object_]]"
"""An array of Python integers, for values that exceed 64 bits."""
Term: TypeAlias = "Tensor | tuple[Tensor, Tensor] | WideIntegers"

_INT64_LIMIT = 1 << 63
# Largest error of a sum, in codes of the result, from rounding the multipliers. A larger error is
# allowed if 8-bit codes and their products would not fit float32; most products are far below V.
_SMALL_ERROR, _FLOAT32_ERROR = Fraction(1, 16), Fraction(1, 2)
_EXACT_FLOAT64 = 1 << 53
# Twice the longest code range (2^32 codes, any zero point): larger values saturate.
_SATURATES_LOG2 = 34

TIER_BOUNDS = {"a": 1 << 24, "b": 1 << 31, "c": 1 << 53, "d": 1 << 62}


def significant_bits(width: int) -> int:
    """Return the bits of a multiplier: 16 for operands of 17 to 32 bits in total, otherwise 24."""
    return 16 if 16 < width <= 32 else 24


def one_term(ratio: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Return multiplier and shift of `ratio`, rounded half to even to `p` significant bits.

    Args:
        ratio: float64, positive, any shape.
        p: Significant bits.

    Returns:
        (M, k), int64 of `ratio`'s shape, with M in [2^(p-1), 2^p) and M / 2^k the rounded ratio.
    """
    mantissa, exponent = torch.frexp(ratio)
    M = torch.round(mantissa * float(1 << p)).to(torch.int64)
    k = p - exponent.to(torch.int64)
    overflow = M == 1 << p
    return torch.where(overflow, M >> 1, M), torch.where(overflow, k - 1, k)


@dataclass(frozen=True)
class WeightedSum:
    """The numbers of one weighted sum.

    Attributes:
        multipliers: M_i, one per term: an int, or int64 of shape (channels,).
        shift: k: an int, or int64 of shape (channels,).
        zero_point: Added after rounding.
        lo: Smallest code.
        hi: Largest code.
        tier: Arithmetic that is exact for this sum: 'a' float32, 'b' 32-bit, 'c' float64,
            'd' 64-bit, 'e' 128-bit. It never changes the value.
        rounding: The rule by which the sum is rounded.
    """

    multipliers: tuple[int | Tensor, ...]
    shift: int | Tensor
    zero_point: int
    lo: int
    hi: int
    tier: str
    rounding: str = DEFAULT

    def __call__(self, *terms: Term) -> Tensor:
        """Return the clamped codes, int64, in the broadcast shape of the terms."""
        return self.unclamped(*terms).clamp(self.lo, self.hi)

    def unclamped(self, *terms: Term) -> Tensor:
        """Return the rounded sum plus the zero point, before the clamp; int64.

        Values that do not fit int64 are replaced by values outside [lo, hi] on the same side.
        """
        if self.tier == "e":
            return _round_python(self, terms) + self.zero_point
        total: Any = 0
        for term, M in zip(terms, self.multipliers, strict=True):
            total = total + (term[0] * term[1] if isinstance(term, tuple) else term) * M
        return _round_int64(self, total) + self.zero_point

    @property
    def first_shift(self) -> int | Tensor:
        """Bits of the largest multiplier, which the first step of ``double`` shifts out, or 0."""
        if self.rounding != "double":
            return 0
        (M, *others) = self.multipliers
        if isinstance(M, Tensor):
            return torch.frexp(M.to(torch.float64))[1].to(torch.int64)
        return max(int(each).bit_length() for each in (M, *others))


def several_terms(
    ratios: Sequence[float],
    bounds: Sequence[int],
    *,
    bits: int,
    lo: int,
    hi: int,
    zero_point: int,
    pot: bool,
    rounding: str = DEFAULT,
) -> WeightedSum:
    """Choose one shift for all terms: that of a fast tier if accurate, otherwise a larger one.

    Args:
        ratios: Scale of each term over the scale of the result.
        bounds: V_i, the largest |v_i|.
        bits: Width of the result.
        lo: Smallest code of the result.
        hi: Largest code of the result.
        zero_point: Zero point of the result.
        pot: Whether all scales are powers of two. The multipliers are then divided by their common
            power of two before a tier is chosen, which changes no value.
        rounding: The rule of the sum.
    """
    k = _shift_of_24_bits(ratios)
    if not pot:
        k = _shift_of_a_tier(ratios, bounds, k, bits + 4)
    Ms = _multipliers(ratios, k)
    in_float32 = _largest(Ms, bounds) < TIER_BOUNDS["a"] and max(bounds) <= 1 << 16
    if _error(ratios, Ms, bounds, k) > (_FLOAT32_ERROR if in_float32 else _SMALL_ERROR):
        k = _accurate_shift(ratios, bounds, k)
        Ms = _multipliers(ratios, k)
    if pot:
        joint = reduce(or_, Ms)
        common = (joint & -joint).bit_length() - 1
        Ms, k = list(map(rshift, Ms, repeat(common))), k - common
    return WeightedSum(tuple(Ms), k, zero_point, lo, hi, tier_of(Ms, bounds, k), rounding)


def tier_of(Ms: Sequence[int], bounds: Sequence[int], k: int) -> str:
    """Return the first tier that can hold a sum of several terms.

    Args:
        Ms: Multipliers.
        bounds: V_i, the largest |v_i|.
        k: The shift.
    """
    largest = _largest(Ms, bounds)
    for tier in TIER_BOUNDS:
        if _fits(tier, largest, k):
            return tier
    return "e"


def one_term_tier(bound: int, p: int) -> str:
    """Return 'd' if a term |v| <= bound times a p-bit multiplier fits 64 bits, otherwise 'e'."""
    return "d" if (bound << p) < _INT64_LIMIT else "e"


def check_accumulator(name: str, weight_bits: int, K: int, reach: int) -> None:
    """Check that 64 bits hold the accumulators of the kernels.

    Kernels of wide operands multiply the weights by 17-bit halves of the operand.

    Args:
        name: 'matmul.Wx' or 'matmul.Rh'.
        weight_bits: Width of the weights.
        K: Products of each sum.
        reach: The largest magnitude of the operand.

    Raises:
        QuantGRUError: There are too many products.
    """
    most = ((1 << 63) - 1) // (min(reach, 1 << 16) << (weight_bits - 1))
    if most < K:
        raise QuantGRUError(
            f"Expected at most {most} features beside weights of {weight_bits} bits, so that "
            f"accumulators fit 64 bits, got {K} (operator {name!r})"
        )


def exact_matmul(v: Tensor, weight: Tensor, bound: int) -> Tensor | WideIntegers:
    """Return the exact integer product `v @ weight.T`.

    Args:
        v: int64 (..., K), |v| < 2^33.
        weight: integer (M, K), |weight| <= 2^31.
        bound: The largest |result| that the widths allow.

    Returns:
        int64 (..., M) if the bound permits it, otherwise an array of Python integers.
    """
    if bound < _EXACT_FLOAT64:
        # Every partial sum is an integer below 2^53, so float64 is exact in any order.
        return (v.to(torch.float64) @ weight.to(torch.float64).T).to(torch.int64)
    if v.shape[-1] >= 1 << 20:
        raise QuantGRUError(
            f"Expected fewer than 2^20 features beside operators of more than 16 bits, "
            f"got {v.shape[-1]}"
        )
    weight = weight.to(torch.int64)
    limbs = [
        exact_matmul(a, b, 0)
        for a, b in (
            (v >> 16, weight >> 16),
            (v >> 16, weight & 0xFFFF),
            (v & 0xFFFF, weight >> 16),
            (v & 0xFFFF, weight & 0xFFFF),
        )
    ]
    hh, hl, lh, ll = (python_integers(limb) for limb in limbs)
    product: WideIntegers = (hh << 32) + ((hl + lh) << 16) + ll
    return product


def _multipliers(ratios: Sequence[float], k: int) -> list[int]:
    return list(map(round, map(math.ldexp, ratios, repeat(k))))


def _shift_of_24_bits(ratios: Sequence[float]) -> int:
    """Return the largest k for which every multiplier is below 2^24."""
    largest = max(ratios)
    k = 24 - math.frexp(largest)[1]
    return k - 1 if round(math.ldexp(largest, k)) == 1 << 24 else k


def _shift_of_a_tier(ratios: Sequence[float], bounds: Sequence[int], most: int, least: int) -> int:
    """Return the largest k of the first tier in which the largest multiplier has `least` bits.

    Args:
        ratios: Scale of each term over the scale of the result.
        bounds: V_i, the largest |v_i|.
        most: Upper limit of k, returned if no tier qualifies.
        least: Bits of the largest multiplier.
    """
    for tier in TIER_BOUNDS:
        k, Ms = most, _multipliers(ratios, most)
        while max(Ms).bit_length() >= least:
            if _fits(tier, _largest(Ms, bounds), k):
                return k
            k -= 1
            Ms = _multipliers(ratios, k)
    return most


def _error(ratios: Sequence[float], Ms: Sequence[int], bounds: Sequence[int], k: int) -> Fraction:
    """Return the largest change of a sum by rounding the multipliers, in codes of the result."""
    unit, error = 1 / Fraction(2) ** k, Fraction(0)
    for ratio, M, V in zip(ratios, Ms, bounds, strict=True):
        error += abs(Fraction(ratio) - M * unit) * V
    return error


def _accurate_shift(ratios: Sequence[float], bounds: Sequence[int], k: int) -> int:
    """Return the smallest shift above `k` with a small error, or the largest that fits 128 bits."""
    while _fits_words(Ms := _multipliers(ratios, k + 1), bounds, k + 1):
        k += 1
        if _error(ratios, Ms, bounds, k) <= _SMALL_ERROR:
            break
    return k


def _largest(Ms: Sequence[int], bounds: Sequence[int]) -> int:
    """Return the largest magnitude of a sum before it is rounded."""
    return sum(map(mul, Ms, bounds))


def _fits(tier: str, largest: int, k: int) -> bool:
    half = 0 if tier == "a" or k < 1 else 1 << (k - 1)
    return largest + half < TIER_BOUNDS[tier]


def _fits_words(Ms: Sequence[int], bounds: Sequence[int], k: int) -> bool:
    """Return whether the multipliers fit 64 bits and the rounded sum 128 bits."""
    return max(Ms) < _INT64_LIMIT and _largest(Ms, bounds) + (1 << max(k - 1, 0)) < 1 << 127


def _round_int64(of: WeightedSum, total: Tensor) -> Tensor:
    """Return total / 2^shift rounded, for any shift, for all int64; negative shifts saturate."""
    k, first = (
        torch.as_tensor(each, dtype=torch.int64, device=total.device)
        for each in (of.shift, of.first_shift)
    )
    found = shifted(total, k.clamp(min=0), of.rounding, first)
    left = (-k).clamp(0, _SATURATES_LOG2)
    limit = torch.full_like(left, 1 << _SATURATES_LOG2) >> left
    multiplied = torch.minimum(torch.maximum(total, -limit), limit) << left
    return torch.where(k < 0, multiplied, found)


def python_integers(value: Any) -> WideIntegers:
    """Return the values of a tensor or number as Python integers, same shape."""
    if isinstance(value, np.ndarray):
        return value
    return torch.as_tensor(value, device="cpu").numpy().astype(object)


def _round_python(of: WeightedSum, terms: Sequence[Term]) -> Tensor:
    """Return the rounded sum from Python integers, clamped to 62 bits."""
    total: Any = 0
    device = torch.device("cpu")
    for term, M in zip(terms, of.multipliers, strict=True):
        factors = term if isinstance(term, tuple) else (term,)
        v: Any = 1
        for factor in factors:
            device = factor.device if isinstance(factor, Tensor) else device
            v = v * python_integers(factor)
        total = total + v * python_integers(M)
    device = of.shift.device if isinstance(of.shift, Tensor) else device
    # Use at least one dimension: NumPy converts 0-d object arrays to machine integers.
    k, first = (np.atleast_1d(python_integers(each)) for each in (of.shift, of.first_shift))
    right, left = np.maximum(k, 0), np.maximum(-k, 0)
    found = shifted_integers(total, right, of.rounding, first) << left
    limited = np.minimum(np.maximum(found, -(1 << 62)), 1 << 62)
    return torch.from_numpy(np.asarray(limited, dtype=np.int64)).to(device)
