"""The input projection from codes in one launch: an int8 GEMM with a requantizing epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel, Machine
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.structure import MOST_SHARED
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import ProjectBytesC, ProjectPassingC

_STAGES = 4
_DEPTH = 64  # bytes of a row per stage
_RESERVED_BYTES = 1024  # bytes of shared memory that the system reserves per block
_FEW_BLOCKS = 256  # fewer blocks leave much of a device idle


class Epilogue(NamedTuple):
    """The parameters of epilogue.cuh, which requantizes sums.

    Attributes:
        planes: Bytes per code of x.
        codes: Codes of W x: 1 if they use all of 8 bits, 2 if they need 16 bits, 3 if they use all
            of 16 bits, 0 otherwise.
        powers: Whether multipliers are powers of two.
        long: Whether sums of two planes may exceed int32.
    """

    planes: int
    codes: int = 0
    powers: bool = False
    long: bool = False

    @property
    def macros(self) -> dict[str, object]:
        """The macros that specialize a kernel."""
        macros = {"PLANES": self.planes, "CODES": self.codes, "POWERS": int(self.powers)}
        return {**macros, "LONG": int(self.long)}


def epilogue_of(numbers: Numbers) -> Epilogue:
    """Return the epilogue of a plan's projection."""
    W, planes = numbers.W, numbers.x_planes
    codes = int(W.hi - W.lo == 255)
    if numbers.form.wide_input:
        codes = 3 if planes == 2 and W.hi - W.lo == 65535 else 2
    return Epilogue(planes, codes, numbers.x_powers, numbers.long_sums)


@dataclass(frozen=True)
class Warps:
    """The warps of a block. A warp computes 16 units, and 8 rows per column.

    Attributes:
        unit_warps: Warps across units.
        row_warps: Warps across rows.
        columns: Columns per warp.
    """

    unit_warps: int
    row_warps: int
    columns: int

    @property
    def units(self) -> int:
        """Units per block."""
        return 16 * self.unit_warps

    @property
    def rows(self) -> int:
        """Rows per block."""
        return 8 * self.columns * self.row_warps

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.unit_warps * self.row_warps

    def macros(self, epilogue: Epilogue) -> dict[str, object]:
        """Return the macros that specialize a kernel with such blocks."""
        return {
            **PLAIN,
            **epilogue.macros,
            "UNIT_WARPS": self.unit_warps,
            "ROW_WARPS": self.row_warps,
            "COLUMNS": self.columns,
        }


