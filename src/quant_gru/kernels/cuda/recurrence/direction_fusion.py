"""Direction fusion: choose the directions of a layer that share a launch of the recurrence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from quant_gru.kernels.cuda.plan.structure import Form, joint_form
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.recurrence import planner


class HasNumbers(Protocol):
    """One layer and direction.

    Attributes:
        numbers: Its plan's numbers.
    """

    numbers: Numbers


_Direction = TypeVar("_Direction", bound=HasNumbers)


def launches_of(
    directions: Sequence[_Direction], N: int, clusters: Mapping[int, int]
) -> Sequence[tuple[Sequence[_Direction], Form]]:
    """Return the directions of each launch of the recurrence, and its form.

    Directions with equal forms share a launch. Directions with different forms share a launch
    whose form is exact for both, unless two launches take less time. Two launches can be faster if
    one direction fills a device.

    Args:
        directions: One or two directions.
        N: Rows.
        clusters: As for `planner.candidates`.
    """
    numbers = [each.numbers for each in directions]
    H, forms = numbers[0].H, [each.form for each in numbers]
    apart = [([each], each.numbers.form) for each in directions]
    if any(each.H != H for each in numbers):
        return apart
    joint = joint_form([(each.form, each.frozen) for each in numbers])
    if joint is None:
        return apart
    if any(form != joint for form in forms):
        alone = sum(_time(form, H, N, 1, clusters) for form in forms)
        if _time(joint, H, N, len(forms), clusters) > alone:
            return apart
    return [(directions, joint)]


def _time(form: Form, H: int, N: int, directions: int, clusters: Mapping[int, int]) -> float:
    shape = planner.choose(form, H, N, directions, clusters)
    if shape is None:
        return math.inf
    return planner.time_of(shape, form, N, directions, clusters)
