"""Blocks of a projection from real values that share the codes of rows within a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quant_gru.kernels.cuda.frozen import MOST_SHARED
from quant_gru.kernels.cuda.launch import PLAIN, Grid, Kernel
from quant_gru.kernels.cuda.projection import spread

_SLOTS = 3  # of a group of warps, of tiles


@dataclass(frozen=True)
class Sharing:
    """What a block makes whose weights stay while rows pass, as project_shared.cu has it.

    Attributes:
        cluster: Blocks that share rows, each with units of its own.
        unit_warps: Units of a block over 16.
        groups: Groups of as many warps, each with tiles of its own.
        columns: Of 8 rows, of a tile at most.
        clusters: As many as the device holds at once.
    """

    cluster: int
    unit_warps: int
    groups: int
    columns: int
    clusters: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.unit_warps * self.groups

    def shared_bytes(self, padded: int, planes: int) -> int:
        """Shared memory of a block."""
        line, rows = -(-padded // 32) * 32 + 16, 8 * self.columns
        of_group = _SLOTS * (planes * rows * line + rows + 8) + 8 * rows
        return 48 * self.unit_warps * line + self.groups * of_group

    def macros(self, planes: int) -> dict[str, object]:
        """What project_shared.cu is specialized on."""
        return {
            **PLAIN,
            "PLANES": planes,
            "CL": self.cluster,
            "UNIT_WARPS": self.unit_warps,
            "GROUPS": self.groups,
            "COLUMNS": self.columns,
        }

    def across(self, units: int) -> int:
        """Clusters that make all units of the same rows."""
        return -(-units // (16 * self.unit_warps * self.cluster))

    def spread(self, units: int, rows: int) -> tuple[int, int]:
        """Rows of a cluster and of a tile, as even as they get."""
        parts = self.clusters // self.across(units)
        return spread(rows, parts, self.groups, self.columns)

    def launch(
        self, units: int, rows: int, padded: int, planes: int
    ) -> tuple[Kernel, Grid, int, int]:
        """What to launch, and where; rows of a cluster and of a tile."""
        span, tile = self.spread(units, rows)
        blocks = self.cluster * self.across(units) * -(-rows // span)
        return (
            Kernel.of("project_shared", "project_shared", self.macros(planes)),
            Grid(
                (blocks, 1),
                self.threads,
                cluster=self.cluster,
                shared_bytes=self.shared_bytes(padded, planes),
            ),
            span,
            tile,
        )


# unit warps, groups and columns by planes
FORMS = {1: (4, 3, 8), 2: (4, 3, 4)}
FEWEST_ROWS = 6144


def choose(
    units: int, rows: int, padded: int, planes: int, clusters: Mapping[int, int]
) -> Sharing | None:
    """The blocks of a projection, where they are faster than those of other forms.

    Args:
        units: H padded to groups of 16.
        rows: Steps times padded rows.
        padded: C padded.
        planes: Bytes of a code of x.
        clusters: Blocks of a cluster -> how many such clusters the device holds at once.
    """
    form = FORMS[planes]
    for cluster, at_once in sorted(clusters.items()):
        block = Sharing(cluster, *form, at_once)
        idle = 16 * block.unit_warps * cluster - units
        if cluster > 1 and at_once and idle >= 0:
            fits = block.shared_bytes(padded, planes) <= MOST_SHARED and 8 * idle <= units
            return block if fits and rows >= FEWEST_ROWS else None
    return None
