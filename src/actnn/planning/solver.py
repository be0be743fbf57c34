"""The choice for each unit: least cost under a peak, by dynamic programming over the units.

The peak of a step is the largest of: bytes held by the units so far, plus what one unit needs
above in its forward or backward. So a state is (units decided, bytes held), and each choice is
either within the budget for this state or not. Bytes are rounded up to a grid, so that a plan is
never above the budget by the rounding.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from actnn.planning.costs import Costs

Key = TypeVar("Key")
GRID = 2000  # steps of the budget, at least


def solve(costs: Costs[Key], budget: float, noise_price: float = 1.0) -> list[Key] | None:
    """Choices of least time plus noise whose predicted peak is within a budget.

    Args:
        costs: The costs of each choice for each unit.
        budget: Bytes.
        noise_price: Relative time that a relative gradient variance of 1 is worth.

    Returns:
        A choice for each unit, or None if there is none. Of plans with equal costs, one that
        holds most; of choices with equal costs, the first.
    """
    keys = list(costs.of)
    units = len(next(iter(costs.of.values())).held)
    room = budget - costs.base
    if room < 1:
        return None
    grid = max(GRID, 50 * units)
    step = room / grid
    levels = np.arange(grid + 1)
    scale = min(costs.seconds([key] * units) for key in keys)
    best = np.full(grid + 1, np.inf)  # least cost with so many grid steps held
    best[0] = 0.0
    taken = np.zeros((units, grid + 1), dtype=np.int16)
    for unit in range(units):
        after = np.full(grid + 1, np.inf)
        for index, key in enumerate(keys):
            each = costs.of[key]
            steps = int(np.ceil(each.held[unit] / step - 1e-9))
            if steps > grid:
                continue
            cost = each.seconds[unit] / scale + noise_price * each.noise[unit]
            now = levels[: grid + 1 - steps] * step
            fits = (now + each.forward[unit] <= room) & (
                now + steps * step + each.backward[unit] <= room
            )
            candidate = np.where(fits, best[: grid + 1 - steps] + cost, np.inf)
            better = candidate < after[steps:]
            after[steps:][better] = candidate[better]
            taken[unit, steps:][better] = index
        best = after
    best = np.where(levels * step + costs.loss <= room, best, np.inf)
    if not np.isfinite(best).any():
        return None
    # Of equal costs the plan that holds most: it keeps, where another choice gains nothing.
    level = int(np.flatnonzero(best <= best.min() * (1 + 1e-12))[-1])
    plan = []
    for unit in reversed(range(units)):
        key = keys[taken[unit, level]]
        plan.append(key)
        level -= int(np.ceil(costs.of[key].held[unit] / step - 1e-9))
    return plan[::-1]


def smallest_budget(costs: Costs[Key]) -> float:
    """The smallest budget in bytes, to one part in a thousand, for which there is a plan."""
    low, high = float(costs.base), float(costs.base) + 1.0
    while solve(costs, high) is None:
        high = costs.base + 2 * (high - costs.base)
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if solve(costs, middle) is None:
            low = middle
        else:
            high = middle
    return high
