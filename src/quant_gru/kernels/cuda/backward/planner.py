"""Launch shapes of the recurrence of gradients in clusters; see recurrence.cu."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from quant_gru.errors import QuantGRUError

VARIABLE = "QUANT_GRU_CUDA_BACK_SHAPE"
_REGISTERS = 65536  # per multiprocessor
_MOST_THREADS = 512
_MOST_SHARED = 220 << 10
_BESIDE = 40  # registers that a thread needs at least besides weights and sums


@dataclass(frozen=True)
class BackShape:
    """The shape of a launch of the recurrence of gradients.

    Attributes:
        units: Units per block, a multiple of 8.
        blocks: Blocks per cluster.
        tiles: Tiles of 16 rows of R transposed per warp.
        split: Warps that share the depth of these tiles.
        rows: Rows per tile of the batch: 1, 2, 4 or 8.
        planes: bfloat16 parts of a gradient.
        weight_planes: bfloat16 parts of a weight.
    """

    units: int
    blocks: int
    tiles: int
    split: int
    rows: int
    planes: int
    weight_planes: int

    @property
    def depth(self) -> int:
        """Gradients per block and row, padded."""
        step = 32 * self.split
        return -(-3 * self.units // step) * step

    @property
    def groups(self) -> int:
        """Groups of `tiles` tiles; each group has `split` warps."""
        return -(-self.units * self.blocks // (16 * self.tiles))

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.groups * self.split * 32

    @property
    def elements(self) -> int:
        """Elements per thread."""
        return -(-self.units * self.rows // self.threads)

    @property
    def weight_registers(self) -> int:
        """Registers per thread that hold weights."""
        return self.weight_planes * self.depth // 16 // self.split * self.tiles * 4

    @property
    def fragments(self) -> int:
        """Number of words of all weights."""
        return self.weight_registers * self.threads * self.blocks

    @property
    def _weights(self) -> dict[str, int]:
        return {
            "U": self.units,
            "CL": self.blocks,
            "MT": self.tiles,
            "KS": self.split,
            "KP": self.depth,
            "WP": self.weight_planes,
        }

    def layout(self) -> dict[str, int]:
        """Return the layout in which operands.cu stores the weights."""
        return {**self._weights, "groups": self.groups, "count": self.fragments}

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per block."""
        row = -(-2 * self.depth // 128) * 128
        columns = max(self.rows, 2) * (2 if self.packed else 4)
        sums = 2 * self.blocks * self.split * self.units * columns
        copies = 2 if self.blocks > 1 else 1
        return copies * self.planes * self.rows * row + sums + 16

    @property
    def packed(self) -> bool:
        """Whether blocks exchange sums in bfloat16."""
        return self.planes == 1 and self.blocks > 1 and self.rows == 8

    @property
    def fits(self) -> bool:
        """Whether a block's weights fit registers, and its other data shared memory."""
        allowed = min(255, _REGISTERS // self.threads // 8 * 8)
        beside = _BESIDE + 4 * self.tiles + 6 * self.elements
        return (
            self.threads <= _MOST_THREADS
            and self.elements <= 8
            and self.weight_registers + beside <= allowed
            and self.shared_bytes <= _MOST_SHARED
        )

    def macros(self, half: bool, operand: int, directions: int) -> dict[str, object]:
        """Return the macros that specialize recurrence.cu."""
        return {
            **self._weights,
            "NB": self.rows,
            "PL": self.planes,
            "PACK": int(self.packed),
            "HALF": int(half),
            "OPERAND": operand,
            "DIRS": directions,
        }


def candidates(
    H: int, planes: int, weight_planes: int, clusters: Mapping[int, int]
) -> Iterator[BackShape]:
    """Yield the shapes that a device can run.

    Args:
        H: Units.
        planes: bfloat16 parts of a gradient.
        weight_planes: bfloat16 parts of a weight.
        clusters: Blocks per cluster -> number of such clusters that are resident at once.
    """
    for blocks in clusters:
        units = -(-H // (8 * blocks)) * 8
        if blocks > 1 and units * (blocks - 1) >= H:
            continue
        for tiles in (1, 2, 3, 4):
            for split in (1, 2, 4):
                for rows in (1, 2, 4, 8):
                    shape = BackShape(units, blocks, tiles, split, rows, planes, weight_planes)
                    if shape.fits:
                        yield shape


def choose(
    H: int, N: int, directions: int, planes: int, weight_planes: int, clusters: Mapping[int, int]
) -> BackShape | None:
    """Return the shape with the least estimated time, or None if weights do not fit registers.

    `QUANT_GRU_CUDA_BACK_SHAPE=blocks,tiles,split,rows` overrides the choice.
    """
    wanted = os.environ.get(VARIABLE)
    if wanted:
        return _override(wanted, H, planes, weight_planes, clusters)
    return _fastest(H, N, directions, planes, weight_planes, tuple(clusters.items()))


@lru_cache(maxsize=4096)
def _fastest(
    H: int,
    N: int,
    directions: int,
    planes: int,
    weight_planes: int,
    clusters: tuple[tuple[int, int], ...],
) -> BackShape | None:
    best: tuple[float, BackShape] | None = None
    resident = dict(clusters)
    for shape in candidates(H, planes, weight_planes, resident):
        tiles = -(-N // shape.rows) * directions
        at_once = max(resident[shape.blocks], 1)
        time = -(-tiles // at_once) * step_time(shape, min(1.0, tiles / at_once))
        if best is None or time < best[0]:
            best = (time, shape)
    return best[1] if best else None


def step_time(shape: BackShape, full: float) -> float:
    """Return the estimated nanoseconds of a step on an H200.

    For good shapes the estimate is within 9 % (rms) of measurements.

    Args:
        shape: The shape.
        full: Busy share of the device, 0 to 1.
    """
    warps, planes = shape.threads // 32, shape.planes
    steps = shape.depth // 16 // shape.split
    products = steps * shape.tiles * planes * shape.weight_planes
    # mma instructions of different warps compete for tensor cores; those of a warp form chains
    turns = 8.0 * products * -(-warps // 4)
    chain = (
        33.0 * products / (shape.tiles * (1 if shape.tiles >= 4 else 2 if shape.tiles > 1 else 4))
    )
    read = warps * steps / 2 * planes * max(1.0, shape.rows / 2)
    elements = shape.elements * math.sqrt(planes)
    added = shape.blocks * shape.split * shape.elements
    alone = 204 + 0.452 * turns + 0.739 * read + 48 * elements + 1.8 * added + 1.5 * shape.blocks
    # on a busy device, reads and writes cost more
    beside = 97 + 0.264 * turns + 0.281 * chain + 1.329 * read + 164 * elements + 1.1 * added
    beside += 0.9 * shape.blocks
    if shape.blocks > 1:
        columns = max(shape.rows, 2) * (2 if shape.packed else 4)
        kilobytes = shape.units * shape.blocks * shape.split * columns / 1024
        alone += 25.2 * kilobytes + 15.6 * shape.tiles
        beside += 33.4 * kilobytes + 13 * shape.tiles
    return alone + full * (beside - alone)


def _override(
    wanted: str, H: int, planes: int, weight_planes: int, clusters: Mapping[int, int]
) -> BackShape:
    try:
        blocks, tiles, split, rows = (int(part) for part in wanted.split(","))
    except ValueError:
        raise QuantGRUError(
            f"Expected {VARIABLE} to be blocks,tiles,split,rows, got {wanted!r}"
        ) from None
    for shape in candidates(H, planes, weight_planes, clusters):
        if (shape.blocks, shape.tiles, shape.split, shape.rows) == (blocks, tiles, split, rows):
            return shape
    raise QuantGRUError(
        f"Expected {VARIABLE} to be a shape that this device can run for {H} units, got {wanted!r}"
    )
