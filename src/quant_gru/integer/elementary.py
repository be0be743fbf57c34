"""Elementary functions in float64 with the same bits on every machine.

NumPy's exp, tanh and power differ in the last bit between processors and versions. Tables must not.
These functions use only operations that IEEE 754 rounds correctly. `cpp/src/plan/elementary.hpp`
has the same operations in the same order.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_LOWEST = -700.0  # exp of lower numbers is that of this one, about 1e-304
# ln(2) in two parts; the first has trailing zeros, so that its small multiples are exact
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_TERMS = 13


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)) without overflow."""
    below, exponent = _exponential(-np.abs(x))
    e = np.ldexp(1.0 + below, exponent)
    return np.asarray(np.where(x >= 0, 1.0, e) / (1.0 + e))


def tanh(x: Array) -> Array:
    """Hyperbolic tangent."""
    below, exponent = _exponential(-2.0 * np.abs(x))
    e = np.ldexp(1.0 + below, exponent)
    # near zero, 1 - exp(-2 |x|) is `-below` without cancellation
    y = np.where(exponent == 0, -below / (2.0 + below), (1.0 - e) / (1.0 + e))
    return np.asarray(np.where(x < 0, -y, y))


def cube_root(x: Array) -> Array:
    """The cube root of non-negative numbers."""
    mantissa, exponent = np.frexp(x)
    third = np.floor(exponent / 3.0).astype(np.int32)
    m = np.ldexp(mantissa, exponent - 3 * third)  # in [1/2, 4)
    y = 0.5 + 0.25 * m
    for _ in range(6):
        y = y - (y * y * y - m) / (3.0 * y * y)
    return np.asarray(np.where(x > 0, np.ldexp(y, third), 0.0))


def _exponential(x: Array) -> tuple[Array, NDArray[np.int32]]:
    """Return (b, n) with exp(x) = (1 + b) * 2^n, for x <= 0."""
    x = np.maximum(x, _LOWEST)
    n = np.rint(x * 1.4426950408889634)
    high, low = x - n * _LN2_HIGH, n * _LN2_LOW
    r = high - low
    lost = (high - r) - low
    p = np.full_like(r, 1.0 / math.factorial(_TERMS))
    for term in range(_TERMS - 1, 1, -1):
        p = p * r + 1.0 / math.factorial(term)
    return r + (lost + r * r * p), n.astype(np.int32)
