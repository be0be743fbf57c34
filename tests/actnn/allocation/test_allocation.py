"""Precision allocation: the greedy against brute force, the device's against the greedy."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actnn.allocation import allocate, calc_precision
from actnn.errors import ActNNError

POSITIVE = st.floats(1e-6, 1e6)


def objective(c, bits):
    return sum(x / (2.0**b - 1) ** 2 for x, b in zip(c, bits, strict=True))


@settings(max_examples=40)
@given(st.lists(POSITIVE, min_size=1, max_size=5), st.data())
def test_the_greedy_is_optimal_for_equal_weights(c, data):
    target = data.draw(st.integers(len(c), 4 * len(c)))
    bits = calc_precision(4, c, np.ones(len(c)), target)
    best = min(
        objective(c, each)
        for each in itertools.product(range(1, 5), repeat=len(c))
        if sum(each) <= target
    )
    assert bits.sum() <= target
    assert objective(c, bits) == pytest.approx(best, rel=1e-12)


@settings(max_examples=40)
@given(st.lists(st.tuples(POSITIVE, st.integers(1, 9)), min_size=1, max_size=5), st.data())
def test_the_greedy_is_optimal_for_the_bits_it_uses(items, data):
    """With any weights, no choice of at most as many bits in all does less damage."""
    c, w = zip(*items, strict=True)
    target = data.draw(st.integers(sum(w), 4 * sum(w)))
    bits = calc_precision(4, c, w, target)
    used = sum(x * b for x, b in zip(w, bits, strict=True))
    best = min(
        objective(c, each)
        for each in itertools.product(range(1, 5), repeat=len(c))
        if sum(x * b for x, b in zip(w, each, strict=True)) <= used
    )
    assert used <= target
    assert objective(c, bits) == pytest.approx(best, rel=1e-12)


def test_ties_take_from_the_largest_index():
    assert calc_precision(8, np.ones(3), np.ones(3), 23).tolist() == [8, 8, 7]
    # Without statistics the definition empties the last items first.
    assert calc_precision(8, np.zeros(16), np.ones(16), 32).tolist() == [8, 8, 3] + [1] * 13


@settings(max_examples=60)
@given(
    st.lists(st.tuples(POSITIVE, st.integers(1, 1000)), min_size=1, max_size=40), st.floats(1, 8)
)
def test_the_device_allocates_what_the_greedy_allocates(items, average):
    c, w = (np.array(each, dtype=np.float64) for each in zip(*items, strict=True))
    bits = allocate(torch.tensor(c), torch.tensor(w), average)
    budget = 1 * w.sum() + (average - 1) * w.sum()
    assert bits.tolist() == calc_precision(8, c, w, budget).tolist()
    assert (bits.double() * torch.tensor(w)).sum() <= budget


@settings(max_examples=40)
@given(st.lists(POSITIVE, min_size=2, max_size=20), st.floats(1, 8), st.floats(1, 100), st.data())
def test_more_sensitive_never_means_fewer_bits(c, average, times, data):
    index = data.draw(st.integers(0, len(c) - 1))
    before = allocate(torch.tensor(c), torch.ones(len(c)), average)
    raised = torch.tensor(c)
    raised[index] *= times
    assert allocate(raised, torch.ones(len(c)), average)[index] >= before[index]


@pytest.mark.parametrize(("average", "expected"), [(2, [2] * 4), (2.5, [3, 3, 2, 2]), (8, [8] * 4)])
def test_no_statistics_mean_uniform_bits(average, expected):
    assert allocate(torch.zeros(4), torch.ones(4), average).tolist() == expected


def test_nan_gets_the_most_bits():
    c = torch.tensor([1.0, torch.nan, 1e30, 1.0])
    assert allocate(c, torch.ones(4), 3)[1] == 8
    assert calc_precision(8, c.numpy(), np.ones(4), 12)[1] == 8


def test_the_average_may_be_on_the_device():
    c, w = torch.rand(9), torch.ones(9)
    assert torch.equal(allocate(c, w, torch.tensor(2.5)), allocate(c, w, 2.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: calc_precision(8, [1.0], [1.0, 2.0], 4), "vectors of one length"),
        (lambda: calc_precision(8, [-1.0], [1.0], 4), "C to be non-negative"),
        (lambda: calc_precision(8, [1.0], [0.0], 4), "w to be positive"),
        (lambda: calc_precision(0, [1.0], [1.0], 4), "b to be at least 1"),
        (lambda: calc_precision(8, [1.0], [4.0], 3), "at least one bit"),
        (lambda: allocate(torch.ones(2), torch.ones(3), 2), "vectors of one length"),
        (lambda: allocate(torch.ones(2), torch.ones(2), 9), "from 1 to 8, got 9"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ActNNError, match=message):
        call()
