"""Intervals with which backward compares a tensor, such as those of clamp, abs and leaky ReLU.

A decoded number may lie on the other side of a bound, so that its gradient is another one. Codes of
such tensors have one bit per element and interval beside them. Hooks see a tensor before it is
known which operation saves it: the first step finds out, and holds the tensor itself. Tensors that
are compared with other tensors are never rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from actnn.saving.bit_masks import pack_mask, restore_positive, unpack_mask

COMPARED_WITH = "compared with a bound"  # the reason in records


class Interval(NamedTuple):
    """Numbers that have the same kind of derivative.

    Attributes:
        low: The lower bound.
        high: The upper bound.
        closed: Whether the bounds are inside.
    """

    low: float
    high: float
    closed: bool = False

    def has(self, x: Tensor) -> Tensor:
        """Return which elements are inside."""
        low, high = x >= self.low, x <= self.high
        if not self.closed:  # infinities are inside
            low &= x != self.low if math.isfinite(self.low) else True
            high &= x != self.high if math.isfinite(self.high) else True
        return low & high

    def put(self, x: Tensor, inside: Tensor) -> Tensor:
        """Return a tensor whose elements are inside where they are to be, and outside elsewhere."""
        numbers = torch.finfo(x.dtype)

        def beyond(bound: float, sign: int) -> float:
            step = max(abs(bound) * numbers.eps, numbers.tiny)
            return bound + sign * step if math.isfinite(bound) else bound

        low, high, below, above = self.low, self.high, self.low, self.high
        if self.closed:
            below, above = beyond(low, -1), beyond(high, 1)
        else:
            low, high = beyond(low, 1), beyond(high, -1)
        if not math.isfinite(self.low) or not math.isfinite(self.high):
            nearest = torch.full_like(x, below if math.isfinite(self.low) else above)
        else:
            is_low = x - self.low < self.high - x
            nearest = torch.where(is_low, torch.full_like(x, below), torch.full_like(x, above))
        return torch.where(inside, x.clamp(low, high), torch.where(self.has(x), nearest, x))


Intervals = dict[Interval, None]
_POSITIVE, _NEGATIVE = Interval(0.0, math.inf), Interval(-math.inf, 0.0)


def _clamped(node: Any) -> tuple[Interval, ...]:
    low, high = getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return (Interval(float(low), float(high), closed=True),)


def _shrunk(node: Any) -> tuple[Interval, ...]:
    return (Interval(-float(node._saved_lambd), float(node._saved_lambd), closed=True),)


_PAIRS = (
    "Maximum Minimum Fmax Fmin Clamp MultiMarginLoss MultilabelMarginLoss SmoothL1Loss HuberLoss"
).split()
_NORMS = ["NormBackward0", "NormBackward1", "LinalgVectorNormBackward0"]
_DISTANCES = ["CdistBackward0", "PdistBackward0"]
_OF_ORDERS = frozenset(_NORMS + _DISTANCES)  # the gradient of that of order 1 is a sign
_INTERVALS: dict[str, Callable[[Any], tuple[Interval, ...]]] = {
    **dict.fromkeys(("ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0"), _clamped),
    **dict.fromkeys(("HardshrinkBackward0", "SoftshrinkBackward0"), _shrunk),
    **dict.fromkeys(
        [
            *("LeakyReluBackward0", "LeakyReluBackward1", "PreluKernelBackward0"),
            *("RreluWithNoiseBackward0", "RreluWithNoiseBackward1"),
        ],
        lambda node: (_POSITIVE,),
    ),
    **dict.fromkeys(  # compare with tensors, or round a quotient
        [
            *(f"{n}Backward0" for n in _PAIRS),
            *(f"{n}Backward1" for n in "ClampMin ClampMax Remainder Fmod".split()),
            *_DISTANCES,
        ],
        lambda node: (),
    ),
    **dict.fromkeys(
        ["AbsBackward0", "SpecialI0EBackward0", *_NORMS],
        lambda node: (_POSITIVE, _NEGATIVE),
    ),
    "HardsigmoidBackward0": lambda node: (Interval(-3.0, 3.0),),
    "HardtanhBackward0": lambda node: (
        Interval(float(node._saved_min_val), float(node._saved_max_val)),
    ),
    **dict.fromkeys(
        ("ThresholdBackward0", "ThresholdBackward1"),
        lambda node: (Interval(float(node._saved_threshold), math.inf),),
    ),
}


def compares(node: Any) -> bool:
    """Whether a node compares its operands with bounds, or with each other."""
    name = node.name()
    return name in _INTERVALS and (name not in _OF_ORDERS or order_of(node) == 1)


def order_of(node: Any) -> float:
    """Return the order of a norm or distance that a node has computed."""
    order = node._saved_ord if hasattr(node, "_saved_ord") else node._saved_p
    return 2.0 if order is None else float(order)


def intervals_of(node: Any) -> Intervals:
    """Return the intervals with which a node compares its operand; none if with a tensor."""
    found = _INTERVALS.get(node.name())
    return {} if found is None else dict.fromkeys(found(node))


class Sides(NamedTuple):
    """In which intervals the elements of a dense tensor are.

    Attributes:
        intervals: The intervals.
        masks: For each, one bit per element in the order of memory.
    """

    intervals: tuple[Interval, ...]
    masks: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the masks."""
        return sum(mask.nbytes for mask in self.masks)


def sides_of(x: Tensor, intervals: Intervals) -> Sides:
    """Return the sides of a dense tensor."""
    x = x.detach()
    return Sides(tuple(intervals), tuple(pack_mask(each.has(x)) for each in intervals))


def restore_sides(x: Tensor, held: Tensor | Sides) -> Tensor:
    """Return a decoded tensor whose elements are on their sides of bounds.

    Args:
        x: Dense; may become the result.
        held: What `positive_mask` returned, or sides.
    """
    if isinstance(held, Tensor):
        return restore_positive(x, held)
    for interval, mask in zip(held.intervals, held.masks, strict=True):
        found = interval.put(x, unpack_mask(mask, x.shape, x.stride()))
        x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(found)
    return x
