"""The input projection in one launch, from real values: codes of x never leave a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.cuda import planner, projection
from quant_gru.kernels.cuda.frozen import MOST_SHARED
from quant_gru.kernels.cuda.launch import PLAIN, Grid, Kernel, Machine
from quant_gru.kernels.cuda.numbers import Numbers, is_power_of_two
from quant_gru.kernels.cuda.structures import ProjectFewC, ProjectRealsC

_EASY = 2.0**90
_AT_A_TURN = 128  # features that the lanes of a warp take at once
FEWEST_ROWS = 8  # up to so many, a warp for each unit is faster than a product of tiles
_FEW_UNITS = 8  # of a block, a warp each


@dataclass(frozen=True)
class Block(projection.Warps):
    """What a block makes, as standing.cuh has it; units are those of a tile.

    Attributes:
        stages: Of weights.
        blocks: Of a multiprocessor, that registers have to do for.
        parts: Blocks that share the units of the same rows.
        depth: Features of a stage.
    """

    stages: int
    blocks: int
    parts: int
    depth: int = 64

    def tiles(self, units: int) -> int:
        """Tiles of a block that has most of them."""
        tiles = -(-units // self.units)
        return -(-tiles // self.parts)

    def shared_bytes(self, units: int, padded: int, planes: int) -> int:
        """Shared memory of a block."""
        own = self.tiles(units) * self.units
        kept = planes * (self.rows + self.columns % 2 * 8) * (-(-padded // 32) * 32 + 16)
        ring = self.stages * self.depth * 3 * self.units
        return ring + kept + 12 * self.rows + 36 * own

    def macros(
        self, end: projection.End, exact: bool = False, short: bool = False
    ) -> dict[str, object]:
        """What project_reals.cu is specialized on."""
        return {
            **super().macros(end),
            "EXACT": int(exact),
            "SHORT": int(short),
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
            "DEPTH": self.depth,
        }

    def kernel(self, numbers: Numbers, x: Quantizer) -> Kernel:
        """What to launch for a plan whose x is of a quantizer."""
        exact, short = is_power_of_two(x.scale), numbers.C <= _AT_A_TURN
        macros = self.macros(projection.end_of(numbers), exact, short)
        return Kernel.of("project_reals", "project_reals", macros)

    def grid(self, units: int, rows: int, padded: int, planes: int) -> Grid:
        """Where to launch it."""
        blocks = -(-rows // self.rows) * self.parts
        return Grid(
            (blocks, 1), self.threads, shared_bytes=self.shared_bytes(units, padded, planes)
        )


SMALL, MEDIUM = Block(2, 2, 2, 4, 4, 1), Block(4, 2, 4, 4, 2, 1)
TALL, TWO_PLANES = Block(2, 2, 8, 4, 3, 1), Block(2, 2, 2, 4, 3, 1)
# by planes, blocks that have a multiprocessor each: of many rows, so that weights pass seldom
ALONE = {
    1: tuple(Block(8, 1, columns, 3, 1, 1, 128) for columns in (5, 7, 8, 10, 13)),
    2: tuple(Block(4, 2, columns, 3, 1, 1, 128) for columns in (4, 5, 6, 7)),
}
_FEW_ROWS = 4096  # up to so many, small blocks are faster
# small blocks of a multiprocessor, by planes, up to which units are shared
_AT_ONCE = {1: 2, 2: 7}
_MOST_FEATURES = 384  # with more, rows that come and go are faster
_STAYING_WEIGHTS = 1 << 18  # units times features, from which on those that stay are
_BESIDE = 24  # rows that take a block as long as all else that it does


def reads_reals(numbers: Numbers) -> bool:
    """Whether the projection of a plan may start from real values."""
    return easy_division(numbers.x) and numbers.projects_bytes


def easy_division(x: Quantizer) -> bool:
    """Whether codes of up to 16 bits may come from `fill_division`."""
    return 1 / _EASY <= x.scale <= _EASY


@lru_cache(maxsize=4096)
def choose(
    units: int, rows: int, padded: int, planes: int, processors: int, alone: bool = True
) -> Block | None:
    """The block of a projection, as it was fastest when measured, or None for one from codes.

    Args:
        units: H padded to groups of 16.
        rows: Steps times padded rows.
        padded: C padded.
        planes: Bytes of a code of x.
        processors: Multiprocessors of the device.
        alone: Whether a block may have all shared memory of one.
    """
    if padded > _MOST_FEATURES:
        return None
    block = SMALL if planes == 1 else TWO_PLANES
    at_once = _AT_ONCE[planes]
    if planes == 1 and rows > _FEW_ROWS:
        block = TALL if rows >= 1.5 * processors * TALL.rows else MEDIUM
    if alone and rows > _FEW_ROWS and block != TALL:
        large = min(ALONE[planes], key=lambda b: _turns(b, rows, processors))
        if large.shared_bytes(units, padded, planes) <= MOST_SHARED:
            block, at_once = large, 1
    strips, tiles = -(-rows // block.rows), -(-units // block.units)
    parts = 1
    while 2 * parts <= tiles and 2 * parts * strips <= processors * at_once:
        parts *= 2
    return replace(block, parts=parts)


def _turns(block: Block, rows: int, processors: int) -> int:
    """What a multiprocessor goes through, in rows."""
    strips = -(-rows // block.rows)
    return -(-strips // processors) * (block.rows + _BESIDE)


def choose_for(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> Block | None:
    """The same for a plan on a machine."""
    many = shape.units * numbers.padded_C >= _STAYING_WEIGHTS
    if many and projection.resident(machine, numbers, shape, T, N):
        return None
    rows, padded = T * shape.strips(N) * shape.strip, numbers.padded_C
    there = machine.clusters()
    return choose(shape.units, rows, padded, numbers.x_planes, there[1], len(there) > 1)


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
    grid = block.grid(shape.units, rows, p.padded, numbers.x_planes)
    return block.kernel(numbers, x), grid, p, keep


def few_projection(
    numbers: Numbers, shape: planner.Shape, T: int, N: int, x: Quantizer
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """The same for few rows, a warp for each unit."""
    p: Any = ProjectFewC()
    weights, _ = numbers.gemm[0]
    p.weights, p.padded = weights.data_ptr(), weights.shape[0]
    p.N, p.C, p.H, p.nan_stride = N, numbers.C, numbers.H, -(-T // 4) * 4
    p.NB, p.tiles, p.groups = shape.strip, shape.strips(N), shape.units // 16
    p.wide = numbers.form.wide_input
    p.W = numbers.W
    fill_division(p.division, x)
    kernel = Kernel.of("project_few", "project_few", {**PLAIN, "WIDE": int(numbers.x_planes == 2)})
    grid = Grid((T * N, -(-numbers.H // _FEW_UNITS)), 32 * _FEW_UNITS)
    return kernel, grid, p, [weights]


def fill_division(d: Any, x: Quantizer) -> None:
    """Set a quantizer's numbers for a division without a branch."""
    d.scale = x.scale
    # float64 has twice the digits of float32: rounding twice is rounding once
    scale = float(d.scale)
    d.inverse = 1 / scale
    d.exact = is_power_of_two(scale)
    d.least, d.most = (x.lo - x.zero_point) * scale, (x.hi - x.zero_point) * scale
