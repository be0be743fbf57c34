"""The launches of a whole call with so many steps and rows, prepared once.

A call quantizes its input and runs each layer; the recurrence takes and gives real values, NaN
included. All that a launch needs but addresses is kept.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from kernel_runtime.cuda.launch import Grid, Kernel, Machine, Prepared
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.backward import Kept
from quant_gru.integer.plan import CellPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.forward.executor import (
    FEW_ROWS,
    load_products,
    multiply_bytes,
    numbers_of,
)
from quant_gru.kernels.cuda.forward.native_call import Memories, Sizes, makers_of, native_call
from quant_gru.kernels.cuda.machine import PLAIN
from quant_gru.kernels.cuda.plan.structure import Form
from quant_gru.kernels.cuda.plan.tensors import Numbers
from quant_gru.kernels.cuda.projection.from_codes import Resident, block_of, projection
from quant_gru.kernels.cuda.projection.from_reals import (
    FEWEST_ROWS,
    Block,
    Groups,
    choose_for,
    easy_division,
    few_projection,
    fill_division,
    kernel_of,
    reads_reals,
    real_projection,
)
from quant_gru.kernels.cuda.projection.overlap import Beside, beside
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.recurrence.direction_fusion import launches_of
from quant_gru.kernels.cuda.structs import (
    KINDS,
    RECURRENT_C,
    BetweenC,
    ProjectC,
    TakeC,
)

_THREADS = 256
_ROWS = _THREADS // 32  # of a block of the border's kernels
_TAKEN = 2 * _ROWS  # of one that takes real values
_TAKE = Kernel.of("boundary/quantize_input", "take", PLAIN)
_BETWEEN = Kernel.of("boundary/requantize_layers", "between", PLAIN)
_FINISH, _FEW = (Kernel.of("projection/int_mm", name, PLAIN) for name in ("finish", "project"))


class Cell:
    """What calls need of one layer and direction."""

    def __init__(self, plan: CellPlan, between: Sequence[WeightedSum]) -> None:
        self.numbers: Numbers = numbers_of(plan)
        self.x, self.h = plan.x, plan.h
        self.finite = plan.weights.finite.contiguous()
        self.between = between


class Group(NamedTuple):
    """The directions of a layer that share a launch of the recurrence.

    Attributes:
        cells: The directions.
        form: Structure of the launch.
        shape: How it is laid over a GPU.
    """

    cells: Sequence[Cell]
    form: Form
    shape: planner.Shape


def schedule_of(
    machine: Machine,
    layers: Sequence[Sequence[Cell]],
    T: int,
    N: int,
    with_h0: bool,
    keeps: bool,
) -> Schedule | None:
    """A schedule, or None where weights fit no registers.

    Args:
        machine: Where kernels run.
        layers: Directions of each layer.
        T: Steps.
        N: Rows.
        with_h0: Whether states before the first step are given.
        keeps: Whether calls keep what a backward needs.
    """
    clusters = machine.clusters()
    chosen = []
    for cells in layers:
        layer = []
        for group, form in launches_of(cells, N, clusters):
            shape = planner.choose(form, group[0].numbers.H, N, len(group), clusters)
            if shape is None:
                return None
            layer.append(Group(group, form, shape))
        chosen.append(layer)
    return Schedule(machine, chosen, T, N, with_h0, keeps)


class _Product:
    """A product of bytes: codes of an input times the weights of a direction."""

    def __init__(self, rows: _Rows, weights: Tensor) -> None:
        self.rows, self.weights = rows, weights
        self.memory = Memory()
        self.result: Any = None

        rows.multiplied = True

    def start(self, stream: int) -> None:
        """Multiply."""
        multiply_bytes(self.rows.tensor, self.weights, self.result)


class _Rows:
    """Codes of an input as bytes, (planes * T * N, padded features)."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        self.start = 0
        self.records: list[Any] = []  # whose `bytes` are these
        self.multiplied = False
        self.tensor: Any = None


