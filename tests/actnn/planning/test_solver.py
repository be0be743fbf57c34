"""The solver against all combinations."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actnn.planning.costs import Costs, UnitCosts
from actnn.planning.solver import smallest_budget, solve


@st.composite
def problems(draw):
    units = draw(st.integers(1, 5))

    def numbers(high):
        return np.array(draw(st.lists(st.integers(0, high), min_size=units, max_size=units))) * 1.0

    of = {
        name: UnitCosts(
            held=numbers(100),
            forward=numbers(60),
            backward=numbers(60),
            seconds=numbers(9) + 1,
            noise=numbers(3) / 10,
        )
        for name in "abc"
    }
    return Costs(base=draw(st.integers(0, 50)), loss=draw(st.integers(0, 40)), other=1.0, of=of)


def cost(costs, plan):
    scale = min(costs.seconds([key] * len(plan)) for key in costs.of)
    return (costs.seconds(plan) - costs.other) / scale + costs.noise(plan)


@settings(max_examples=60)
@given(problems(), st.integers(60, 700))
def test_the_plan_is_the_best_within_the_budget(costs, budget):
    units = len(costs.of["a"].held)
    plan = solve(costs, budget)
    plans = [list(each) for each in itertools.product("abc", repeat=units)]
    fitting = [cost(costs, each) for each in plans if costs.peak(each) <= budget]
    # Rounding to the grid may cost a part in a thousand of the budget, never exceed it.
    surely = [cost(costs, each) for each in plans if costs.peak(each) <= 0.99 * budget]
    if plan is None:
        assert not surely
        return
    assert costs.peak(plan) <= budget + 1e-6
    assert cost(costs, plan) >= min(fitting) - 1e-9
    if surely:
        assert cost(costs, plan) <= min(surely) + 1e-9


@settings(max_examples=20)
@given(problems())
def test_the_smallest_budget_is_that_of_the_plan_with_the_smallest_peak(costs):
    units = len(costs.of["a"].held)
    least = min(costs.peak(list(each)) for each in itertools.product("abc", repeat=units))
    found = smallest_budget(costs)
    assert solve(costs, found) is not None
    assert found == pytest.approx(least, rel=0.01, abs=2)


def test_equal_costs_keep():
    def unit(held):
        zero = np.zeros(3)
        return UnitCosts(
            held=np.full(3, held), forward=zero, backward=zero, seconds=zero + 1, noise=zero
        )

    of = {"keep": unit(10.0), "codes": unit(2.0), "recompute": unit(1.0)}
    costs = Costs(base=0, loss=0, other=1.0, of=of)
    assert solve(costs, 100) == ["keep"] * 3
    plan = solve(costs, 15)
    assert plan is not None
    assert sorted(plan) == ["codes", "codes", "keep"]


def test_the_peak_counts_what_later_units_do_not_hold_yet():
    """A unit that needs much above may run where little is held."""
    needs = np.array([0.0, 0.0, 50.0])
    of = {
        "keep": UnitCosts(np.array([40.0, 40, 40]), needs, np.zeros(3), np.ones(3), np.zeros(3)),
        "drop": UnitCosts(np.zeros(3), needs, np.zeros(3), np.full(3, 2.0), np.zeros(3)),
    }
    costs = Costs(base=0, loss=0.0, other=0.0, of=of)
    assert costs.peak(["keep"] * 3) == 130
    assert solve(costs, 131) == ["keep"] * 3
    # The last unit's need comes after the first two hold theirs: one of these must give way.
    plan = solve(costs, 101)
    assert sorted(plan[:2]) == ["drop", "keep"]
    assert solve(costs, 49) is None
