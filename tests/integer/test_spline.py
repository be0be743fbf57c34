"""Continuous splines with few or many segments."""

from itertools import pairwise

import numpy as np
import pytest

from quant_gru.integer import spline

FIRST, LAST = -32768, 32767


def sigmoid(q):
    return 32768 / (1 + np.exp(-q / 4096))


def tanh(q):
    return 32768 * np.tanh(q / 8192)


def largest_error(f, starts, coefficients, codes):
    segment = np.searchsorted(starts, codes, side="right") - 1
    t = (codes - starts[segment]).astype(float)
    y = sum(coefficients[segment, power] * t**power for power in range(coefficients.shape[1]))
    return np.abs(y - f(codes.astype(float))).max()


@pytest.mark.parametrize("f", [sigmoid, tanh])
@pytest.mark.parametrize("segments", [8, 16, 64, 256])
def test_straight_segments_are_near_the_best(f, segments):
    """With many segments the least error of continuous ones is (integral of |f''|^(1/2) / 4S)^2."""
    codes = np.arange(FIRST, LAST + 1)
    found = largest_error(f, *spline.fit_spline(f, FIRST, LAST, segments, 1), codes)
    bends = np.abs(np.gradient(np.gradient(f(codes.astype(float)))))
    assert found < (1.35 if segments < 16 else 1.2) * (np.sqrt(bends).sum() / (4 * segments)) ** 2


@pytest.mark.parametrize("f", [sigmoid, tanh])
def test_parabolas_get_better_with_the_third_power_of_their_number(f):
    codes = np.arange(FIRST, LAST + 1)
    errors = [
        largest_error(f, *spline.fit_spline(f, FIRST, LAST, segments, 2), codes)
        for segments in (16, 32, 64, 128, 256)
    ]
    for more, fewer in pairwise(errors):
        assert fewer < more / 7


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("codes", [2, 3, 17, 200])
def test_a_knot_at_every_code_leaves_no_error(degree, codes):
    def f(q):
        return np.sin(q) * 1000

    starts, coefficients = spline.fit_spline(f, 5, 4 + codes, 256, degree)
    assert largest_error(f, starts, coefficients, np.arange(5, 5 + codes)) < 1e-6


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("codes", [20, 39, 47])
def test_steep_functions_get_all_the_segments_there_are_codes_for(degree, codes):
    """Where a function bends between two codes, ends of segments are moved apart."""

    def f(q):
        return 2048 * np.tanh((q - codes / 2) * 0.5)

    starts, coefficients = spline.fit_spline(f, 0, codes - 1, 256, degree)
    assert starts.tolist() == list(range(codes - 1))
    assert largest_error(f, starts, coefficients, np.arange(codes)) < 1e-6


def test_knots_are_moved_apart():
    knots = np.array([0.0, 0, 0, 5, 5, 5, 9, 9])
    assert spline._distinct(knots).tolist() == [0, 1, 2, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("count", [2, 5, 40])
def test_values_are_those_of_least_squares(monkeypatch, degree, count):
    monkeypatch.setattr(spline, "_REWEIGHTINGS", 1)
    generator = np.random.default_rng(count)
    knots = np.sort(generator.choice(np.arange(1, 999), count - 1, replace=False)).astype(float)
    knots = np.concatenate([[0.0], knots, [999.0]])
    grid = np.arange(1000.0)
    y = generator.standard_normal(1000)
    at_knots = generator.standard_normal(knots.size)
    values, error = spline._fit_values(grid, y, knots, at_knots, degree)
    hats = np.stack([np.interp(grid, knots, row) for row in np.eye(knots.size)], axis=1)
    basis = hats
    if degree == 2:
        bubbles = hats[:, :-1] * hats[:, 1:]
        basis = np.concatenate([hats, bubbles], axis=1)
    expected = np.linalg.lstsq(basis, y, rcond=None)[0]
    np.testing.assert_allclose(basis @ values, basis @ expected, atol=1e-9)
    np.testing.assert_allclose(error, np.abs(basis @ expected - y), atol=1e-9)


def test_segments_without_points_have_the_functions_values_at_their_ends():
    grid, knots = np.array([0.0, 10.0, 90.0, 100.0]), np.array([0.0, 20, 40, 60, 80, 100])
    values, error = spline._fit_values(grid, grid**2, knots, knots**2, 2)
    assert values.shape == (11,)
    assert np.isfinite(values).all()
    np.testing.assert_allclose(values[[2, 3]], knots[[2, 3]] ** 2, rtol=1e-6)
    np.testing.assert_array_equal(values[[7, 8, 9]], 0)
    assert error.max() < 1e-6


def test_a_tridiagonal_system_is_solved():
    generator = np.random.default_rng(0)
    for size in (1, 2, 3, 50):
        beside = generator.standard_normal(size - 1)
        diagonal = 3 + generator.random(size)
        target = generator.standard_normal(size)
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        found = spline._solve(diagonal, beside, target)
        np.testing.assert_allclose(matrix @ found, target, atol=1e-12)
