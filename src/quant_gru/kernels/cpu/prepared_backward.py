"""The backward of a GRU of one layer and direction, prepared: a call only sets addresses.

A training step with few time steps and rows lasts some ten microseconds, which is less than it
takes to build the arguments of a call. The common arguments of calls of one size are built once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_runtime.allocators import Maker, maker
from quant_gru.integer.call_form import Packing
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import boundary, executor
from quant_gru.kernels.cpu.backward import CHUNK_ITEMS, constants

_CPU = torch.device("cpu")
_SUMS = ("W", "R", "bw", "br")


class PreparedBackward:
    """The backward of a GRU of one layer and direction without noise, in float32.

    Args:
        cell: The plan, with operators of up to 16 bits. Its tensors must keep their addresses.
        variant: The instruction set, one of `executor.choices()` except 'reference'.
    """

    def __init__(self, cell: CellPlan, variant: str) -> None:
        self._cell, self._variant = cell, variant
        numbers, self._keep = constants(cell, reverse=False)
        absent = dict.fromkeys(("held", "lengths", "dh", "dx", "dbw", "dbr"), 0)
        self._numbers: dict[str, Any] = {**absent, **numbers, "chunk_items": CHUNK_ITEMS}
        # `constants` may have copied weights; copies would not follow the weights of the plan.
        self._follows = all(
            any(mine is theirs for theirs in (w.W, w.R, *w.scales.values()))
            for w in (cell.weights,)
            for mine in self._keep
        )
        self._size: _Size | None = None

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        lengths: Tensor | None,
        outs: Sequence[Tensor],
        nan: Tensor,
        grad_y: Tensor | None,
        grad_last: Tensor | None,
        wanted: tuple[bool, ...],
        packing: Packing | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor | None] | None:
        """Compute all gradients of a call, or return None if the general backward has to do it.

        Args:
            x: Input of the forward, (T, N, C). A dtype other than float32 gives None.
            h0: Initial state of the forward. Anything but None (zeros) gives None.
            lengths: Anything but None gives None.
            outs: One tensor: the codes of output.h (T, N, H) from the forward.
            nan: float32 (1, N): NaN for rows that became NaN, 0 for others.
            grad_y: Gradient of the output (T, N, H). None gives None.
            grad_last: Gradient of the last states (1, N, H), or None for zeros.
            wanted: Whether the gradients of x, h0, W, R and, with biases, bw and br are wanted.
            packing: Anything but None gives None.
            dtype: float32.

        Returns:
            The gradients in the order of `wanted`; None for those that are not wanted.
        """
        out = outs[0]
        if packing is not None or lengths is not None or h0 is not None or grad_y is None:
            return None
        if not self._follows:
            return None
        for each in (x, grad_y):
            if each.dtype is not torch.float32 or each.is_neg() or each.stride(2) != 1:
                return None
        if not out.is_contiguous() or not out.numel() or executor.chosen() != self._variant:
            return None
        T, N, _ = x.shape
        size = self._size
        if size is None or (size.T, size.N) != (T, N):
            size = self._size = self._size_of(T, N)
        cell, makers, numbers = self._cell, size.makers, size.numbers.copy()
        codes, _ = boundary.quantize(cell.x, x)
        last = nan[0][:, None].expand(N, cell.hidden_size)
        last = last.contiguous() if grad_last is None else grad_last[0] + last
        found: list[Tensor | None] = [makers["x"]() if wanted[0] else None, None]
        dx, dh = found[0], makers["h0"]()
        for name, is_wanted in zip(_SUMS, wanted[2:], strict=False):
            made = makers[name]() if is_wanted else None
            numbers[f"d{name}"] = 0 if made is None else made.data_ptr()
            found.append(made)
        numbers["x"], numbers["out"] = codes.data_ptr(), out.data_ptr()
        numbers["grad_out"], numbers["grad_last"] = grad_y.data_ptr(), last.data_ptr()
        numbers["grad_step"], numbers["grad_row"], _ = grad_y.stride()
        numbers["dh0"], numbers["threads"] = dh.data_ptr(), torch.get_num_threads()
        if dx is not None:
            numbers["dx"] = dx.data_ptr()
        executor.layer_of(cell, self._variant).backward(numbers)
        if dx is not None:
            boundary.mask(cell.x, x, dx)
        return found

    def _size_of(self, T: int, N: int) -> _Size:
        """Build the common arguments of all calls of a size."""
        C, H = self._cell.input_size, self._cell.hidden_size
        shapes = {
            "x": (T, N, C),
            "h0": (N, H),
            "W": (3 * H, C),
            "R": (3 * H, H),
            "bw": (3 * H,),
            "br": (3 * H,),
        }
        makers = {name: maker(shape, _CPU) for name, shape in shapes.items()}
        h = self._cell.h
        zero = torch.full((N, H), h.zero_point, dtype=h.container, device="cpu")
        numbers = self._numbers | {"T": T, "N": N, "h0": zero.data_ptr()}
        return _Size(T, N, makers, numbers, zero)


class _Size(NamedTuple):
    """Common arguments of calls of a size. `numbers` contains the address of `zero_state`."""

    T: int
    N: int
    makers: dict[str, Maker]
    numbers: dict[str, Any]
    zero_state: Tensor
