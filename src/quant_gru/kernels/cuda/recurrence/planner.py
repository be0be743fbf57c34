"""Choose the layout of a recurrence: blocks per cluster, rows per tile, warps per unit group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kernel_runtime.cuda.launch import Grid, Kernel
from quant_gru.errors import QuantGRUError
from quant_gru.kernels.cuda.plan.structure import MOST_SHARED, Form

VARIABLE = "QUANT_GRU_CUDA_SHAPE"
# held units replace zoneout's interpolation
_HELD = {"HELD": 1, "QG_ZONEOUT": 0}
_REGISTERS = 65536  # per multiprocessor
_MOST_THREADS = 512
# registers per thread besides weights, for the gate arithmetic of 1, 2 and 4 elements
_OTHER_REGISTERS = {1: 72, 2: 88, 4: 112}
_FEW_OTHER_REGISTERS = (
    66  # the same for up to two elements, float32 arithmetic and one MMA pass per weight
)
_ROWS = (1, 2, 4, 8, 16)
_MOST_WITHOUT_CLUSTERS = 99 << 10  # bytes of shared memory per block
# steps of W x in the ring buffer; the short ring can let two blocks share a multiprocessor
_RING, _SHORT_RING = 4, 2
_FEW_WEIGHT_REGISTERS = 128  # up to this many weight registers leave enough for the rest
_MANY_WEIGHT_REGISTERS = 160  # more weight registers leave few for the rest
# two blocks within these limits fit a multiprocessor, whatever their registers
_LIGHT_THREADS, _LIGHT_SHARED = 128, (MOST_SHARED - 1024) // 2
_SHARED_STEP = 1.1  # step time of two blocks on a multiprocessor, relative to one block
_ALONE_SHARED = _LIGHT_SHARED + 16  # bytes that keep a second block off the multiprocessor
_FEWEST = 32  # other registers; with fewer, spills dominate a thread's time


class StateOutputs(NamedTuple):
    """Which forms of every step's states are written by a launch with real first and last states.

    Attributes:
        values: Whether it writes real values.
        codes: Whether it writes codes.
    """

    values: bool
    codes: bool


@dataclass(frozen=True)
class Shape:
    """The layout of a recurrence on a GPU.

    Attributes:
        features: H padded, as the depth of the GEMM with R.
        units: H padded, as the number of units.
        blocks: Blocks per cluster.
        split: Warps that split the features of 16 units: 1 or 2.
        spread: Warps that repeat the GEMM of 16 units and divide its rows: 1 or 2.
        rows: Rows per tile: 1, 2, 4, 8 or 16. A tile of 16 rows has two alternating strips.
    """

    features: int
    units: int
    blocks: int
    split: int
    spread: int
    rows: int

    @property
    def threads(self) -> int:
        """Threads per block."""
        return self.units // self.blocks // 16 * self.split * self.spread * 32

    @property
    def elements(self) -> int:
        """Elements per thread and strip."""
        return max(1, self.strip // 2 // (self.split * self.spread))

    def tiles(self, N: int) -> int:
        """Return the number of tiles of N rows, which is the number of clusters."""
        return -(-N // self.rows)

    @property
    def strip(self) -> int:
        """Rows of one MMA instruction; a tile has one or two strips."""
        return min(self.rows, 8)

    def strips(self, N: int) -> int:
        """Return the number of strips in the tiles of N rows."""
        return self.tiles(N) * self.rows // self.strip

    def projected_words(self, form: Form, T: int, N: int) -> int:
        """Return the size of the input projection of T steps and N rows, in 32-bit words."""
        return T * self.strips(N) * self.units * self.strip * (2 if form.wide_input else 1)

    def weight_registers(self, form: Form) -> int:
        """Return the number of weight registers per thread."""
        return 12 * (self.features // 32) // self.split * form.weight_bytes

    def fits(self, form: Form, clusters: bool = True) -> bool:
        """Return whether a block's weights fit registers and the rest fits shared memory.

        Args:
            form: The plan's form.
            clusters: Whether the device has clusters; other devices may have less shared memory.
        """
        # `form.own` exists only on devices with large shared memory
        most = MOST_SHARED if clusters or form.own is not None else _MOST_WITHOUT_CLUSTERS
        allowed = min(255, _REGISTERS // self.threads)
        return (
            self.threads <= _MOST_THREADS
            and self.weight_registers(form) + _FEWEST <= allowed
            and self.shared_bytes(form) <= most
        )

    def spilled(self, form: Form) -> int:
        """Estimate the number of spilled registers per thread."""
        allowed = min(255, _REGISTERS // self.threads)
        lean = form.recurrence.real == "float" and self.passes(form) == 1 and self.elements <= 2
        beside = (
            _FEW_OTHER_REGISTERS
            if lean
            else _OTHER_REGISTERS[self.elements] * (form.state_bytes + 1) // 2
        )
        return max(0, self.weight_registers(form) + beside - allowed)

    def doubles(self, form: Form) -> bool:
        """Return whether a tile may have two strips."""
        return form.weight_bytes == 1 and self.split == 2 and self.blocks > 1

    def passes(self, form: Form) -> int:
        """Return the MMA passes per weight. For few rows, one pass has both bytes as columns."""
        packed = form.weight_bytes == 1 and self.strip <= 4
        return form.weight_bytes * (1 if packed else form.state_bytes)

    def resident(self, form: Form, clusters: Mapping[int, int]) -> tuple[int, int]:
        """Return the number of clusters that run at once, without and with shared multiprocessors.

        Args:
            form: The plan's form.
            clusters: As for `candidates`.
        """
        alone = max(clusters[self.blocks], 1)
        light = self.threads <= _LIGHT_THREADS and self.shared_bytes(form) <= _LIGHT_SHARED
        return alone, 2 * alone if light and self.blocks > 1 else alone

    def sets(self, form: Form) -> int:
        """Return the accumulators per gate: two if a scheduler has one warp and registers allow."""
        alone = self.threads <= 128 and form.weight_bytes == 1 and self.passes(form) == 1
        roomy = 64 < self.features and self.weight_registers(form) <= _FEW_WEIGHT_REGISTERS
        return 2 if alone and roomy else 1

    def saturated(self, form: Form) -> bool:
        """Return whether gates are those of saturating.cuh, whose constants need registers."""
        return form.saturated and self.weight_registers(form) <= _FEW_WEIGHT_REGISTERS

    def late(self, form: Form) -> bool:
        """Return whether the update gate's GEMM comes last, which needs registers for operands."""
        roomy = self.weight_registers(form) <= _FEW_WEIGHT_REGISTERS
        return form.recurrence.real == "float" and roomy

    def tight(self, form: Form) -> bool:
        """Return whether biases and multipliers are in shared memory, as registers are few."""
        narrow = form.recurrence.real == "float" and form.state_bytes + form.weight_bytes <= 3
        return narrow and self.elements > 1 and self.weight_registers(form) > _MANY_WEIGHT_REGISTERS

    def macros(self, form: Form, H: int, directions: int) -> dict[str, object]:
        """Return the macros that specialize persistent.cu."""
        return {
            "KP": self.features,
            "UP": self.units,
            "CL": self.blocks,
            "KS": self.split,
            "SPREAD": self.spread,
            "NB": self.strip,
            "NT": self.rows // self.strip,
            "HP": form.state_bytes,
            "WP": form.weight_bytes,
            "WX": 2 if form.wide_input else 1,
            "OUT": form.out_bytes,
            "REAL": form.recurrence.real,
            "QG_WORDS": int(form.words),
            "QG_POT": int(form.powers and form.recurrence.real == "float"),
            "SATURATED": int(self.saturated(form)),
            **dict(zip(("TZ", "TR", "TG"), form.recurrence.tables, strict=True)),
            "COPY": copied_bytes(form, H),
            "DIRS": directions,
            "RING": self.ring(form),
            "BULK": int(self.bulk(form)),
            "LATE": int(self.late(form)),
            "SETS": self.sets(form),
            "TIGHT": int(self.tight(form)),
            **form.products,
        }

    def bulk(self, form: Form) -> bool:
        """Return whether a block sends its states of a strip in one bulk copy, if they are many."""
        whole = self.features == self.units == 64 * self.blocks
        large = form.state_bytes == 2 or self.rows == 8
        return whole and large and self.blocks > 1 and form.weight_bytes == 1

    def ring(self, form: Form) -> int:
        """Return the number of steps of W x in the ring buffer: being loaded or in use."""
        light = self.threads <= _LIGHT_THREADS and self.blocks > 1
        crowded = self._shared_with(_RING, form) > _LIGHT_SHARED
        fits = self._shared_with(_SHORT_RING, form) <= _LIGHT_SHARED
        return _SHORT_RING if light and crowded and fits else _RING

    def shared_bytes(self, form: Form) -> int:
        """Return the bytes of shared memory per block."""
        return self._shared_with(self.ring(form), form)

    def _shared_with(self, steps: int, form: Form) -> int:
        bulk = self.bulk(form)
        stride = self.units if bulk else -(-max(self.features, self.units) // 128) * 128 + 64
        groups = self.units // self.blocks // 16
        sets = form.state_bytes + form.weight_bytes - 1
        state = 2 * form.state_bytes * self.rows * stride
        exchange = 4 * 2 * groups * 2 * sets * 3 * self.elements * 32 if self.split == 2 else 0
        halves = self.split * self.spread
        strips = self.rows // self.strip
        owned = max(1, self.strip // halves)
        stage = 0 if bulk else 2 * groups * halves * form.state_bytes * owned * 16
        # barriers, NaN flags of rows, and biases and multipliers
        beside = 16 * strips + 32 + (12 * self.threads if self.tight(form) else 0)
        ring = steps * strips * self.threads * self.elements * (8 if form.wide_input else 4)
        received = stage if self.blocks > 1 else 0
        return state + exchange + received + beside + ring + form.recurrence.table_bytes


@lru_cache(maxsize=4096)
def layout(
    shape: Shape,
    form: Form,
    H: int,
    N: int,
    directions: int,
    held: bool = False,
    outputs: StateOutputs | None = None,
    early: bool = False,
    chunk: int = 0,
) -> tuple[Kernel, Grid]:
    """Return the kernel and grid for N rows of H units.

    Args:
        shape: The layout on the GPU.
        form: The plan's form.
        H: Units.
        N: Rows.
        directions: Directions of the launch.
        held: Whether some units keep their state in a step.
        outputs: Which forms of the states are written; None if the launch reads and writes codes.
        early: Whether blocks may start while the previous launch ends. Allowed only if every block
            of the launch gets a multiprocessor of its own.
        chunk: Steps per time chunk that the recurrence waits for if it overlaps with the input
            projection; 0 without overlap.
    """
    macros = shape.macros(form, H, directions)
    if held:
        macros |= _HELD
    if outputs is not None:
        macros |= {"REALS": 1, "VALUES": int(outputs.values), "CODES": int(outputs.codes)}
    if chunk:
        macros |= {"STRETCH": chunk}
    kernel = Kernel.of("recurrence/persistent", "recurrent", macros)
    blocks = (shape.tiles(N) * shape.blocks, directions)
    shared = shape.shared_bytes(form)
    if early:
        # prevent two blocks from sharing a multiprocessor while other multiprocessors are busy
        shared = max(shared, _ALONE_SHARED)
    return kernel, Grid(blocks, shape.threads, shape.blocks, shared, early=early)


def copied_bytes(form: Form, H: int) -> int:
    """Return the bytes of states that a thread copies at once: 16 or 4 for aligned rows, else 0."""
    if form.out_bytes != form.state_bytes:
        return 0
    if H * form.state_bytes % 16 == 0:
        return 16
    return 4 if form.state_bytes == 1 and H % 4 == 0 else 0


def make_shape(H: int, blocks: int, split: int, spread: int, rows: int) -> Shape:
    """Return the shape of H units with the required padding."""
    features = -(-H // (64 * split)) * 64 * split
    units = -(-H // (16 * blocks)) * 16 * blocks
    return Shape(features, units, blocks, split, spread, rows)


def candidates(form: Form, H: int, clusters: Mapping[int, int]) -> Iterator[Shape]:
    """Yield the shapes that a device can run.

    Args:
        form: The plan's form.
        H: Units.
        clusters: Blocks per cluster -> number of such clusters that the device runs at once.
    """
    for blocks in clusters:
        if blocks > 1 and H < 16 * blocks:
            continue
        for split, spread in ((1, 1), (1, 2), (2, 1)):
            for rows in _ROWS:
                shape = make_shape(H, blocks, split, spread, rows)
                if _possible(shape, form, clusters):
                    yield shape


def _possible(shape: Shape, form: Form, clusters: Mapping[int, int]) -> bool:
    """Return whether a device can run a shape."""
    rows = shape.rows >= shape.spread and (shape.rows <= 8 or shape.doubles(form))
    return rows and shape.fits(form, len(clusters) > 1)


def choose(
    form: Form, H: int, N: int, directions: int, clusters: Mapping[int, int]
) -> Shape | None:
    """Return the shape with the least estimated time, or None if weights do not fit registers.

    `QUANT_GRU_CUDA_SHAPE=blocks,split,spread,rows` overrides the choice.
    """
    if not form.narrow:
        return None
    wanted = os.environ.get(VARIABLE)
    if wanted:
        return _override(wanted, form, H, clusters)
    return _fastest(form, H, N, directions, tuple(clusters.items()))


@lru_cache(maxsize=4096)
def _fastest(
    form: Form, H: int, N: int, directions: int, clusters: tuple[tuple[int, int], ...]
) -> Shape | None:
    best: tuple[float, Shape] | None = None
    resident = dict(clusters)
    for shape in candidates(form, H, resident):
        time = time_of(shape, form, N, directions, resident)
        if best is None or time < best[0]:
            best = (time, shape)
    return best[1] if best else None


def time_of(
    shape: Shape, form: Form, N: int, directions: int, clusters: Mapping[int, int]
) -> float:
    """Estimate the nanoseconds per step of a launch with N rows in each direction."""
    tiles = shape.tiles(N) * directions
    return waves(shape, form, tiles, clusters) * step_time(shape, form)


def waves(shape: Shape, form: Form, tiles: int, clusters: Mapping[int, int]) -> float:
    """Return the waves of clusters for a number of tiles, weighted for shared multiprocessors."""
    alone, most = shape.resident(form, clusters)
    whole, left = divmod(tiles, most)
    shared = 1.0 if most == alone else _SHARED_STEP
    return whole * shared + (0.0 if left == 0 else 1.0 if left <= alone else shared)


def step_time(shape: Shape, form: Form) -> float:
    """Estimate the nanoseconds of a step on an H200."""
    busy = max(1.0, shape.threads / 128)  # warps per scheduler
    steps = shape.features / 32 / shape.split * shape.passes(form)
    # MMA instructions of a warp depend on each other, and warps share a tensor core
    turn = steps * max(12.7, 9.7 * busy)
    fixed, each = (239.0, 59.0) if form.recurrence.real == "float" else (398.0, 206.0)
    if form.in_int32:
        fixed, each = 300.0, 80.0  # table lookups have more instructions; from their latencies
    turn += fixed + each * shape.elements * busy**0.92
    if shape.split == 2:
        turn += 47 + 4.6 * busy
    spilled = shape.spilled(form)
    turn += 1.6 * spilled + 0.05 * spilled**2
    exchange = 0.0
    if shape.blocks > 1:
        kilobytes = shape.units * shape.strip * form.state_bytes / 1024
        exchange = 77 + 2.3 * shape.blocks + (72 + 2.8 * shape.blocks) * min(kilobytes, 8)
        exchange += 45 * max(kilobytes - 8, 0)
    # one strip's states are exchanged while the other strip is computed
    return float(max(turn + exchange, turn * (shape.rows // shape.strip)))


def _override(wanted: str, form: Form, H: int, clusters: Mapping[int, int]) -> Shape:
    try:
        blocks, split, spread, rows = (int(part) for part in wanted.split(","))
    except ValueError:
        raise QuantGRUError(
            f"Expected {VARIABLE} to be blocks,split,spread,rows, got {wanted!r}"
        ) from None
    allowed = blocks in clusters and rows in _ROWS
    if not allowed or (split, spread) not in ((1, 1), (1, 2), (2, 1)):
        raise QuantGRUError(
            f"Expected {VARIABLE} to have {', '.join(map(str, clusters))} blocks (of this device), "
            f"at most two warps in all and 1, 2, 4, 8 or 16 rows, got {wanted!r}"
        )
    shape = make_shape(H, blocks, split, spread, rows)
    if not _possible(shape, form, clusters):
        raise QuantGRUError(
            f"Expected {VARIABLE} to be a shape whose weights fit registers, got {wanted!r} for "
            f"{H} units"
        )
    return shape
