"""Bits for items whose costs are known at each width."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actnn.allocation import calc_precision
from actnn.allocation.spend import law, spend


def test_the_law_has_the_known_cost_and_no_fewer_bits_than_the_least():
    table = law(2.0, 2, 2)
    assert table[0] == math.inf
    assert table[1] == 2.0
    assert table[2] == pytest.approx(2.0 * 9 / 49)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e6), st.integers(1, 1000)), min_size=1, max_size=12),
    st.floats(1, 8),
)
def test_the_budget_is_kept(items, average):
    costs = {str(i): law(cost, 1) for i, (cost, _) in enumerate(items)}
    weights = {str(i): weight for i, (_, weight) in enumerate(items)}
    budget = average * sum(weights.values()) * (1 + 1e-12)
    bits = spend(costs, weights, budget)
    assert all(1 <= b <= 8 for b in bits.values())
    assert sum(b * weights[name] for name, b in bits.items()) <= budget
    rest = budget - sum(b * weights[name] for name, b in bits.items())
    assert all(b == 8 or weights[name] > rest for name, b in bits.items())  # nothing is left over


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(1, 8))
def test_items_of_one_size_under_the_law_get_the_bits_of_the_definition(costs, average):
    bits = spend({str(i): law(c, 1) for i, c in enumerate(costs)}, dict.fromkeys(
        map(str, range(len(costs))), 1), average * len(costs))  # fmt: skip
    best = calc_precision(8, costs, [1.0] * len(costs), average * len(costs))
    total = sum(law(c, 1)[bits[str(i)] - 1] for i, c in enumerate(costs))
    assert total == pytest.approx(
        sum(law(c, 1)[b - 1] for c, b in zip(costs, best, strict=True)), rel=1e-9
    )


def test_costs_that_fall_late_are_seen():
    """One bit more for "a" gains nothing, two gain most."""
    costs = {"a": [10.0, 10.0, 1.0, *[1.0] * 5], "b": [3.0, 2.0, 1.5, *[1.5] * 5]}
    assert spend(costs, {"a": 1, "b": 1}, 4) == {"a": 3, "b": 1}
    every = itertools.product(range(1, 9), repeat=2)
    best = min((costs["a"][a - 1] + costs["b"][b - 1], a, b) for a, b in every if a + b <= 4)
    assert best == (4.0, 3, 1)


def test_the_fewest_bits_are_those_of_finite_costs():
    assert spend({"a": law(1.0, 2, 2), "b": law(1.0, 1)}, {"a": 8, "b": 8}, 16) == {"a": 2, "b": 1}
