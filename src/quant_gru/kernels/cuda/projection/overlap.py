"""Overlap of an input projection with the recurrence that reads it."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_runtime.cuda.launch import Grid, Machine
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.projection import from_codes
from quant_gru.kernels.cuda.recurrence import planner

ALLOWED = True  # whether recurrences may start before their projections end; for experiments
_CHUNKS = (8, 16, 32, 64)  # steps per time chunk
_FEWEST_STEPS = 64  # overlap pays from this number of steps
# rows * units from which it pays if x would otherwise be projected from real values
_WORK = 4_000_000
_LARGEST_SHARE = 0.9  # the largest ratio of projection time to recurrence time
# by planes: nanoseconds of a block per row and unit, and those per row, unit and feature
_TIME = {1: (0.39, 0.00038), 2: (1.0, 0.00085)}


@dataclass(frozen=True)
class Overlap:
    """A projection that runs concurrently with the recurrence, on the clusters that it leaves free.

    Attributes:
        block: Its blocks.
        cluster: Blocks per cluster. It equals the recurrence's, so that the rest of the device has
            room for the recurrence's clusters.
        clusters: The most clusters that the projection uses.
        chunk: Steps per time chunk, a power of two. The recurrence waits for whole time chunks.
    """

    block: from_codes.WeightStationary
    cluster: int
    clusters: int
    chunk: int = _CHUNKS[0]

    def chunks(self, T: int) -> int:
        """Return the number of time chunk counters; loads also check one after the last chunk."""
        return T // self.chunk + 2

    def strips(self, units: int) -> int:
        """Return the number of blocks with the same units, or 0 if none gives whole clusters."""
        across = self.block.across(units)
        most = self.cluster * self.clusters // across
        return next((n for n in range(most, 0, -1) if n * across % self.cluster == 0), 0)

    def grid(self, numbers: Numbers, shape: planner.Shape) -> Grid:
        """Return the grid for the units of a recurrence."""
        blocks = self.block.across(shape.units) * self.strips(shape.units)
        shared = self.block.shared_bytes(numbers.padded_C, numbers.x_planes)
        return Grid((blocks, 1), self.block.threads, self.cluster, shared)

    def time(self, units: int, rows: int, padded: int, planes: int) -> float:
        """Return the estimated time in nanoseconds."""
        each, feature = _TIME[planes]
        blocks = max(1, self.block.across(units) * self.strips(units))
        return rows * units * (each + feature * padded) / blocks


def overlap_of(
    machine: Machine, numbers: Numbers, shape: planner.Shape, T: int, N: int
) -> Overlap | None:
    """Return the projection that overlaps with one direction's recurrence; None if none pays."""
    clusters, size, planes = machine.clusters(), shape.blocks, numbers.x_planes
    if not ALLOWED or T < _FEWEST_STEPS or size == 1 or not numbers.projects_bytes:
        return None
    large = T * N * shape.units >= _WORK and from_codes.can_keep_weights(machine, numbers, shape, N)
    if not large and from_codes.weight_stationary(machine, numbers, shape, T, N) is None:
        return None
    padded, units, block = numbers.padded_C, shape.units, from_codes.STATIONARY[planes]
    # a tile must not cross time chunks
    chunk = next((s for s in _CHUNKS if s * N % block.tile_rows == 0), 0)
    found = Overlap(block, size, clusters[size] - shape.tiles(N), chunk)
    if not chunk or found.clusters <= 0 or not found.strips(units):
        return None
    time = found.time(units, T * N, padded, planes)
    return found if time < _LARGEST_SHARE * T * shape.step_time(numbers.form) else None
