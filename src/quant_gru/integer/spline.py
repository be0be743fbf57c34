"""Continuous piecewise polynomials with few segments, for hardware without large tables."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_GRID = 384
_PLACEMENTS = 16
_REWEIGHTINGS = 24
_DAMPING = 0.5


def fit_spline(
    f: Callable[[Array], Array], first: int, last: int, segments: int, degree: int
) -> tuple[NDArray[np.int64], Array]:
    """Fit a continuous spline to `f` over the codes [first, last], near the least maximum error.

    Segment ends are placed by curvature: the integral of |f^(degree+1)|^(1/(degree+1)) is the same
    in every segment; they are then moved until the largest errors of all segments are about equal.
    Values follow from least squares whose weights are raised where the error is largest (Lawson's
    iteration).

    Args:
        f: Function of (real-valued) codes.
        first: Smallest code.
        last: Largest code.
        segments: At most this many segments; fewer where there are fewer codes.
        degree: 1 or 2.

    Returns:
        First code of each segment, int64 (S,), and the coefficients (S, degree + 1) in powers of
        `t = code - start`.
    """
    if last == first:
        row = np.zeros((1, degree + 1))
        row[0, 0] = f(np.array([float(first)]))[0]
        return np.array([first]), row
    # half of the points evenly, half where the function bends
    bends = _by_curvature(f, first, last, _GRID, degree)
    grid = np.unique(np.rint(np.concatenate([np.linspace(first, last, _GRID), bends])))
    y = f(grid)
    knots = _by_curvature(f, first, last, min(segments, last - first), degree)
    best, best_knots, best_error = np.zeros(0), knots, np.inf
    for _ in range(_PLACEMENTS):
        values, error = _fit_values(_basis(grid, knots, degree), y)
        if error.max() < best_error:
            best, best_knots, best_error = values, knots, float(error.max())
        knots = _equalize(knots, grid, error, degree)
    return best_knots[:-1].astype(np.int64), _coefficients(best, best_knots, degree)


def _fit_values(basis: Array, y: Array) -> tuple[Array, Array]:
    """Basis weights of a nearly least maximum error, and the error at each point."""
    weights = np.full(y.shape, 1.0 / y.size)
    best, best_error = np.zeros(basis.shape[1]), np.full(y.shape, np.inf)
    for _ in range(_REWEIGHTINGS):
        root = np.sqrt(weights)
        values = np.linalg.lstsq(basis * root[:, None], y * root, rcond=None)[0]
        error = np.abs(basis @ values - y)
        if error.max() < best_error.max():
            best, best_error = values, error
        weights = weights * (error + 1e-3 * error.max() + 1e-300)
        weights /= weights.sum()
    return best, best_error


def _equalize(knots: Array, grid: Array, error: Array, degree: int) -> Array:
    """Move the knots so that segments with larger errors become shorter."""
    segment = np.clip(np.searchsorted(knots, grid, side="right") - 1, 0, knots.size - 2)
    largest = np.zeros(knots.size - 1)
    np.maximum.at(largest, segment, error)
    weight = (largest / max(largest.max(), 1e-300) + 1e-3) ** (_DAMPING / (degree + 1))
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    moved = np.interp(np.linspace(0.0, mass[-1], knots.size), mass, knots)
    moved[0], moved[-1] = knots[0], knots[-1]
    return np.unique(np.rint(moved))


def _by_curvature(
    f: Callable[[Array], Array], first: int, last: int, segments: int, degree: int
) -> Array:
    """Knots, (segments + 1,), distinct integers from `first` to `last`."""
    x = np.linspace(first, last, 4097)
    derivative = f(x)
    for _ in range(degree + 1):
        derivative = np.gradient(derivative, x)
    density = np.abs(derivative) ** (1.0 / (degree + 1))
    # a floor keeps knots apart where the function is a straight line
    density += 1e-3 * density.max() + 1e-300
    mass = np.concatenate([[0.0], np.cumsum(0.5 * (density[1:] + density[:-1]))])
    knots = np.rint(np.interp(np.linspace(0.0, mass[-1], segments + 1), mass, x))
    knots[0], knots[-1] = first, last
    return np.unique(knots)


def _basis(grid: Array, knots: Array, degree: int) -> Array:
    """Hat functions at the knots and, for degree 2, one bubble `t*(T-t)/T^2` per segment."""
    hats = np.stack([np.interp(grid, knots, row) for row in np.eye(knots.size)], axis=1)
    if degree == 1:
        return hats
    bubbles = hats[:, :-1] * hats[:, 1:]
    return np.concatenate([hats, bubbles], axis=1)


def _coefficients(values: Array, knots: Array, degree: int) -> Array:
    left, right = values[: knots.size - 1], values[1 : knots.size]
    T = np.diff(knots)
    slope = (right - left) / T
    if degree == 1:
        return np.stack([left, slope], axis=1)
    bubble = values[knots.size :]
    return np.stack([left, slope + bubble / T, -bubble / T**2], axis=1)
