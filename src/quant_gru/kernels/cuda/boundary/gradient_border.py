"""What a backward is given and gives, and what brings it to the form of kernels and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_runtime.allocators import maker
from quant_gru.integer.border import Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.cuda.boundary.conversions import Conversion, row_maker

SPACE, X, H0, LENGTHS, NAN, GRAD_Y, GRAD_LAST, SORTED, UNSORTED, OUTS = range(10)
"""Numbers of a call's tensors, as `_native.GPUBackward` counts them; gradients come last."""


class Place(NamedTuple):
    """An address: so many bytes from the start of a tensor of a call."""

    tensor: int
    offset: int = 0

    def after(self, bytes: int) -> Place:
        """So many bytes further on."""
        return Place(self.tensor, self.offset + bytes)


class Given(NamedTuple):
    """What a backward is given, as `prepared.PreparedBackward.run` takes it."""

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
    """A gradient that a backward gives.

    Attributes:
        shape: That of kernels; of a vector (1, 1, features), of a matrix (1, rows, features).
        dtype: That of what it is the gradient of.
        make: What makes it; that of packed rows takes their number.
    """

    shape: tuple[int, int, int]
    dtype: torch.dtype
    make: Callable[..., Tensor]


def all_gradients(plan: GRUPlan, given: Given, of_cell: int) -> list[Gradient]:
    """All gradients of a backward, in order.

    Args:
        plan: The plan.
        given: What a backward is given.
        of_cell: Weights of each layer and direction: 2 or, with biases, 4.
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
    """The real values of a backward where its kernels read and write them.

    What is in another form than theirs, float32 (T, N, features), has memory of its own, and is
    converted by a launch before all others, or after them.

    Args:
        given: What a backward is given.
        directions: One or two.
        gradients: All that a backward may give.
        wanted: Which of these are wanted.
        room: room(bytes, *name) -> memory that nothing else has.

    Attributes:
        given: As kernels see it: what is converted is a tensor of the same layout.
        at: Where x, h0, and the gradients of the output and of the last states are.
        results: Where kernels leave each gradient.
        inward: What is converted first.
        outward: What is converted last.
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
            # of packed rows there is but one stride
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
