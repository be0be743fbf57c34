"""Continuous piecewise polynomials with few segments, for hardware without large tables.

Sums are cumulative and roots are of `elementary`, so that every machine fits the same coefficients.
`cpp/src/plan/spline.cpp` has the same operations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quant_gru.integer.elementary import cube_root

Array = NDArray[np.float64]

_POINTS = 24  # evenly spaced points per segment, on average; as many again follow the curvature
_FEWEST_POINTS = 384
_PLACEMENTS = 16
_REWEIGHTINGS = 24


def fit_spline(
    f: Callable[[Array], Array], first: int, last: int, segments: int, degree: int
) -> tuple[NDArray[np.int64], Array]:
    """Fit a continuous spline to `f` over the codes [first, last], near the least maximum error.

    Segment ends are placed by curvature: the integral of |f^(degree+1)|^(1/(degree+1)) is the same
    in every segment. They are then moved until the maximum errors of all segments are about equal.
    The values come from least squares with weights that grow where the error is largest (Lawson's
    iteration).

    Args:
        f: Function of codes as real values.
        first: Smallest code.
        last: Largest code.
        segments: Maximum number of segments; fewer if there are fewer codes.
        degree: 1 or 2.

    Returns:
        First code of each segment, int64 (S,), and the coefficients (S, degree + 1) in powers of
        `t = code - start`.
    """
    if last == first:
        row = np.zeros((1, degree + 1))
        row[0, 0] = f(np.array([float(first)]))[0]
        return np.array([first]), row
    # half of the points are evenly spaced, half follow the curvature
    points = max(_FEWEST_POINTS, _POINTS * segments)
    bends = _by_curvature(f, first, last, points, degree)
    grid = np.unique(np.rint(np.concatenate([np.linspace(first, last, points), bends])))
    y = f(grid)
    knots = _distinct(_by_curvature(f, first, last, min(segments, last - first), degree))
    best, best_knots, best_error = np.zeros(0), knots, np.inf
    for _ in range(_PLACEMENTS):
        values, error = _fit_values(grid, y, knots, f(knots), degree)
        if error.max() < best_error:
            best, best_knots, best_error = values, knots, float(error.max())
        knots = _equalize(knots, grid, error, degree)
    return best_knots[:-1].astype(np.int64), _coefficients(best, best_knots, degree)


def _fit_values(
    grid: Array, y: Array, knots: Array, at_knots: Array, degree: int
) -> tuple[Array, Array]:
    """Return values with nearly the least maximum error, and the error at each point.

    The spline between two knots is `(1 - u) * left + u * right`, plus a bubble `u * (1 - u)` for
    degree 2. Only neighboring knots share equations: eliminating the bubbles segment by segment
    leaves a tridiagonal system. The unknowns are corrections to the values of the function.

    Returns:
        Values at the knots, followed for degree 2 by the bubbles of all segments.
    """
    count = knots.size - 1
    segment = np.clip(np.searchsorted(knots, grid, side="right") - 1, 0, count - 1)
    right = (grid - knots[segment]) / np.diff(knots)[segment]
    left = 1.0 - right
    bubble = left * right if degree == 2 else np.zeros_like(grid)
    rest = y - (left * at_knots[segment] + right * at_knots[segment + 1])
    weights = np.full(y.shape, 1.0 / y.size)
    best, best_error = np.zeros(0), np.full(y.shape, np.inf)
    for _ in range(_REWEIGHTINGS):
        parts = [
            np.bincount(segment, weights * v * w, count)
            for v, w in (
                *((left, left), (left, right), (right, right), (left, rest), (right, rest)),
                *((bubble, bubble), (bubble, left), (bubble, right), (bubble, rest)),
            )
        ]
        ll, lr, rr, ly, ry, bb, bl, br, by = parts
        # a segment without points between its knots has no bubble
        inverse = np.divide(1.0, bb, out=np.zeros(count), where=bb > 1e-200)
        diagonal = np.append(ll - bl * bl * inverse, 0.0)
        diagonal[1:] += rr - br * br * inverse
        beside = lr - bl * br * inverse
        target = np.append(ly - bl * by * inverse, 0.0)
        target[1:] += ry - br * by * inverse
        # a knot without points keeps the value of the function
        added = _solve(diagonal + 1e-12 * (_sum(diagonal) / diagonal.size), beside, target)
        bubbles = (by - bl * added[:-1] - br * added[1:]) * inverse
        error = np.abs(
            left * added[segment] + right * added[segment + 1] + bubble * bubbles[segment] - rest
        )
        if error.max() < best_error.max():
            values = at_knots + added
            best = values if degree == 1 else np.concatenate([values, bubbles])
            best_error = error
        weights = weights * (error + 1e-3 * error.max() + 1e-300)
        weights /= _sum(weights)
    return best, best_error


def _solve(diagonal: Array, beside: Array, target: Array) -> Array:
    """Solve a symmetric tridiagonal system, in the same order on every machine."""
    above, rest = beside.tolist(), target.tolist()
    pivots = diagonal.tolist()
    for i, value in enumerate(above):
        factor = value / pivots[i]
        pivots[i + 1] -= factor * value
        rest[i + 1] -= factor * rest[i]
    rest[-1] /= pivots[-1]
    for i in range(len(above) - 1, -1, -1):
        rest[i] = (rest[i] - above[i] * rest[i + 1]) / pivots[i]
    return np.array(rest)


def _equalize(knots: Array, grid: Array, error: Array, degree: int) -> Array:
    """Move the knots so that segments with larger errors become shorter."""
    segment = np.clip(np.searchsorted(knots, grid, side="right") - 1, 0, knots.size - 2)
    largest = np.zeros(knots.size - 1)
    np.maximum.at(largest, segment, error)
    weight = np.sqrt(_root(largest / max(largest.max(), 1e-300) + 1e-3, degree))
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    moved = np.interp(np.linspace(0.0, mass[-1], knots.size), mass, knots)
    moved[0], moved[-1] = knots[0], knots[-1]
    return _distinct(np.rint(moved))


def _by_curvature(
    f: Callable[[Array], Array], first: int, last: int, segments: int, degree: int
) -> Array:
    """Return knots (segments + 1,), integers from `first` to `last`, possibly with duplicates."""
    x = np.linspace(first, last, 4097)
    derivative = f(x)
    for _ in range(degree + 1):
        derivative = np.gradient(derivative)
    density = _root(np.abs(derivative), degree)
    # a floor keeps knots apart where the function is linear
    density += 1e-3 * density.max() + 1e-300
    mass = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
    knots = np.rint(np.interp(np.linspace(0.0, mass[-1], segments + 1), mass, x))
    knots[0], knots[-1] = first, last
    return np.asarray(knots)


def _root(values: Array, degree: int) -> Array:
    """Return the root of order degree + 1."""
    return np.sqrt(values) if degree == 1 else cube_root(values)


def _sum(values: Array) -> float:
    """Return the sum in the order of the values; the order of np.sum depends on the machine."""
    return float(np.cumsum(values)[-1])


def _distinct(knots: Array) -> Array:
    """Move equal knots apart so that they ascend strictly. The caller ensures enough room."""
    order = np.arange(float(knots.size))
    apart = np.maximum.accumulate(knots - order) + order
    return np.asarray(np.minimum(apart, knots[-1] - order[::-1]))


def _coefficients(values: Array, knots: Array, degree: int) -> Array:
    left, right = values[: knots.size - 1], values[1 : knots.size]
    T = np.diff(knots)
    slope = (right - left) / T
    if degree == 1:
        return np.stack([left, slope], axis=1)
    bubble = values[knots.size :]
    return np.stack([left, slope + bubble / T, -bubble / (T * T)], axis=1)
