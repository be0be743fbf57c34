"""How the recurrence of gradients is laid over a whole GPU; see back_grid.cu."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from quant_gru._errors import QuantGRUError

VARIABLE = "QUANT_GRU_CUDA_BACK_GRID"
NONE = "none"
_WARPS = 8
_REGISTERS = 255  # of a thread
_BESIDE = 74  # of them beside weights, sums and gradients, at least
_MOST_SHARED = 200 << 10
_MOST_SHARED_ALONE = 96 << 10  # of chips without clusters
_ALIGNED = 8  # units whose gradients a thread reads at once
_STEP_BY_STEP = 7.5  # microseconds of a step that is a product and a kernel


@dataclass(frozen=True)
class GridShape:
    """One way to run the recurrence with all blocks there at once.

    Attributes:
        H: Units.
        blocks: Blocks of a cluster.
        tiles: Tiles of 16 units of a block.
        columns: Tiles of 8 rows of a block.
        warps: Warps of a block.
        parked: Loads whose weights stand in shared memory.
        chunk: Loads of a row that are checked at once.
        ahead: Checks ahead of which loads are issued.
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
        """Loads of a row, of 32 gradients each, of a warp."""
        parts = 32 * self.warps * self.blocks * self.chunk
        return -(-3 * self.H // parts) * self.chunk

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 8 * self.columns

    @property
    def groups(self) -> int:
        """Clusters that share the units."""
        return -(-self.H // (16 * self.tiles))

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps

    @property
    def fragments(self) -> int:
        """Words of all weights."""
        return self.groups * self.blocks * self.threads * self.loads * self.tiles * 8

    @property
    def registers(self) -> int:
        """Registers of a thread, about."""
        held = (self.loads - self.parked) * self.tiles * 8
        read = min(1 + self.ahead, self.loads // self.chunk) * self.chunk * self.columns * 4
        elements = -(-self.pairs // (self.blocks * self.threads))
        return held + self.tiles * self.columns * 4 + read + _BESIDE + 20 * (elements - 1)

    @property
    def pairs(self) -> int:
        """Pairs of units, row by row, of a block."""
        return 64 * self.tiles * self.columns

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        weights = self.parked * self.tiles * 32 * self.threads
        sums = 2 * self.warps * self.rows * (16 * self.tiles + 4) * 4
        received = 2 * self.pairs * 8 if self.blocks > 1 else 0
        return weights + sums + received + 16

    def clusters(self, N: int) -> int:
        """Clusters of a launch, all of which have to be there at once."""
        return self.groups * -(-N // self.rows)

    def macros(self, half: bool) -> dict[str, object]:
        """What back_grid.cu is specialized on."""
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
        """How operands.cu lays weights out."""
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
    """Shapes whose blocks a device holds at once.

    Args:
        H: Units, a multiple of 8.
        N: Rows.
        clusters: Blocks of a cluster -> how many such clusters the device holds at once.
    """
    most = _MOST_SHARED if len(clusters) > 1 else _MOST_SHARED_ALONE
    for blocks, tiles, columns, chunk in product(
        clusters, range(1, 9), (1, 2, 3, 4, 6, 8), range(1, 7)
    ):
        # few loads at once are waited for, but enough to be on their way
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
    """Estimated microseconds of a step on an H200."""
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
    """Whether the environment asks for a shape, wherever weights would fit."""
    return os.environ.get(VARIABLE, NONE) != NONE


def choose(H: int, N: int, clusters: Mapping[int, int]) -> GridShape | None:
    """The shape with the least estimated time; None where step by step is no slower.

    `QUANT_GRU_CUDA_BACK_GRID=blocks,tiles,columns,warps,parked,chunk,ahead` overrides the choice,
    and `none` goes step by step.
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
