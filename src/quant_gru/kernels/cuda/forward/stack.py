"""Whole calls on a GPU, with real inputs and outputs, prepared once for each input size."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import FLOATS, CallForm, Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.cuda.driver import Device, Prepared
from quant_gru.kernel_runtime.cuda.graph_capture import capturing, current, index_of, on
from quant_gru.kernel_runtime.cuda.streams import native_streams
from quant_gru.kernels import _native
from quant_gru.kernels.cuda import machine as machines
from quant_gru.kernels.cuda.forward.launch_plan import Schedule, planned
from quant_gru.kernels.cuda.plan.cell import Cell
from quant_gru.kernels.cuda.plan.tensors import CHANGES, numbers_of

_MOST_SCHEDULES = 64
_KEPT_BYTES = 8 << 20
_MISSING: Any = object()
_logger = logging.getLogger(__name__)

# A stack is kept as long as the first cell's weight part. It must not reference that part.
_stacks: weakref.WeakKeyDictionary[Any, tuple[Any, Stack | None]] = weakref.WeakKeyDictionary()


def stack_of(plan: GRUPlan, machine: Device | None = None) -> Stack | None:
    """Return the stack of a plan, which is created at its first use.

    Return None if an operator has more than 16 bits, or if sums are rounded twice (`double`).

    Args:
        plan: The plan, on a GPU.
        machine: The GPU that runs the kernels; None for the plan's GPU.
    """
    weights, parts = plan.cells[0][0].weights, plan.parts
    made_of, stack = _stacks.get(weights, ((), None))
    if made_of == parts:
        return stack
    cells = [cell for layer in plan.cells for cell in layer]
    device = weights.W.device
    machine = machine or machines.machine_of(device)
    runs = all(numbers_of(cell).form.narrow for cell in cells)
    stack = Stack(plan, machine) if runs else None
    how = "whole calls" if runs else "each layer by itself, with over 16 bits or rounded twice"
    _logger.debug("plan of %d cells on %s: %s kernels, %s", len(cells), device, machine.arch, how)
    if not capturing(device):
        # a captured graph computes nothing before its replay
        _stacks[weights] = parts, stack
    return stack


class Stack:
    """All layers and directions of a GRU on a GPU, with real inputs and outputs.

    Args:
        plan: A plan that `stack_of` takes.
        machine: The GPU that runs the kernels.

    Attributes:
        device: The plan's device.
        input_size: C.
        hidden_size: H.
        states: Layers times directions.
    """

    def __init__(self, plan: GRUPlan, machine: Device) -> None:
        self.machine = machine
        self.layers = [
            [
                Cell(cell, plan.between[index - 1][direction] if index else ())
                for direction, cell in enumerate(cells)
            ]
            for index, cells in enumerate(plan.cells)
        ]
        cell = plan.cells[0][0]
        self.device = cell.weights.W.device
        self.input_size, self.hidden_size = cell.input_size, cell.hidden_size
        self.directions = len(plan.cells[0])
        self.states = len(plan.cells) * self.directions
        self._schedules: dict[tuple[Any, ...], Schedule | None] = {}

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None = None,
        kept: Kept | None = None,
        packing: Packing | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor] | None:
        """Run a whole call.

        Args:
            x: (T, N, C), or (rows, C) for packed rows, on the plan's device, with any strides and
                a dtype of `FLOATS`.
            h0: (states, N, H), with the same device and dtypes, or None for zeros.
            lengths: int64 (N,) or None.
            kept: Receives the data that a backward needs.
            packing: The packing of rows, or None.
            dtype: The dtype of the results.

        Returns:
            Output (T, N, D*H), or (rows, D*H) for packed rows, and last states (states, N, H).
            None if the call has no steps or rows, or if weights do not fit registers.
        """
        T, N = x.shape[:2] if packing is None else packing[:2]
        form = CallForm.of(x, h0, dtype, packing)
        with on(self.device):
            schedule = self.schedule(T, N, form, kept is not None)
            return None if schedule is None else schedule.run(x, h0, lengths, kept, packing)

    def schedule(self, T: int, N: int, form: CallForm, keeps: bool = False) -> Schedule | None:
        """Return the schedule of calls of a size, which is created at its first use.

        The stack's device must be the current device.

        Args:
            T: Steps.
            N: Rows.
            form: The form of calls.
            keeps: Whether calls keep data for a backward.

        Returns:
            The schedule. None if the call has no steps or rows, or if weights do not fit registers.
        """
        key = (T, N, form, keeps)
        schedule: Schedule | None = self._schedules.get(key, _MISSING)
        if schedule is _MISSING:
            schedule = None
            if T and N:
                given = (self.machine, self.layers, T, N, form, keeps)
                plan = planned(*given)
                schedule = None if plan is None else Schedule(*given, plan)
            if not capturing(self.device):
                if len(self._schedules) >= _MOST_SCHEDULES:
                    self._schedules.clear()
                self._schedules[key] = schedule
        return schedule

    def prepared(
        self, guard: _native.WeightGuard, dtype: torch.dtype | None = None
    ) -> _native.PreparedCall:
        """Return a native object that runs whole calls of the sizes added by `prepare`.

        Args:
            guard: The guard of all weights of the module.
            dtype: The dtype of results; None for the input's.
        """
        sizes, functions = self._native_arguments()
        return _native.PreparedCallGPU(sizes, guard, functions, _KEPT_BYTES)

    def prepared_step(self, guard: _native.WeightGuard) -> _native.PreparedStepGPU:
        """Return a native object that runs steps of training as prepared by `prepare_step`.

        Args:
            guard: The guard of all weights of the module, which the plan follows.
        """
        sizes, functions = self._native_arguments()
        stream, _ = native_streams(self.machine.stream, self.device)
        given = (sizes, guard, (*functions, stream), CHANGES, _KEPT_BYTES)
        return _native.PreparedStepGPU(*given, self.machine.raise_for)

    def _native_arguments(
        self,
    ) -> tuple[tuple[int, int, int, int], tuple[Callable[..., Any], ...]]:
        """Return the sizes and functions that prepared calls need."""
        sizes = (index_of(self.device), self.states, self.input_size, self.hidden_size)
        return sizes, (Tensor, torch.is_grad_enabled, *current(self.device))

    def prepare(
        self,
        call: _native.PreparedCallGPU | _native.PreparedStepGPU,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        packing: Packing | None = None,
        dtype: torch.dtype = torch.float32,
        differentiable: bool = False,
        updates: Sequence[Prepared] = (),
    ) -> None:
        """Prepare calls with the form and size of a call that `run` has run.

        Args:
            call: The result of `prepared` or `prepared_step`.
            x: Input of the call that `run` has run.
            h0: Its initial states.
            lengths: Its lengths; None for a step.
            packing: Its packing of rows.
            dtype: The dtype of its results.
            differentiable: Whether it kept data for a backward.
            updates: Launches that repeat the updates before it, for a step.
        """
        T, N = x.shape[:2] if packing is None else packing[:2]
        form = CallForm.of(x, h0, dtype, packing)
        # there is no entry for a call that ran during graph capture
        schedule = self._schedules.get((T, N, form, differentiable))
        if schedule is None:
            return
        states = -1 if h0 is None else FLOATS[h0.dtype]
        rows = 2 if packing is not None else int(lengths is not None)
        key = (T, N, FLOATS[x.dtype], states, rows)
        if isinstance(call, _native.PreparedCallGPU):
            call.add(key, schedule.call)
            return
        update = self.machine.join(updates)
        split = schedule.codes_of if differentiable and self.states > 1 else None
        call.add(key, differentiable, schedule.call, split)
        call.follow(update.native, self.machine.stream(), update)
