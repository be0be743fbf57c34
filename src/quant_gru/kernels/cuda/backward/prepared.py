"""The backward of a layer like one before: launches, addresses and views are there already.

A schedule is for all calls of a size, whatever they bring. Where calls come from one forward again
and again, all that their tensors have beside an address is the same each time; it is set once, and
nothing of it is looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_runtime.allocators import maker, parts
from kernel_runtime.cuda.graph_capture import capturing
from kernel_runtime.cuda.launch import Machine, Prepared
from kernel_runtime.cuda.streams import native_streams
from kernel_runtime.cuda.workspace import Memory
from quant_gru.integer.backward import Tape, Wanted
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels import _native
from quant_gru.kernels.cuda.backward.inputs import PRECISIONS, Call, Precision
from quant_gru.kernels.cuda.backward.launch_plan import Schedule
from quant_gru.kernels.cuda.backward.time_chunks import most_steps
from quant_gru.kernels.cuda.boundary import boundary

_MOST_KINDS = 64
_KEPT_BYTES = 8 << 20

Found = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Gradients of x, behind the mask of its quantizer, and of W, R, bw and br, where wanted."""


class QuickBackward:
    """Backwards of a GRU of one layer and direction, without lengths and noise.

    A gradient of the state before the first step is none of them.

    Args:
        cell: Its plan.
        precision: As for `quant_gru.kernels.cuda.backward.layer.backward`; 'fp32' is for that, as
            it depends on what PyTorch may round at the moment.
        machine: Where kernels run.
    """

    def __init__(self, cell: CellPlan, precision: str, machine: Machine) -> None:
        self._cell, self._machine = cell, machine
        self._precision: Precision = PRECISIONS[precision]
        device = cell.weights.W.device
        self._index = device.index if device.type == "cuda" else -1
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
        latest = self._latest
        if latest is not None and h0 is None and wanted == latest.asked:
            assert latest.native is not None
            result: Found | None = latest.native.run(x, None, out, nan, grad_out, grad_last)
            if result is not None:
                return result
        if self._index >= 0 and torch._C._cuda_getDevice() != self._index:
            return None
        kind = (
            x.shape,
            x.stride(),
            h0 is None,
            None if grad_out is None else (grad_out.dtype, grad_out.stride()),
            grad_last is None,
            wanted,
        )
        found = self._kinds.get(kind)
        if (
            x.is_neg()
            or (grad_out is not None and grad_out.is_neg())
            or (
                grad_last is not None
                and (
                    grad_last.dtype is not torch.float32
                    or grad_last.is_neg()
                    or not grad_last.is_contiguous()
                )
            )
            or not out.is_contiguous()
        ):
            return None
        states = None if h0 is None else boundary.quantize(self._cell.h, h0[0], self._machine)[0]
        if found is None:
            # a graph would have to compute what is kept
            if kind in self._kinds or capturing(x.device):
                return None
            found = self._prepared(x, states, out, nan, grad_out, grad_last, wanted)
            if found is not None and found.native is not None and h0 is None:
                found.asked = wanted
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
        if not x.numel() or x.stride(2) != 1 or not boundary.takes(self._cell.x):
            return None
        if grad_out is not None and grad_out.dtype is not torch.float32:
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
    """The memory of a call, and for whose work it is."""

    def __init__(self, memory: Tensor, stream: int) -> None:
        self.memory, self.stream = memory, stream


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
        native: All of a call in native code, where launches are all there is to it.
        asked: What calls want that native code may take as they come; None for none.
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
        self._zero, self._device = zero, call.device
        self.asked: tuple[bool, ...] | None = None
        T, N, C, H3 = self._sizes.T, self._sizes.N, self._sizes.C, 3 * self._sizes.H
        at, results = self.at[0], self.products.results[0]
        masked = results.get("x") or Memory()
        self._mask: Prepared | None = None
        self._mask_record: Any = None
        if wanted.x:
            self._mask, self._mask_record = boundary.prepared_mask(
                call.plan.x, call.strides, (T, N, C), machine
            )
            at["values"].point(self._mask_record, "real")
            masked.point(self._mask_record, "grad")
        self.point([call])
        self.repeats = self.follows_plans
        # the gradient of the state before the first step is not asked for
        self._dh0_at = self.memory.take(4 * N * (H3 // 3))
        self._make_memory = maker((self.memory.size,), call.device, torch.int8)
        shapes = ((T, N, C), (H3, C), (H3, H3 // 3), (H3,), (H3,))
        self._makers = [
            maker(shape, call.device) if is_wanted else None
            for shape, is_wanted in zip(
                shapes, (wanted.x, wanted.W, wanted.R, wanted.bw, wanted.br), strict=True
            )
        ]
        # in the order of addresses
        self._moved = [
            self.memory,
            *(at[name] for name in ("values", "h0", "out", "nan", "grad_out", "grad_last", "dh0")),
            masked,
            *(results.get(name) or Memory() for name in "WR"),
            *(at[name] for name in ("bw", "br")),
        ]
        self._space: _Space | None = None
        made = bool(results) or not (wanted.x or wanted.W or wanted.R)
        self.native: _native.Repeated | None = None
        if self.whole is not None and made:
            launches = [self.whole] if self._mask is None else [self.whole, self._mask]
            self.native = self._native_call(call, machine.join(launches))

    def _native_call(self, call: Call, launches: Prepared) -> _native.Repeated:
        for each in self._moved:
            launches.native.follow(each.fields)
        T, N, C, H = self._sizes.T, self._sizes.N, self._sizes.C, self._sizes.H
        last = call.tensors["grad_last"]
        absent: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        grad_out = absent if self._zero is not None else ((T, N, H), call.grad_out.stride())
        layouts = [
            ((T, N, C), (*call.strides, 1)),
            grad_out,
            absent if last is None else ((1, N, H), (N * H, H, 1)),
        ]
        is_gpu = self._device.type == "cuda"
        index = self._device.index if is_gpu else -1
        raw = torch._C
        functions = (
            Tensor,
            raw._cuda_getDevice if is_gpu else lambda: -1,
            native_streams(self._machine, self._device),
            raw._cuda_isCurrentStreamCapturing if is_gpu else lambda: False,
        )
        zero = 0 if self._zero is None else self._zero.data_ptr()
        makers = [
            None if make is None else parts(make) for make in (self._make_memory, *self._makers)
        ]
        return _native.Repeated(
            launches.native,
            (index, self.memory.size, self._dh0_at, _KEPT_BYTES, zero),
            layouts,
            makers,
            functions,
            self._machine.raise_for,
            (launches, self._moved, self._stages, self._mask_record, self._zero),
        )

    def forget_space(self) -> None:
        """Give memory back that waits for the next call."""
        self._space = None
        if self.native is not None:
            self.native.forget()

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
        if self.native is not None:
            result: Found | None = self.native.run(x, h0, out, nan, grad_out, grad_last)
            if result is not None:
                return result
        stream = self._machine.stream()
        made = [None if make is None else make() for make in self._makers]
        given = (x, h0, out, nan, self._zero if grad_out is None else grad_out, grad_last)
        with self._lock:
            # work of other calls on this stream is done before that of this one
            space = self._space
            if space is None or space.stream != stream or capturing(self._device):
                space = self._new_space(stream)
            memory = space.memory
            base = memory.data_ptr()
            addresses = [0 if each is None else each.data_ptr() for each in (*given, *made)]
            addresses = [base, *addresses[:6], base + self._dh0_at, *addresses[6:]]
            for moved, address in zip(self._moved, addresses, strict=True):
                moved.move(address)
            if self.whole is not None:
                self.whole.start(stream)
            else:
                self.start(memory, stream)
            if not self.products.results[0]:
                self._multiply(memory, made)
            if self._mask is not None:
                self._mask.start(stream)
        return made[0], made[1], made[2], made[3], made[4]

    def _multiply(self, memory: Tensor, made: Sequence[Tensor | None]) -> None:
        """The last products, from torch."""
        real = memory.view(self._precision.dtype)
        with torch.autocast(self._device.type, enabled=False):
            for name, to in zip("xWR", made, strict=False):
                if to is not None:
                    self.products.write(0, name, real, to.view(-1, to.shape[-1]))

    def _new_space(self, stream: int) -> _Space:
        """Memory for a call; where it is little, and no graph's, it is kept for the next."""
        space = _Space(self._make_memory(), stream)
        if self.memory.size <= _KEPT_BYTES and not capturing(self._device):
            self._space = space
        return space
