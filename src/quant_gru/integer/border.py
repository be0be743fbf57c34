"""Real values at the border: their dtypes, and packed rows.

Executors compute in float32, on (T, N, features) and (states, N, features).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Values = TypeVar("Values", Tensor, Tensor | None)
States = TypeVar("States", Tensor, Tensor | None)

FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
"""The dtypes of real values, as kernels and native code number them."""


class Packing(NamedTuple):
    """The rows of a PackedSequence.

    Attributes:
        T: Steps.
        N: Rows of the first step.
        layout: int64 (N + T + 1,), on the device of the data: how many steps each row has, then
            where the rows of each step start in the data, and where the last ones end.
        sorted_indices: int64 (N,): which of the caller's rows each row is; None for the same.
        unsorted_indices: int64 (N,): the inverse; None as above.
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
        """Where each of so many rows of the data stands among T * N, int64 (rows,)."""
        starts, row = self.layout[self.N :], torch.arange(rows, device=self.layout.device)
        step = torch.searchsorted(starts[1:], row, right=True)
        return step * self.N + row - starts[step]


class CallForm(NamedTuple):
    """What the launches of a call depend on beside its size.

    Attributes:
        values: dtype of the values that come in, one of `FLOATS`.
        states: dtype of the states that come in; None where none do.
        results: dtype of the values that go out.
        last: dtype of the states that go out.
        is_packed: Whether values are (rows, features) of a PackedSequence, and states in the
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
        """That of a forward, whose results are to be of a dtype."""
        states = None if h0 is None else h0.dtype
        return cls(x.dtype, states, dtype, dtype, packing is not None)

    def converts(self, dtype: torch.dtype) -> bool:
        """Whether tensors of one of its dtypes are not as executors have them."""
        return self.is_packed or dtype is not torch.float32


def inward(
    values: Values,
    states: States,
    packing: Packing | None,
    dtype: torch.dtype | None = torch.float32,
) -> tuple[Values, States]:
    """Real values, or their gradients, as executors take them; differentiable.

    Args:
        values: (T, N, features), or (rows, features) where they are packed; None stays None.
        states: (states, N, H) in the caller's order; None stays None.
        packing: How rows are packed; None where they are not.
        dtype: What both are cast to; None for what they are.

    Returns:
        (T, N, features), zeros beyond a row's steps, and (states, N, H) in the order of rows.
    """
    if values is not None:
        values = values if dtype is None or values.dtype is dtype else values.to(dtype)
        if packing is not None:
            padded = values.new_zeros(packing.T * packing.N, values.shape[1])
            # all rows in one piece: steps one after the other would be a copy each
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
    """The inverse of `inward`, but for dtypes; differentiable.

    Args:
        values: (T, N, features); None stays None.
        states: (states, N, H); None stays None.
        packing: How rows are packed; None where they are not.
        rows: How many rows are packed.
    """
    if packing is not None:
        if values is not None:
            values = values.flatten(0, 1).index_select(0, packing.places(rows))
        if states is not None and packing.unsorted_indices is not None:
            states = states.index_select(1, packing.unsorted_indices)
    return values, states
