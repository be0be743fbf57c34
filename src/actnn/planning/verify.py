"""Finds units whose forward does something else when it runs again in backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from actnn.planning.blocks import BlockChoice
from actnn.planning.comparison import KEEP, RECOMPUTE, Difference
from actnn.planning.units import Unit

TOLERANCE = 1e-5  # squared difference of equal gradients over their squared norm: of rounding
ROUNDED = 2.5e-3  # likewise, of code that is compiled in another way
MOST_ROUNDED = 0.25  # likewise, if rounding has large effects in this model
MOST_STEPS = 40  # that look for the units

Compare = Callable[[Sequence[BlockChoice]], Difference]


def limit_of(again: float) -> float:
    """Return the largest difference of gradients that counts as none.

    Args:
        again: The difference between two equal steps.
    """
    return TOLERANCE + 10 * again


def text_of(difference: float, error: str) -> str:
    """Say how wrong gradients are.

    Args:
        difference: Squared, over the squared norm of the gradient; infinite for NaN.
        error: What the step has raised, or ''.
    """
    if error:
        return f"the step fails ({error})"
    if not math.isfinite(difference):
        return "the gradient is not finite"
    return f"the gradient is wrong by {math.sqrt(difference):.2g} of its norm"


def mark_unrepeatable(units: list[Unit], compare: Compare) -> float:
    """Mark the units that must not be recomputed, by steps whose gradient is compared with KEEP's.

    One step is enough if recomputing all of them is right. Else halves are tried.

    Args:
        units: The units; those that are found are replaced.
        compare: A choice for each unit -> how far the gradient is from that of keeping all.

    Returns:
        The difference between two equal steps, if it was needed to know, else 0.
    """
    steps = 0

    def wrong(among: list[int]) -> str:
        nonlocal steps
        steps += 1
        plan = [RECOMPUTE if index in among else KEEP for index in range(len(units))]
        found, _, error = compare(plan)
        return text_of(found, error) if found > limit else ""

    def mark(among: list[int], why: str) -> None:
        for index in among:
            units[index] = replace(units[index], once=why)

    def search(among: list[int], why: str) -> None:
        if len(among) == 1 or steps >= MOST_STEPS:
            mark(among, f"when its forward runs again, {why}")
            return
        for half in (among[: len(among) // 2], among[len(among) // 2 :]):
            reason = wrong(half)
            if reason:
                search(half, reason)

    limit = TOLERANCE
    left = [index for index, unit in enumerate(units) if not unit.once]
    why = wrong(left) if left else ""
    if not why:
        return 0.0
    again, _, error = compare([KEEP] * len(units))
    if again > TOLERANCE:
        mark(left, f"two equal steps differ: {text_of(again, error)}")
        return again
    limit = limit_of(again)
    search(left, why)
    left = [index for index in left if not units[index].once]
    why = wrong(left) if left else ""
    if why:  # only together
        mark(left, f"when forwards run again, {why}")
    return again
