"""Input projections that go on while the recurrence that reads them runs, and leave it room."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_runtime.cuda.launch import Grid, Machine
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.projection import from_codes
from quant_gru.kernels.cuda.recurrence import planner

ALLOWED = True  # whether recurrences start while projections go on, for experiments
_STRETCHES = (8, 16, 32, 64)  # steps that a recurrence waits for at once
_EARLIEST = 64  # steps from which on waiting for some of them pays
# rows times units, likewise, where x would otherwise be projected from real values
_WORK = 4_000_000
_BUSY = 0.9  # of the recurrence's time, which a projection beside it may take
# nanoseconds of a block for a row and unit, and of these for a feature, by planes
_TIME = {1: (0.39, 0.00038), 2: (1.0, 0.00085)}


@dataclass(frozen=True)
class Beside:
    """A projection that goes on while the recurrence runs, in clusters that leave it room.

    Attributes:
        block: What a block makes.
        cluster: Blocks of a cluster, as many as of the recurrence: what is left of a device then
            holds the recurrence's.
        clusters: Clusters.
        stretch: Steps that the recurrence waits for at once, a power of two.
    """

    block: from_codes.Resident
    cluster: int
    clusters: int
    stretch: int = _STRETCHES[0]

    def stretches(self, T: int) -> int:
        """Stretches of T steps that are counted: loads ask for what is behind the last, too."""
        return T // self.stretch + 2

    def strips(self, units: int) -> int:
        """Blocks of the same units; 0 where no number of them makes whole clusters."""
        across = self.block.across(units)
        most = self.cluster * self.clusters // across
        return next((n for n in range(most, 0, -1) if n * across % self.cluster == 0), 0)

    def grid(self, numbers: Numbers, shape: planner.Shape) -> Grid:
        """The grid, for the units of a recurrence."""
        blocks = self.block.across(shape.units) * self.strips(shape.units)
        shared = self.block.shared_bytes(numbers.padded_C, numbers.x_planes)
        return Grid((blocks, 1), self.block.threads, self.cluster, shared)

    def time(self, units: int, rows: int, padded: int, planes: int) -> float:
        """Estimated nanoseconds."""
        each, feature = _TIME[planes]
        blocks = max(1, self.block.across(units) * self.strips(units))
        return rows * units * (each + feature * padded) / blocks


def beside(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> Beside | None:
    """The projection that a recurrence of one direction can run beside; None where none pays."""
    clusters, size, planes = machine.clusters(), shape.blocks, numbers.x_planes
    if not ALLOWED or T < _EARLIEST or size == 1 or not numbers.projects_bytes:
        return None
    large = T * N * shape.units >= _WORK and from_codes.passes(machine, numbers, shape, N)
    if not large and from_codes.resident(machine, numbers, shape, T, N) is None:
        return None
    padded, units, block = numbers.padded_C, shape.units, from_codes.STAYING[planes]
    # tiles are of one stretch
    stretch = next((s for s in _STRETCHES if s * N % block.tile_rows == 0), 0)
    found = Beside(block, size, clusters[size] - shape.tiles(N), stretch)
    if not stretch or found.clusters <= 0 or not found.strips(units):
        return None
    time = found.time(units, T * N, padded, planes)
    return found if time < _BUSY * T * planner.step_time(shape, numbers.form) else None
