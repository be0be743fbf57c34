"""The launches of a whole GRU's backward, which native code lists (host/gru_backward.hpp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS, Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.allocators import maker, row_maker
from quant_gru.kernel_runtime.cuda.launch import Machine
from quant_gru.kernel_runtime.cuda.streams import native_streams
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.inputs import Precision, weights_of, zero_on
from quant_gru.kernels.cuda.backward.launch_plan import POLICY
from quant_gru.kernels.cuda.backward.steps import add_steps
from quant_gru.kernels.cuda.plan.cell import Cell
from quant_gru.kernels.cuda.planned_launches import Steps
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


def repeated(
    plan: GRUPlan,
    given: Given,
    wanted: tuple[bool, ...],
    precision: Precision,
    machine: Machine,
    kept_bytes: int,
) -> _native.GPUBackward | None:
    """Return an object that runs backwards which differ only in the addresses of their tensors.

    Return None if kernels do not read the plan's own tensors, whose addresses do not change.

    Args:
        plan: The plan.
        given: The inputs of the first call.
        wanted: Which gradients to compute, as in `prepared.PreparedBackward.run`.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.
        kept_bytes: The most memory that is kept for the next call.
    """
    device, cells = given.x.device, len(given.outs)
    keep: list[Any] = [plan]
    zero = zero_on(device)
    native = _native_cells(plan, keep)
    if native is None:
        return None
    with planner.our_errors():
        planned, size = _native.gru_backward_of(
            native,
            len(plan.cells[0]),
            _form(given, wanted),
            zero.data_ptr(),
            astuple(precision),
            machine.clusters(),
            POLICY,
        )
    made = _OUTS + cells
    steps = Steps(machine, made + len(wanted))
    size = add_steps(steps, planned, size, _SPACE, made)
    is_gpu = device.type == "cuda"
    functions = (
        Tensor,
        torch._C._cuda_getDevice if is_gpu else lambda: -1,
        native_streams(machine, device),
        torch._C._cuda_isCurrentStreamCapturing if is_gpu else lambda: False,
    )
    T, N = given.x.shape[:2] if given.packing is None else given.packing[:2]
    rows = (given.lengths is not None, given.packing is not None, T, N)
    return _native.GPUBackward(
        steps.native((keep, zero)),
        (device.index if is_gpu else -1, size, kept_bytes, cells, *rows),
        [_expected(each) for each in (given.x, given.h0, given.grad_y, given.grad_last)],
        [maker((size,), device, torch.int8), *_makers(plan, given, wanted)],
        functions,
    )


def _native_cells(plan: GRUPlan, keep: list[Any]) -> list[_native.BackwardCell] | None:
    """Return the cells of a plan; None if a tensor of their weights is not the plan's own."""
    found: list[_native.BackwardCell] = []
    for layer, cells in enumerate(plan.cells):
        for d, cell in enumerate(cells):
            between = plan.between[layer - 1][d] if layer else ()
            weights, own = weights_of(cell)
            if not own:
                return None
            keep.append(weights)
            kinds = KINDS[cell.weights.W.dtype], KINDS[cell.weights.R.dtype]
            addresses = tuple(each.data_ptr() for each in weights.values())
            found.append((Cell(cell, between).native(keep), kinds, addresses))
    return found


def _expected(tensor: Tensor | None) -> _native.Layout:
    """Return the shape, strides and dtype of tensors that calls are repeated with."""
    if tensor is None:
        return (), (), 0
    return tuple(tensor.shape), tensor.stride(), FLOATS[tensor.dtype]


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
