"""Repeated backwards of a whole GRU with prepared launches, addresses and views.

A schedule serves all calls of a size, with any tensors. If the same forward calls repeatedly, its
tensors differ only in their addresses. All other properties are set once and not checked again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS, Packing
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernel_runtime.allocators import maker
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernel_runtime.cuda.launch import Machine
from quant_gru.kernel_runtime.cuda.streams import native_streams
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.gru_launches import Given, GRULaunches
from quant_gru.kernels.cuda.backward.inputs import PRECISIONS, Precision
from quant_gru.kernels.cuda.backward.time_chunks import steps_of
from quant_gru.kernels.cuda.boundary import boundary
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
        self._kinds: dict[Any, RepeatedBackward | None] = {}
        self._latest: RepeatedBackward | None = None

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
        if latest is not None and latest.native is not None and (wanted, dtype) == latest.wanted:
            result = latest.native.run(x, h0, lengths, outs, nan, grad_y, grad_last, packing)
            if result is not None:
                return result
        if self._index >= 0 and torch._C._cuda_getDevice() != self._index:
            return None
        given = _taken(Given(x, h0, lengths, outs, nan, grad_y, grad_last, packing, dtype))
        if given is None:
            return None
        repeated = self._repeated(given, wanted)
        if repeated is None:
            return None
        if repeated is not self._latest:
            if self._latest is not None:
                self._latest.forget_space()
            self._latest = repeated
        return repeated.run(given)

    def _repeated(self, given: Given, wanted: tuple[bool, ...]) -> RepeatedBackward | None:
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
        found: RepeatedBackward | None = None
        if self._fits(given):
            found = RepeatedBackward(self._plan, given, wanted, self._precision, self._machine)
            found = found if found.follows_plan else None
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
                if not numbers_of(cell).form.narrow or not boundary.takes(cell.x):
                    return False
                sizes = (N, cell.input_size, cell.hidden_size)
                if steps_of(*sizes, self._precision, directions) < T:
                    return False
        return True


class RepeatedBackward:
    """Backwards that differ only in addresses.

    Args:
        plan: The plan.
        given: The inputs of the first call.
        wanted: Which gradients to compute.
        precision: How gradients are multiplied.
        machine: The machine that runs the kernels.

    Attributes:
        wanted: `wanted` as given, and the dtype of gradients of weights.
        follows_plan: Whether kernels read the plan's own tensors, whose addresses do not change.
        native: The whole call in native code; None if torch has to do part of the work.
    """

    def __init__(
        self,
        plan: GRUPlan,
        given: Given,
        wanted: tuple[bool, ...],
        precision: Precision,
        machine: Machine,
    ) -> None:
        self.wanted = wanted, given.dtype
        self._machine, self._device = machine, given.x.device
        launches = self._launches = GRULaunches(plan, given, wanted, precision, machine)
        self.follows_plan = launches.follows_plan
        self._steps = launches.steps
        self._makers = launches.makers
        self._make_memory = maker((launches.size,), given.x.device, torch.int8)
        self._lock = threading.Lock()
        self._space: _Space | None = None
        self.native = self._native_call(given)

    def _native_call(self, given: Given) -> _native.GPUBackward | None:
        launches, first = self._launches, self._steps[0]
        if len(self._steps) > 1 or callable(first):
            return None
        for memory in launches.fields.values():
            first.native.follow(memory.fields)
        is_gpu = self._device.type == "cuda"
        raw = torch._C
        functions = (
            Tensor,
            raw._cuda_getDevice if is_gpu else lambda: -1,
            native_streams(self._machine, self._device),
            raw._cuda_isCurrentStreamCapturing if is_gpu else lambda: False,
        )
        index, cells = self._device.index if is_gpu else -1, len(given.outs)
        T, N = given.x.shape[:2] if given.packing is None else given.packing[:2]
        rows = (given.lengths is not None, given.packing is not None, T, N)
        sizes = (index, launches.size, _KEPT_BYTES, cells, *rows)
        layouts = [_layout(each) for each in (given.x, given.h0, given.grad_y, given.grad_last)]
        return _native.GPUBackward(
            first.native,
            sizes,
            list(launches.fields),
            layouts,
            [self._make_memory, *self._makers],
            functions,
            self._machine.raise_for,
            (first, launches),
        )

    def forget_space(self) -> None:
        """Free the memory that is kept for the next call."""
        self._space = None
        if self.native is not None:
            self.native.forget()

    def run(self, given: Given) -> Found:
        """Compute all gradients of a call."""
        if self.native is not None:
            result = self.native.run(*given[:-1])
            if result is not None:
                return result
        stream = self._machine.stream()
        packing = given.packing
        made = [None if make is None else make() for make in self._makers[1:]]
        first = self._makers[0]
        rows = () if packing is None else (given.x.shape[0],)
        made.insert(0, None if first is None else first(*rows))
        _, _, *layout = packing or (0, 0, given.lengths, None, None)
        tensors = (
            *(given.x, given.h0, layout[0], given.nan, given.grad_y, given.grad_last),
            *layout[1:],
            *given.outs,
            *made,
        )
        with self._lock:
            # a stream runs calls in order, so calls on the same stream can share memory
            space = self._space
            if space is None or space.stream != stream or capturing(self._device):
                space = self._new_space(stream)
            memory = space.memory
            bases = [memory.data_ptr()]
            bases += [0 if each is None else each.data_ptr() for each in tensors]
            for tensor, fields in self._launches.fields.items():
                fields.move(bases[tensor])
            for step in self._steps:
                if callable(step):
                    step(memory, made)
                else:
                    step.start(stream)
        return made

    def _new_space(self, stream: int) -> _Space:
        """Allocate memory for a call; small memory outside graphs is kept for the next call."""
        space = _Space(self._make_memory(), stream)
        if self._launches.size <= _KEPT_BYTES and not capturing(self._device):
            self._space = space
        return space


class _Space:
    """The memory of a call, and the stream whose work uses it."""

    def __init__(self, memory: Tensor, stream: int) -> None:
        self.memory, self.stream = memory, stream


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
    given = given._replace(h0=_contiguous(h0), grad_last=_contiguous(grad_last))
    # conversions need contiguous features
    if grad_y is not None and (packing is not None or grad_y.dtype is not torch.float32):
        given = given._replace(grad_y=grad_y if grad_y.stride(-1) == 1 else grad_y.contiguous())
    return given


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous().resolve_neg()


def _kind(tensor: Tensor | None) -> tuple[torch.dtype, tuple[int, ...]] | None:
    return None if tensor is None else (tensor.dtype, tensor.stride())


def _layout(tensor: Tensor | None) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    if tensor is None:
        return (), (), 0
    return tuple(tensor.shape), tensor.stride(), FLOATS[tensor.dtype]
