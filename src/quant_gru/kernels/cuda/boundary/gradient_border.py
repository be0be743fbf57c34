"""Inputs and gradients of a backward, and their conversion to and from the layout of kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.call_form import Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.allocators import maker
from quant_gru.kernels.cuda.boundary.conversions import Conversion, row_maker

SPACE, X, H0, LENGTHS, NAN, GRAD_Y, GRAD_LAST, SORTED, UNSORTED, OUTS = range(10)
"""Indices of a call's tensors in `_native.GPUBackward`; the gradients follow the outputs."""


class Place(NamedTuple):
    """An address, as a byte offset into one of a call's tensors."""

    tensor: int
    offset: int = 0

    def after(self, bytes: int) -> Place:
        """Return the address that lies `bytes` bytes further on."""
        return Place(self.tensor, self.offset + bytes)


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


class Gradient(NamedTuple):
    """A gradient that a backward returns.

    Attributes:
        shape: Shape in kernels: (1, 1, features) for a vector, (1, rows, features) for a matrix.
        dtype: dtype of the tensor whose gradient it is.
        make: Function that allocates it; for packed rows it takes the number of rows.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    make: Callable[..., Tensor]


def all_gradients(plan: GRUPlan, given: Given, of_cell: int) -> list[Gradient]:
    """Return all gradients of a backward, in order.

    Args:
        plan: The plan.
        given: The inputs of the backward.
        of_cell: Number of weights per layer and direction: 2 or, with biases, 4.
    """
    x, h0, device, first = given.x, given.h0, given.x.device, plan.cells[0][0]
    H, N, cells = first.hidden_size, given.nan.shape[1], len(given.outs)
    packing, states = given.packing, torch.float32 if h0 is None else h0.dtype
    T = x.shape[0] if packing is None else packing.T
    of_x = maker(x.shape, device, x.dtype)
    found = [
        Gradient(
            (T, N, first.input_size),
            x.dtype,
            of_x if packing is None else row_maker(x.shape[1], device, x.dtype),
        ),
        Gradient((cells, N, H), states, maker((cells, N, H), device, states)),
    ]
    for layer in plan.cells:
        for cell in layer:
            shapes = ((3 * H, cell.input_size), (3 * H, H), (3 * H,), (3 * H,))
            for shape in shapes[:of_cell]:
                make = maker(shape, device, given.dtype)
                found.append(Gradient((1, *(1, *shape)[-2:]), given.dtype, make))
    return found


class Border:
    """The addresses at which kernels of a backward read and write real values.

    The layout of kernels is float32 (T, N, features). A tensor in another layout gets a buffer of
    its own. The first launch converts inputs, and the last one converts gradients.

    Args:
        given: The inputs of the backward.
        directions: One or two.
        gradients: All gradients that the backward can return.
        wanted: Which of these the caller wants.
        room: room(bytes, *name) -> exclusive memory.

    Attributes:
        given: The inputs as kernels see them; converted inputs are tensors in the kernels' layout.
        at: Addresses of x, h0, and the gradients of the output and of the last states.
        results: Addresses at which kernels write each gradient.
        inward: Conversions before the other launches.
        outward: Conversions after the other launches.
    """

    def __init__(
        self,
        given: Given,
        directions: int,
        gradients: Sequence[Gradient],
        wanted: Sequence[bool],
        room: Callable[..., Place],
    ) -> None:
        packing, real, values, states = given.packing, torch.float32, *gradients[:2]
        (T, N, _), H = values.shape, states.shape[2]
        self.at = {each: Place(each) for each in (X, H0, GRAD_Y, GRAD_LAST)}
        first = OUTS + len(given.outs)
        self.results = [Place(first + number) for number in range(len(gradients))]
        self.inward: list[Conversion] = []
        self.outward: list[Conversion] = []
        starts = None if packing is None else Place(LENGTHS, 8 * N)
        output = (T, N, directions * H)
        shapes = {X: values.shape, H0: states.shape, GRAD_Y: output, GRAD_LAST: states.shape}
        tensors = {X: given.x, H0: given.h0, GRAD_Y: given.grad_y, GRAD_LAST: given.grad_last}
        for number, tensor in tensors.items():
            if tensor is None or (packing is None and tensor.dtype is real):
                continue
            shape, is_state = shapes[number], number in (H0, GRAD_LAST)
            self.at[number] = at = room(4 * math.prod(shape), "converted", number)
            # packed rows have only one stride
            strides = (0, *tensor.stride())[-3:-1]
            self.inward.append(
                Conversion(
                    shape,
                    tensor.dtype,
                    real,
                    Place(number),
                    at,
                    order=Place(SORTED) if packing is not None and is_state else None,
                    packed=None if is_state else starts,
                    strides=strides,
                )
            )
            tensors[number] = tensor.new_empty(shape, dtype=real)
        for number, gradient in enumerate(gradients):
            is_packed = packing is not None and number < 2
            if not wanted[number] or not (is_packed or gradient.dtype is not real):
                continue
            shape, result = gradient.shape, self.results[number]
            self.results[number] = at = room(4 * math.prod(shape), "to convert", number)
            self.outward.append(
                Conversion(
                    shape,
                    real,
                    gradient.dtype,
                    at,
                    result,
                    order=Place(UNSORTED) if is_packed and number else None,
                    to_packed=None if number else starts,
                )
            )
        x, h0, grad_y, grad_last = tensors.values()
        assert x is not None
        lengths = given.lengths if packing is None else packing.lengths
        self.given = given._replace(x=x, h0=h0, lengths=lengths, grad_y=grad_y, grad_last=grad_last)
