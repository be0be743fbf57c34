"""The definition of precision allocation: an exact greedy, one bit at a time."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from actnn.errors import ActNNError

Numbers = Sequence[float] | npt.NDArray[np.float64]


def damage(sensitivity: float, bits: int) -> float:
    """Gradient variance of one item at a bit width: C / (2^b - 1)^2."""
    return sensitivity / float((1 << bits) - 1) ** 2


def calc_precision(
    b: Sequence[int] | npt.NDArray[np.int64] | int, C: Numbers, w: Numbers, target: float
) -> npt.NDArray[np.int64]:
    """Integer bits that minimize sum C / (2^b - 1)^2 subject to sum w b <= target.

    All items start at `b` bits. The item that does the least damage per freed bit loses one bit,
    until the sum fits. Of equal items, that with the largest index loses a bit first. For equal
    weights the result is optimal. A sensitivity of NaN counts as infinite.

    Args:
        b: Bits to start with, and most bits: a number, or one for each item, shape (n,).
        C: Sensitivities, none negative, shape (n,).
        w: Weights (elements of an item), all positive, shape (n,).
        target: Total bits: sum of w b.

    Returns:
        Bits of each item, at least 1, int64 (n,).

    Raises:
        ActNNError: If shapes differ, an argument is out of range, or one bit each is too much.

    Source: the allocation of ActNN (Chen et al., ICML 2021).

    Example:
        >>> calc_precision(8, [1.0, 100.0], [10, 10], target=100)
        array([3, 7])
    """
    sensitivity = np.asarray(C, dtype=np.float64)
    weight = np.asarray(w, dtype=np.float64)
    if sensitivity.ndim != 1 or weight.shape != sensitivity.shape:
        raise ActNNError(
            f"Expected C and w to be vectors of one length, got {sensitivity.shape} and "
            f"{weight.shape}"
        )
    bits = np.array(np.broadcast_to(np.asarray(b), sensitivity.shape), dtype=np.int64)
    if (bits < 1).any():
        raise ActNNError(f"Expected b to be at least 1, got {bits.min()}")
    if (sensitivity < 0).any():
        raise ActNNError(f"Expected C to be non-negative, got {np.nanmin(sensitivity)}")
    if not (weight > 0).all():
        raise ActNNError(f"Expected w to be positive, got {weight.min()}")
    if weight.sum() > target:
        raise ActNNError(
            f"Expected target to be at least one bit for each element ({weight.sum():g}), "
            f"got {target:g}"
        )
    sensitivity = np.where(np.isnan(sensitivity), np.inf, sensitivity)

    def entry(index: int) -> tuple[float, int]:
        """The smallest entry of the heap loses a bit next."""
        now = int(bits[index])
        gain = damage(1.0, now - 1) - damage(1.0, now)
        return sensitivity[index] * gain / weight[index], -index

    total = float((weight * bits).sum())
    heap = [entry(index) for index in range(len(bits)) if bits[index] > 1]
    heapq.heapify(heap)
    while total > target:
        index = -heapq.heappop(heap)[1]
        bits[index] -= 1
        total -= weight[index]
        if bits[index] > 1:
            heapq.heappush(heap, entry(index))
    return bits
