"""Conversions of real values at the boundary of a call: dtypes and packed rows.

Executors compute in float32, on (T, N, features) and (states, N, features).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Values = TypeVar("Values", Tensor, Tensor | None)
States = TypeVar("States", Tensor, Tensor | None)

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
"""The dtypes of real values and their numbers in kernels and native code."""


class Packing(NamedTuple):
    """The rows of a PackedSequence.

    Attributes:
        T: Steps.
        N: Rows of the first step.
        layout: int64 (N + T + 1,), on the device of the data: the number of steps of each row,
            then the start of each step's rows in the data, then the end of the last step.
        sorted_indices: int64 (N,), the caller's index of each row; None for the identity.
        unsorted_indices: int64 (N,), the inverse; None for the identity.
    """

    T: int
    N: int
    layout: Tensor
    sorted_indices: Tensor | None
    unsorted_indices: Tensor | None

    @property
    def lengths(self) -> Tensor:
        """Steps of each row, int64 (N,)."""
        return self.layout[: self.N]

    def places(self, rows: int) -> Tensor:
        """Return the index of each of `rows` data rows in a (T * N) layout, int64 (rows,)."""
        starts, row = self.layout[self.N :], torch.arange(rows, device=self.layout.device)
        step = torch.searchsorted(starts[1:], row, right=True)
        return step * self.N + row - starts[step]


class CallForm(NamedTuple):
    """The properties of a call, besides its size, that its launches depend on.

    Attributes:
        values: dtype of the input values, one of `FLOATS`.
        states: dtype of the initial states; None without initial states.
        results: dtype of the output values.
        last: dtype of the final states.
        is_packed: Whether values are (rows, features) of a PackedSequence, with states in the
            caller's order.
    """

    values: torch.dtype = torch.float32
    states: torch.dtype | None = None
    results: torch.dtype = torch.float32
    last: torch.dtype = torch.float32
    is_packed: bool = False

    @classmethod
    def of(
        cls, x: Tensor, h0: Tensor | None, dtype: torch.dtype, packing: Packing | None
    ) -> CallForm:
        """Return the form of a forward with results of `dtype`."""
        states = None if h0 is None else h0.dtype
        return cls(x.dtype, states, dtype, dtype, packing is not None)


def inward(
    values: Values,
    states: States,
    packing: Packing | None,
    dtype: torch.dtype | None = torch.float32,
) -> tuple[Values, States]:
    """Convert real values, or their gradients, to the form of the executors; differentiable.

    Args:
        values: (T, N, features), or (rows, features) if packed; None stays None.
        states: (states, N, H) in the caller's order; None stays None.
        packing: How rows are packed; None for padded sequences.
        dtype: Target dtype of both; None keeps their dtypes.

    Returns:
        (T, N, features), zero beyond a row's steps, and (states, N, H) in the order of the rows.
    """
    if values is not None:
        values = values if dtype is None or values.dtype is dtype else values.to(dtype)
        if packing is not None:
            padded = values.new_zeros(packing.T * packing.N, values.shape[1])
            # one copy of all rows: a loop over steps would be one copy per step
            padded = padded.index_copy(0, packing.places(values.shape[0]), values)
            values = padded.view(packing.T, packing.N, values.shape[1])
    if states is not None:
        states = states if dtype is None or states.dtype is dtype else states.to(dtype)
        if packing is not None and packing.sorted_indices is not None:
            states = states.index_select(1, packing.sorted_indices)
    return values, states


def outward(
    values: Values, states: States, packing: Packing | None, rows: int
) -> tuple[Values, States]:
    """Undo `inward`, except for dtypes; differentiable.

    Args:
        values: (T, N, features); None stays None.
        states: (states, N, H); None stays None.
        packing: How rows are packed; None for padded sequences.
        rows: Number of packed rows.
    """
    if packing is not None:
        if values is not None:
            values = values.flatten(0, 1).index_select(0, packing.places(rows))
        if states is not None and packing.unsorted_indices is not None:
            states = states.index_select(1, packing.unsorted_indices)
    return values, states
