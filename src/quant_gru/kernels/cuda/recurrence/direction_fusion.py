"""Direction fusion: choose the directions of a layer that share a launch of the recurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from quant_gru.errors import QuantGRUError
from quant_gru.kernels import _native
from quant_gru.kernels._native import Form
from quant_gru.kernels.cuda.plan.tensors import Numbers


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
        clusters: As for `planner.choose`.
    """
    numbers = [each.numbers for each in directions]
    H = numbers[0].H
    if all(each.H == H for each in numbers):
        forms = [(each.form, each.frozen.native) for each in numbers]
        try:
            joint = _native.shared_form(forms, H, N, clusters)
        except ValueError as error:
            raise QuantGRUError(str(error)) from None
        if joint is not None:
            return [(directions, joint)]
    return [([each], each.numbers.form) for each in directions]
