"""The launches of a layer's backward, prepared once per size; a call only sets addresses.

Native code plans them (host/layer_backward.hpp).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Gradients, Wanted
from quant_gru.kernel_runtime.cuda.launch import Kernel, Machine, Prepared
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.final_gemms import (
    Factors,
    LastProducts,
    Matrix,
    multiply,
    multiply_into,
)
from quant_gru.kernels.cuda.backward.inputs import Call, Precision, weights_of
from quant_gru.kernels.cuda.forward.planned_launches import (
    BLOCKS,
    SPACE,
    arguments_of,
    joined,
    multiply_bytes,
)
from quant_gru.kernels.cuda.recurrence import planner

POLICY = _native.BackwardPolicy()
"""What experiments change, such as the most bytes of integer sums."""
VARIABLES = ("QUANT_GRU_CUDA_BACK_SHAPE", "QUANT_GRU_CUDA_BACK_GRID")
"""Environment variables that override shapes of recurrences, see host/plans/backward_shapes.hpp."""

# what a direction reads and writes, in the order of native code; numbers of strides come last
_STRIDES = ("x_step", "x_next", "grad_step", "grad_next", "grad_unit")
_SLOTS = (
    *("x", "values", "h0", "out", "lengths", "held", "grad_out", "grad_last", "nan"),
    *("dh0", "bw", "br", "W", "R", "s_W", "s_R", "Bw", "Br", "Mx", "Mh", "kx", "kh"),
    *_STRIDES,
)
_ELEMENTS = (torch.int8, torch.int32, torch.float32, torch.bfloat16, torch.float64)

Step = Callable[[Tensor, Sequence[Tensor | None]], None]
"""step(memory of the call, its gradients): work of a call that is not a launch."""


class Schedule:
    """The launches for calls of one size, for the directions of a layer.

    Args:
        calls: The first calls of that size, one per direction.
        wanted: Which gradients to compute.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        memory: The memory of a call.
        at: For each direction, the fields that point to a call's inputs and outputs, and those with
            their strides, by name.
        steps: All launches, and the work of torch in between; final GEMMs of torch come after them.
    """

    def __init__(
        self, calls: Sequence[Call], wanted: Wanted, precision: Precision, machine: Machine
    ) -> None:
        first = calls[0]
        self._frozen = [weakref.ref(call.plan.frozen) for call in calls]
        self._sizes = (first.T, first.N, first.C, first.H)
        self._wanted, self._machine = wanted, machine
        self._lock = threading.Lock()
        self._parts: list[weakref.ref[Any] | None] = [None for _ in calls]
        with planner.our_errors():
            steps, results, size = _native.layer_backward_of(
                [call.native for call in calls],
                first.T,
                first.N,
                (wanted.x, wanted.W, wanted.R, wanted.bw, wanted.br),
                astuple(precision),
                machine.clusters(),
                POLICY,
            )
        self.memory = Memory()
        self.memory.take(size)
        self.at = [{name: Memory() for name in _SLOTS} for _ in calls]
        self._records: list[Any] = []
        work = [self._step(*each) for each in steps]
        factors = [
            {
                name: Factors(matrix_of(each[0]), matrix_of(each[1]), each[2])
                for name, each in zip("xWR", products, strict=True)
                if each is not None
            }
            for products, _ in results
        ]
        self._d = [matrix_of(d) for _, d in results]
        self._factors, self._results = factors, [{n: Memory() for n in each} for each in factors]
        rooms = zip(factors, self._results, strict=True)
        products = [(group[name], to[name], 0) for group, to in rooms for name in group]
        self._products = LastProducts(machine, products)
        if self._products.workspace is None:
            self._results = [{} for _ in factors]
        else:
            workspace = self.memory.take(self._products.workspace)
            work.append(self._products.launch(self.memory, workspace))
        self.steps: list[Prepared | Step] = joined(machine, work)

    def _step(
        self, launch: _native.PlannedLaunch | None, matrices: Sequence[_native.NativeMatrix]
    ) -> Prepared | Step:
        if launch is None:
            return work_of(matrices)
        record = arguments_of(launch)
        self._records.append(record)
        slots = [memory for at in self.at for memory in at.values()]
        for at, block, offset in launch[5]:
            memory = self.memory if block == SPACE else slots[block - BLOCKS - 1]
            memory.fields.add(ctypes.addressof(record) + at, offset)
        return self._machine.prepare(Kernel.of(*launch[:3]), planner.grid_of(launch[3]), record)

    def belongs_to(self, calls: Sequence[Call]) -> bool:
        """Return whether the calls have the plans for which this schedule was prepared."""
        return all(ref() is call.plan.frozen for ref, call in zip(self._frozen, calls, strict=True))

    def run(self, calls: Sequence[Call]) -> list[Gradients]:
        """Compute all gradients of a call."""
        device, (_, N, _, H), dirs = calls[0].device, self._sizes, len(calls)
        memory = torch.empty(self.memory.size, dtype=torch.int8, device=device)
        dh0 = torch.empty((dirs * N, H), dtype=torch.float32, device=device)
        db = torch.empty((2 * dirs, 3 * H), dtype=torch.float32, device=device)
        dh0_at, db_at = dh0.data_ptr(), db.data_ptr()
        with self._lock:
            self.memory.move(memory.data_ptr())
            for d, at in enumerate(self.at):
                at["dh0"].move(dh0_at + 4 * d * N * H)
                at["bw"].move(db_at + 24 * d * H)
                at["br"].move(db_at + 24 * d * H + 12 * H)
            # tensors that must live until all kernels are launched
            keep = self._point(calls)
            found = self._start(memory, dh0, db)
            del keep
            return found

    def _point(self, calls: Sequence[Call]) -> list[Any]:
        """Point arguments to the tensors of calls.

        Returns:
            Tensors that must live until all kernels are launched.
        """
        keep: list[Any] = []
        for d, call in enumerate(calls):
            at = self.at[d]
            for name, tensor in call.tensors.items():
                at[name].move(0 if tensor is None else tensor.data_ptr())
            keep.append(self._point_at_weights(d, call))
            strides = (*call.strides, *call.grad_out.stride())
            for name, stride in zip(_STRIDES, strides, strict=True):
                at[name].move(stride)
        return keep

    def _point_at_weights(self, d: int, call: Call) -> dict[str, Tensor] | None:
        """Point arguments to the weights.

        Returns:
            Tensors that must live until all kernels are launched, or None if nothing changed.
        """
        kept = self._parts[d]
        if kept is not None and kept() is call.plan.weights:
            return None
        found, own = weights_of(call.plan)
        for name, tensor in found.items():
            self.at[d][name].move(tensor.data_ptr())
        self._parts[d] = weakref.ref(call.plan.weights) if own else None
        return found

    def _start(self, memory: Tensor, dh0: Tensor, db: Tensor) -> list[Gradients]:
        (T, N, C, H), wanted = self._sizes, self._wanted
        made: list[dict[str, Tensor]] = []
        for factors, rooms in zip(self._factors, self._results, strict=True):
            sizes = {name: factors[name].product[:2] for name in rooms}
            made.append({n: torch.empty(size, device=memory.device) for n, size in sizes.items()})
            for name, to in rooms.items():
                to.move(made[-1][name].data_ptr())
        stream = self._machine.stream()
        for step in self.steps:
            if callable(step):
                step(memory, ())
            else:
                step.start(stream)
        dirs = len(self.at)
        biases, states = db.unbind(), [dh0] if dirs == 1 else dh0.chunk(dirs)
        results = []
        for d in range(dirs):

            def found(name: str, d: int = d) -> Tensor:
                return made[d][name] if made[d] else multiply(*self._factors[d][name].of(memory))

            results.append(
                Gradients(
                    found("x").view(T, N, C) if wanted.x else None,
                    states[d],
                    found("W") if wanted.W else None,
                    found("R") if wanted.R else None,
                    biases[2 * d] if wanted.bw else None,
                    biases[2 * d + 1] if wanted.br else None,
                    self._d[d].of(memory).clone().view(T, N, H) if wanted.h else None,
                )
            )
        return results


def matrix_of(given: _native.NativeMatrix) -> Matrix:
    """Return a matrix of native code."""
    start, rows, columns, element = given
    return Matrix(start, rows, columns, _ELEMENTS[element])


def work_of(given: Sequence[_native.NativeMatrix]) -> Step:
    """Return a product of matrices, or the filling of a single one."""
    matrices = list(map(matrix_of, given))

    def fill(memory: Tensor, _: Sequence[Tensor | None]) -> None:
        matrices[0].of(memory).fill_(-1)

    def multiply(memory: Tensor, _: Sequence[Tensor | None]) -> None:
        left, right, result = (each.of(memory) for each in matrices)
        if left.dtype is torch.int8:
            multiply_bytes(left, right.t(), result)
        else:
            multiply_into(left, right, result)

    return fill if len(matrices) == 1 else multiply
