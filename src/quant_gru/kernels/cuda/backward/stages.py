"""The stages of a layer's backward: arguments, grids and macros of their launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel, Machine, Prepared
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels.cuda.backward.buffers import Buffers, Sizes, buffers_of
from quant_gru.kernels.cuda.backward.final_gemms import Matrix
from quant_gru.kernels.cuda.backward.inputs import Call
from quant_gru.kernels.cuda.backward.structs import (
    OPERANDS_C,
    SLOPES_BYTES_C,
    SLOPES_C,
    BackC,
    BackGridC,
    BackStepC,
    OuterC,
)
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.structure import byte_offset
from quant_gru.kernels.cuda.structs import KINDS

_THREADS = 256
_BLOCKS = 396  # blocks that fill a GPU: 3 per multiprocessor of the largest
_CODES_BLOCKS = 528  # blocks per activation: 4 per multiprocessor of the largest
_MAGIC = 12582912.0  # the magic number of float32, see gates/arithmetic.cuh


class Chunk(NamedTuple):
    """The launch that computes the derivatives of some rows.

    Attributes:
        first: The first row.
        rows: Number of rows.
        launch: The launch.
    """

    first: int
    rows: int
    launch: Prepared


class Stages:
    """The launches of a layer's backward, and the memory that their arguments point to.

    Args:
        sizes: The sizes of the layer.
        calls: The calls of its directions.
        machine: The machine that runs the kernels.

    Attributes:
        memory: The memory of a call.
        at: For each direction, the fields that point to tensors of a call, by name.
        buffers: The buffers of each direction.
        operands: Converts codes and weights to bytes and operands.
        derivatives: Compute the derivatives of all elements.
        recurrence: One launch; or one per direction, over the whole GPU or for a step.
        projections: Compute the gradients of both projections and of the biases.
        codes: For each direction, the record with the strides of the input.
        states: For each direction, the record of the recurrence, with the strides of the gradient.
    """

    def __init__(self, sizes: Sizes, calls: Sequence[Call], machine: Machine) -> None:
        self._sizes, self._calls, self._machine = sizes, calls, machine
        self.memory = Memory()
        self.at: list[dict[str, Memory]] = [{} for _ in calls]
        self.buffers = [buffers_of(sizes, self.memory) for _ in calls]
        self.codes: list[Any] = []
        self.states: list[Any] = []
        # records must live as long as the launches that read them
        self._keep: list[Any] = []
        self.operands = self._operands()
        self.derivatives = self._derivatives()
        self.recurrence = self._recurrence()
        self.projections = self._projections()
        # schedules outlive calls, and must not keep their own cache key (the plan) alive
        del self._calls

    def _point(self, matrix: Matrix | None, *fields: tuple[Any, str]) -> None:
        """Point fields of records to a buffer."""
        if matrix is not None:
            for record, name in fields:
                self.memory.point(record, name, matrix.start)

    def _read(self, direction: int, record: Any, **names: str) -> None:
        """Point fields of a record to tensors of a call, by name."""
        for name, tensor in names.items():
            self.at[direction].setdefault(tensor, Memory()).point(record, name)

    def _launch(
        self, source: str, function: str, macros: Mapping[str, object], grid: Grid, records: Any
    ) -> Prepared:
        all_macros = {**PLAIN, "DIRS": self._sizes.dirs, **macros}
        kernel = Kernel.of(f"backward/{source}", function, all_macros)
        return self._machine.prepare(kernel, grid, records)

    # operands

    def _operands(self) -> Prepared:
        sizes = self._sizes
        H, rows, layout = sizes.H, sizes.rows, sizes.fragments
        records: Any = OPERANDS_C[sizes.dirs]()
        self._keep.append(records)
        records.weights.H, records.taken.rows, records.taken.chunk = H, rows, sizes.chunk
        for d, buffers in enumerate(self.buffers):
            for i in range(2):
                self._weights_record(records.weights.w[2 * d + i], d, i)
                self._codes_record(records.taken.c[2 * d + i], d, i)
            if layout["count"]:
                self._fragments_record(records.fragments[d], d, buffers)
            self.codes.append(records.taken.c[2 * d])
        records.of_weights = -(-3 * H // 8)
        # a thread unpacks at least 8 codes
        records.of_codes = min(-(-rows * max(sizes.padded) // (8 * _THREADS)), _CODES_BLOCKS)
        # a warp transposes the tiles of a step
        of_fragments = 0
        if layout["count"]:
            of_fragments = -(-layout["count"] // (_THREADS // 32 * 128 * layout["MT"]))
        blocks = sizes.dirs * (2 * (records.of_weights + records.of_codes) + of_fragments)
        macros = {"OPERAND": sizes.precision.operand, "HALF": 1}
        return self._launch("operands", "operands", macros, Grid((blocks, 1), _THREADS), records)

    def _weights_record(self, p: Any, d: int, i: int) -> None:
        sizes, plan, buffers = self._sizes, self._calls[d].plan, self.buffers[d]
        of, act = (buffers.W, buffers.R)[i], (plan.x, plan.h)[i]
        if i:
            self._read(d, p, codes="R", scales="s_R", bias="Br", M="Mh", k="kh")
        else:
            self._read(d, p, codes="W", scales="s_W", bias="Bw", M="Mx", k="kx")
        p.kind = KINDS[(plan.weights.W, plan.weights.R)[i].dtype]
        p.K, p.padded, p.planes = (sizes.C, sizes.H)[i], sizes.padded[i], sizes.weight_planes[i]
        p.offset, p.zero, p.max_abs = byte_offset(act), act.zero_point, act.max_abs
        p.activation_planes, p.activation_scale = sizes.planes[i], act.scale
        self._point(of.channels, (p, "channels"))
        self._point(of.weights, (p, "bytes"))
        self._point(of.real_weights, (p, "real"))

    def _codes_record(self, c: Any, d: int, i: int) -> None:
        sizes, call, buffers = self._sizes, self._calls[d], self.buffers[d]
        of, act = (buffers.W, buffers.R)[i], (call.plan.x, call.plan.h)[i]
        if i:
            self._read(d, c, codes="out", before="h0")
        else:
            self._read(d, c, codes="x", values="values")
        c.kind, c.K = KINDS[act.container], (sizes.C, sizes.H)[i]
        c.padded, c.planes = sizes.padded[i], sizes.planes[i]
        c.offset, c.zero, c.scale = byte_offset(act), act.zero_point, act.scale
        c.N, c.states, c.reverse = sizes.N, i, call.reverse
        c.lo, c.hi = act.lo - act.zero_point, act.hi - act.zero_point
        self._point(of.codes, (c, "bytes"))
        self._point(of.real_codes, (c, "real"))

    def _fragments_record(self, p: Any, d: int, buffers: Buffers) -> None:
        plan = self._calls[d].plan
        self._read(d, p, codes="R")
        p.kind, p.H = KINDS[plan.weights.R.dtype], self._sizes.H
        for name, value in self._sizes.fragments.items():
            setattr(p, name, value)
        self._point(buffers.fragments, (p, "to"))
        if self._sizes.grid:
            self._read(d, p, scales="s_R")
            p.activation_scale = plan.h.scale

    # derivatives

    def _derivatives(self) -> list[Chunk]:
        sizes, form = self._sizes, self._calls[0].form
        kinds = SLOPES_BYTES_C if sizes.fused else SLOPES_C
        macros: dict[str, object] = {
            "REAL": form.real,
            "OPERAND": 0,
            "HALF": int(sizes.half),
            "QG_WORDS": int(form.words),
            **dict(zip(("TZ", "TR", "TG"), form.tables, strict=True)),
            **form.products,
        }
        found: list[Chunk] = []
        for first in range(0, sizes.rows, sizes.chunk):
            count = min(sizes.chunk, sizes.rows - first)
            records: Any = (kinds[form.real] * sizes.dirs)()
            self._keep.append(records)
            for d, p in enumerate(records):
                p.rows = count
                self._derivatives_record(p, d, first)
            if sizes.fused:
                launch = self._fused_derivatives(macros, records)
            else:
                launch = self._derivatives_of_sums(macros, records, count)
            found.append(Chunk(first, count, launch))
        return found

    def _derivatives_record(self, p: Any, d: int, first: int) -> None:
        sizes, call, buffers = self._sizes, self._calls[d], self.buffers[d]
        plan, q = call.plan, call.plan.frozen.quantizers
        self._read(d, p, lengths="lengths", held="held")
        p.N, p.H = sizes.N, sizes.H
        if sizes.fused:
            p.h_less = byte_offset(plan.h) - plan.h.zero_point
        else:
            self._read(d, p, out="out", h0="h0")
            p.first, p.T, p.reverse = first, sizes.T, call.reverse
            p.h_kind = KINDS[plan.h.container]
        for i, name in enumerate(("matmul.Wx", "matmul.Rh")):
            each, of, out = (p.W, p.R)[i], (buffers.W, buffers.R)[i], q[name]
            self._point(of.channels, (each, "channels"))
            each.lo, each.hi = out.lo - out.zero_point, out.hi - out.zero_point
            each.low, each.high = _MAGIC + each.lo, _MAGIC + each.hi
            if sizes.fused:
                each.padded = sizes.padded[i]
                self._point(of.codes, (each, "rows"))
                self._point(of.weights, (each, "weights"))
            else:
                each.columns, each.planes = sizes.columns[i], sizes.planes[i]
                each.weight_planes = sizes.weight_planes[i]
                self._point(of.sums, (each, "product"))
        gates = p.gates
        gates.s_z, gates.s_r, gates.s_g = (q[f"gate.{gate}_out"].scale for gate in "zrg")
        gates.s_h, gates.s_Rh = plan.h.scale, q["matmul.Rh"].scale
        gates.cell = call.numbers.frozen.cells[call.form.real]
        self._point(buffers.of_R, (p, "of_R"))
        self._point(buffers.of_W, (p, "of_W"))

    def _fused_derivatives(self, macros: Mapping[str, object], records: Any) -> Prepared:
        sizes, shape = self._sizes, self._sizes.fused
        assert shape is not None
        processors = self._machine.clusters()[1]
        grid, share = shape.grid(sizes.H, sizes.rows, sizes.dirs, processors)
        for p in records:
            p.share = share
        all_macros = {**macros, **shape.macros}
        return self._launch(
            "local_derivatives_bytes", "derivatives_bytes", all_macros, grid, records
        )

    def _derivatives_of_sums(
        self, macros: Mapping[str, object], records: Any, rows: int
    ) -> Prepared:
        sizes = self._sizes
        is_bytes = max(*sizes.planes, *sizes.weight_planes) == 1
        across = -(-sizes.H // 32) * sizes.dirs
        spread = min(-(-rows // 8), max(1, _BLOCKS // across))
        grid = Grid((spread, across), _THREADS, 1, self._calls[0].form.table_bytes)
        all_macros = {**macros, "BYTES": int(is_bytes)}
        return self._launch("local_derivatives", "derivatives_of", all_macros, grid, records)

    # recurrence

    def _recurrence(self) -> list[Prepared]:
        sizes = self._sizes
        kind = BackC if sizes.recurrence else BackGridC if sizes.grid else BackStepC
        records: Any = (kind * sizes.dirs)()
        self._keep.append(records)
        for d, b in enumerate(records):
            self._recurrence_record(b, d)
            self.states.append(b)
        if sizes.recurrence:
            shape = sizes.recurrence
            clusters = -(-sizes.N // shape.rows) * shape.blocks
            grid = Grid((clusters, sizes.dirs), shape.threads, shape.blocks, shape.shared_bytes)
            macros = shape.macros(sizes.half, 0, sizes.dirs)
            return [self._launch("recurrence", "back", macros, grid, records)]
        if sizes.grid:
            whole = sizes.grid
            blocks = (whole.groups * whole.blocks, -(-sizes.N // whole.rows))
            grid = Grid(blocks, whole.threads, whole.blocks, whole.shared_bytes, together=True)
            macros = whole.macros(sizes.half)
            return [
                self._launch("recurrence_grid", "back_grid", macros, grid, each) for each in records
            ]
        grid = Grid((sizes.N, -(-sizes.H // _THREADS)), _THREADS)
        macros = {"OPERAND": sizes.precision.operand, "HALF": int(sizes.half)}
        return [
            self._launch("recurrence_step", "back_step", macros, grid, each) for each in records
        ]

    def _recurrence_record(self, b: Any, d: int) -> None:
        sizes, call, buffers = self._sizes, self._calls[d], self.buffers[d]
        self._read(d, b, grad_out="grad_out", grad_last="grad_last", nan="nan", lengths="lengths")
        b.N, b.H = sizes.N, sizes.H
        self._point(buffers.of_R, (b, "derivatives"))
        self._point(buffers.d, (b, "d"))
        if buffers.fragments is not None:
            b.T, b.reverse = sizes.T, call.reverse
            self._read(d, b, dh0="dh0")
            self._point(buffers.fragments, (b, "weights"))
        else:
            self._read(d, b, dh="dh0")
            self._point(buffers.step, (b, "product"))
        if sizes.recurrence:
            self._read(d, b, scales="s_R")
        else:
            b.scale = call.plan.h.scale
            self._point(buffers.dRh, (b, "dRh"))

    # gradients of projections and biases

    def _projections(self) -> list[Prepared]:
        sizes, wanted = self._sizes, self._sizes.wanted
        H, dirs = sizes.H, sizes.dirs
        records: Any = (OuterC * dirs)()
        self._keep.append(records)
        for d, o in enumerate(records):
            self._projections_record(o, d)
        wide = 2 if H % 2 == 0 else 1
        operand = {"OPERAND": sizes.precision.operand, "HALF": int(sizes.half)}
        macros = {**operand, "WIDE": wide}
        blocks = (sizes.summed, -(-H // (32 * wide)) * dirs)
        grid = Grid(blocks, _THREADS, 1, 8 * 6 * 32 * 4 * wide)
        found = [self._launch("projection_gradients", "outer", macros, grid, records)]
        if wanted.bw or wanted.br:
            grid = Grid((-(-6 * H // 32), dirs), _THREADS, 1, 8 * 32 * 4)
            launch = self._launch("projection_gradients", "outer_sums", macros, grid, records)
            found.append(launch)
        return found

    def _projections_record(self, o: Any, d: int) -> None:
        sizes, plan, buffers = self._sizes, self._calls[d].plan, self.buffers[d]
        wanted = sizes.wanted
        self._read(d, o, bw="bw", br="br")
        o.rows, o.H, o.chunk, o.chunks = sizes.rows, sizes.H, sizes.summed_rows, sizes.summed
        o.scale_x, o.scale_h = plan.x.scale, plan.h.scale
        for name in ("of_R", "of_W", "d"):
            self._point(getattr(buffers, name), (o, name))
        self._point(buffers.partial, (o, "partial"))
        # the kernel skips a gradient whose pointer is null
        if wanted.x or wanted.W:
            self._point(buffers.dWx, (o, "dWx"))
        if sizes.recurrence and wanted.R:
            self._point(buffers.dRh, (o, "dRh"))
