"""The launches of each layer: quantizing its input, its projections, and its recurrence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernel_runtime.cuda.launch import Grid, Kernel, Machine, Prepared
from quant_gru.integer.call_form import CallForm
from quant_gru.kernels import _native
from quant_gru.kernels._native import (
    Method,
    Overlap,
    Selection,
    Tile,
    WeightStationary,
)
from quant_gru.kernels.cuda.forward.border import Border, Extent
from quant_gru.kernels.cuda.forward.inputs import (
    ByteRows,
    Gemm,
    LayerInput,
    RealInput,
    may_load_fours,
    quantize_input,
    requantize_layers,
)
from quant_gru.kernels.cuda.forward.layer import (
    Cell,
    Group,
    LayerOutput,
    by_direction,
    padded_steps,
    scale_of,
)
from quant_gru.kernels.cuda.forward.native_call import Memories
from quant_gru.kernels.cuda.projection import int_mm
from quant_gru.kernels.cuda.projection.from_codes import projection
from quant_gru.kernels.cuda.projection.from_reals import few_projection, kernel_of, real_projection
from quant_gru.kernels.cuda.projection.select import RealBlocks, overlap_of, select
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import KINDS, RECURRENT_C, ProjectC


class LayerLaunches:
    """Prepares the launches of layers, and reserves the workspace that they share.

    Args:
        machine: The GPU that runs the kernels.
        layers: For each layer, the groups of directions that share a launch of the recurrence.
        T: Steps.
        N: Rows.
        form: The form of calls.
        keeps: Whether calls keep data for a backward.

    Attributes:
        memories: The argument fields that point to the tensors of a call.
        x: The arguments that read the real values of a call.
        steps: Launches and GEMMs in the order of a call.
        rows: Codes as bytes.
        gemms: The GEMMs among the steps.
        kept: For each direction, the offset and dtype of its states' codes.
        keep: The owners of memory that arguments point to.
    """

    def __init__(
        self,
        machine: Machine,
        layers: Sequence[Sequence[Group]],
        T: int,
        N: int,
        form: CallForm,
        keeps: bool,
    ) -> None:
        self._machine, self._T, self._N = machine, T, N
        self._form, self._keeps, self._layers = form, keeps, len(layers)
        self.x = RealInput()
        self.memories = Memories.around(self.x.memory)
        self.steps: list[Prepared | Gemm] = []
        self.rows: list[ByteRows] = []
        self.gemms: list[Gemm] = []
        self.kept: list[tuple[int, torch.dtype]] = []
        self.keep: list[Any] = []
        space = self.memories.space
        self._projected = [
            space.take(4 * max(s.projected_words(c.numbers.form, T, N) for c, s in sized))
            for sized in zip(*(by_direction(layer) for layer in layers), strict=True)
        ]
        numbers, D = layers[0][0].cells[0].numbers, len(self._projected)
        extent = Extent(T, N, numbers.C, numbers.H, len(layers), D)
        self._border = Border(machine, self.memories, self.x, form, extent)
        self.steps += self._border.inward
        below: LayerOutput | None = None
        for index, layer in enumerate(layers):
            below = self._add_layer(index, layer, below)
        self.steps += self._border.outward
        self.keep.append(self._border)
        for rows in self.rows:
            rows.start = space.take(rows.shape[0] * rows.shape[1])
            for record in rows.records:
                space.point(record, "bytes", rows.start)

    def _launch(self, kernel: Kernel, grid: Grid, arguments: Any) -> None:
        self.steps.append(self._machine.prepare(kernel, grid, arguments))

    def _add_layer(
        self, index: int, layer: Sequence[Group], below: LayerOutput | None
    ) -> LayerOutput:
        # only a backward reads the last layer's codes
        outputs = planner.StateOutputs(
            values=index == self._layers - 1, codes=index < self._layers - 1
        )
        outputs = outputs._replace(codes=outputs.codes or self._keeps)
        cells = [cell for group in layer for cell in group.cells]
        T, N, H = self._T, self._N, cells[0].numbers.H
        # a launch can wait for one projection only, and that projection runs forwards in time
        first, overlap = layer[0], None
        if len(first.cells) == 1:
            overlap = overlap_of(self._machine, first.cells[0].numbers, first.shape, T, N)
        for i, group in enumerate(layer):
            # start compiling; the tensors that the kernel reads are created meanwhile
            kernel, _ = self._recurrence(group, outputs, None if i else overlap)
            self._machine.expect(kernel)
        space = self.memories.space
        this = LayerOutput(cells, space.take(N * padded_steps(T)))
        selected = [
            select(
                self._machine,
                cell.numbers,
                shape,
                T,
                N,
                real_values=below is None,
                overlap=None if direction else overlap,
            )
            for direction, (cell, shape) in enumerate(by_direction(layer))
        ]
        inputs = self._add_inputs(layer, selected, this, below)
        for cell in cells:
            size = T * N * H * cell.h.container.itemsize * outputs.codes
            this.out.append(self.memories.codes.take(size))
            self.kept.append((this.out[-1], cell.h.container))
            if self._form.states:
                this.h0_nan.append(space.take(N))
        direction = 0
        for group in layer:
            chosen = list(zip(inputs, selected, strict=True))[direction:]
            self._add_group(this, group, chosen, direction, index, outputs, overlap)
            direction, overlap = direction + len(group.cells), None
        return this

    def _add_inputs(
        self,
        layer: Sequence[Group],
        selected: Sequence[Selection],
        this: LayerOutput,
        below: LayerOutput | None,
    ) -> list[LayerInput]:
        """Return the input of each direction's projection. Equal codes are computed once."""
        inputs: list[LayerInput] = []
        for (cell, shape), selection in zip(by_direction(layer), selected, strict=True):
            if selection.reads_reals:
                inputs.append(LayerInput(this.nan))
                if selection.reals:
                    kernel = kernel_of(selection.reals, cell.numbers, shape, cell.x)
                    self._machine.expect(kernel)
                continue
            same = [
                each
                for each, other in zip(inputs, this.cells, strict=False)
                if each.nan is None and cell.reads_as(other)
            ]
            inputs.append(same[0] if same else self._add_codes(cell, selection, this.nan, below))
        return inputs

    def _add_codes(
        self, cell: Cell, selection: Selection, nan: int, below: LayerOutput | None
    ) -> LayerInput:
        """Add the launch that writes a layer's input codes, from real values or the lower layer."""
        numbers, T, N, space = cell.numbers, self._T, self._N, self.memories.space
        if below is None:
            kernel, grid, record = quantize_input(cell, T, N)
        else:
            kernel, grid, record = requantize_layers(cell, below, space, self.memories.codes, T, N)
        found = LayerInput()
        if selection.method == Method.CODES_FEW_ROWS:
            found.codes = space.take(T * N * numbers.C * cell.x.container.itemsize)
            space.point(record.to, "codes", found.codes)
        else:
            padded = numbers.padded_C
            found.rows = ByteRows((numbers.x_planes * T * N, padded))
            self.rows.append(found.rows)
            record.to.planes, record.to.padded = numbers.x_planes, padded
            record.to.x_offset = numbers.x_offset
            found.rows.records.append(record.to)
            found.target = record.to
        space.point(record.to, "nan", nan)
        if below is None:
            self._border.read(record, may_load_fours(record))
        self._launch(kernel, grid, record)
        return found

    def _add_group(
        self,
        this: LayerOutput,
        group: Group,
        inputs: Sequence[tuple[LayerInput, Selection]],
        first: int,
        layer: int,
        outputs: planner.StateOutputs,
        overlap: Overlap | None,
    ) -> None:
        """Add the projections and the recurrence launch of a group of directions.

        Args:
            this: The locations of the layer's codes and NaN flags.
            group: The directions.
            inputs: For each direction, the input and the selection of its projection.
            first: Index of the first direction.
            layer: Index of the layer.
            outputs: Which forms of the states the recurrence writes.
            overlap: How the projection overlaps with the recurrence, or None.
        """
        cells, form, shape = group
        space = self.memories.space
        records: Any = (RECURRENT_C[form.recurrence.real] * len(cells))()
        for i, (cell, (given, selection)) in enumerate(zip(cells, inputs, strict=False)):
            d = first + i
            record = records[i]
            counts = self._add_projection(cell, shape, given, selection, d, overlap)
            if counts is not None:
                space.point(record, "counts", counts)
            fragments, bias, m = cell.numbers.fragments(shape.features, shape.units)
            exact = cell.numbers.exact_float[1]
            self.keep += [fragments, bias, m, exact]
            self._fill_sequence(record.s, cell, reverse=d == 1)
            self.memories.codes.point(record.s, "out", this.out[d])
            self._fill_boundary(record.boundary, this, layer, d)
            self.memories.lengths.point(record.s, "lengths")
            record.weights, record.bias, record.m = (
                each.data_ptr() for each in (fragments, bias, m)
            )
            record.exact_float = exact.data_ptr()
            cell.numbers.frozen.fill(record, form)
            space.point(record, "Wx", self._projected[d])
        self._launch(*self._recurrence(group, outputs, overlap), records)

    def _recurrence(
        self, group: Group, outputs: planner.StateOutputs, overlap: Overlap | None
    ) -> tuple[Kernel, Grid]:
        (cells, form, shape), N = group, self._N
        alone = _native.starts_early(shape, N, len(cells), self._machine.clusters())
        return planner.layout(
            shape,
            form,
            cells[0].numbers.H,
            N,
            len(cells),
            outputs=outputs,
            early=alone,
            chunk=overlap.chunk if overlap else 0,
        )

    def _add_projection(
        self,
        cell: Cell,
        shape: planner.Shape,
        given: LayerInput,
        selection: Selection,
        direction: int,
        overlap: Overlap | None,
    ) -> int | None:
        """Add the projection of a direction.

        Returns:
            Offset of the counts of finished rows per time chunk, if the projection overlaps with
            the recurrence; otherwise None.
        """
        if given.nan is not None:
            self._project_reals(cell, shape, given.nan, selection.reals, direction)
        elif given.rows is None:
            self._project_few(cell, shape, given, direction)
        elif selection.codes:
            return self._project_bytes(
                cell, shape, given.rows, given.target, selection.codes, direction, overlap
            )
        else:
            self._project_by_gemm(cell, shape, given.rows, direction)
        return None

    def _project_reals(
        self,
        cell: Cell,
        shape: planner.Shape,
        nan: int,
        block: RealBlocks | None,
        direction: int,
    ) -> None:
        """Add a projection from real values. Without a block, one warp computes each unit."""
        numbers, T, N, space = cell.numbers, self._T, self._N, self.memories.space
        kernel, grid, record, keep = (
            real_projection(numbers, shape, T, N, cell.x, block)
            if block
            else few_projection(numbers, shape, T, N, cell.x)
        )
        self._border.read(record, True)
        space.point(record, "nan", nan)
        space.point(record, "Wx", self._projected[direction])
        self.keep += [numbers, *keep]
        self._launch(kernel, grid, record)

    def _project_bytes(
        self,
        cell: Cell,
        shape: planner.Shape,
        rows: ByteRows,
        target: Any,
        block: Tile | WeightStationary,
        direction: int,
        overlap: Overlap | None,
    ) -> int | None:
        """Add a projection from codes as bytes, on tensor cores; return as `_add_projection`."""
        numbers, T, N, space = cell.numbers, self._T, self._N, self.memories.space
        counts, processors = None, self._machine.clusters()[1]
        kernel, grid, record, keep = projection(numbers, shape, T, N, block, processors)
        rows.records.append(record)
        space.point(record, "Wx", self._projected[direction])
        if overlap:
            made = overlap.grid(shape.units, numbers.padded_C, numbers.x_planes)
            grid, record.stretch = planner.grid_of(made), overlap.chunk * N
            target.stretches = overlap.chunks(T)
            counts = space.take(4 * target.stretches)
            space.point(target, "counts", counts)
            space.point(record, "counts", counts)
        self.keep += [numbers, *keep]
        # a weight-stationary kernel loads its weights while the codes are computed
        early = isinstance(block, WeightStationary)
        self._launch(kernel, grid._replace(early=early), record)
        return counts

    def _project_few(
        self, cell: Cell, shape: planner.Shape, given: LayerInput, direction: int
    ) -> None:
        """Add a projection from codes in their container, with one warp per unit."""
        record = self._int_mm_arguments(cell, shape, direction)
        self.memories.space.point(record.s, "x", given.codes)
        self._launch(*int_mm.few_rows(self._T * self._N, cell.numbers.H), record)

    def _project_by_gemm(
        self, cell: Cell, shape: planner.Shape, rows: ByteRows, direction: int
    ) -> None:
        """Add a projection from codes as bytes: a GEMM of torch and a requantizing kernel."""
        record = self._int_mm_arguments(cell, shape, direction)
        weights, folded = int_mm.fill_gemm(record, cell.numbers)
        gemm = Gemm(rows, weights)
        self.gemms.append(gemm)
        self.steps.append(gemm)
        self.keep += [weights, folded]
        gemm.memory.point(record, "product")
        self._launch(*int_mm.requantize(shape, self._T, self._N), record)

    def _int_mm_arguments(self, cell: Cell, shape: planner.Shape, direction: int) -> Any:
        record: Any = ProjectC()
        self._fill_sequence(record.s, cell, reverse=False)
        self.memories.space.point(record, "Wx", self._projected[direction])
        int_mm.fill(record, cell.numbers, shape, self._N)
        self.keep.append(cell.numbers)
        return record

    def _fill_sequence(self, s: Any, cell: Cell, *, reverse: bool) -> None:
        s.x_kind, s.h_kind = KINDS[cell.x.container], KINDS[cell.h.container]
        s.T, s.N, s.C, s.H = self._T, self._N, cell.numbers.C, cell.numbers.H
        s.reverse = reverse

    def _fill_boundary(self, boundary: Any, this: LayerOutput, layer: int, d: int) -> None:
        """Set the arguments for the real values of the states of direction d of a layer."""
        cells, cell, N, memories = this.cells, this.cells[d], self._N, self.memories
        H, state = cell.numbers.H, layer * len(cells) + d
        if this.h0_nan:
            self._border.h0.point(boundary, "h0", 4 * state * N * H)
            memories.space.point(boundary, "h0_nan", this.h0_nan[d])
        self._border.y.point(boundary, "values", 4 * d * H)
        self._border.h_n.point(boundary, "last", 4 * state * N * H)
        memories.nan.point(boundary, "last_nan", 4 * state * N)
        memories.space.point(boundary, "nan", this.nan)
        boundary.finite = cell.finite.data_ptr()
        boundary.next, boundary.stride = len(cells) * H, padded_steps(self._T)
        boundary.scale, boundary.lo, boundary.hi = scale_of(cell.h)
