"""Repeated backwards of a whole GRU with prepared launches, addresses and views.

A schedule serves all calls of a size, with any tensors. If the same forward calls repeatedly, its
tensors differ only in their addresses. All other properties are set once and not checked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS, Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernel_runtime.cuda.launch import Machine
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.gru_launches import Given, repeated
from quant_gru.kernels.cuda.backward.inputs import PRECISIONS, Precision
from quant_gru.kernels.cuda.backward.time_chunks import steps_of
from quant_gru.kernels.cuda.plan.structure import takes
from quant_gru.kernels.cuda.plan.tensors import numbers_of

_MOST_KINDS = 64
_KEPT_BYTES = 8 << 20

Found = Sequence[Tensor | None]
"""Gradients of x and h0, after the masks of their quantizers, and of W, R, bw, br of each cell."""


class PreparedBackward:
    """Backwards of a GRU without noise, for sequences that need no division into time chunks.

    Args:
        plan: The plan, whose tensors keep their addresses.
        precision: 'bf16' or 'tf32', see `quant_gru.kernels.cuda.backward.layer.backward`. Callers
            use that function for 'fp32', which depends on PyTorch's current matmul precision.
        machine: The machine that runs the kernels.
    """

    def __init__(self, plan: GRUPlan, precision: str, machine: Machine) -> None:
        self._plan, self._machine = plan, machine
        self._precision: Precision = PRECISIONS[precision]
        self._device = plan.cells[0][0].weights.W.device
        self._index = self._device.index if self._device.type == "cuda" else -1
        self._kinds: dict[Any, _native.GPUBackward | None] = {}
        # and what it was asked for
        self._latest: tuple[_native.GPUBackward, tuple[Any, ...]] | None = None

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
    ) -> Found | None:
        """Return all gradients of a call, or None if the general path must compute them.

        The tensors are on the plan's device, which must be the current device.

        Args:
            x: Input of the forward: (T, N, C), or (rows, C) if rows are packed.
            h0: Initial states of the forward (cells, N, H), or None for zeros; cells are layers
                times directions.
            lengths: Lengths of the forward, int64 (N,), or None.
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
        if lengths is not None and (
            lengths.dtype is not torch.int64 or lengths.device != self._device
        ):
            return None
        latest = self._latest
        if latest is not None and latest[1] == (wanted, dtype):
            result = latest[0].run(x, h0, lengths, outs, nan, grad_y, grad_last, packing)
            if result is not None:
                return result
        if self._index >= 0 and torch._C._cuda_getDevice() != self._index:
            return None
        given = _taken(Given(x, h0, lengths, outs, nan, grad_y, grad_last, packing, dtype))
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
            given.lengths is None,
            *map(_kind, (given.x, given.h0, given.grad_y, given.grad_last)),
            given.dtype,
            wanted,
        )
        if kind in self._kinds:
            return self._kinds[kind]
        if capturing(self._device):
            # tensors made now would be valid only after the graph has run
            return None
        found: _native.GPUBackward | None = None
        if self._fits(given):
            how = (self._precision, self._machine, _KEPT_BYTES)
            found = repeated(self._plan, given, wanted, *how)
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = found
        return found

    def _fits(self, given: Given) -> bool:
        """Return whether kernels support the call, with all steps at once."""
        x = given.x
        T, N = x.shape[:2] if given.packing is None else given.packing[:2]
        if not x.numel() or x.stride(-1) != 1:
            return False
        directions = len(self._plan.cells[0])
        for cells in self._plan.cells:
            for cell in cells:
                if not numbers_of(cell).form.narrow or not takes(cell.x):
                    return False
                sizes = (N, cell.input_size, cell.hidden_size)
                if steps_of(*sizes, self._precision, directions) < T:
                    return False
        return True


def _taken(given: Given) -> Given | None:
    """Convert the inputs of a call for kernels; None if the general path must handle them."""
    x, h0, _, outs, nan, grad_y, grad_last, packing, _ = given
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


def _kind(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return None if tensor is None else (tensor.dtype, tensor.stride())
