"""The backward of a layer like one before: launches, addresses and views are there already.

A schedule is for all calls of a size, whatever they bring. Where calls come from one forward again
and again, all that their tensors have beside an address is the same each time; it is set once, and
nothing of it is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quant_gru.integer.backward import Tape, Wanted
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cuda import border
from quant_gru.kernels.cuda.backward.call import PRECISIONS, Call, Precision
from quant_gru.kernels.cuda.backward.pieces import most_steps
from quant_gru.kernels.cuda.backward.schedule import Schedule, product
from quant_gru.kernels.cuda.launch import Machine
from quant_gru.kernels.cuda.memory import Memory, maker
from quant_gru.kernels.cuda.numbers import capturing

_MOST_KINDS = 64
_KEPT_BYTES = 8 << 20

Found = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, behind the mask of its quantizer, and of W, R, bw and br, where wanted."""


class QuickBackward:
    """Backwards of a GRU of one layer and direction, without lengths and noise.

    A gradient of the state before the first step is none of them.

    Args:
        cell: Its plan.
        precision: As for `quant_gru.kernels.cuda.backward.run.backward`; 'fp32' is for that, as it
            depends on what PyTorch may round at the moment.
        machine: Where kernels run.
    """

    def __init__(self, cell: CellPlan, precision: str, machine: Machine) -> None:
        self._cell, self._machine = cell, machine
        self._precision: Precision = PRECISIONS[precision]
        self._kinds: dict[Any, _Repeated | None] = {}
        self._latest: _Repeated | None = None

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        out: Tensor,
        nan: Tensor,
        grad_out: Tensor | None,
        grad_last: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> Found | None:
        """All gradients of a call, or None where the general way has to find them.

        On the plan's device, which has to be the current one.

        Args:
            x: float32 (T, N, C), as the forward took it.
            h0: float32 (1, N, H), likewise, or None for zeros.
            out: Codes of output.h (T, N, H), as the forward gave them.
            nan: float32 (1, N): 0, or NaN where a row is.
            grad_out: Gradient of the output (T, N, H), or None for zeros.
            grad_last: Gradient of the last state (1, N, H), or None for zeros.
            wanted: Whether the gradients of x, W, R and, with biases, of bw and br are wanted.
        """
        device = x.device
        if device.type == "cuda" and torch._C._cuda_getDevice() != device.index:
            return None
        for grad in (grad_out, grad_last):
            if grad is not None and (grad.dtype is not torch.float32 or grad.is_neg()):
                return None
        if not out.is_contiguous() or (grad_last is not None and not grad_last.is_contiguous()):
            return None
        kind = (
            x.shape,
            x.stride(),
            h0 is None,
            None if grad_out is None else grad_out.stride(),
            grad_last is None,
            wanted,
        )
        states = None if h0 is None else border.quantize(self._cell.h, h0[0], self._machine)[0]
        found = self._kinds.get(kind)
        if found is None:
            # a graph would have to compute what is kept
            if kind in self._kinds or capturing(device):
                return None
            found = self._prepared(x, states, out, nan, grad_out, grad_last, wanted)
            if len(self._kinds) >= _MOST_KINDS:
                self._kinds.clear()
            self._kinds[kind] = found
            if found is None:
                return None
        if found is not self._latest:
            if self._latest is not None:
                self._latest.forget_space()
            self._latest = found
        return found.repeat(x, states, out, nan, grad_out, grad_last)

    def _prepared(
        self,
        x: Tensor,
        h0: Tensor | None,
        out: Tensor,
        nan: Tensor,
        grad_out: Tensor | None,
        grad_last: Tensor | None,
        wanted: tuple[bool, ...],
    ) -> _Repeated | None:
        if not x.numel() or x.stride(2) != 1 or x.is_neg() or not border.takes(self._cell.x):
            return None
        tape = Tape(self._cell, x, h0, out, nan=nan[0])
        if most_steps(tape, self._precision, 1) < len(x):
            return None
        call = Call(tape, grad_out, None if grad_last is None else grad_last[0])
        if not call.form.narrow:
            return None
        zero = call.grad_out if grad_out is None else None
        of_x, W, R, bw, br = (*wanted, False, False)[:5]
        found = _Repeated(call, Wanted(of_x, W, R, bw, br), self._precision, self._machine, zero)
        return found if found.repeats else None


