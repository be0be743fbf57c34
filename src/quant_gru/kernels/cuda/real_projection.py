"""The input projection in one launch, from real values: codes of x never leave a block."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.cuda import planner, projection
from quant_gru.kernels.cuda.launch import PLAIN, Grid, Kernel
from quant_gru.kernels.cuda.numbers import Numbers
from quant_gru.kernels.cuda.structures import ProjectRealsC

_DEPTH = 64  # bytes of a line in a stage
_MOST_SHARED = 200 << 10  # of a block
_SHARED = 227 << 10  # of a multiprocessor
_EASY = 2.0**90


@dataclass(frozen=True)
class Block:
    """What a block makes, as standing.cuh has it: 16 units a warp and 8 rows a column.

    Attributes:
        unit_warps: Warps beside each other in units.
        row_warps: Warps beside each other in rows.
        columns: Of a warp.
        stages: Of weights.
        blocks: Of a multiprocessor, that registers have to do for.
        parts: Blocks that share the units of the same rows.
    """

    unit_warps: int
    row_warps: int
    columns: int
    stages: int
    blocks: int
    parts: int

    @property
    def units(self) -> int:
        """Units of a tile."""
        return 16 * self.unit_warps

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 8 * self.columns * self.row_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.unit_warps * self.row_warps

    def shared_bytes(self, padded: int, planes: int) -> int:
        """Shared memory of a block."""
        lines = self.rows + self.columns % 2 * 8
        kept = planes * lines * (-(-padded // 32) * 32 + 16)
        return self.stages * _DEPTH * 3 * self.units + kept + 12 * self.rows

    def macros(self, planes: int) -> dict[str, object]:
        """What project_reals.cu is specialized on."""
        return {
            **PLAIN,
            "PLANES": planes,
            "UNIT_WARPS": self.unit_warps,
            "ROW_WARPS": self.row_warps,
            "COLUMNS": self.columns,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }

    def launch(self, units: int, rows: int, padded: int, planes: int) -> tuple[Kernel, Grid]:
        """What to launch, and where."""
        strips = -(-rows // self.rows)
        return (
            Kernel.of("project_reals", "project_reals", self.macros(planes)),
            Grid(
                (strips * self.parts, 1),
                self.threads,
                shared_bytes=self.shared_bytes(padded, planes),
            ),
        )


def real_projection(
    numbers: Numbers, shape: planner.Shape, T: int, N: int, x: Quantizer, block: Block
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """The launch of a projection of one direction, from real values.

    Args:
        numbers: The plan's, whose weights are bytes.
        shape: The recurrence that reads the result.
        T: Steps.
        N: Rows.
        x: The quantizer of x.
        block: What a block makes.

    Returns:
        The kernel, its grid, its arguments without `real`, `nan`, `Wx` and what `place` sets, and
        tensors to keep.
    """
    p: Any = ProjectRealsC()
    keep = projection.fill(p, numbers, shape, T, N)
    p.C, p.nan_stride, p.parts = numbers.C, -(-T // 4) * 4, block.parts
    p.zero = x.zero_point - numbers.x_offset
    fill_division(p.division, x)
    rows = T * shape.strips(N) * shape.strip
    kernel, grid = block.launch(shape.units, rows, p.padded, numbers.x_planes)
    return kernel, grid, p, keep


def fill_division(d: Any, x: Quantizer) -> None:
    """Set a quantizer's numbers, and what makes its division cheap."""
    scale = ctypes.c_float(x.scale).value
    d.scale, d.lo, d.hi = scale, x.lo - x.zero_point, x.hi - x.zero_point
    d.easy = 1 / _EASY <= scale <= _EASY and max(abs(d.lo), abs(d.hi)) < 1 << 20
    if d.easy:
        # float64 has twice the digits of float32: rounding twice is rounding once
        d.inverse, d.least, d.most = 1 / scale, d.lo * scale, d.hi * scale
