"""The launches of a whole call with a given number of steps and rows, prepared once.

A call quantizes its input and runs each layer. The recurrence reads and writes real values of
states, NaN included. A prepared launch has all its arguments except addresses.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.cuda.graph_capture import capturing
from kernel_runtime.cuda.launch import Machine, Prepared
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import CallForm, Packing
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.forward.inputs import Gemm
from quant_gru.kernels.cuda.forward.layer import Cell, Group
from quant_gru.kernels.cuda.forward.layer_launches import LayerLaunches
from quant_gru.kernels.cuda.forward.native_call import Sizes, makers_of, native_call
from quant_gru.kernels.cuda.projection.int_mm import load_gemm
from quant_gru.kernels.cuda.recurrence import planner


def schedule_of(
    machine: Machine,
    layers: Sequence[Sequence[Cell]],
    T: int,
    N: int,
    form: CallForm,
    keeps: bool,
) -> Schedule | None:
    """Return a schedule, or None if weights do not fit registers.

    Args:
        machine: The GPU that runs the kernels.
        layers: Directions of each layer.
        T: Steps.
        N: Rows.
        form: The form of calls.
        keeps: Whether calls keep data for a backward.
    """
    clusters = machine.clusters()
    chosen = []
    for cells in layers:
        layer = []
        for group, cell_form in planner.launches_of(cells, N, clusters):
            shape = planner.choose(cell_form, group[0].numbers.H, N, len(group), clusters)
            if shape is None:
                return None
            layer.append(Group(group, cell_form, shape))
        chosen.append(layer)
    return Schedule(machine, chosen, T, N, form, keeps)


class Schedule:
    """The launches of a call.

    Args:
        machine: The GPU that runs the kernels.
        layers: For each layer, the groups of directions that share a launch of the recurrence.
        T: Steps.
        N: Rows.
        form: The form of calls.
        keeps: Whether calls keep data for a backward.

    Attributes:
        call: The native call, for tensors that kernels can read directly. None if torch runs GEMMs
            between launches.
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
        self._machine, self._T, self._N, self._keeps = machine, T, N, keeps
        self._lock = threading.Lock()
        made = LayerLaunches(machine, layers, T, N, form, keeps)
        # codes of states have separate memory, because a backward may keep them
        self._memories, self._x, self._kept = made.memories, made.x, made.kept
        self._gemms, self._keep = made.gemms, made.keep
        directions = [cell for group in layers[0] for cell in group.cells]
        numbers = directions[0].numbers
        self._H = numbers.H
        if self._gemms and not capturing(numbers.device):
            # load cuBLAS while kernels compile; the next statement waits for them
            load_gemm(numbers.device)
        self._steps = _joined(machine, made.steps)
        self._multiplied = [rows for rows in made.rows if rows.multiplied]
        sizes = Sizes(
            T,
            N,
            numbers.C,
            numbers.H,
            len(layers),
            len(directions),
            self._memories.space.size,
            self._memories.codes.size,
        )
        # codes of a single cell are allocated as a tensor of their own
        container = self._kept[0][1] if len(self._kept) == 1 else None
        self._made = makers_of(sizes, form, container, numbers.device)
        self.call = self._native_call(sizes, numbers.device)

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        kept: Kept | None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Start all launches. Arguments and results are those of `Stack.run`."""
        if lengths is not None:
            lengths = lengths.to(x.device, torch.int64).contiguous()
        result: Any = NotImplemented
        if self.call is not None:
            result = self.call.run(x, h0, lengths, packing)
        if result is NotImplemented:
            if x.stride(-1) != 1 or x.is_neg():
                x = x.detach().resolve_neg().contiguous()
            if h0 is not None:
                h0 = h0.detach().contiguous().resolve_neg()
            run = self._run if self.call is None else self.call.run
            result = run(x, h0, lengths, packing)
        if kept is not None:
            _, _, kept.nan, codes = result
            self._hand_on(codes, kept)
        return result[0], result[1]

    def _run(
        self, x: Tensor, h0: Tensor | None, lengths: Tensor | None, packing: Packing | None
    ) -> tuple[Tensor | None, ...]:
        """Do the work of `call` in Python, for calls with GEMMs of torch between launches."""
        made = self._made
        y = made.y() if packing is None else made.y_otherwise(x.shape[0])
        h_n, nan, codes = made.h_n(), None, None
        if self._keeps:
            space, nan, codes = made.space(), made.nan(), made.codes()
        else:
            space = made.whole_space()
        memories = self._memories
        with self._lock:
            base = space.data_ptr()
            memories.space.move(base)
            memories.codes.move(base + memories.space.size if codes is None else codes.data_ptr())
            for rows in self._multiplied:
                rows.tensor = space.as_strided(rows.shape, (rows.shape[1], 1), rows.start)
            for each in self._gemms:
                shape = (each.rows.shape[0], each.weights.shape[1])
                each.result = torch.empty(shape, dtype=torch.int32, device=x.device)
                each.memory.move(each.result.data_ptr())
            self._x.move(x if packing is None else x[None])
            if packing is not None:
                memories.lengths.move(packing.layout.data_ptr())
                for memory, order in (
                    (memories.sorted, packing.sorted_indices),
                    (memories.unsorted, packing.unsorted_indices),
                ):
                    memory.move(0 if order is None else order.data_ptr())
            if h0 is not None:
                memories.h0.move(h0.data_ptr())
            if lengths is not None:
                memories.lengths.move(lengths.data_ptr())
            memories.nan.move(0 if nan is None else nan.data_ptr())
            memories.y.move(y.data_ptr())
            memories.h_n.move(h_n.data_ptr())
            stream = self._machine.stream()
            for step in self._steps:
                step.start(stream)
            for rows in self._multiplied:
                rows.tensor = None
            for each in self._gemms:
                each.result = None
        return y, h_n, nan, codes

    def _native_call(self, sizes: Sizes, device: torch.device) -> _native.Call | None:
        launches = self._steps[0]
        if len(self._steps) > 1 or isinstance(launches, Gemm):
            return None
        return native_call(
            self._machine,
            launches,
            self._memories,
            self._x.records,
            sizes,
            self._made,
            device,
            keeps=self._keeps,
            keep=self._keep,
        )

    def _hand_on(self, codes: Tensor, kept: Kept) -> None:
        """Append the codes of states, which are parts of the tensor `codes`, to `kept`."""
        if len(self._kept) == 1:
            kept.out.append(codes)
            return
        T, N, H = self._T, self._N, self._H
        for start, container in self._kept:
            part = codes if container is torch.int8 else codes.view(container)
            at = start // container.itemsize
            kept.out.append(part.as_strided((T, N, H), (N * H, H, 1), at))


def _joined(machine: Machine, steps: Sequence[Prepared | Gemm]) -> list[Prepared | Gemm]:
    """Return the steps with consecutive launches joined into one."""
    found: list[Prepared | Gemm] = []
    for is_gemm, run in itertools.groupby(steps, lambda step: isinstance(step, Gemm)):
        group = list(run)
        found += group if is_gemm else [machine.join(group)]
    return found
