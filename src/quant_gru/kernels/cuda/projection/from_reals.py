"""The input projection from real values in one launch: codes of x stay in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel, Machine
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.structure import MOST_SHARED
from quant_gru.kernels.cuda.plan.tensors import Numbers, is_power_of_two
from quant_gru.kernels.cuda.projection import from_codes
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import ProjectFewC, ProjectRealsC

_LARGEST_SCALE = 2.0**90
_FEATURES_AT_ONCE = 128  # features that the lanes of a warp load at once
FEWEST_ROWS = 8  # up to this number of rows, a warp per unit is faster than tensor cores
_FEW_UNITS = 8  # units per block, one per warp
_WGMMA_ARCH = "sm_90a"  # the architecture that has wgmma


@dataclass(frozen=True)
class Block(from_codes.Warps):
    """An activation-stationary block, as in mma_activation_stationary.cuh.

    `units` counts the units of a tile; a block processes several tiles.

    Attributes:
        stages: Pipeline stages of weights.
        blocks: Blocks per multiprocessor for which registers must suffice.
        parts: Blocks that share the units of the same rows.
        depth: Features per stage.
    """

    stages: int
    blocks: int
    parts: int
    depth: int = 64

    def tiles(self, units: int) -> int:
        """Return the largest number of tiles of a block."""
        tiles = -(-units // self.units)
        return -(-tiles // self.parts)

    def shared_bytes(self, units: int, padded: int, planes: int) -> int:
        """Return the bytes of shared memory per block."""
        own = self.tiles(units) * self.units
        kept = planes * (self.rows + self.columns % 2 * 8) * (-(-padded // 32) * 32 + 16)
        ring = self.stages * self.depth * 3 * self.units
        return ring + kept + 12 * self.rows + 36 * own

    def macros(self, epilogue: from_codes.Epilogue) -> dict[str, object]:
        """Return the macros that specialize reals_tiled.cu, without those of `macros_of`."""
        own = {"STAGES": self.stages, "BLOCKS": self.blocks, "DEPTH": self.depth}
        return {**super().macros(epilogue), **own}


@dataclass(frozen=True)
class Warpgroups:
    """A block of two warpgroups in ping-pong, as in wgmma_pingpong.cuh.

    Attributes:
        columns: Columns of 8 rows. `columns * planes` is one of `COLUMNS`; if it is odd, the GEMM
            computes one more column.
        parts: Blocks that share the units of the same rows, a power of two.
        units: H padded to groups of 16.
        padded: Features, padded to a multiple of 16.
        planes: Bytes per code of x.
    """

    columns: int
    parts: int
    units: int
    padded: int
    planes: int = 1

    threads = 256

    @property
    def rows(self) -> int:
        """Rows per block."""
        return 8 * self.columns

    @property
    def product_rows(self) -> int:
        """Rows of the GEMM: the rows of all planes."""
        return 8 * self.planes * self.columns

    @property
    def tiles(self) -> int:
        """The largest number of tiles of a block; a tile has 64 units."""
        tiles = -(-self.units // 64)
        return -(-tiles // self.parts)

    @property
    def group_tiles(self) -> int:
        """Tiles per warpgroup."""
        return -(-self.tiles // 2)

    @property
    def panels(self) -> int:
        """Panels of 128 features, which is also the depth of a stage of weights."""
        return -(-self.padded // 128)

    @property
    def stages(self) -> int:
        """Pipeline stages of a warpgroup's weights; more stages would delay loads of rows."""
        return min(3, self.group_tiles * self.panels)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per block."""
        product_rows = 2 * self.stages * 3 * 64 + self.panels * self.product_rows
        barriers = 2 * 8 * self.stages
        return 128 * product_rows + barriers + 12 * self.rows + 6 * 4 * 64 * self.tiles

    def macros(self, epilogue: from_codes.Epilogue) -> dict[str, object]:
        """Return the macros that specialize reals_wgmma.cu, without those of `macros_of`."""
        return {
            **PLAIN,
            **epilogue.macros,
            "COLUMNS": self.columns,
            "STAGES": self.stages,
            "STEPS": -(-self.padded // 32),
        }


SMALL, MEDIUM = Block(2, 2, 2, 4, 4, 1), Block(4, 2, 4, 4, 2, 1)
TALL, TWO_PLANES = Block(2, 2, 8, 4, 3, 1), Block(2, 2, 2, 4, 3, 1)
# by planes: blocks with one per multiprocessor, whose many rows make loads of weights rare
ALONE = {
    1: tuple(Block(8, 1, columns, 3, 1, 1, 128) for columns in (5, 7, 8, 10, 13)),
    2: tuple(Block(4, 2, columns, 3, 1, 1, 128) for columns in (4, 5, 6, 7)),
}
COLUMNS = (8, 10, 12, 13, 14)  # of `Warpgroups`, for all planes together
# `Warpgroups` are fastest from this number of rows, and of rows * units * features
_WGMMA_ROWS, _WGMMA_WORK = 1536, 20_000_000
_WARPGROUP_OVERHEAD = 90  # work of a warpgroup besides the GEMM, in rows
_FEW_TILES = 2  # up to this number of tiles per warpgroup, an odd number of columns pays
_FEW_ROWS = 4096  # up to this number of rows, small blocks are faster
# by planes: small blocks per multiprocessor up to which blocks share the units of their rows
_AT_ONCE = {1: 2, 2: 7}
_MOST_FEATURES = 384  # with more features, blocks that stream rows are faster
_STATIONARY_WEIGHTS = 1 << 18  # units * features from which weight-stationary blocks are faster
_BLOCK_OVERHEAD = 24  # work of a block besides the GEMM, in rows


def reads_reals(numbers: Numbers) -> bool:
    """Return whether the projection of a plan can read real values."""
    return divides_without_branch(numbers.x) and numbers.projects_bytes


def divides_without_branch(x: Quantizer) -> bool:
    """Return whether `fill_division` gives exact codes of up to 16 bits."""
    return 1 / _LARGEST_SCALE <= x.scale <= _LARGEST_SCALE


@lru_cache(maxsize=4096)
def choose(
    units: int, rows: int, padded: int, planes: int, processors: int, alone: bool = True
) -> Block | None:
    """Return the block that measured fastest, or None if a projection from codes is faster.

    Args:
        units: H padded to groups of 16.
        rows: Steps times padded rows.
        padded: C padded.
        planes: Bytes per code of x.
        processors: Multiprocessors of the device.
        alone: Whether a block may use all shared memory of a multiprocessor.
    """
    if padded > _MOST_FEATURES:
        return None
    block = SMALL if planes == 1 else TWO_PLANES
    at_once = _AT_ONCE[planes]
    if planes == 1 and rows > _FEW_ROWS:
        block = TALL if rows >= 1.5 * processors * TALL.rows else MEDIUM
    if alone and rows > _FEW_ROWS and block != TALL:
        large = min(ALONE[planes], key=lambda b: _rows_in_series(b, rows, processors))
        if large.shared_bytes(units, padded, planes) <= MOST_SHARED:
            block, at_once = large, 1
    strips, tiles = -(-rows // block.rows), -(-units // block.units)
    parts = 1
    while 2 * parts <= tiles and 2 * parts * strips <= processors * at_once:
        parts *= 2
    return replace(block, parts=parts)


def _rows_in_series(block: Block, rows: int, processors: int) -> int:
    """Return the rows that a multiprocessor processes in sequence, overhead included."""
    strips = -(-rows // block.rows)
    return -(-strips // processors) * (block.rows + _BLOCK_OVERHEAD)


def choose_warpgroups(
    units: int, rows: int, padded: int, planes: int, processors: int
) -> Warpgroups | None:
    """Return the fastest blocks of warpgroups, or None if other blocks are faster.

    The arguments are those of `choose`.
    """
    work = rows * units * padded
    if rows < _WGMMA_ROWS or work < _WGMMA_WORK or padded > _MOST_FEATURES:
        return None
    parts = [1 << i for i in range((-(-units // 64)).bit_length())]
    columns = [each // planes for each in COLUMNS if each % planes == 0]
    found = [Warpgroups(each, n, units, padded, planes) for n in parts for each in columns]
    fitting = [each for each in found if each.shared_bytes <= MOST_SHARED]
    # padding of the GEMM matters only where the GEMM is most of the work
    fitting = [e for e in fitting if e.product_rows % 16 == 0 or e.group_tiles <= _FEW_TILES]
    best = min(fitting, key=lambda each: _time(each, rows, processors), default=None)
    if best and planes == 2 and units <= 64 and (blocks_of(best, rows) - 1) // processors == 1:
        return None  # one tile uses only one warpgroup, which saves less than a second wave costs
    return best


def _time(block: Warpgroups, rows: int, processors: int) -> int:
    """Return the work of a warpgroup in rows times tiles, overhead included."""
    one_after_the_other = -(-blocks_of(block, rows) // processors)
    return one_after_the_other * (
        _WARPGROUP_OVERHEAD + block.group_tiles * block.planes * block.rows
    )


def blocks_of(block: Block | Warpgroups, rows: int) -> int:
    """Return the number of blocks of a launch."""
    return -(-rows // block.rows) * block.parts


def choose_for(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> Block | Warpgroups | None:
    """Return the fastest blocks for a plan on a machine, or None if those from codes are faster."""
    many = shape.units * numbers.padded_C >= _STATIONARY_WEIGHTS
    if many and from_codes.weight_stationary(machine, numbers, shape, T, N):
        return None
    rows, padded = T * shape.strips(N) * shape.strip, numbers.padded_C
    clusters, planes = machine.clusters(), numbers.x_planes
    if machine.arch == _WGMMA_ARCH:
        found = choose_warpgroups(shape.units, rows, padded, planes, clusters[1])
        if found:
            return found
    return choose(shape.units, rows, padded, planes, clusters[1], len(clusters) > 1)


def kernel_of(
    block: Block | Warpgroups, numbers: Numbers, shape: planner.Shape, x: Quantizer
) -> Kernel:
    """Return the kernel for a plan, the recurrence's shape, and the quantizer of x."""
    exact, whole = is_power_of_two(x.scale), x.hi - x.lo == 255
    macros = macros_of(block, from_codes.epilogue_of(numbers), shape.strip, numbers.C, exact, whole)
    if isinstance(block, Warpgroups):
        return Kernel.of("projection/reals_wgmma", "project_groups", macros)
    return Kernel.of("projection/reals_tiled", "project_reals", macros)


