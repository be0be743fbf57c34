"""The launches of a whole GRU's backward, from the last layer to the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Tape, Wanted
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.kernel_runtime.cuda.launch import Machine, Prepared
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels.cuda.backward.inputs import Call, Precision
from quant_gru.kernels.cuda.backward.launch_plan import Schedule, Step
from quant_gru.kernels.cuda.boundary import boundary
from quant_gru.kernels.cuda.boundary.conversions import MOST, Conversion, convert
from quant_gru.kernels.cuda.boundary.gradient_border import (
    GRAD_LAST,
    GRAD_Y,
    H0,
    LENGTHS,
    NAN,
    OUTS,
    SPACE,
    Border,
    Given,
    Place,
    X,
    all_gradients,
)

# marks memory shared by layers; its offset is known only once all layers are added
_SHARED = -1


class GRULaunches:
    """The launches of a call, and the argument fields that follow the addresses of its tensors.

    All layers use the same memory, one after the other. Memory for data that passes from a layer to
    the next follows it.

    Args:
        plan: The plan.
        given: The inputs of the first call.
        wanted: Which gradients to compute, as in `prepared.PreparedBackward.run`.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        steps: Launches, and the work of torch in between.
        fields: Fields that follow the addresses in `places`.
        places: The addresses.
        size: Bytes of a call's memory.
        makers: Functions that allocate the gradients; None for a gradient that is not wanted.
        follows_plan: Whether kernels read the plan's own tensors, whose addresses do not change.
        keep: Objects that launches read.
    """

    def __init__(
        self,
        plan: GRUPlan,
        given: Given,
        wanted: tuple[bool, ...],
        precision: Precision,
        machine: Machine,
    ) -> None:
        self._plan, self._wanted = plan, wanted
        self._precision, self._machine = precision, machine
        self._D, self._H = len(plan.cells[0]), plan.cells[0][0].hidden_size
        self._T, self._N = given.x.shape[:2] if given.packing is None else given.packing[:2]
        self._cells = len(given.outs)
        self._of_cell = (len(wanted) - 2) // self._cells
        all_of_them = all_gradients(plan, given, self._of_cell)
        self.makers = [
            gradient.make if is_wanted else None
            for gradient, is_wanted in zip(all_of_them, wanted, strict=True)
        ]
        self.steps: list[Prepared | Step] = []
        self.fields: list[Memory] = []
        self.follows_plan = True
        self.keep: list[object] = [plan]
        self._followed: list[Place] = []
        self._shared, self._rooms = Memory(), dict[tuple[object, ...], int]()
        self._most = 0  # bytes of the largest layer
        self._border = Border(given, self._D, all_of_them, wanted, self._room)
        self._given = self._border.given
        self._convert(self._border.inward)
        # the gradient of a layer's output, and a tensor of the same layout
        self._grad: tuple[Place, Tensor] | None = None
        if self._given.grad_y is not None:
            self._grad = self._border.at[GRAD_Y], self._given.grad_y
        for layer in reversed(range(len(plan.cells))):
            onward = self._is_wanted_below(layer)
            self._add_layer(layer, onward)
            if not onward:
                break
            self._add_masks(layer)
        self._convert(self._border.outward)
        self.places = list(map(self._resolved, self._followed))
        self.size = self._most + self._shared.size
        # do not keep the tensors of the first call alive
        del self._given, self._grad, self._border

    def _convert(self, conversions: Sequence[Conversion]) -> None:
        for i in range(0, len(conversions), MOST):
            launch, records = convert(self._machine, conversions[i : i + MOST], self._point)
            self.keep.append(records)
            self.steps.append(launch)

    def _is_wanted_below(self, layer: int) -> bool:
        """Return whether a gradient of x, h0 or weights below this layer is wanted."""
        if not layer:
            return self._wanted[0]
        return any(self._wanted[: 2 + self._of_cell * self._D * layer])

    def _flags(self, index: int) -> tuple[bool, ...]:
        """Return whether the gradients of W, R, bw and br of a cell are wanted."""
        first = 2 + self._of_cell * index
        return (*self._wanted[first : first + self._of_cell], False, False)[:4]

    # addresses

    def _follow(self, memory: Memory, place: Place) -> None:
        self.fields.append(memory)
        self._followed.append(place)

    def _point(self, record: Any, name: str, place: Place, index: int = 0) -> None:
        """Make a field of a record, or an element of it, follow an address."""
        memory = Memory()
        memory.point(record, name, index=index)
        self._follow(memory, place)

    def _room(self, size: int, *what: object) -> Place:
        """Return memory that follows that of a layer; layers with equal arguments share it."""
        key = (size, *what)
        start = self._rooms.get(key)
        if start is None:
            start = self._rooms[key] = self._shared.take(size)
        return Place(_SHARED, start)

    def _resolved(self, place: Place) -> Place:
        return Place(SPACE, self._most + place.offset) if place.tensor == _SHARED else place

    # a layer

    def _add_layer(self, layer: int, onward: bool) -> None:
        cells, first = self._plan.cells[layer], layer * self._D
        inputs = self._add_inputs(layer)
        places: list[dict[str, Place]] = []
        calls: list[Call] = []
        for d, cell in enumerate(cells):
            call, of_call = self._call_of(cell, first + d, d, *inputs[d])
            calls.append(call)
            places.append(of_call)
        flags = [self._flags(first + d) for d in range(self._D)]
        wanted = Wanted(onward, *(any(each) for each in zip(*flags, strict=True)))
        alike = self._D == 1 or calls[0].key == calls[1].key
        for group in [range(self._D)] if alike else [range(1), range(1, 2)]:
            chosen = [calls[d] for d in group]
            schedule = Schedule(chosen, wanted, self._precision, self._machine)
            schedule.point(chosen)
            self.follows_plan &= schedule.follows_plans
            self._most = max(self._most, schedule.memory.size)
            self._follow(schedule.memory, Place(SPACE))
            for at, d in zip(schedule.at, group, strict=True):
                for name, place in places[d].items():
                    self._follow(at[name], place)
            self._add_schedule(schedule, layer, group)
        if self._wanted[1]:
            for d, cell in enumerate(cells):
                self._mask_state(cell, first + d)

    def _add_inputs(self, layer: int) -> list[tuple[Tensor, Place]]:
        """Return for each direction a tensor like its input, and the input's address."""
        given = self._given
        if not layer:
            return [(given.x, self._border.at[X])] * self._D
        found: list[tuple[Tensor, Place]] = []
        known: dict[bytes, tuple[Tensor, Place]] = {}
        for d, cell in enumerate(self._plan.cells[layer]):
            launch, record = self._requantize(layer, d)
            # directions often have the same input
            numbers = bytes(record)
            if numbers not in known:
                like = given.x.new_empty(
                    (self._T, self._N, cell.input_size), dtype=cell.x.container
                )
                place = self._room(like.numel() * like.itemsize, "input", d)
                self._point(record, "to", place)
                self._point_at_codes(record, layer)
                self.steps.append(launch)
                known[numbers] = like, place
            found.append(known[numbers])
        return found

    def _requantize(self, layer: int, d: int) -> tuple[Prepared, Any]:
        """Prepare the launch between the layer below and this one.

        See `boundary.prepared_requantize`.
        """
        below = [cell.h for cell in self._plan.cells[layer - 1]]
        above = self._plan.cells[layer][d].x
        sums, shape = self._plan.between[layer - 1][d], (self._T, self._N, self._H)
        launch, record = boundary.prepared_requantize(sums, below, above, shape, self._machine)
        self.keep.append(record)
        return launch, record

    def _point_at_codes(self, record: Any, layer: int) -> None:
        for d in range(self._D):
            self._point(record, "codes", Place(OUTS + (layer - 1) * self._D + d), d)

    def _call_of(
        self, cell: CellPlan, index: int, d: int, x: Tensor, at_x: Place
    ) -> tuple[Call, dict[str, Place]]:
        """Return the call of one direction, and the addresses of its tensors."""
        given, of_state = self._given, 4 * self._N * self._H
        h0 = None
        places = {
            "x" if index >= self._D else "values": at_x,
            "out": Place(OUTS + index),
            "nan": Place(NAN, 4 * self._N * index),
            "dh0": self._room(of_state, "dh0", d),
        }
        if given.h0 is not None:
            h0 = x.new_empty((self._N, self._H), dtype=cell.h.container)
            places["h0"] = self._add_state(cell, index, d, h0)
        if self._wanted[1]:
            places["dh0"] = self._border.results[1].after(of_state * index)
        if given.lengths is not None:
            places["lengths"] = Place(LENGTHS)
        grad_last = None
        if given.grad_last is not None:
            places["grad_last"], grad_last = (
                self._border.at[GRAD_LAST].after(of_state * index),
                given.grad_last[index],
            )
        grad = None
        if self._grad is not None:
            at, like = self._grad
            places["grad_out"] = at.after(4 * d * self._H * like.stride(2))
            grad = like.chunk(self._D, dim=-1)[d]
        for i, name in enumerate(("bw", "br")):
            if self._flags(index)[2 + i]:
                places[name] = self._border.results[2 + self._of_cell * index + 2 + i]
        tape = Tape(cell, x, h0, given.outs[index], given.lengths, d == 1, None, given.nan[index])
        call = Call(tape, grad, grad_last)
        # keeps alive the zero that replaces an absent gradient
        self.keep.append(call.grad_out if grad is None else None)
        return call, places

    def _add_state(self, cell: CellPlan, index: int, d: int, like: Tensor) -> Place:
        """Add the launch that quantizes an initial state, and return the address of its codes."""
        N, H = like.shape
        launch, record = boundary.prepared_quantize(cell.h, N, H, self._machine)
        codes = self._room(like.numel() * like.itemsize, "h0", d)
        self._point(record, "real", self._border.at[H0].after(4 * N * H * index))
        self._point(record, "codes", codes)
        self._point(record, "nan", self._room(N, "nan of h0"))
        self.keep.append(record)
        self.steps.append(launch)
        return codes

    def _mask_state(self, cell: CellPlan, index: int) -> None:
        N, H = self._N, self._H
        launch, record = boundary.prepared_mask(cell.h, (N * H, H), (1, N, H), self._machine)
        self._point(record, "real", self._border.at[H0].after(4 * N * H * index))
        self._point(record, "grad", self._border.results[1].after(4 * N * H * index))
        self.keep.append(record)
        self.steps.append(launch)

    # gradients of the input and of weights

    def _target(self, layer: int, d: int, name: str, size: int) -> Place:
        """Return the address at which the final GEMMs write a gradient of `size` bytes."""
        index = layer * self._D + d
        if name == "x":
            # the gradient of the last direction accumulates the others
            if not layer and d == self._D - 1:
                return self._border.results[0]
            # the layer below reads it while writing its own gradient, so two buffers alternate
            return self._room(size, "x", d, layer % 2)
        i = "WR".index(name)
        if self._flags(index)[i]:
            return self._border.results[2 + self._of_cell * index + i]
        # wanted for the other direction only
        return self._room(size, name)

    def _add_schedule(self, schedule: Schedule, layer: int, group: range) -> None:
        """Add the steps of a layer, or of one of its directions, including the final GEMMs."""
        products = schedule.products
        rooms: list[tuple[int, str, Place, tuple[int, int]]] = []
        for i, d in enumerate(group):
            for name, (rows, columns) in products.shapes(i).items():
                place = self._target(layer, d, name, 4 * rows * columns)
                if products.launch is not None:
                    self._follow(products.results[i][name], place)
                else:
                    rooms.append((i, name, place, (rows, columns)))
        self.keep.append(schedule)
        self.steps += schedule.steps
        if not rooms:
            return

        def multiply(memory: Tensor, made: Sequence[Tensor | None]) -> None:
            with torch.autocast(memory.device.type, enabled=False):
                for i, name, place, shape in rooms:
                    products.write(i, name, memory, self._tensor(place, shape, memory, made))

        self.steps.append(multiply)

    def _tensor(
        self, place: Place, shape: tuple[int, int], memory: Tensor, made: Sequence[Tensor | None]
    ) -> Tensor:
        """Return a gradient of a call as a matrix."""
        if place.tensor == _SHARED:
            start = (self._most + place.offset) // 4
            return memory.view(torch.float32).as_strided(shape, (shape[1], 1), start)
        found = made[place.tensor - OUTS - self._cells]
        assert found is not None
        return found.view(shape)

    def _add_masks(self, layer: int) -> None:
        """Add launches that mask the gradient of a layer's input and sum it over directions."""
        given, T, N = self._given, self._T, self._N
        C = self._plan.cells[layer][0].input_size
        targets = [self._target(layer, d, "x", 4 * T * N * C) for d in range(self._D)]
        for d, (cell, target) in enumerate(zip(self._plan.cells[layer], targets, strict=True)):
            if layer:
                launch, record = self._requantize(layer, d)
                self._point_at_codes(record, layer)
            else:
                strides = given.x.stride()[:2]
                launch, record = boundary.prepared_mask(cell.x, strides, (T, N, C), self._machine)
                self.keep.append(record)
                self._point(record, "real", self._border.at[X])
            self._point(record, "grad", target)
            if d:
                self._point(record, "added", targets[0])
            self.steps.append(launch)
        self._grad = targets[-1], given.x.new_empty((T, N, C))
