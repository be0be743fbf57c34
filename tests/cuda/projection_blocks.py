"""Blocks of input projections for tests, and what is chosen for a machine and a plan."""

from quant_gru.kernel_runtime.cuda.launch import Kernel
from quant_gru.kernels import _native
from quant_gru.kernels._native import Chip, ProjectionSize, Tile, TiledReals, WeightStationary
from quant_gru.kernels.cpu.plan_packing import pack_quantizer
from quant_gru.kernels.cuda import planned_launches
from quant_gru.kernels.cuda.plan.cell import Cell
from quant_gru.kernels.cuda.projection.select import POLICY, chip_of
from quant_gru.kernels.cuda.recurrence import planner

MOST_SHARED = 227 << 10  # bytes per block, for compute capabilities 9 and 10
SMALL_TILE, MEDIUM_TILE, LARGE_TILE = Tile(2, 2, 2), Tile(2, 2, 4), Tile(2, 2, 8)
# by planes
STATIONARY = {1: WeightStationary(4, 3, 8, 4, 1), 2: WeightStationary(4, 3, 4, 4, 1)}
COLUMNS = (8, 10, 12, 13, 14)  # of warpgroups, for all planes together


def small(parts=1):
    return TiledReals(2, 2, 2, 4, 4, parts)


def medium(parts=1):
    return TiledReals(4, 2, 4, 4, 2, parts)


def two_planes(parts=1):
    return TiledReals(2, 2, 2, 4, 3, parts)


TALL = TiledReals(2, 2, 8, 4, 3, 1)


def alone(columns, planes):
    """A block with one per multiprocessor."""
    warps = (8, 1) if planes == 1 else (4, 2)
    return TiledReals(*warps, columns, 3, 1, 1, 128)


def weight_stationary(machine, numbers, shape, T, N):
    """Blocks that keep their weights, or None."""
    return _native.weight_stationary(chip_of(machine), size_of(numbers, shape, T, N), POLICY)


def choose_reals(machine, numbers, shape, T, N):
    """The blocks that read real values, or None."""
    return _native.choose_reals(chip_of(machine), size_of(numbers, shape, T, N), POLICY)


def keep_few_weights(monkeypatch, block):
    """Let blocks of one kind keep their weights in small cases."""
    monkeypatch.setattr(POLICY, "stationary", [block, block])
    monkeypatch.setattr(POLICY, "stationary_rows", 50)
    monkeypatch.setattr(POLICY, "stationary_weights", 16)


def size_of(numbers, shape, T, N):
    """The projection of T steps of N rows for a recurrence of a shape."""
    x = pack_quantizer(numbers.x)
    return ProjectionSize(T, N, numbers.C, numbers.bits[0], x, shape)


def overlap_of(machine, numbers, shape, T, N):
    """The projection that runs at the same time as a recurrence, or None."""
    size = size_of(numbers, shape, T, N)
    return _native.overlap_of(chip_of(machine), size, numbers.form, POLICY)


def select(machine, numbers, shape, T, N, real_values=False, overlap=None):
    """How a projection is computed."""
    size = size_of(numbers, shape, T, N)
    return _native.select_projection(chip_of(machine), size, real_values, overlap, POLICY)


def epilogue_of(numbers):
    """The parameters of epilogue.cuh."""
    return _native.epilogue_of(numbers.frozen.native, numbers.C)


class Projection:
    """The launch of one projection.

    Args:
        plan: The plan of its cell.
        shape: That of the recurrence.
        T: Steps.
        N: Rows.
        blocks: As for `_native.projection_of`.
        overlap: The same.
    """

    def __init__(self, plan, shape, T, N, blocks, overlap=None):
        self._keep, self._cell = [], Cell(plan)
        cell, chip = self._cell.native(self._keep), Chip("sm_80", {1: 2})
        self._made = _native.projection_of(cell, chip, T, N, shape, blocks, overlap)
        source, function, macros, grid, *_ = self._made
        self.kernel, self.grid = Kernel.of(source, function, macros), planner.grid_of(grid)

    def run(self, host, x, Wx, flags=None, counts=None, fours=False):
        """Read real values or codes, and write codes of W x, NaN flags and counts."""
        arguments, bases = planned_launches.arguments_of(self._made), [0] * planned_launches.BLOCKS
        for place, tensor in ((0, x), (3, Wx), (5, flags), (7, counts)):
            bases[place] = 0 if tensor is None else tensor.data_ptr()
        planned_launches.point(self._made, arguments, bases)
        if self._made[6] is not None:
            step, following, flag = (at // 8 for at in self._made[6])
            arguments[step], arguments[following] = x.stride()[:2]
            arguments[flag] = fours
        self._cell.fill(host)
        host.launch(self.kernel, self.grid, arguments)
