"""What each choice costs each unit, and the peak that a combination of choices reaches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from actnn.planning.timeline import LOSS, Timeline

Key = TypeVar("Key")
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class UnitCosts:
    """One choice for all units, each array of shape (units,).

    Attributes:
        held: Bytes that a unit holds from its forward to its backward.
        forward: Bytes above those held when its forward begins, at most.
        backward: Bytes above those held when its backward begins, at most.
        seconds: Time of its forward and backward.
        noise: Variance that it adds to the gradient, relative to the gradient's squared norm.
    """

    held: Array
    forward: Array
    backward: Array
    seconds: Array
    noise: Array


@dataclass(frozen=True)
class Costs(Generic[Key]):
    """The costs of every choice that was measured.

    Attributes:
        base: Bytes before the step: parameters, inputs.
        loss: Bytes above those held while the loss is computed, at most.
        other: Seconds of the step outside of all units.
        of: The costs of each choice.
    """

    base: int
    loss: float
    other: float
    of: dict[Key, UnitCosts]

    def peak(self, plan: Sequence[Key]) -> float:
        """Predicted peak of a step in bytes, with a choice for each unit."""
        held, highest = float(self.base), 0.0
        for unit, key in enumerate(plan):
            costs = self.of[key]
            highest = max(highest, held + costs.forward[unit])
            held += costs.held[unit]
            highest = max(highest, held + costs.backward[unit])
        return max(highest, held + self.loss)

    def seconds(self, plan: Sequence[Key]) -> float:
        """Predicted seconds of a step."""
        return self.other + sum(float(self.of[k].seconds[u]) for u, k in enumerate(plan))

    def noise(self, plan: Sequence[Key]) -> float:
        """Predicted relative variance that compression adds to the gradient."""
        return sum(float(self.of[k].noise[u]) for u, k in enumerate(plan))


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of a step: before the first unit, of each unit, and above in the loss."""

    base: int
    held: Array
    forward: Array
    backward: Array
    loss: float


def unit_memory(timeline: Timeline, units: int) -> UnitMemory:
    """Take the bytes of each unit from a step whose memory was measured."""
    held, forward, backward = np.zeros(units), np.zeros(units), np.zeros(units)
    forwards = [part for part in timeline.parts if not part.backward and part.unit >= 0]
    base, loss = forwards[0].start, 0.0
    ends = [part.start for part in forwards[1:]]
    ends += [part.start for part in timeline.parts if part.unit == LOSS]
    first: dict[int, int] = {}  # order of units in the forward
    for part, end in zip(forwards, ends, strict=True):
        held[part.unit] += end - part.start
        forward[part.unit] = max(forward[part.unit], part.peak - part.start)
        first.setdefault(part.unit, len(first))
    held = np.maximum(held, 0)
    until = {u: sum(held[v] for v in first if first[v] <= first[u]) for u in first}
    for part in timeline.parts:
        if part.unit == LOSS:
            loss = max(loss, part.peak - base - float(held.sum()))
        elif part.backward:
            above = part.peak - base - until[part.unit]
            backward[part.unit] = max(backward[part.unit], above)
    return UnitMemory(base, held, forward, backward, loss)


def unit_seconds(timelines: list[Timeline], units: int) -> tuple[Array, float]:
    """Seconds of each unit, and of all else, from several steps."""
    seconds = np.zeros((len(timelines), units))
    for each, timeline in zip(seconds, timelines, strict=True):
        for part in timeline.parts:
            if part.unit >= 0:
                each[part.unit] += part.seconds
    other = [t.seconds - each.sum() for t, each in zip(timelines, seconds, strict=True)]
    return typical(seconds), float(typical(other))


def typical(times: Array | list[float]) -> Array:
    """Return the lower quartile over the first axis: what disturbs a step only adds time."""
    return np.asarray(np.quantile(np.asarray(times), 0.25, axis=0))
