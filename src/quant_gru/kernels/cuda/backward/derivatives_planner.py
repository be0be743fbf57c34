"""Launch shapes of the weight-stationary kernel that computes derivatives from bytes."""

from __future__ import annotations

from dataclasses import dataclass

from quant_gru.kernel_runtime.cuda.launch import Grid

_WARPS = 12  # warps for which a multiprocessor has registers
_STAGE_ROWS, _STAGES, _DEPTH = 32, 4, 64  # the ring of a group
_MOST_SHARED, _MOST_WITHOUT_CLUSTERS = 222 << 10, 98 << 10
_MOST_ROWS = (1 << 31) - (1 << 20)  # rows are counted in 32 bits


@dataclass(frozen=True)
class DerivativesShape:
    """The blocks of a launch.

    Attributes:
        unit_warps: Units per block divided by 16.
        groups: Groups of `unit_warps` warps; each group has rows of its own.
        padded: Features of x and of the state, padded to multiples of 16.
        table_bytes: Bytes of shared memory for tables.
    """

    unit_warps: int
    groups: int
    padded: tuple[int, int]
    table_bytes: int

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.unit_warps * self.groups

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory per block: tables, stages of rows, and weights."""
        rings = self.groups * _STAGES * _STAGE_ROWS * _DEPTH
        lines = sum(-(-each // 32) * 32 + 16 for each in self.padded)
        return -(-self.table_bytes // 128) * 128 + rings + 48 * self.unit_warps * lines

    @property
    def macros(self) -> dict[str, object]:
        """The macros that specialize the kernel."""
        return {"UNIT_WARPS": self.unit_warps, "GROUPS": self.groups}

    def grid(self, H: int, rows: int, directions: int, processors: int) -> tuple[Grid, int]:
        """Return the grid for a number of multiprocessors, and the rows per group."""
        across = -(-H // (16 * self.unit_warps))
        at_once = processors * max(1, _WARPS * 32 // self.threads)
        most = max(1, at_once // (across * directions))
        share = 8 * -(-rows // (8 * most * self.groups))
        blocks = -(-rows // (share * self.groups))
        grid = Grid((across * blocks, directions), self.threads, 1, self.shared_bytes)
        return grid, share


def choose(
    H: int, rows: int, padded: tuple[int, int], table_bytes: int, clusters: bool
) -> DerivativesShape | None:
    """Return the shape with the most units per block that fits and leaves few units idle.

    Args:
        H: Hidden size.
        rows: Steps times rows of the batch.
        padded: Features of x and of the state, padded to multiples of 16.
        table_bytes: Bytes of shared memory for tables.
        clusters: Whether the device has clusters; devices without them have less shared memory.

    Returns:
        The shape, or None if the weights do not fit shared memory.
    """
    if rows > _MOST_ROWS:
        return None
    limit = _MOST_SHARED if clusters else _MOST_WITHOUT_CLUSTERS
    tiles = -(-H // 16)
    for unit_warps, groups in ((2, 4), (2, 3), (1, 6)):
        shape = DerivativesShape(unit_warps, groups, padded, table_bytes)
        idle = -(-tiles // unit_warps) * unit_warps - tiles
        if shape.shared_bytes <= limit and 4 * idle <= tiles:
            return shape
    return None