class Schedule:
    """The launches of a call.

    Args:
        machine: Where kernels run.
        layers: Of each layer the directions that share a launch of the recurrence.
        T: Steps.
        N: Rows.
        with_h0: Whether states before the first step are given.
        keeps: Whether calls keep what a backward needs.

    Attributes:
        call: What runs calls whose tensors are as kernels read them; None where torch multiplies
            between launches.
    """

    def __init__(
        self,
        machine: Machine,
        layers: Sequence[Sequence[Group]],
        T: int,
        N: int,
        with_h0: bool,
        keeps: bool,
    ) -> None:
        self._machine, self._T, self._N, self._keeps = machine, T, N, keeps
        directions = [cell for group in layers[0] for cell in group.cells]
        self._layers, self._directions = len(layers), len(directions)
        self._H = directions[0].numbers.H
        self._lock = threading.Lock()
        self._memory, self._x = Memory(), Memory()
        # codes of states have memory of their own, which may be kept
        self._codes = Memory()
        self._kept: list[tuple[int, torch.dtype]] = []
        self._h0, self._lengths = Memory(), Memory()
        self._y, self._h_n, self._nan = Memory(), Memory(), Memory()
        self._rows: list[_Rows] = []
        self._products: list[_Product] = []
        self._steps: list[Prepared | _Product] = []
        self._takes: list[Any] = []
        self._reals: list[Any] = []
        self._layout: tuple[tuple[int, ...], int] | None = None
        self._keep: list[Any] = []
        self._projected = [
            self._memory.take(4 * max(s.projected_words(c.numbers.form, T, N) for c, s in sized))
            for sized in zip(*(_by_direction(layer) for layer in layers), strict=True)
        ]
        below: Any = None
        for index, layer in enumerate(layers):
            below = self._add_layer(index, layer, below, with_h0)
        for rows in self._rows:
            rows.start = self._memory.take(rows.shape[0] * rows.shape[1])
            for record in rows.records:
                self._memory.point(record, "bytes", rows.start)
        if self._products and not capturing(directions[0].numbers.device):
            # while kernels are compiled, which are waited for next
            load_products(directions[0].numbers.device)
        self._steps = _joined(self._machine, self._steps)
        self._multiplied = [rows for rows in self._rows if rows.multiplied]
        numbers = directions[0].numbers
        sizes = Sizes(
            T,
            N,
            numbers.C,
            numbers.H,
            self._layers,
            self._directions,
            self._memory.size,
            self._codes.size,
        )
        # codes of one cell are a tensor by themselves
        container = self._kept[0][1] if len(self._kept) == 1 else None
        self._made = makers_of(sizes, container, numbers.device)
        self.call = self._native_call(sizes, numbers.device)

    def run(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, kept: Kept | None
    ) -> tuple[Tensor, Tensor]:
        """Start all launches; arguments and results as `Stack.run` has them."""
        if lengths is not None:
            lengths = lengths.to(x.device, torch.int64).contiguous()
        result: Any = NotImplemented
        if self.call is not None:
            result = self.call.run(x, h0, lengths)
        if result is NotImplemented:
            if x.stride(2) != 1 or x.is_neg():
                x = x.detach().resolve_neg().contiguous()
            if h0 is not None:
                h0 = h0.detach().contiguous().resolve_neg()
            run = self._run if self.call is None else self.call.run
            result = run(x, h0, lengths)
        if kept is not None:
            _, _, kept.nan, codes = result
            self._hand_on(codes, kept)
        return result[0], result[1]

    def _run(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """What `call` does, where torch multiplies between launches."""
        made = self._made
        y, h_n, nan, codes = made.y(), made.h_n(), None, None
        if self._keeps:
            space, nan, codes = made.space(), made.nan(), made.codes()
        else:
            space = made.whole_space()
        with self._lock:
            base = space.data_ptr()
            self._memory.move(base)
            self._codes.move(base + self._memory.size if codes is None else codes.data_ptr())
            for rows in self._multiplied:
                rows.tensor = space.as_strided(rows.shape, (rows.shape[1], 1), rows.start)
            for each in self._products:
                shape = (each.rows.shape[0], each.weights.shape[1])
                each.result = torch.empty(shape, dtype=torch.int32, device=x.device)
                each.memory.move(each.result.data_ptr())
            self._move_input(x)
            if h0 is not None:
                self._h0.move(h0.data_ptr())
            if lengths is not None:
                self._lengths.move(lengths.data_ptr())
            self._nan.move(0 if nan is None else nan.data_ptr())
            self._y.move(y.data_ptr())
            self._h_n.move(h_n.data_ptr())
            stream = self._machine.stream()
            for step in self._steps:
                step.start(stream)
            for rows in self._multiplied:
                rows.tensor = None
            for each in self._products:
                each.result = None
        return y, h_n, nan, codes

    def _native_call(self, sizes: Sizes, device: torch.device) -> _native.Call | None:
        launches = self._steps[0]
        if len(self._steps) > 1 or isinstance(launches, _Product):
            return None
        memories = Memories(
            self._x,
            self._h0,
            self._lengths,
            self._y,
            self._h_n,
            self._nan,
            self._codes,
            self._memory,
        )
        inputs = [(take, _may_take_fours(take)) for take in self._takes]
        inputs += [(each, True) for each in self._reals]
        return native_call(
            self._machine,
            launches,
            memories,
            inputs,
            sizes,
            self._made,
            device,
            keeps=self._keeps,
            keep=self._keep,
        )

    def _hand_on(self, codes: Tensor, kept: Kept) -> None:
        """Hands on the codes of states, which lie in some memory."""
        if len(self._kept) == 1:
            kept.out.append(codes)
            return
        T, N, H = self._T, self._N, self._H
        for start, container in self._kept:
            part = codes if container is torch.int8 else codes.view(container)
            at = start // container.itemsize
            kept.out.append(part.as_strided((T, N, H), (N * H, H, 1), at))

    def _move_input(self, x: Tensor) -> None:
        address, strides = x.data_ptr(), x.stride()
        self._x.move(address)
        if (strides, address % 16) != self._layout:
            self._layout = strides, address % 16
            aligned = not (address % 16 or strides[0] % 4 or strides[1] % 4 or x.shape[2] % 4)
            for take in self._takes:
                take.step, take.next = strides[:2]
                take.fours = aligned and _may_take_fours(take)
            for each in self._reals:
                each.step, each.next = strides[:2]
                each.fours = aligned

    def _launch(self, kernel: Kernel, grid: Grid, arguments: Any) -> None:
        self._steps.append(self._machine.prepare(kernel, grid, arguments))

    def _add_layer(
        self,
        index: int,
        layer: Sequence[Group],
        below: _Below | None,
        with_h0: bool,
    ) -> _Below:
        # the last layer's codes are for a backward
        ends = planner.Ends(values=index == self._layers - 1, codes=index < self._layers - 1)
        ends = ends._replace(codes=ends.codes or self._keeps)
        cells = [cell for group in layer for cell in group.cells]
        T, N, H = self._T, self._N, cells[0].numbers.H
        # a launch waits for one projection, which goes through time forwards
        first, ahead = layer[0], None
        if len(first.cells) == 1:
            ahead = beside(self._machine, first.cells[0].numbers, first.shape, T, N)
        for i, group in enumerate(layer):
            # tensors that it reads are made while it is compiled
            kernel, _ = self._recurrence(group, ends, None if i else ahead)
            self._machine.expect(kernel)
        this = _Below(cells, self._memory.take(N * _padded_steps(T)))
        inputs: list[_Input] = []
        for direction, (cell, shape) in enumerate(_by_direction(layer)):
            waits = ahead and direction == 0
            if below is None and not waits and (reals := self._reals_of(cell, shape, this.nan)):
                inputs.append(reals)
                continue
            like = [
                i
                for i, other in enumerate(cells[:direction])
                if inputs[i].nan is None and _same_input(cell, other)
            ]
            inputs.append(inputs[like[0]] if like else self._add_input(cell, this.nan, below))
        for cell in cells:
            this.out.append(self._codes.take(T * N * H * cell.h.container.itemsize * ends.codes))
            self._kept.append((this.out[-1], cell.h.container))
            if with_h0:
                this.h0_nan.append(self._memory.take(N))
        direction = 0
        for group in layer:
            self._add_group(
                this, group, inputs, direction, index, ends, None if direction else ahead
            )
            direction += len(group.cells)
        return this

    def _reals_of(self, cell: Cell, shape: planner.Shape, nan: int) -> _Input | None:
        """Real values, where the projection reads them itself."""
        found, T, N = _Input(), self._T, self._N
        found.nan = nan
        if not reads_reals(cell.numbers):
            return None
        if T * N > FEWEST_ROWS:
            found.block = choose_for(self._machine, cell.numbers, shape, T, N)
            if found.block:
                self._machine.expect(kernel_of(found.block, cell.numbers, shape, cell.x))
        return found if found.block or T * N <= FEW_ROWS else None

    def _add_input(self, cell: Cell, nan: int, below: _Below | None) -> _Input:
        """Codes of a layer's input, from real values or from the layer below."""
        numbers, T, N = cell.numbers, self._T, self._N
        record: Any = TakeC() if below is None else BetweenC()
        found = _Input()
        if T * N > FEW_ROWS:
            padded = numbers.padded_C
            found.rows = _Rows((numbers.x_planes * T * N, padded))
            self._rows.append(found.rows)
            record.to.planes, record.to.padded = numbers.x_planes, padded
            record.to.x_offset = numbers.x_offset
            found.rows.records.append(record.to)
            found.target = record.to
        else:
            found.codes = self._memory.take(T * N * numbers.C * cell.x.container.itemsize)
            self._memory.point(record.to, "codes", found.codes)
        self._fill_target(record.to, cell.x, N, T, numbers.C, _padded_steps(T))
        self._memory.point(record.to, "nan", nan)
        if below is None:
            self._x.point(record, "real")
            self._takes.append(record)
            _fill_scale(record, cell.x)
            if easy_division(cell.x):
                fill_division(record.division, cell.x)
            kernel, rows = _TAKE, _TAKEN
        else:
            self._fill_flags(record.below, below)
            for d, (under, each) in enumerate(zip(below.cells, cell.between, strict=True)):
                self._codes.point(record, "codes", below.out[d], d)
                record.kind[d], record.zero[d] = KINDS[under.h.container], under.h.zero_point
                record.M[d], record.k[d] = int(each.multipliers[0]), int(each.shift)
            x = cell.x
            record.H, record.directions = below.cells[0].numbers.H, len(below.cells)
            record.lo, record.hi = x.lo - x.zero_point, x.hi - x.zero_point
            record.out_zero = x.zero_point
            kernel, rows = _BETWEEN, _ROWS
        self._launch(kernel, Grid((-(-T * N // rows), 1), _THREADS), record)
        return found

    def _add_group(
        self,
        this: _Below,
        group: Group,
        inputs: Sequence[_Input],
        first: int,
        layer: int,
        ends: planner.Ends,
        ahead: Beside | None,
    ) -> None:
        """The directions that share a launch of the recurrence, and a projection it is ahead of."""
        cells, form, shape = group
        records: Any = (RECURRENT_C[form.recurrence.real] * len(cells))()
        for i, cell in enumerate(cells):
            d = first + i
            record = records[i]
            counts = self._add_projection(cell, shape, inputs[d], d, ahead)
            if counts is not None:
                self._memory.point(record, "counts", counts)
            fragments, bias, m = cell.numbers.fragments(shape.features, shape.units)
            exact = cell.numbers.exact_float[1]
            self._keep += [fragments, bias, m, exact]
            self._fill_sequence(record.s, cell, reverse=d == 1)
            self._codes.point(record.s, "out", this.out[d])
            self._fill_ends(record.ends, this, layer, d)
            self._lengths.point(record.s, "lengths")
            record.weights, record.bias, record.m = (
                each.data_ptr() for each in (fragments, bias, m)
            )
            record.exact_float = exact.data_ptr()
            cell.numbers.frozen.fill(record, form)
            self._memory.point(record, "Wx", self._projected[d])
        self._launch(*self._recurrence(group, ends, ahead), records)

    def _recurrence(
        self, group: Group, ends: planner.Ends, ahead: Beside | None
    ) -> tuple[Kernel, Grid]:
        (cells, form, shape), N = group, self._N
        clusters = self._machine.clusters()
        # without clusters no launch starts early, and some chips have too little memory for it
        alone = len(clusters) > 1 and shape.tiles(N) * len(cells) <= clusters[shape.blocks]
        return planner.layout(
            shape,
            form,
            cells[0].numbers.H,
            N,
            len(cells),
            ends=ends,
            early=alone,
            stretch=ahead.stretch if ahead else 0,
        )

    def _add_projection(
        self,
        cell: Cell,
        shape: planner.Shape,
        given: _Input,
        direction: int,
        ahead: Beside | None,
    ) -> int | None:
        """Where it counts what is there, if the recurrence is ahead of it."""
        numbers, T, N = cell.numbers, self._T, self._N
        if given.nan is not None:
            kernel, grid, record, keep = (
                real_projection(numbers, shape, T, N, cell.x, given.block)
                if given.block
                else few_projection(numbers, shape, T, N, cell.x)
            )
            self._x.point(record, "real")
            self._reals.append(record)
            self._memory.point(record, "nan", given.nan)
            self._memory.point(record, "Wx", self._projected[direction])
            self._keep += [numbers, *keep]
            self._launch(kernel, grid, record)
            return None
        if given.rows is not None and numbers.projects_bytes:
            counts = None
            tile = ahead.block if ahead else block_of(self._machine, numbers, shape, T, N)
            processors = self._machine.clusters()[1]
            kernel, grid, record, keep = projection(numbers, shape, T, N, tile, processors)
            given.rows.records.append(record)
            self._memory.point(record, "Wx", self._projected[direction])
            if ahead:
                grid, record.stretch = ahead.grid(numbers, shape), ahead.stretch * N
                given.target.stretches = ahead.stretches(T)
                counts = self._memory.take(4 * given.target.stretches)
                self._memory.point(given.target, "counts", counts)
                self._memory.point(record, "counts", counts)
            self._keep += [numbers, *keep]
            # weights that stay are loaded while the codes are made
            self._launch(kernel, grid._replace(early=isinstance(tile, Resident)), record)
            return counts
        strips = shape.strips(N)
        p: Any = ProjectC()
        p.W = numbers.W
        self._fill_sequence(p.s, cell, reverse=False)
        self._memory.point(p, "Wx", self._projected[direction])
        p.wide, p.NB, p.tiles = numbers.form.wide_input, shape.strip, strips
        p.groups = shape.units // 16
        self._keep.append(numbers)
        if given.rows is None:
            self._memory.point(p.s, "x", given.codes)
            units = _THREADS // 32
            self._launch(_FEW, Grid((T * N, -(-numbers.H // units)), _THREADS), p)
            return None
        weights, folded = numbers.gemm[0]
        product = _Product(given.rows, weights)
        self._products.append(product)
        self._steps.append(product)
        p.planes_x, p.planes_W = numbers.x_planes, numbers.W_planes
        p.padded_C, p.columns = weights.shape
        p.x_offset, p.folded = numbers.x_offset, folded.data_ptr()
        self._keep += [weights, folded]
        product.memory.point(p, "product")
        threads = min(_THREADS, -(-shape.units * shape.strip // 32) * 32)
        self._launch(_FINISH, Grid((T * strips, 1), threads), p)
        return None

    def _fill_sequence(self, s: Any, cell: Cell, *, reverse: bool) -> None:
        s.x_kind, s.h_kind = KINDS[cell.x.container], KINDS[cell.h.container]
        s.T, s.N, s.C, s.H = self._T, self._N, cell.numbers.C, cell.numbers.H
        s.reverse = reverse

    def _fill_ends(self, ends: Any, this: _Below, layer: int, d: int) -> None:
        """Real values of the states of direction d of a layer."""
        cells, cell, N = this.cells, this.cells[d], self._N
        H, state = cell.numbers.H, layer * len(cells) + d
        if this.h0_nan:
            self._h0.point(ends, "h0", 4 * state * N * H)
            self._memory.point(ends, "h0_nan", this.h0_nan[d])
        self._y.point(ends, "values", 4 * d * H)
        self._h_n.point(ends, "last", 4 * state * N * H)
        self._nan.point(ends, "last_nan", 4 * state * N)
        self._memory.point(ends, "nan", this.nan)
        ends.finite = cell.finite.data_ptr()
        ends.next, ends.stride = len(cells) * H, _padded_steps(self._T)
        ends.scale, ends.lo, ends.hi = _scale_of(cell.h)

    def _fill_flags(self, flags: Any, layer: _Below) -> None:
        self._memory.point(flags, "nan", layer.nan)
        for d, cell in enumerate(layer.cells):
            flags.finite[d] = cell.finite.data_ptr()
            if layer.h0_nan:
                self._memory.point(flags, "h0_nan", layer.h0_nan[d], d)
        flags.T, flags.stride = self._T, _padded_steps(self._T)

    @staticmethod
    def _fill_target(to: Any, q: Quantizer, N: int, T: int, features: int, stride: int) -> None:
        to.kind, to.T, to.N, to.features, to.nan_stride = (
            KINDS[q.container],
            T,
            N,
            features,
            stride,
        )


class _Input:
    """Where an input is: codes in bytes for a product or in their container, or real values.

    Attributes:
        nan: Where it is written which rows are NaN, by what reads real values.
        block: How it reads them, where they are not few.
        target: What makes the codes, the part of its arguments that says where they go.
    """

    def __init__(self) -> None:
        self.nan: int | None = None
        self.block: Block | Groups | None = None
        self.rows: _Rows | None = None
        self.codes = 0
        self.target: Any = None


class _Below:
    """A layer, and where its codes and NaN are in memory."""

    def __init__(self, cells: Sequence[Cell], nan: int) -> None:
        self.cells, self.nan = cells, nan
        self.out: list[int] = []
        self.h0_nan: list[int] = []


def _joined(machine: Machine, steps: Sequence[Prepared | _Product]) -> list[Prepared | _Product]:
    """The same steps, launches that follow each other as one."""
    found: list[Prepared | _Product] = []
    for product, run in itertools.groupby(steps, lambda step: isinstance(step, _Product)):
        group = list(run)
        found += group if product else [machine.join(group)]
    return found


def _same_input(a: Cell, b: Cell) -> bool:
    return a.x == b.x and all(
        int(u.multipliers[0]) == int(v.multipliers[0]) and int(u.shift) == int(v.shift)
        for u, v in zip(a.between, b.between, strict=True)
    )


def _may_take_fours(take: Any) -> bool:
    return bool(take.to.planes > 0 and take.division.scale)


def _fill_scale(record: Any, q: Quantizer) -> None:
    record.zero = q.zero_point
    record.scale, record.lo, record.hi = _scale_of(q)


def _scale_of(q: Quantizer) -> tuple[float, int, int]:
    return q.scale, q.lo - q.zero_point, q.hi - q.zero_point


def _by_direction(layer: Sequence[Group]) -> list[tuple[Cell, planner.Shape]]:
    return [(cell, group.shape) for group in layer for cell in group.cells]


def _padded_steps(T: int) -> int:
    return -(-T // 4) * 4
