"""Layers of a call: their directions, the launches that directions share, and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels._native import Form
from quant_gru.kernels.cuda.forward.executor import numbers_of
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.recurrence import planner


class Cell:
    """The data of one layer and direction that calls need.

    Args:
        plan: Its plan.
        between: The weighted sums that requantize codes of the lower layer, by direction.
    """

    def __init__(self, plan: CellPlan, between: Sequence[WeightedSum]) -> None:
        self.numbers: Numbers = numbers_of(plan)
        self.x, self.h = plan.x, plan.h
        self.finite = plan.weights.finite.contiguous()
        self.between = between

    def reads_as(self, other: Cell) -> bool:
        """Return whether both cells read the same input codes."""
        return self.x == other.x and all(
            int(u.multipliers[0]) == int(v.multipliers[0]) and int(u.shift) == int(v.shift)
            for u, v in zip(self.between, other.between, strict=True)
        )


class Group(NamedTuple):
    """The directions of a layer that share a launch of the recurrence.

    Attributes:
        cells: The directions.
        form: The form of the launch.
        shape: The layout of the launch on the GPU.
    """

    cells: Sequence[Cell]
    form: Form
    shape: planner.Shape


class LayerOutput:
    """A layer's directions, and the offsets of its codes and NaN flags in memory.

    Args:
        cells: Its directions.
        nan: Offset of the flags of input rows with NaN.

    Attributes:
        out: Offset of the states' codes, by direction.
        h0_nan: Offset of the flags of h0 rows with NaN, by direction; empty without h0.
    """

    def __init__(self, cells: Sequence[Cell], nan: int) -> None:
        self.cells, self.nan = cells, nan
        self.out: list[int] = []
        self.h0_nan: list[int] = []

    def fill_flags(self, flags: Any, memory: Memory, T: int) -> None:
        """Set the arguments that point the next layer to this layer's NaN flags.

        Args:
            flags: The arguments.
            memory: The memory of the NaN flags.
            T: Steps.
        """
        memory.point(flags, "nan", self.nan)
        for d, cell in enumerate(self.cells):
            flags.finite[d] = cell.finite.data_ptr()
            if self.h0_nan:
                memory.point(flags, "h0_nan", self.h0_nan[d], d)
        flags.T, flags.stride = T, padded_steps(T)


def by_direction(layer: Sequence[Group]) -> list[tuple[Cell, planner.Shape]]:
    """Return the directions of a layer, each with the shape of its recurrence."""
    return [(cell, group.shape) for group in layer for cell in group.cells]


def padded_steps(T: int) -> int:
    """Return the bytes of NaN flags per row: T padded to a multiple of 4."""
    return -(-T // 4) * 4


def scale_of(q: Quantizer) -> tuple[float, int, int]:
    """Return a quantizer's scale, and its limits less its zero point."""
    return q.scale, q.lo - q.zero_point, q.hi - q.zero_point
