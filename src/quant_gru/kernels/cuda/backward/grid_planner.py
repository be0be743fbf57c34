"""Launch shapes of the recurrence of gradients over a whole GPU; see recurrence_grid.cu."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from quant_gru.errors import QuantGRUError

VARIABLE = "QUANT_GRU_CUDA_BACK_GRID"
NONE = "none"
_WARPS = 8
_REGISTERS = 255  # per thread
_BESIDE = 74  # registers needed at least besides weights, sums and gradients
_MOST_SHARED = 200 << 10
_MOST_SHARED_ALONE = 96 << 10  # for chips without clusters
_ALIGNED = 8  # units whose gradients a thread reads at once
_STEP_BY_STEP = 7.5  # microseconds per step that consists of a GEMM and a kernel


@dataclass(frozen=True)
class GridShape:
    """The shape of a cooperative launch of the recurrence.

    Attributes:
        H: Units.
        blocks: Blocks per cluster.
        tiles: Tiles of 16 units per block.
        columns: Tiles of 8 rows per block.
        warps: Warps per block.
        parked: Loads whose weights are in shared memory.
        chunk: Loads of a row that are checked at once.
        ahead: Checks by which loads run ahead.
    """

    H: int
    blocks: int
    tiles: int
    columns: int
    warps: int
    parked: int
    chunk: int
    ahead: int

    @property
    def loads(self) -> int:
        """Loads per row and warp, of 32 gradients each."""
        parts = 32 * self.warps * self.blocks * self.chunk
        return -(-3 * self.H // parts) * self.chunk

    @property
    def rows(self) -> int:
        """Rows per block."""
        return 8 * self.columns

    @property
    def groups(self) -> int:
        """Number of clusters that share the units."""
        return -(-self.H // (16 * self.tiles))

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.warps

    @property
    def fragments(self) -> int:
        """Number of words of all weights."""
        return self.groups * self.blocks * self.threads * self.loads * self.tiles * 8

    @property
    def registers(self) -> int:
        """Estimated registers per thread."""
        held = (self.loads - self.parked) * self.tiles * 8
        read = min(1 + self.ahead, self.loads // self.chunk) * self.chunk * self.columns * 4
        elements = -(-self.pairs // (self.blocks * self.threads))
        return held + self.tiles * self.columns * 4 + read + _BESIDE + 20 * (elements - 1)

    @property
    def pairs(self) -> int:
        """Pairs of units in all rows of a block."""
        return 64 * self.tiles * self.columns

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per block."""
        weights = self.parked * self.tiles * 32 * self.threads
        sums = 2 * self.warps * self.rows * (16 * self.tiles + 4) * 4
        received = 2 * self.pairs * 8 if self.blocks > 1 else 0
        return weights + sums + received + 16

    def clusters(self, N: int) -> int:
        """Return the number of clusters of a launch, all of which must be resident at once."""
        return self.groups * -(-N // self.rows)

    def macros(self, half: bool) -> dict[str, object]:
        """Return the macros that specialize recurrence_grid.cu."""
        return {
            "CL": self.blocks,
            "MT": self.tiles,
            "NT": self.columns,
            "WARPS": self.warps,
            "LOADS": self.loads,
            "PARKED": self.parked,
            "CHUNK": self.chunk,
            "AHEAD": self.ahead,
            "HALF": int(half),
            "OPERAND": 0,
            "DIRS": 1,
        }

    def layout(self) -> dict[str, int]:
        """Return the layout in which operands.cu stores the weights."""
        parts = self.blocks * self.warps
        return {
            "U": self.H,
            "CL": 1,
            "MT": self.tiles,
            "KS": parts,
            "KP": 32 * self.loads * parts,
            "WP": 1,
            "groups": self.groups,
            "count": self.fragments,
        }


def candidates(H: int, N: int, clusters: Mapping[int, int]) -> Iterator[GridShape]:
    """Yield the shapes whose blocks are all resident on a device at once.

    Args:
        H: Units, a multiple of 8.
        N: Rows.
        clusters: Blocks per cluster -> number of such clusters that are resident at once.
    """
    most = _MOST_SHARED if len(clusters) > 1 else _MOST_SHARED_ALONE
    for blocks, tiles, columns, chunk in product(
        clusters, range(1, 9), (1, 2, 3, 4, 6, 8), range(1, 7)
    ):
        # few loads per check, so that waiting is short, but enough loads in flight
        if blocks > 8 or not 4 <= chunk * columns <= 8:
            continue
        for ahead in (2, 1):
            shape = GridShape(H, blocks, tiles, columns, _WARPS, 0, chunk, ahead)
            if shape.clusters(N) > clusters[blocks]:
                break
            parked = max(0, -(-(shape.registers - _REGISTERS) // (8 * tiles)))
            shape = replace(shape, parked=parked)
            if parked <= shape.loads and shape.shared_bytes <= most:
                yield shape
                break


def step_time(shape: GridShape, N: int) -> float:
    """Return the estimated microseconds of a step on an H200."""
    blocks = shape.clusters(N) * shape.blocks
    depth = 32 * shape.loads * shape.warps
    per_us = 1900.0  # cycles
    read = blocks * min(N, shape.rows) * depth * 2 / 5.6e6
    read = max(read, shape.rows * depth * 2 / 48 / per_us)
    products = 2 * shape.loads * shape.warps * shape.tiles * shape.columns
    multiplied = products / 4 * 6.2 / per_us
    parked = shape.parked * shape.tiles * 32 * shape.threads / 128 / per_us
    added = 2 * shape.warps * shape.pairs * 8 / 128 / per_us
    exchanged = (0.2 + 0.05 * shape.blocks) if shape.blocks > 1 else 0.0
    longest, other = max(read, multiplied + parked / 2), min(read, multiplied + parked / 2)
    return 0.75 + longest + 0.25 * other + added + exchanged + 0.1 * (shape.pairs / 256)


def wanted() -> bool:
    """Return whether the environment requests a shape, even if weights would fit a cluster."""
    return os.environ.get(VARIABLE, NONE) != NONE


def choose(H: int, N: int, clusters: Mapping[int, int]) -> GridShape | None:
    """Return the shape with the least estimated time, or None if step by step is no slower.

    `QUANT_GRU_CUDA_BACK_GRID=blocks,tiles,columns,warps,parked,chunk,ahead` overrides the choice,
    and `none` selects step by step.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return _override(given, H, N, clusters)
    if H % _ALIGNED:
        return None
    return _fastest(H, N, tuple(clusters.items()))


@lru_cache(maxsize=4096)
def _fastest(H: int, N: int, clusters: tuple[tuple[int, int], ...]) -> GridShape | None:
    best: GridShape | None = None
    least = _STEP_BY_STEP
    for shape in candidates(H, N, dict(clusters)):
        time = step_time(shape, N)
        if time < least:
            best, least = shape, time
    return best


def _override(given: str, H: int, N: int, clusters: Mapping[int, int]) -> GridShape | None:
    if given == NONE:
        return None
    try:
        blocks, tiles, columns, warps, parked, chunk, ahead = map(int, given.split(","))
    except ValueError:
        raise QuantGRUError(
            f"Expected {VARIABLE} to be blocks,tiles,columns,warps,parked,chunk,ahead or {NONE}, "
            f"got {given!r}"
        ) from None
    if H % _ALIGNED == 0 and blocks in clusters and min(tiles, columns, warps, chunk) > 0:
        shape = GridShape(H, blocks, tiles, columns, warps, parked, chunk, ahead)
        if (
            shape.clusters(N) <= clusters[blocks]
            and 0 <= parked <= shape.loads
            and ahead >= 0
            and shape.pairs % blocks == 0
            and shape.shared_bytes <= _MOST_SHARED
        ):
            return shape
    raise QuantGRUError(
        f"Expected {VARIABLE} to be a shape that this device can run for {H} units and {N} rows, "
        f"got {given!r}"
    )