class _Space:
    """The memory of a call, and the operands of products in it.

    Attributes:
        stream: For whose work it is.
        x: Factors of the gradient of x; likewise W and R.
    """

    def __init__(self, memory: Tensor, stream: int) -> None:
        self.memory, self.stream = memory, stream
        self.address = memory.data_ptr()
        self.x: tuple[Tensor, Tensor] | None = None
        self.W: tuple[Tensor, Tensor] | None = None
        self.R: tuple[Tensor, Tensor] | None = None


class _Repeated(Schedule):
    """The launches of calls of one direction that differ in addresses alone.

    Args:
        call: The first of them.
        wanted: Which gradients to compute.
        precision: How they are multiplied.
        machine: Where kernels run.
        zero: What stands for the gradient of the output where there is none.

    Attributes:
        repeats: Whether the plan's tensors are what kernels read, and stay where they are.
    """

    def __init__(
        self,
        call: Call,
        wanted: Wanted,
        precision: Precision,
        machine: Machine,
        zero: Tensor | None,
    ) -> None:
        super().__init__([call], wanted, precision, machine)
        self._zero = zero
        shape = (self._T, self._N, self._C)
        self._mask, record = border.prepared_mask(call.plan.x, call.strides, shape, machine)
        self._mask_record = record
        self._masked = Memory()
        self._masked.point(record, "grad")
        self._at[0]["values"].point(record, "real")
        self._point([call])
        self.repeats = self._parts[0] is not None
        # the gradient of the state before the first step is not asked for
        self._dh0_at = self._memory.take(4 * self._N * self._H)
        at = self._at[0]
        self._moves = [
            at[name].move for name in ("values", "h0", "out", "nan", "grad_out", "grad_last")
        ]
        self._move_dh0, self._move_db = at["dh0"].move, at["db"].move
        self._space: _Space | None = None
        self._new_biases: Callable[[], Tensor] | None = None

    def forget_space(self) -> None:
        """Give memory back that waits for the next call."""
        self._space = None

    def repeat(
        self,
        x: Tensor,
        h0: Tensor | None,
        out: Tensor,
        nan: Tensor,
        grad_out: Tensor | None,
        grad_last: Tensor | None,
    ) -> Found:
        """All gradients of a call; arguments as for `QuickBackward.run`, h0 in codes."""
        stream, wanted = self._machine.stream(), self._wanted
        given = (x, h0, out, nan, self._zero if grad_out is None else grad_out, grad_last)
        biases = wanted.bw or wanted.br
        if self._new_biases is None:
            self._new_biases = maker((2, 3 * self._H), x.device)
        db = self._new_biases() if biases else None
        with self._lock:
            # work of other calls on this stream is done before that of this one
            space = self._space
            if space is None or space.stream != stream or capturing(x.device):
                space = self._new_space(x.device, stream)
            base = space.address
            self._memory.move(base)
            for move, tensor in zip(self._moves, given, strict=True):
                move(0 if tensor is None else tensor.data_ptr())
            self._move_dh0(base + self._dh0_at)
            self._move_db(0 if db is None else db.data_ptr())
            if self._whole is not None:
                self._whole.start(stream)
            else:
                self._start_in_parts(space.memory, stream)
            grad_x = grad_W = grad_R = None
            if space.x is not None:
                grad_x = product(*space.x).view(self._T, self._N, self._C)
                self._masked.move(grad_x.data_ptr())
                self._mask.start(stream)
            if space.W is not None:
                grad_W = product(*space.W)
            if space.R is not None:
                grad_R = product(*space.R)
        if db is None:
            return grad_x, grad_W, grad_R, None, None
        bw, br = db.unbind()
        return grad_x, grad_W, grad_R, bw if wanted.bw else None, br if wanted.br else None

    def _new_space(self, device: torch.device, stream: int) -> _Space:
        """Memory for a call; where it is little, and no graph's, it is kept for the next."""
        size = self._memory.size
        space = _Space(torch.empty(size, dtype=torch.int8, device=device), stream)
        real = space.memory.view(self._precision.dtype)
        dWx, dRh = (each.of(real) for each in self._outer[0])
        codes = [each.of(real) for each in self._real_codes[0]]
        if self._wanted.x:
            space.x = (dWx, self._real_weights[0][0].of(real))
        if self._wanted.W:
            space.W = (dWx.t(), codes[0])
        if self._wanted.R:
            space.R = (dRh.t(), codes[-1])
        if size <= _KEPT_BYTES and not capturing(device):
            self._space = space
        return space