def macros_of(
    block: Block | Warpgroups,
    epilogue: from_codes.Epilogue,
    strip: int,
    features: int,
    exact: bool,
    whole: bool,
) -> dict[str, object]:
    """Return the macros that specialize a kernel.

    Args:
        block: The blocks.
        epilogue: The parameters of the epilogue.
        strip: Rows of a tile of the recurrence.
        features: Features per row.
        exact: Whether the inverse of the scale of x is exact.
        whole: Whether codes of x use the whole range of a byte.
    """
    of_rows = {"SHORT": int(features <= _FEATURES_AT_ONCE), "FOURS": int(features % 4 == 0)}
    of_codes = {"EXACT": int(exact), "WHOLE": int(whole)}
    return {**block.macros(epilogue), "STRIP": strip, **of_rows, **of_codes}


def real_projection(
    numbers: Numbers, shape: planner.Shape, T: int, N: int, x: Quantizer, block: Block | Warpgroups
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """Return the launch of a projection of one direction from real values.

    Args:
        numbers: Numbers of a plan with 8-bit weights.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
        x: The quantizer of x.
        block: The blocks.

    Returns:
        The kernel, its grid, its arguments without `real`, `nan`, `Wx`, `step`, `next` and
        `fours`, and tensors to keep.
    """
    p: Any = ProjectRealsC()
    keep = from_codes.fill(p, numbers, shape, T, N)
    if isinstance(block, Warpgroups):
        keep.append(numbers.tiles)
        p.weights = keep[-1].data_ptr()
    p.C, p.nan_stride, p.parts = numbers.C, -(-T // 4) * 4, block.parts
    p.zero = x.zero_point - numbers.x_offset
    fill_division(p.division, x)
    blocks = blocks_of(block, T * shape.strips(N) * shape.strip)
    shared = (
        block.shared_bytes
        if isinstance(block, Warpgroups)
        else block.shared_bytes(shape.units, p.padded, numbers.x_planes)
    )
    grid = Grid((blocks, 1), block.threads, shared_bytes=shared)
    return kernel_of(block, numbers, shape, x), grid, p, keep


def few_projection(
    numbers: Numbers, shape: planner.Shape, T: int, N: int, x: Quantizer
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """Return the launch of a projection of few rows from real values, with a warp per unit."""
    p: Any = ProjectFewC()
    weights, _ = numbers.gemm[0]
    p.weights, p.padded = weights.data_ptr(), weights.shape[0]
    p.N, p.C, p.H, p.nan_stride = N, numbers.C, numbers.H, -(-T // 4) * 4
    p.NB, p.tiles, p.groups = shape.strip, shape.strips(N), shape.units // 16
    p.wide = numbers.form.wide_input
    p.W = numbers.W
    fill_division(p.division, x)
    kernel = Kernel.of(
        "projection/reals_few_rows", "project_few", {**PLAIN, "WIDE": int(numbers.x_planes == 2)}
    )
    grid = Grid((T * N, -(-numbers.H // _FEW_UNITS)), 32 * _FEW_UNITS)
    return kernel, grid, p, [weights]


def fill_division(d: Any, x: Quantizer) -> None:
    """Set the constants for division by a quantizer's scale without branches."""
    d.scale = x.scale
    # float64 has over twice the bits of float32, so double rounding equals a single rounding
    scale = float(d.scale)
    d.inverse = 1 / scale
    d.exact = is_power_of_two(scale)
    d.least, d.most = (x.lo - x.zero_point) * scale, (x.hi - x.zero_point) * scale
