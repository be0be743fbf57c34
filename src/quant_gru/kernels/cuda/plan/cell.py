"""One layer and direction as native code reads it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from quant_gru.integer.plan import CellPlan
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.plan.tensors import Arrays, Numbers, numbers_of

_lock = threading.RLock()


@contextmanager
def filled(cells: Sequence[Cell], machine: Device) -> Iterator[None]:
    """Let native code ask for arrays of cells, which `Cell.native` gives it; then write them.

    Other threads wait: they may ask for the same arrays.
    """
    with _lock:
        yield
        for cell in cells:
            cell.fill(machine)


class Cell:
    """The data of one layer and direction that calls need.

    Args:
        plan: Its plan.
        between: The weighted sums that requantize codes of the lower layer, by direction.

    Attributes:
        numbers: The numbers of the plan.
        arrays: The arrays of the latest `native`.
    """

    def __init__(self, plan: CellPlan, between: Sequence[WeightedSum] = ()) -> None:
        self.numbers: Numbers = numbers_of(plan)
        self.arrays: Arrays = self.numbers.arrays
        self._finite = plan.weights.finite.contiguous()
        self._between = [(int(each.shift), int(each.multipliers[0])) for each in between]

    def native(self, keep: list[Any]) -> _native.CellNumbers:
        """Return the cell as an argument of `_native.launches_of`, called inside of `filled`.

        Args:
            keep: Receives the owners of all memory whose addresses the launches have.
        """
        arrays = self.numbers.arrays
        # what a captured graph derives is valid only after a replay
        self.arrays = arrays.copy() if capturing(self.numbers.device) else arrays
        keep += [self.numbers, self.arrays, self._finite]
        return self.arrays.native, self._between, self._finite.data_ptr()

    def fill(self, machine: Device) -> None:
        """Write the arrays that native code has asked for."""
        self.arrays.fill(machine)
