"""Repeated backwards of a whole GRU with prepared launches, addresses and views.

A schedule serves all calls of a size, with any tensors. If the same forward calls repeatedly, its
tensors differ only in their addresses. All other properties are set once and not checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS, Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.allocators import maker, row_maker
from quant_gru.kernel_runtime.cuda.driver import Device
from quant_gru.kernel_runtime.cuda.graph_capture import capturing, current, index_of
from quant_gru.kernel_runtime.cuda.streams import native_streams
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.inputs import PRECISIONS, Precision, weights_of, zero_on
from quant_gru.kernels.cuda.backward.launch_plan import POLICY
from quant_gru.kernels.cuda.backward.steps import add_steps
from quant_gru.kernels.cuda.backward.time_chunks import most_steps
from quant_gru.kernels.cuda.plan.cell import Cell
from quant_gru.kernels.cuda.plan.structure import KINDS, takes
from quant_gru.kernels.cuda.plan.tensors import numbers_of
from quant_gru.kernels.cuda.planned_launches import Steps
from quant_gru.kernels.cuda.recurrence import planner

_MOST_KINDS = 64
_KEPT_BYTES = 8 << 20
# indices of a call's tensors; the gradients follow the codes of each cell
_SPACE, _OUTS = 0, 9
_OF_ROWS = (1, 7, 8)
"""x and the orders of rows: batches of packed rows have their own."""

Found = Sequence[Tensor | None]
"""Gradients of x and h0, after the masks of their quantizers, and of W, R, bw, br of each cell."""


class Given(NamedTuple):
    """The inputs of a backward, as passed to `PreparedBackward.run`."""

    x: Tensor
    h0: Tensor | None
    outs: Sequence[Tensor]
    nan: Tensor
    grad_y: Tensor | None
    grad_last: Tensor | None
    packing: Packing | None = None
    dtype: torch.dtype = torch.float32


class PreparedBackward:
    """Backwards of a GRU without noise, for sequences that need no division into time chunks.

    Args:
        plan: The plan, whose tensors keep their addresses.
        precision: 'bf16' or 'tf32', see `quant_gru.kernels.cuda.backward.layer.backward`. Callers
            use that function for 'fp32', which depends on PyTorch's current matmul precision.
        machine: The machine that runs the kernels.
    """

    def __init__(self, plan: GRUPlan, precision: str, machine: Device) -> None:
        self._plan, self._machine = plan, machine
        self._precision: Precision = PRECISIONS[precision]
        self._device = plan.cells[0][0].weights.W.device
        self._index = index_of(self._device)
        self._kinds: dict[Any, _native.GPUBackward | None] = {}
        # and what it was asked for
        self._latest: tuple[_native.GPUBackward, tuple[Any, ...]] | None = None

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        outs: Sequence[Tensor],
        nan: Tensor,
        grad_y: Tensor | None,
        grad_last: Tensor | None,
        wanted: tuple[bool, ...],
        packing: Packing | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Found | None:
        """Return all gradients of a call, or None if the general path must compute them.

        The tensors are on the plan's device, which must be the current device.

        Args:
            x: Input of the forward: (T, N, C), or (rows, C) if rows are packed.
            h0: Initial states of the forward (cells, N, H), or None for zeros; cells are layers
                times directions.
            outs: Codes of output.h (T, N, H) of each cell, as returned by the forward.
            nan: float32 (cells, N): NaN for rows that are NaN, otherwise 0.
            grad_y: Gradient of the output (T, N, D*H), or (rows, D*H), or None for zeros.
            grad_last: Gradient of the last states (cells, N, H), or None for zeros.
            wanted: Which gradients are wanted: x, h0, and for each cell W, R and, with biases, bw
                and br.
            packing: How rows are packed; None if they are not.
            dtype: dtype of the gradients of weights.

        Returns:
            The gradients in the order of `wanted`, and None for those that are not wanted. The
            gradients of x and h0 have the dtypes of x and h0.
        """
        latest = self._latest
        if latest is not None and latest[1] == (wanted, dtype):
            result = latest[0].run(x, h0, outs, nan, grad_y, grad_last, packing)
            if result is not None:
                return result
        if self._index >= 0 and torch._C._cuda_getDevice() != self._index:
            return None
        given = _taken(Given(x, h0, outs, nan, grad_y, grad_last, packing, dtype))
        if given is None:
            return None
        found = self._repeated(given, wanted)
        if found is None:
            return None
        if latest is not None and found is not latest[0]:
            latest[0].forget()
        self._latest = found, (wanted, dtype)
        return found.run(*given[:-1])

    def _repeated(self, given: Given, wanted: tuple[bool, ...]) -> _native.GPUBackward | None:
        """Return the object that repeats calls of this kind, made at the first of them."""
        packing = given.packing
        kind = (
            given.x.shape if packing is None else packing[:2],
            *map(_kind, (given.x, given.h0, given.grad_y, given.grad_last)),
            given.dtype,
            wanted,
        )
        if kind in self._kinds:
            return self._kinds[kind]
        if capturing(self._device):
            # tensors made now would be valid only after the graph has run
            return None
        found = self._made(given, wanted) if self._fits(given) else None
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = found
        return found

    def _made(self, given: Given, wanted: tuple[bool, ...]) -> _native.GPUBackward | None:
        """Return an object that runs backwards which differ only in the addresses of their tensors.

        Native code lists their launches (host/gru_backward.hpp). Return None if kernels do not read
        the plan's own tensors, whose addresses do not change.
        """
        device, cells = given.x.device, len(given.outs)
        keep: list[Any] = [self._plan]
        zero = zero_on(device)
        native = _native_cells(self._plan, keep)
        if native is None:
            return None
        (T, N), packed = _sizes(given), given.packing is not None
        layouts = [_layout(each) for each in (given.x, given.h0, given.grad_y, given.grad_last)]
        with planner.our_errors():
            planned, size = _native.gru_backward_of(
                native,
                len(self._plan.cells[0]),
                (T, N, packed, layouts, FLOATS[given.dtype], list(wanted)),
                zero.data_ptr(),
                astuple(self._precision),
                self._machine.clusters(),
                POLICY,
            )
        made = _OUTS + cells
        steps = Steps(self._machine, made + len(wanted), _OF_ROWS if packed else ())
        size = add_steps(steps, planned, size, _SPACE, made)
        is_here, is_captured = current(device)
        functions = (Tensor, is_here, native_streams(self._machine.stream, device), is_captured)
        return _native.GPUBackward(
            steps.native((keep, zero)),
            (self._index, size, _KEPT_BYTES, cells, packed, T, N),
            layouts,
            [maker((size,), device, torch.int8), *_makers(self._plan, given, wanted)],
            functions,
        )

    def _fits(self, given: Given) -> bool:
        """Return whether kernels support the call, with all steps at once."""
        x, (T, N) = given.x, _sizes(given)
        if not x.numel() or x.stride(-1) != 1:
            return False
        directions = len(self._plan.cells[0])
        for cells in self._plan.cells:
            for cell in cells:
                if not numbers_of(cell).form.narrow or not takes(cell.x):
                    return False
                sizes = (N, cell.input_size, cell.hidden_size)
                if most_steps(*sizes, self._precision, directions) < T:
                    return False
        return True


def _taken(given: Given) -> Given | None:
    """Convert the inputs of a call for kernels; None if the general path must handle them."""
    x, h0, outs, nan, grad_y, grad_last, packing, _ = given
    for each in (x, h0, grad_y, grad_last):
        if each is not None and each.dtype not in FLOATS:
            return None
    if x.is_neg() or (grad_y is not None and grad_y.is_neg()):
        return None
    if not nan.is_contiguous() or not all(out.is_contiguous() for out in outs):
        return None
    # native code takes no subclass, such as a Parameter
    x = x if type(x) is Tensor else x.detach().as_subclass(Tensor)
    given = given._replace(x=x, h0=_contiguous(h0), grad_last=_contiguous(grad_last))
    # conversions need contiguous features
    if grad_y is not None and (packing is not None or grad_y.dtype is not torch.float32):
        given = given._replace(grad_y=grad_y if grad_y.stride(-1) == 1 else grad_y.contiguous())
    return given


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return (
        None if tensor is None else tensor.detach().as_subclass(Tensor).contiguous().resolve_neg()
    )


def _sizes(given: Given) -> Sequence[int]:
    """Return T and N."""
    return given.x.shape[:2] if given.packing is None else given.packing[:2]


def _kind(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return None if tensor is None else (tensor.dtype, tensor.stride())


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


def _layout(tensor: Tensor | None) -> _native.Layout:
    """Return the shape, strides and dtype of tensors that calls are repeated with."""
    if tensor is None:
        return (), (), 0
    return tuple(tensor.shape), tensor.stride(), FLOATS[tensor.dtype]


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
