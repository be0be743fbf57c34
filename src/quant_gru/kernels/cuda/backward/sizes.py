"""The sizes of a layer's backward, and the shapes of the kernels that they lead to."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_runtime.cuda.launch import Machine
from quant_gru.integer.backward import Wanted
from quant_gru.kernels.cuda.backward import grid_planner, planner
from quant_gru.kernels.cuda.backward.derivatives_planner import choose as slopes_shape
from quant_gru.kernels.cuda.backward.inputs import Call, Precision
from quant_gru.kernels.cuda.plan.structure import planes_of

FEWEST_ROWS = 32
"""Rows of a product of bytes at least: torch._int_mm takes more than 16."""
_PRODUCT_BYTES = 32 << 20  # of the int32 sums of W x, or of R h, at once
_SUMMED = 256  # chunks of rows whose sums are added in the end


class Sizes:
    """What all stages of a layer's backward have in common.

    Pairs are of W x and of R h.

    Args:
        calls: The directions of the layer.
        wanted: Which gradients to compute.
        precision: How they are multiplied.
        machine: Where kernels run.

    Attributes:
        T: Steps.
        N: Rows of a step.
        C: Features of the input.
        H: Features of the state.
        rows: Steps times rows.
        dirs: Directions.
        wanted: As given.
        precision: As given.
        half: Whether slopes are kept in half precision.
        planes: Bytes of a code of the input, and of the state.
        weight_planes: Bytes of a weight of W, and of R.
        padded: Features of rows of bytes: multiples of 16, as products of bytes want them.
        columns: Columns of the int32 sums.
        fused: The shape of the one kernel that makes slopes from bytes; None where torch multiplies
            the bytes.
        chunk: Rows whose slopes a launch makes.
        recurrence: The shape of the recurrence in clusters, or None.
        grid: The shape of the recurrence over the whole GPU, or None. Where both are None, each
            step is a launch and a product.
        summed_rows: Rows whose bias gradients a block sums.
        summed: Sums of bias gradients, which are added in the end.
    """

    def __init__(
        self, calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Machine
    ) -> None:
        first = calls[0]
        self.T, self.N, self.C, self.H = first.T, first.N, first.C, first.H
        self.rows, self.dirs = first.T * first.N, len(calls)
        self.wanted, self.precision = wanted, precision
        self.half = precision.half and all(call.fits_half for call in calls)
        w = first.plan.weights
        self.planes = (planes_of(first.plan.x.bits), planes_of(first.plan.h.bits))
        self.weight_planes = (planes_of(w.bits_W), planes_of(w.bits_R))
        x_padded, h_padded = (-(-max(K, 1) // 16) * 16 for K in (self.C, self.H))
        self.padded = (x_padded, h_padded)
        self.columns = tuple(
            -(-(3 * self.H if planes == 1 else 6 * self.H + 1) // 16) * 16
            for planes in self.weight_planes
        )
        clusters = machine.clusters()
        self.fused = None
        if max(*self.planes, *self.weight_planes) == 1:
            tables = first.form.table_bytes
            self.fused = slopes_shape(self.H, self.rows, self.padded, tables, len(clusters) > 1)
        row = 4 * max(c * p for c, p in zip(self.columns, self.planes, strict=True))
        chunks = 1 if self.fused else max(1, -(-self.rows * row // _PRODUCT_BYTES))
        self.chunk = -(-self.rows // chunks)
        weight_parts = 2 if precision.exact_weights and self.weight_planes[1] == 2 else 1
        self.recurrence = planner.choose(
            self.H, self.N, self.dirs, precision.planes, weight_parts, clusters
        )
        self.grid: grid_planner.GridShape | None = None
        if precision.operand == 0 and (self.recurrence is None or grid_planner.wanted()):
            self.grid = grid_planner.choose(self.H, self.N, machine.clusters())
            self.recurrence = None if self.grid else self.recurrence
        self.summed_rows = max(64, -(-self.rows // _SUMMED))
        self.summed = -(-self.rows // self.summed_rows)

    @property
    def fragments(self) -> dict[str, int]:
        """How R, transposed, is laid out for the recurrence; 'count' of 0 words: it is not."""
        shape = self.recurrence or self.grid
        return shape.layout() if shape else {"count": 0}
