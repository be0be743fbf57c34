"""The launches of a whole GRU's backward, which native code lists (host/gru_backward.hpp)."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS, Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.allocators import maker, row_maker
from quant_gru.kernel_runtime.cuda.launch import Kernel, Machine, Prepared
from quant_gru.kernel_runtime.cuda.workspace import Memory
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.final_gemms import (
    Factors,
    LastProducts,
    Matrix,
    multiply_into,
)
from quant_gru.kernels.cuda.backward.inputs import Precision, weights_of, zero_on
from quant_gru.kernels.cuda.backward.launch_plan import POLICY, Step, matrix_of, work_of
from quant_gru.kernels.cuda.forward.layer import Cell
from quant_gru.kernels.cuda.forward.planned_launches import arguments_of, joined
from quant_gru.kernels.cuda.recurrence import planner
from quant_gru.kernels.cuda.structs import KINDS

# indices of a call's tensors; the gradients follow the codes of each cell
_SPACE, _OUTS = 0, 9


class Given(NamedTuple):
    """The inputs of a backward, as passed to `prepared.PreparedBackward.run`."""

    x: Tensor
    h0: Tensor | None
    lengths: Tensor | None
    outs: Sequence[Tensor]
    nan: Tensor
    grad_y: Tensor | None
    grad_last: Tensor | None
    packing: Packing | None = None
    dtype: torch.dtype = torch.float32


class GRULaunches:
    """The launches of a call, and the argument fields that follow the addresses of its tensors.

    Args:
        plan: The plan.
        given: The inputs of the first call.
        wanted: Which gradients to compute, as in `prepared.PreparedBackward.run`.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        steps: Launches, and the work of torch in between.
        fields: The fields that follow each tensor of a call, by its index.
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
        self._machine, self._cells = machine, len(given.outs)
        self.makers = _makers(plan, given, wanted)
        self.fields: defaultdict[int, Memory] = defaultdict(Memory)
        self.follows_plan = True
        self.keep: list[object] = [plan]
        zero = zero_on(given.x.device)
        self.keep.append(zero)
        with planner.our_errors():
            steps, size = _native.gru_backward_of(
                self._native_cells(plan),
                len(plan.cells[0]),
                _form(given, wanted),
                zero.data_ptr(),
                astuple(precision),
                machine.clusters(),
                POLICY,
            )
        space = self.fields[_SPACE]
        space.take(size)
        work = [self._step(*each) for each in steps]
        # all products run one after the other, so they share a workspace
        most = max(
            (each.workspace or 0 for each in work if isinstance(each, LastProducts)), default=0
        )
        workspace = space.take(most)
        self.size = space.size
        self.keep.append(work)
        self.steps: list[Prepared | Step] = joined(
            machine,
            [
                each.launch(space, workspace) if isinstance(each, LastProducts) else each
                for each in work
            ],
        )

    def _native_cells(self, plan: GRUPlan) -> list[_native.BackwardCell]:
        found: list[_native.BackwardCell] = []
        for layer, cells in enumerate(plan.cells):
            for d, cell in enumerate(cells):
                between = plan.between[layer - 1][d] if layer else ()
                weights, own = weights_of(cell)
                self.follows_plan &= own
                self.keep.append(weights)
                kinds = KINDS[cell.weights.W.dtype], KINDS[cell.weights.R.dtype]
                addresses = tuple(each.data_ptr() for each in weights.values())
                found.append((Cell(cell, between).native(self.keep), kinds, addresses))
        return found

    def _step(
        self,
        launch: _native.PlannedLaunch | None,
        matrices: Sequence[_native.NativeMatrix],
        products: Sequence[tuple[_native.LastProduct, tuple[int, int]]],
    ) -> Prepared | Step | LastProducts:
        if launch is not None:
            record = arguments_of(launch)
            self.keep.append(record)
            for at, tensor, offset in launch[5]:
                self.fields[tensor].fields.add(ctypes.addressof(record) + at, offset)
            kernel = Kernel.of(*launch[:3])
            return self._machine.prepare(kernel, planner.grid_of(launch[3]), record)
        if matrices:
            return work_of(matrices)
        found = [(_factors(product), *place) for product, place in products]
        last = LastProducts(self._machine, [(f, self.fields[t], at) for f, t, at in found])
        return self._torch_step(found) if last.workspace is None else last

    def _torch_step(self, products: Sequence[tuple[Factors, int, int]]) -> Step:
        """Return a function that lets torch compute products."""

        def multiply(memory: Tensor, made: Sequence[Tensor | None]) -> None:
            with torch.autocast(memory.device.type, enabled=False):
                for factors, tensor, offset in products:
                    m, n, *_ = factors.product
                    if tensor == _SPACE:
                        to = Matrix(offset, m, n, torch.float32).of(memory)
                    else:
                        gradient = made[tensor - _OUTS - self._cells]
                        assert gradient is not None
                        to = gradient.view(m, n)
                    multiply_into(*factors.of(memory), to)

        return multiply


def _factors(product: _native.LastProduct) -> Factors:
    return Factors(matrix_of(product[0]), matrix_of(product[1]), product[2])


def _form(given: Given, wanted: tuple[bool, ...]) -> _native.BackwardForm:
    """Return what launches depend on besides the plan."""
    packing = given.packing
    T, N = given.x.shape[:2] if packing is None else packing[:2]
    reals = (given.x, given.h0, given.grad_y, given.grad_last)
    layouts = tuple(None if each is None else _layout(each) for each in reals)
    has_lengths = given.lengths is not None or packing is not None
    return T, N, has_lengths, packing is not None, layouts, FLOATS[given.dtype], list(wanted)


def _layout(tensor: Tensor) -> tuple[int, int, int, int]:
    """Return the dtype and strides of steps, rows and units; packed rows have none of steps."""
    step, next, unit = (0, *tensor.stride())[-3:]
    return FLOATS[tensor.dtype], step, next, unit


def _makers(
    plan: GRUPlan, given: Given, wanted: tuple[bool, ...]
) -> list[Callable[..., Tensor] | None]:
    """Return functions that allocate gradients, None for unwanted ones.

    That of packed rows takes their number.
    """
    x, h0, device, dtype = given.x, given.h0, given.x.device, given.dtype
    H, N, cells = plan.cells[0][0].hidden_size, given.nan.shape[1], len(given.outs)
    states = torch.float32 if h0 is None else h0.dtype
    makers: list[Callable[..., Tensor]] = [
        maker(x.shape, device, x.dtype)
        if given.packing is None
        else row_maker(x.shape[1], device, x.dtype),
        maker((cells, N, H), device, states),
    ]
    for cell in (each for layer in plan.cells for each in layer):
        shapes = ((3 * H, cell.input_size), (3 * H, H), (3 * H,), (3 * H,))
        makers += [maker(shape, device, dtype) for shape in shapes[: (len(wanted) - 2) // cells]]
    return [make if asked else None for make, asked in zip(makers, wanted, strict=True)]
