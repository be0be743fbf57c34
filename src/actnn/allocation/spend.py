"""Bits for items whose costs are known at each width: the greedy over tables of costs."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

from actnn.allocation.threshold import MAX_BITS, MIN_BITS


def law(cost: float, bits: int, least: int = MIN_BITS) -> list[float]:
    """Return costs at 1 to 8 bits from that at one width, by 1 / (2^b - 1)^2.

    Args:
        cost: The cost at `bits`.
        bits: Where it is known.
        least: Fewer bits are not to be used: their cost is infinite.
    """
    scale = cost * (2.0**bits - 1) ** 2
    return [
        scale / (2.0**b - 1) ** 2 if b >= least else math.inf for b in range(MIN_BITS, MAX_BITS + 1)
    ]


def spend(
    costs: Mapping[str, Sequence[float]], weights: Mapping[str, int], budget: float
) -> dict[str, int]:
    """Return bits of each item, whose costs have about the least sum within a budget.

    Each item begins at the fewest bits at which its cost is finite. The item that gains most for
    a bit of memory, by one bit more or by several, is next; of equal items the first is.

    Args:
        costs: Name -> the costs at 1 to 8 bits.
        weights: Name -> elements, all positive.
        budget: The most that bits x elements may sum to. It is exceeded only if the fewest bits
            of all items exceed it.
    """
    bits = {name: _fewest(table) for name, table in costs.items()}
    left = budget - sum(weights[name] * b for name, b in bits.items())
    heap: list[tuple[float, int, str, int]] = []

    def push(order: int, name: str) -> None:
        now, table = bits[name], costs[name]
        slopes = [
            ((table[b - 1] - table[now - 1]) / ((b - now) * weights[name]), b)
            for b in range(now + 1, MAX_BITS + 1)
            if (b - now) * weights[name] <= left
        ]
        if slopes:
            slope, b = min(slopes)
            heapq.heappush(heap, (slope, order, name, b))

    for order, name in enumerate(costs):
        push(order, name)
    while heap:
        _, order, name, b = heapq.heappop(heap)
        more = (b - bits[name]) * weights[name]
        if more <= left:
            left -= more
            bits[name] = b
        push(order, name)  # what fits is smaller now
    return bits


def _fewest(table: Sequence[float]) -> int:
    """Return the fewest bits whose cost is finite; if there are none, the most."""
    return next((b for b, cost in enumerate(table, MIN_BITS) if math.isfinite(cost)), MAX_BITS)
