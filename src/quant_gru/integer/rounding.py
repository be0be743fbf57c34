"""The rules by which a sum divided by a power of two becomes an integer.

    half_even    the nearest integer; a tie goes to the even one
    half_away    the nearest integer; a tie goes away from zero
    half_up      the nearest integer; a tie goes towards plus infinity
    floor        the next integer towards minus infinity
    double       half_up at the bits of the multiplier, then half_away at those that are left

Every rule is monotonic and keeps integers, so that clamping to integers may precede it. Those of
real values are in quantizer.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant_gru.config.fields import DEFAULT_ROUNDING, ROUNDINGS

DEFAULT = DEFAULT_ROUNDING
NUMBERS = {rule: number for number, rule in enumerate(ROUNDINGS)}
"""The rules as native code and frozen files for C name them."""


def shifted(total: Tensor, k: Tensor, rule: str, first: Tensor) -> Tensor:
    """Return `total / 2^k` rounded, exact for all int64; int64, in the broadcast shape.

    Args:
        total: int64.
        k: int64, at least 0.
        rule: One of `ROUNDINGS`.
        first: int64, the shift of the first step of ``double``, as far as k reaches; others
            ignore it.
    """
    if rule == "double":
        first = torch.minimum(first, k)
        return shifted(shifted(total, first, "half_up", first), k - first, "half_away", first)
    right = k.clamp(0, 63)
    quotient = total >> right
    if rule == "floor":
        return quotient
    rest = total - (quotient << right)
    half = torch.ones_like(right) << (right - 1).clamp(min=0)
    up = (rest > half) | ((rest == half) & _tie_goes_up(rule, quotient, total))
    return torch.where(k > 63, 0, quotient + (up & (k > 0)))


def shifted_integers(total: Any, k: Any, rule: str, first: Any) -> Any:
    """Return `shifted` of arrays of Python integers of any size.

    Args:
        total: Array of Python integers.
        k: Array of Python integers, at least 0.
        rule: One of `ROUNDINGS`.
        first: Array of Python integers, as for `shifted`.
    """
    if rule == "double":
        first = np.minimum(first, k)
        once = shifted_integers(total, first, "half_up", first)
        return shifted_integers(once, k - first, "half_away", first)
    quotient = total >> k
    if rule == "floor":
        return quotient
    twice_rest = (total - (quotient << k)) << 1
    divisor = np.full_like(k, 1) << k
    up = (twice_rest > divisor) | ((twice_rest == divisor) & _tie_goes_up(rule, quotient, total))
    return quotient + up.astype(object)


def _tie_goes_up(rule: str, quotient: Any, total: Any) -> Any:
    if rule == "half_even":
        return quotient % 2 == 1
    return total >= 0 if rule == "half_away" else total == total
