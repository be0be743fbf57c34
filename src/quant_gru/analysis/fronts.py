"""The best combinations of one choice from each of several blocks: exact, by dominance.

Costs and errors of blocks add up. Blocks are joined one after the other; of all combinations of the
blocks joined so far, one that is no better than another in any cost and in the error can be left
out, because every completion of it is no better than the same completion of the other. What remains
at the end is therefore the whole Pareto front: no combination has less error at no more cost.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quant_gru.errors import QuantGRUError

Array = NDArray[np.float64]

# Combinations kept at a time: beyond it, three or more costs take too long to compare.
_MOST = 200_000


@dataclass(frozen=True)
class Block:
    """Choices of which one is taken.

    Attributes:
        costs: (choices, costs), each at least 0.
        errors: (choices,), the error that each adds.
    """

    costs: Array
    errors: Array


@dataclass(frozen=True)
class Front:
    """Combinations of which none is better than another in everything, by the first cost.

    Attributes:
        costs: (combinations, costs).
        errors: (combinations,).
        choices: (combinations, blocks), the index of the choice in each block.
    """

    costs: Array
    errors: Array
    choices: NDArray[np.int64]


def front(blocks: Sequence[Block], limits: Sequence[float], names: Sequence[str]) -> Front:
    """Return the Pareto front of all combinations within limits.

    Args:
        blocks: At least one.
        limits: The most of each cost; infinite for none.
        names: Names of the costs, for the error.

    Raises:
        QuantGRUError: No combination is within the limits, or there are too many to compare.
    """
    most = np.asarray(limits, dtype=np.float64)
    # the least that the blocks to come will cost
    least = np.array([block.costs.min(axis=0) for block in blocks])
    rest = least[::-1].cumsum(axis=0)[::-1] - least
    costs = np.zeros((1, len(most)))
    errors = np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for block, after in zip(blocks, rest, strict=True):
        k = len(block.errors)
        joined = (costs[:, None] + block.costs[None]).reshape(-1, len(most))
        total = (errors[:, None] + block.errors[None]).reshape(-1)
        possible = np.flatnonzero((joined + after <= most).all(axis=1))
        if not len(possible):
            lowest = zip(names, least.sum(axis=0).tolist(), strict=True)
            raise QuantGRUError(
                "Expected a budget that some widths meet, got less; the least of each is "
                + ", ".join(f"{name} {value:,.0f}" for name, value in lowest)
            )
        kept = possible[undominated(joined[possible], total[possible])]
        if len(kept) > _MOST:
            raise QuantGRUError(
                f"Expected at most {_MOST} combinations to compare, got {len(kept)}; set fewer "
                "budgets at once, fewer widths, or groups of operators with one width"
            )
        costs, errors = joined[kept], total[kept]
        history.append((kept // k, kept % k))
    rows = np.arange(len(errors))
    choices = np.empty((len(errors), len(blocks)), dtype=np.int64)
    for i in range(len(blocks) - 1, -1, -1):
        before, choice = history[i]
        choices[:, i] = choice[rows]
        rows = before[rows]
    return Front(costs, errors, choices)


def undominated(costs: Array, errors: Array) -> NDArray[np.int64]:
    """Return the indices of rows that no other row equals or beats in every cost and the error.

    Of equal rows the first one stays. They are in the order of costs.

    Args:
        costs: (rows, costs).
        errors: (rows,).
    """
    order = np.lexsort((errors, *costs.T[::-1]))
    if costs.shape[1] == 1:
        sorted_errors = errors[order]
        lowest = np.minimum.accumulate(sorted_errors)
        better = np.ones(len(order), dtype=bool)
        better[1:] = sorted_errors[1:] < lowest[:-1]
        return order[better]
    # rows before a row have no greater first cost, so only the others decide
    values = np.column_stack((costs[order, 1:], errors[order]))
    kept = _staircase(values) if values.shape[1] == 2 else _not_beaten(values)
    return order[kept]


def _staircase(values: Array) -> list[int]:
    """Return the rows of (rows, 2) that no earlier row equals or beats in both numbers."""
    kept: list[int] = []
    first: list[float] = []  # ascending, and `second` descending: what is best so far
    second: list[float] = []
    for i, (a, b) in enumerate(values.tolist()):
        at = bisect.bisect_right(first, a)
        if at and second[at - 1] <= b:
            continue
        kept.append(i)
        begin = bisect.bisect_left(first, a)
        end = begin
        while end < len(second) and second[end] >= b:
            end += 1
        first[begin:end], second[begin:end] = [a], [b]
    return kept


def _not_beaten(values: Array) -> list[int]:
    """Return the rows that no earlier row equals or beats in all numbers."""
    kept: list[int] = []
    best = np.empty((0, values.shape[1]))
    for i, row in enumerate(values):
        if not (best <= row).all(axis=1).any():
            kept.append(i)
            best = np.vstack((best[~(row <= best).all(axis=1)], row))
    return kept
