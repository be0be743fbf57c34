"""Conversion of a call's real values between the caller's form and the kernels' form."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from kernel_runtime.cuda.launch import Machine, Prepared
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.call_form import CallForm
from quant_gru.kernels.cuda.boundary.conversions import Conversion, convert
from quant_gru.kernels.cuda.forward.inputs import RealInput
from quant_gru.kernels.cuda.forward.native_call import Memories


class Extent(NamedTuple):
    """The sizes of a call's real values.

    Attributes:
        T: Steps.
        N: Rows.
        C: Features of the input.
        H: Units.
        layers: Layers.
        directions: Directions.
    """

    T: int
    N: int
    C: int
    H: int
    layers: int
    directions: int


class Place(NamedTuple):
    """The location of a tensor: a memory, and an offset in bytes."""

    memory: Memory
    start: int = 0

    def point(self, record: Any, name: str, offset: int = 0) -> None:
        """Make a field of a record hold the address at `offset` bytes into the tensor."""
        self.memory.point(record, name, self.start + offset)


class Border:
    """The locations of inputs, states and results that kernels read and write.

    A tensor in another form than the kernels' is converted by a launch before all others, or by
    one after all others. The converted tensor is part of the workspace.

    Args:
        machine: The GPU that runs the kernels.
        memories: The argument fields that point to the tensors of a call.
        x: The arguments that read the input of a call.
        form: The form of calls.
        extent: The sizes of calls.

    Attributes:
        inward: Launches before all others.
        outward: Launches after all others.
        h0: States before the first step, float32 (states, N, H).
        y: Output, float32 (T, N, directions * H).
        h_n: Last states, float32 (states, N, H).
    """

    def __init__(
        self, machine: Machine, memories: Memories, x: RealInput, form: CallForm, extent: Extent
    ) -> None:
        T, N, C, H, layers, D = extent
        self._memories, self._x, self._converts = memories, x, form.converts(form.values)
        self._strides = N * C, C
        values, states, output = (T, N, C), (layers * D, N, H), (T, N, D * H)
        offsets = Place(memories.lengths, 8 * N) if form.is_packed else None
        real = torch.float32
        inward: list[Conversion] = []
        outward: list[Conversion] = []
        self._real = self._room(values) if self._converts else Place(memories.x)
        if self._converts:
            inward.append(Conversion(values, form.values, real, None, self._real, packed=offsets))
        self.h0, self.y, self.h_n = (
            Place(each) for each in (memories.h0, memories.y, memories.h_n)
        )
        if form.states is not None and form.converts(form.states):
            caller, self.h0 = self.h0, self._room(states)
            order = Place(memories.sorted)
            inward.append(Conversion(states, form.states, real, caller, self.h0, order))
        if form.converts(form.results):
            caller, self.y = self.y, self._room(output)
            outward.append(
                Conversion(output, real, form.results, self.y, caller, to_packed=offsets)
            )
        if form.converts(form.last):
            caller, self.h_n = self.h_n, self._room(states)
            order = Place(memories.unsorted)
            outward.append(Conversion(states, real, form.last, self.h_n, caller, order))
        self._keep: list[Any] = []
        self.inward, self.outward = (self._launch(machine, each) for each in (inward, outward))
        if self._converts:
            x.add(self._keep[0][1], False)

    def _room(self, shape: tuple[int, int, int]) -> Place:
        """Reserve workspace for a float32 tensor."""
        space = self._memories.space
        return Place(space, space.take(4 * math.prod(shape)))

    def _launch(self, machine: Machine, conversions: list[Conversion]) -> list[Prepared]:
        if not conversions:
            return []
        launch, records = convert(
            machine, conversions, lambda record, name, place: place.point(record, name)
        )
        self._keep.append(records)
        return [launch]

    def read(self, record: Any, fours: bool) -> None:
        """Make arguments of a kernel read the input.

        Args:
            record: As for `RealInput.add`.
            fours: As for `RealInput.add`.
        """
        if not self._converts:
            self._x.add(record, fours)
            return
        self._real.point(record, "real")
        record.step, record.next = self._strides
        if fours:
            record.fours = self._strides[1] % 4 == 0