@dataclass(frozen=True)
class Tile(Warps):
    """The tile of a block, as in mma_tiled.cuh. It has the attributes of `Warps`."""

    def blocks(self, units: int, rows: int) -> int:
        """Return the number of blocks of a launch."""
        return -(-units // self.units) * -(-rows // self.rows)

    def launch(self, units: int, rows: int, epilogue: Epilogue) -> tuple[Kernel, Grid]:
        """Return the kernel and its grid."""
        shared = _STAGES * _DEPTH * (3 * self.units + self.rows)
        return (
            Kernel.of("projection/codes_tiled", "project_bytes", self.macros(epilogue)),
            Grid((self.blocks(units, rows), 1), self.threads, shared_bytes=shared),
        )

    def macros(self, epilogue: Epilogue) -> dict[str, object]:
        """Return the macros that specialize codes_tiled.cu."""
        return {**super().macros(epilogue), "STAGES": _STAGES}


@dataclass(frozen=True)
class WeightStationary:
    """A block that keeps its weights in shared memory, as in mma_weight_stationary.cuh.

    Attributes:
        unit_warps: Units per block divided by 16.
        groups: Groups of `unit_warps` warps; each group has rows of its own.
        columns: Columns of 8 rows per tile.
        stages: Pipeline stages of rows.
        blocks: Blocks per multiprocessor.
    """

    unit_warps: int
    groups: int
    columns: int
    stages: int
    blocks: int

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.unit_warps * self.groups

    @property
    def tile_rows(self) -> int:
        """Rows per tile."""
        return 8 * self.columns

    def shared_bytes(self, padded: int, planes: int) -> int:
        """Return the bytes of shared memory per block."""
        rings = self.groups * self.stages * _DEPTH * 8 * self.columns * planes
        return rings + 48 * self.unit_warps * (-(-padded // 32) * 32 + 16)

    def across(self, units: int) -> int:
        """Return the number of blocks that cover all units."""
        return -(-units // (16 * self.unit_warps))

    def macros(self, epilogue: Epilogue) -> dict[str, object]:
        """Return the macros that specialize codes_weight_stationary.cu."""
        return {
            **PLAIN,
            **epilogue.macros,
            "UNIT_WARPS": self.unit_warps,
            "GROUPS": self.groups,
            "COLUMNS": self.columns,
            "STAGES": self.stages,
            "BLOCKS": self.blocks,
        }

    def grid(
        self, units: int, rows: int, padded: int, planes: int, processors: int
    ) -> tuple[Grid, int]:
        """Return a grid that fills the multiprocessors once, and the rows per group."""
        across = self.across(units)
        shared = self.shared_bytes(padded, planes)
        fitting = (MOST_SHARED + _RESERVED_BYTES) // (shared + _RESERVED_BYTES)
        at_once = processors * max(1, min(self.blocks, fitting))
        most = max(1, at_once // across)
        share = 8 * -(-rows // (8 * most * self.groups))
        strips = -(-rows // (share * self.groups))
        return Grid((across * strips, 1), self.threads, shared_bytes=shared), share


SMALL, MEDIUM, LARGE = Tile(2, 2, 2), Tile(2, 2, 4), Tile(2, 2, 8)
# by planes
STATIONARY = {1: WeightStationary(4, 3, 8, 4, 1), 2: WeightStationary(4, 3, 4, 4, 1)}
# weight-stationary blocks are faster from this number of rows, and of units * features
STATIONARY_ROWS = 8192
STATIONARY_WEIGHTS = 1 << 17
_LARGE_AT_ONCE = 3  # resident large tiles per multiprocessor


@lru_cache(maxsize=4096)
def choose(units: int, rows: int, planes: int, processors: int) -> Tile:
    """Return the tile of a projection.

    Args:
        units: H padded to groups of 16.
        rows: Steps times padded rows.
        planes: Bytes per code of x.
        processors: Multiprocessors of the device.
    """
    if MEDIUM.blocks(units, rows) < _FEW_BLOCKS:
        return SMALL
    # larger tiles read operands less often, but their last wave may leave most of a device idle
    blocks, at_once = LARGE.blocks(units, rows), _LARGE_AT_ONCE * processors
    busy = blocks / (at_once * -(-blocks // at_once))
    return LARGE if planes == 1 and busy > 0.6 else MEDIUM


def weight_stationary(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> WeightStationary | None:
    """Return the weight-stationary block of a projection, or None if a tile is faster.

    The kernel reads unpadded rows, so N must be a multiple of the rows of the recurrence's tile.
    """
    padded, units = numbers.padded_C, shape.units
    many = T * N >= STATIONARY_ROWS and units * padded >= STATIONARY_WEIGHTS
    return (
        STATIONARY[numbers.x_planes]
        if many and can_keep_weights(machine, numbers, shape, N)
        else None
    )


def block_of(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> Tile | WeightStationary:
    """Return the blocks of a projection."""
    rows = T * shape.strips(N) * shape.strip
    found = weight_stationary(machine, numbers, shape, T, N)
    return found or choose(shape.units, rows, numbers.x_planes, machine.clusters()[1])


def can_keep_weights(machine: Machine, numbers: Numbers, shape: planner.Shape, N: int) -> bool:
    """Return whether a block can be weight-stationary."""
    planes, block = numbers.x_planes, STATIONARY[numbers.x_planes]
    idle = -shape.units % (16 * block.unit_warps)
    fits = block.shared_bytes(numbers.padded_C, planes) <= MOST_SHARED
    whole = N % shape.rows == 0 and 8 * idle <= shape.units
    return fits and whole and len(machine.clusters()) > 1


def projection(
    numbers: Numbers,
    shape: planner.Shape,
    T: int,
    N: int,
    tile: Tile | WeightStationary,
    processors: int,
) -> tuple[Kernel, Grid, Any, list[Tensor]]:
    """Return the launch of a projection of one direction.

    Args:
        numbers: Numbers of a plan with 8-bit weights.
        shape: Shape of the recurrence that reads the result.
        T: Steps.
        N: Rows.
        tile: The blocks.
        processors: Multiprocessors of the device.

    Returns:
        The kernel, its grid, its arguments without `bytes`, `Wx` and `counts`, and tensors to keep.
    """
    units, rows, planes = shape.units, T * shape.strips(N) * shape.strip, numbers.x_planes
    padded = numbers.padded_C
    epilogue = epilogue_of(numbers)
    p: Any = ProjectBytesC() if isinstance(tile, Tile) else ProjectPassingC()
    keep = fill(p, numbers, shape, T, N)
    if isinstance(tile, Tile):
        kernel, grid = tile.launch(units, rows, epilogue)
    else:
        kernel = Kernel.of(
            "projection/codes_weight_stationary", "project_passing", tile.macros(epilogue)
        )
        grid, p.share = tile.grid(units, rows, padded, planes, processors)
    return kernel, grid, p, keep


def fill(p: Any, numbers: Numbers, shape: planner.Shape, T: int, N: int) -> list[Tensor]:
    """Set the fields that the epilogue reads, and return the tensors to keep."""
    weights, folded = numbers.gemm[0]
    (folded_bytes, m), exact = numbers.of_bytes, numbers.exact_float[0]
    keep = [weights, folded, folded_bytes, m, exact]
    W = numbers.W
    p.weights, p.m, p.folded = weights.data_ptr(), W.m, folded.data_ptr()
    p.folded_bytes, p.m_float = folded_bytes.data_ptr(), m.data_ptr()
    p.exact_float = exact.data_ptr()
    p.T, p.N, p.H, p.padded = T, N, numbers.H, weights.shape[0]
    p.NB, p.tiles, p.groups = shape.strip, shape.strips(N), shape.units // 16
    p.wide = numbers.form.wide_input
    p.lo, p.hi, p.code_lo = W.lo, W.hi, W.code_lo
    return keep
