"""The launches of a layer's backward, prepared once for each size; a call only sets addresses."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.launch import Grid, Kernel, Machine, Prepared
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.backward import Gradients, Wanted
from quant_gru.kernels.cuda.backward import grid_planner, planner
from quant_gru.kernels.cuda.backward.derivatives_planner import choose as slopes_shape
from quant_gru.kernels.cuda.backward.final_gemms import Factors, LastProducts, Matrix, multiply_into
from quant_gru.kernels.cuda.backward.inputs import Call, Precision, weights_of
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
from quant_gru.kernels.cuda.plan.structure import byte_offset, planes_of
from quant_gru.kernels.cuda.projection.int_mm import multiply_bytes
from quant_gru.kernels.cuda.structs import KINDS

_THREADS = 256
_FEWEST_ROWS = 32  # torch._int_mm takes more than 16
_PRODUCT_BYTES = 32 << 20  # of the int32 sums of W x, or of R h, at once
_SUMMED = 256  # chunks of rows whose sums are added in the end
_BLOCKS = 396  # that fill a GPU: 3 for each multiprocessor of the largest
_CODES_BLOCKS = 528  # of an activation: 4 for each multiprocessor of the largest
_CHANNEL_BYTES = 24
_MAGIC = 12582912.0  # of float32, see cell.cuh


class Schedule:
    """The launches of calls of some size, for the directions of a layer."""

    def __init__(
        self, calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Machine
    ) -> None:
        self._frozen = [weakref.ref(call.plan.frozen) for call in calls]
        self._wanted, self._precision, self._machine = wanted, precision, machine
        self._lock = threading.Lock()
        first = calls[0]
        self._T, self._N, self._C, self._H = first.T, first.N, first.C, first.H
        self._rows = first.T * first.N
        self._dirs = len(calls)
        self._reverse = [call.reverse for call in calls]
        self._half = precision.half and all(call.fits_half for call in calls)
        self._memory = Memory()
        # by direction: what a call brings, by name, and records with strides
        self._at: list[dict[str, Memory]] = [{} for _ in calls]
        self._strided: list[Any] = []
        self._taken: list[Any] = []
        self._parts: list[weakref.ref[Any] | None] = [None for _ in calls]
        w = first.plan.weights
        self._weight_planes = (planes_of(w.bits_W), planes_of(w.bits_R))
        self._planes = (planes_of(first.plan.x.bits), planes_of(first.plan.h.bits))
        # multiples of 16, as products of bytes want them
        x_padded, h_padded = (-(-max(K, 1) // 16) * 16 for K in (self._C, self._H))
        self._padded = (x_padded, h_padded)
        self._columns = tuple(
            -(-(3 * self._H if planes == 1 else 6 * self._H + 1) // 16) * 16
            for planes in self._weight_planes
        )
        row = 4 * max(c * p for c, p in zip(self._columns, self._planes, strict=True))
        form, clusters = first.form, machine.clusters()
        self._fused = None
        if max(*self._planes, *self._weight_planes) == 1:
            self._fused = slopes_shape(
                self._H, self._rows, self._padded, form.table_bytes, len(clusters) > 1
            )
        chunks = 1 if self._fused else max(1, -(-self._rows * row // _PRODUCT_BYTES))
        self._chunk = -(-self._rows // chunks)
        self._shape = planner.choose(
            self._H,
            self._N,
            self._dirs,
            precision.planes,
            2 if precision.exact_weights and self._weight_planes[1] == 2 else 1,
            clusters,
        )
        self._grid: grid_planner.GridShape | None = None
        if precision.operand == 0 and (self._shape is None or grid_planner.wanted()):
            self._grid = grid_planner.choose(self._H, self._N, machine.clusters())
            self._shape = None if self._grid else self._shape
        self._plan(calls)

    def belongs_to(self, calls: Sequence[Call]) -> bool:
        """Whether these calls have the plans for which this was prepared."""
        return all(ref() is call.plan.frozen for ref, call in zip(self._frozen, calls, strict=True))

    def run(self, calls: Sequence[Call]) -> list[Gradients]:
        """All gradients of a call."""
        device = calls[0].device
        memory = torch.empty(self._memory.size, dtype=torch.int8, device=device)
        dh0 = torch.empty((self._dirs * self._N, self._H), dtype=torch.float32, device=device)
        db = torch.empty((2 * self._dirs, 3 * self._H), dtype=torch.float32, device=device)
        dh0_at, db_at, H = dh0.data_ptr(), db.data_ptr(), self._H
        with self._lock:
            self._memory.move(memory.data_ptr())
            for d in range(self._dirs):
                at = self._at[d]
                at["dh0"].move(dh0_at + 4 * d * self._N * H)
                at["bw"].move(db_at + 24 * d * H)
                at["br"].move(db_at + 24 * d * H + 12 * H)
            # what has to live until all is launched
            keep = self._point(calls)
            found = self._start(memory, dh0, db)
            del keep
            return found

    def _point(self, calls: Sequence[Call]) -> list[Any]:
        """Let arguments follow what calls bring; returns what has to live until the launches."""
        keep: list[Any] = []
        for d, call in enumerate(calls):
            at = self._at[d]
            for name, tensor in call.tensors.items():
                at[name].move(0 if tensor is None else tensor.data_ptr())
            keep.append(self._point_at_weights(d, call))
            strided = self._strided[d]
            strided.stride_t, strided.stride_n, strided.stride_h = call.grad_out.stride()
            self._taken[d].step, self._taken[d].next = call.strides
        return keep

    def _point_at_weights(self, d: int, call: Call) -> dict[str, Tensor] | None:
        """Returns what has to live until all is launched."""
        kept = self._parts[d]
        if kept is not None and kept() is call.plan.weights:
            return None
        found, own = weights_of(call.plan)
        for name, tensor in found.items():
            self._at[d][name].move(tensor.data_ptr())
        self._parts[d] = weakref.ref(call.plan.weights) if own else None
        return found

    # What follows is done once.

    def _take(self, rows: int, columns: int, dtype: torch.dtype, *to: tuple[Any, str]) -> Matrix:
        """Memory of a call, and the fields of records that point to it."""
        start = self._memory.take(rows * columns * dtype.itemsize)
        for record, name in to:
            self._memory.point(record, name, start)
        return Matrix(start, rows, columns, dtype)

    def _read(self, direction: int, tensor: str, record: Any, name: str) -> None:
        """Let a field point to a tensor of a call."""
        self._at[direction].setdefault(tensor, Memory()).point(record, name)

    def _launch(
        self, source: str, function: str, macros: Mapping[str, object], grid: Grid, records: Any
    ) -> Prepared:
        kernel = Kernel.of(f"backward/{source}", function, {**PLAIN, "DIRS": self._dirs, **macros})
        return self._machine.prepare(kernel, grid, records)

    def _plan(self, calls: Sequence[Call]) -> None:
        H, dirs, rows, wanted = self._H, self._dirs, self._rows, self._wanted
        operand = {"OPERAND": self._precision.operand, "HALF": int(self._half)}
        dtype = self._precision.dtype
        shape, whole = self._shape, self._grid
        laid = shape or whole
        layout = laid.layout() if laid else {"count": 0}

        operands: Any = OPERANDS_C[dirs]()
        weights, taken, fragments = operands.weights, operands.taken, operands.fragments
        slopes: list[Any] = []
        starts = range(0, rows, self._chunk)
        kinds = SLOPES_BYTES_C if self._fused else SLOPES_C
        for start in starts:
            records: Any = (kinds[calls[0].form.real] * dirs)()
            for record in records:
                record.rows = min(self._chunk, rows - start)
                if not self._fused:
                    record.first = start
            slopes.append(records)
        back: Any = (BackC * dirs)()
        grids: Any = (BackGridC * dirs)()
        steps: Any = (BackStepC * dirs)()
        outer: Any = (OuterC * dirs)()
        weights.H, taken.rows, taken.chunk = H, rows, self._chunk
        # [direction][W x or R h]
        self._bytes: list[list[tuple[Matrix, Matrix, Matrix]]] = (
            [] if self._fused else [[] for _ in calls]
        )
        self._real_weights: list[list[Matrix]] = [[] for _ in calls]
        self._real_codes: list[list[Matrix]] = [[] for _ in calls]
        self._outer: list[tuple[Matrix, Matrix]] = []
        self._R_product: list[Matrix] = []
        self._absent: list[Matrix] = []
        self._d: list[Matrix] = []
        self._steps = steps
        chunk = max(64, -(-rows // _SUMMED))
        chunks = -(-rows // chunk)
        words = 2 if self._half else 4
        for d, call in enumerate(calls):
            plan, q = call.plan, call.plan.frozen.quantizers
            for i, act in enumerate((plan.x, plan.h)):
                K, padded, planes = (self._C, H)[i], self._padded[i], self._planes[i]
                p, c = weights.w[2 * d + i], taken.c[2 * d + i]
                codes = (plan.weights.W, plan.weights.R)[i]
                for tensor, name in zip(
                    (("W", "s_W", "Bw", "Mx", "kx"), ("R", "s_R", "Br", "Mh", "kh"))[i],
                    ("codes", "scales", "bias", "M", "k"),
                    strict=True,
                ):
                    self._read(d, tensor, p, name)
                p.kind, p.K, p.padded, p.planes = (
                    KINDS[codes.dtype],
                    K,
                    padded,
                    self._weight_planes[i],
                )
                p.offset, p.zero, p.max_abs = byte_offset(act), act.zero_point, act.max_abs
                p.activation_planes, p.activation_scale = planes, act.scale
                of_channels = [(records[d].R if i else records[d].W) for records in slopes]
                self._take(
                    3 * H,
                    _CHANNEL_BYTES,
                    torch.int8,
                    (p, "channels"),
                    *((each, "channels") for each in of_channels),
                )
                if (wanted.x, not layout["count"])[i]:
                    self._real_weights[d].append(self._take(3 * H, K, dtype, (p, "real")))
                self._read(d, ("x", "out")[i], c, "codes")
                if i:
                    self._read(d, "h0", c, "before")
                else:
                    self._read(d, "values", c, "values")
                    self._taken.append(c)
                c.kind, c.K, c.padded, c.planes = KINDS[act.container], K, padded, planes
                c.offset, c.zero, c.N, c.states, c.reverse = (
                    p.offset,
                    p.zero,
                    self._N,
                    i,
                    call.reverse,
                )
                c.scale = act.scale
                c.lo, c.hi = act.lo - act.zero_point, act.hi - act.zero_point
                if (wanted.W, wanted.R)[i]:
                    self._real_codes[d].append(self._take(rows, K, dtype, (c, "real")))
                if self._fused:
                    (product,) = of_channels
                    product.padded = padded
                    self._take(rows, padded, torch.int8, (c, "bytes"), (product, "rows"))
                    self._take(3 * H, padded, torch.int8, (p, "bytes"), (product, "weights"))
                else:
                    sums = planes * self._chunk + _FEWEST_ROWS
                    products = [(each, "product") for each in of_channels]
                    taken_rows = planes * rows + _FEWEST_ROWS
                    self._bytes[d].append(
                        (
                            self._take(taken_rows, padded, torch.int8, (c, "bytes")),
                            self._take(self._columns[i], padded, torch.int8, (p, "bytes")),
                            self._take(sums, self._columns[i], torch.int32, *products),
                        )
                    )
                    for each in of_channels:
                        each.columns, each.planes = self._columns[i], planes
                        each.weight_planes = self._weight_planes[i]
                out = q[("matmul.Wx", "matmul.Rh")[i]]
                for each in of_channels:
                    each.lo, each.hi = out.lo - out.zero_point, out.hi - out.zero_point
                    each.low, each.high = _MAGIC + each.lo, _MAGIC + each.hi
            for records in slopes:
                p = records[d]
                for name in ("lengths", "held"):
                    self._read(d, name, p, name)
                p.N, p.H = self._N, H
                if self._fused:
                    p.h_less = byte_offset(plan.h) - plan.h.zero_point
                else:
                    self._read(d, "out", p, "out")
                    self._read(d, "h0", p, "h0")
                    p.T, p.reverse = self._T, call.reverse
                    p.h_kind = KINDS[plan.h.container]
                gates = p.gates
                gates.s_z, gates.s_r, gates.s_g = (q[f"gate.{gate}_out"].scale for gate in "zrg")
                gates.s_h, gates.s_Rh = plan.h.scale, q["matmul.Rh"].scale
                gates.cell = call.numbers.frozen.cells[call.form.real]
            o, b = outer[d], (back if shape else grids if whole else steps)[d]
            self._strided.append(b)
            for name in ("grad_out", "grad_last", "nan", "lengths"):
                self._read(d, name, b, name)
            b.N, b.H = self._N, H
            of_R = [(records[d], "of_R") for records in slopes]
            of_W = [(records[d], "of_W") for records in slopes]
            self._take(rows * H, words, torch.int32, *of_R, (b, "slopes"), (o, "of_R"))
            self._take(rows * H, words, torch.int32, *of_W, (o, "of_W"))
            self._d.append(self._take(rows * H, 1, torch.float32, (b, "d"), (o, "d")))
            dWx = self._take(rows, 3 * H, dtype, *([(o, "dWx")] if wanted.x or wanted.W else []))
            if layout["count"]:
                b.T, b.reverse = self._T, call.reverse
                self._read(d, "dh0", b, "dh0")
                p = fragments[d]
                self._read(d, "R", p, "codes")
                p.kind, p.H = KINDS[plan.weights.R.dtype], H
                for name, value in layout.items():
                    setattr(p, name, value)
                self._take(layout["count"], 1, torch.int32, (b, "weights"), (p, "to"))
            if shape:
                self._read(d, "s_R", b, "scales")
                dRh = self._take(rows, 3 * H, dtype, *([(o, "dRh")] if wanted.R else []))
            elif whole:
                self._read(d, "s_R", p, "scales")
                b.scale = p.activation_scale = plan.h.scale
                dRh = self._take(rows, 3 * H, dtype, (b, "dRh"))
                self._absent.append(Matrix(dRh.start, rows, 3 * H // 2, torch.int32))
            else:
                b.scale = plan.h.scale
                self._read(d, "dh0", b, "dh")
                dRh = self._take(rows, 3 * H, dtype, (b, "dRh"))
                self._R_product.append(self._take(self._N, H, torch.float32, (b, "product")))
            self._outer.append((dWx, dRh))
            if wanted.bw or wanted.br:
                self._take(chunks * 6, H, torch.float32, (o, "partial"))
            for name in ("bw", "br"):
                self._read(d, name, o, name)
            o.rows, o.H, o.chunk, o.chunks = rows, H, chunk, chunks
            o.scale_x, o.scale_h = plan.x.scale, plan.h.scale

        operands.of_weights = -(-3 * H // 8)
        # a thread takes at least 8 codes
        operands.of_codes = min(-(-rows * max(self._padded) // (8 * _THREADS)), _CODES_BLOCKS)
        # a warp takes the tiles of a step
        of_fragments = -(-layout["count"] // (_THREADS // 32 * 128 * layout["MT"])) if laid else 0
        blocks = dirs * (2 * (operands.of_weights + operands.of_codes) + of_fragments)
        macros: dict[str, object] = {"OPERAND": self._precision.operand, "HALF": 1}
        grid = Grid((blocks, 1), _THREADS)
        self._before = self._launch("operands", "operands", macros, grid, operands)
        form = calls[0].form
        macros = {
            "REAL": form.real,
            "OPERAND": 0,
            "HALF": int(self._half),
            "QG_WORDS": int(form.words),
            **dict(zip(("TZ", "TR", "TG"), form.tables, strict=True)),
            **form.products,
        }
        self._slopes = []
        if self._fused:
            grid, share = self._fused.grid(H, rows, dirs, self._machine.clusters()[1])
            for p in slopes[0]:
                p.share = share
            macros |= self._fused.macros
            launch = self._launch(
                "local_derivatives_bytes", "slopes_bytes", macros, grid, slopes[0]
            )
            self._slopes.append((0, rows, launch))
        else:
            macros["BYTES"] = int(max(*self._planes, *self._weight_planes) == 1)
            across = -(-H // 32) * dirs
            for start, records in zip(starts, slopes, strict=True):
                count = min(self._chunk, rows - start)
                spread = min(-(-count // 8), max(1, _BLOCKS // across))
                grid = Grid((spread, across), _THREADS, 1, form.table_bytes)
                launch = self._launch("local_derivatives", "slopes_of", macros, grid, records)
                self._slopes.append((start, count, launch))
        if shape:
            clusters = -(-self._N // shape.rows) * shape.blocks
            grid = Grid((clusters, dirs), shape.threads, shape.blocks, shape.shared_bytes)
            self._back = [
                self._launch("recurrence", "back", shape.macros(self._half, 0, dirs), grid, back)
            ]
        elif whole:
            blocks_of = (whole.groups * whole.blocks, -(-self._N // whole.rows))
            grid = Grid(blocks_of, whole.threads, whole.blocks, whole.shared_bytes, together=True)
            self._back = [
                self._launch("recurrence_grid", "back_grid", whole.macros(self._half), grid, each)
                for each in grids
            ]
        else:
            grid = Grid((self._N, -(-H // _THREADS)), _THREADS)
            self._back = [
                self._launch("recurrence_step", "back_step", operand, grid, each) for each in steps
            ]
        wide = 2 if H % 2 == 0 else 1
        macros = {**operand, "WIDE": wide}
        grid = Grid((chunks, -(-H // (32 * wide)) * dirs), _THREADS, 1, 8 * 6 * 32 * 4 * wide)
        self._after = [self._launch("projection_gradients", "outer", macros, grid, outer)]
        if wanted.bw or wanted.br:
            grid = Grid((-(-6 * H // 32), dirs), _THREADS, 1, 8 * 32 * 4)
            self._after.append(
                self._launch("projection_gradients", "outer_sums", macros, grid, outer)
            )
        self._products = LastProducts(
            self._machine, self._memory, [self._factors(d) for d in range(dirs)]
        )
        # what follows the products of bytes, and what comes before, where it is launches alone
        self._rest = self._machine.join([*self._back, *self._after]) if shape else None
        self._whole = None
        if self._rest is not None and not any(self._bytes):
            launches = [self._before, *(launch for _, _, launch in self._slopes), self._rest]
            if self._products.launch is not None:
                launches.append(self._products.launch)
            self._whole = self._machine.join(launches)
        self._keep = (operands, slopes, back, grids, steps, outer)

    def _factors(self, d: int) -> dict[str, Factors]:
        """What the last products of a direction multiply."""
        wanted, (dWx, dRh) = self._wanted, self._outer[d]
        found: dict[str, Factors] = {}
        if wanted.x:
            found["x"] = Factors(dWx, self._real_weights[d][0], False)
        if wanted.W:
            found["W"] = Factors(dWx, self._real_codes[d][0], True)
        if wanted.R:
            found["R"] = Factors(dRh, self._real_codes[d][-1], True)
        return found

    # What follows is done at each call.

    def _start(self, memory: Tensor, dh0: Tensor, db: Tensor) -> list[Gradients]:
        stream, wanted, products = self._machine.stream(), self._wanted, self._products
        made: list[dict[str, Tensor]] = []
        for d, rooms in enumerate(products.results):
            made.append({name: products.new(d, name, memory.device) for name in rooms})
            for name, to in rooms.items():
                to.move(made[d][name].data_ptr())
        if self._whole is not None:
            self._whole.start(stream)
        else:
            self._start_in_parts(memory, stream)
        real = memory.view(self._precision.dtype)
        biases, states = db.unbind(), [dh0] if self._dirs == 1 else dh0.chunk(self._dirs)
        results = []
        for d in range(self._dirs):

            def found(name: str, d: int = d) -> Tensor:
                return made[d][name] if made[d] else products.made(d, name, real)

            results.append(
                Gradients(
                    found("x").view(self._T, self._N, self._C) if wanted.x else None,
                    states[d],
                    found("W") if wanted.W else None,
                    found("R") if wanted.R else None,
                    biases[2 * d] if wanted.bw else None,
                    biases[2 * d + 1] if wanted.br else None,
                    self._state_gradients(d, memory) if wanted.h else None,
                )
            )
        return results

    def _start_in_parts(self, memory: Tensor, stream: int) -> None:
        """All launches, where there are products of torch's in between."""
        self._start_first_parts(memory, stream)
        if self._products.launch is not None:
            self._products.launch.start(stream)

    def _start_first_parts(self, memory: Tensor, stream: int) -> None:
        self._before.start(stream)
        words = memory.view(torch.int32)
        for first, count, launch in self._slopes:
            for each in self._bytes:
                for (rows, weights, sums), planes in zip(each, self._planes, strict=True):
                    taken = max(planes * count, _FEWEST_ROWS)
                    multiply_bytes(
                        rows.of(memory, planes * first, taken),
                        weights.of(memory).t(),
                        sums.of(words, 0, taken),
                    )
            launch.start(stream)
        if self._rest is not None:
            self._rest.start(stream)
            return
        if self._grid is not None:
            # one after the other: each may need the whole GPU
            for absent, launch in zip(self._absent, self._back, strict=True):
                absent.of(words).fill_(-1)
                launch.start(stream)
        else:
            for d, reverse in enumerate(self._reverse):
                self._back_steps(d, reverse, memory, stream)
        for launch in self._after:
            launch.start(stream)

    def _state_gradients(self, d: int, memory: Tensor) -> Tensor:
        """Those of the states after each step; the rest of the memory is not kept for them."""
        found = self._d[d].of(memory.view(torch.float32)).clone()
        return found.view(self._T, self._N, self._H)

    def _back_steps(self, d: int, reverse: bool, memory: Tensor, stream: int) -> None:
        """A product and a launch for each step: for weights that fit no registers."""
        real = memory.view(self._precision.dtype)
        R, dRh = self._real_weights[d][-1].of(real), self._outer[d][1]
        product = self._R_product[d].of(memory.view(torch.float32))
        p, launch = self._steps[d], self._back[d]
        p.started = 0
        for t in range(self._T) if reverse else reversed(range(self._T)):
            p.t = t
            launch.start(stream)
            multiply_into(dRh.of(real, t * self._N, self._N), R, product)
            p.started = 1
        p.t = -1
        launch.start(stream)
