"""The executors of plans, one for each kind of device.

`Executor` is the definition, in PyTorch. The others override what they compute faster, and leave to
it what they do not support. All return the same codes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError, caller_stacklevel, note_once
from quant_gru.integer import cell as reference
from quant_gru.integer import random
from quant_gru.integer.backward import Gradients, Tape, Wanted, complete, straight_through, union
from quant_gru.integer.plan import CellPlan, GRUPlan, Seam
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernels import _native
from quant_gru.kernels.cpu import backward as cpu_training
from quant_gru.kernels.cpu import boundary as cpu_boundary
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda import machine
from quant_gru.kernels.cuda.backward import inputs as cuda_call
from quant_gru.kernels.cuda.backward import layer as cuda_backward
from quant_gru.kernels.cuda.backward.prepared import PreparedBackward
from quant_gru.kernels.cuda.boundary import boundary
from quant_gru.kernels.cuda.boundary.upload import upload_on
from quant_gru.kernels.cuda.forward import executor as cuda
from quant_gru.kernels.cuda.forward import stack as cuda_stack
from quant_gru.kernels.cuda.plan.structure import takes
from quant_gru.kernels.cuda.weights.contents import Contents

Stack: TypeAlias = cpu.Stack | cuda_stack.Stack
Prepared: TypeAlias = PreparedBackward | _native.CPUBackward

CellRunner: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
PreparedStep: TypeAlias = tuple[_native.PreparedCheck, Callable[..., None] | None]
"""Native checks of calls, and a function that lets native code run calls like the last one."""

PRECISIONS = tuple(cuda_call.PRECISIONS)
"""Precisions of GEMMs in a GPU backward: 8, at least 11 or 24 bits. Accumulators are float32."""


class Executor:
    """The reference executor, on any device."""

    def stack_of(self, plan: GRUPlan) -> Stack | None:
        """Return an object that runs all layers and directions of a plan on real values.

        Return None if an operator has more than 16 bits, if the reference executor runs, if the
        input has a zero point outside of its codes, or if sums are rounded twice on a GPU.

        Args:
            plan: The plan.
        """
        return None

    def prepared_step(
        self,
        plan: GRUPlan,
        guard: _native.WeightGuard,
        dtype: torch.dtype | None,
        update: Callable[[], None] | None,
    ) -> PreparedStep | None:
        """Return native checks of calls of a plan that follows its weights; None if there are none.

        Args:
            plan: The plan.
            guard: The guard of the weights.
            dtype: The dtype of the results; None for the dtype of the input.
            update: Updates the numbers that follow the weights, on a CPU; None if it is not native.
        """
        return None

    def prepared_backward(self, plan: GRUPlan, precision: str) -> Prepared | None:
        """Return an object that runs whole backwards faster than `backward_layer`, or None.

        Args:
            plan: The plan.
            precision: As for `backward_layer`.
        """
        return None

    def contents_of(self, weights: Sequence[Tensor]) -> Contents | None:
        """Return an object that finds writes to weights that no version records.

        Return None where nothing finds them, and if no weight is contiguous.

        Args:
            weights: The weights, on one device.
        """
        return None

    def run_cell(
        self,
        plan: CellPlan,
        x: Tensor,
        h0: Tensor,
        lengths: Tensor | None = None,
        reverse: bool = False,
        held: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one layer and direction on codes, like `quant_gru.integer.cell.run`."""
        device = plan.weights.W.device
        if x.device != device or h0.device != device:
            raise QuantGRUError(
                f"Expected codes to be on the plan's device {device}, got {x.device} and "
                f"{h0.device}"
            )
        return self.cell_runner(plan, x, h0, lengths, reverse, held=held)

    @property
    def cell_runner(self) -> CellRunner:
        """A function like `quant_gru.integer.cell.run`, for codes on the plan's device."""
        return reference.run

    def run_layer(
        self,
        plans: Sequence[CellPlan],
        x: Sequence[Tensor],
        h0: Sequence[Tensor],
        lengths: Tensor | None = None,
        held: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Run all directions of a layer on codes.

        Args:
            plans: One plan per direction.
            x: Input codes (T, N, C) of each direction.
            h0: State codes (N, H) of each direction.
            lengths: int64 (N,) or None.
            held: For each direction, bool (T, N, H) that marks units that keep their state, or
                None.

        Returns:
            For each direction, codes after each step (T, N, H) and after the last step (N, H).
        """
        held = held or [None] * len(plans)
        each = enumerate(zip(plans, x, h0, held, strict=True))
        return [
            self.run_cell(plan, codes, state, lengths, index == 1, hold)
            for index, (plan, codes, state, hold) in each
        ]

    def quantize(self, quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize real values.

        Args:
            quantizer: Quantizer of `x`.
            x: Real values (.., features).

        Returns:
            Codes in their container (.., features), and bool (..) that marks rows with NaN. The
            codes of such rows are meaningless.
        """
        return quantizer.quantize(x).to(quantizer.container), x.isnan().any(-1)

    def masked(self, quantizer: Quantizer, x: Tensor, grad: Tensor) -> Tensor:
        """Set a gradient to 0 where the codes of real values were clamped, possibly in place.

        Args:
            quantizer: Quantizer of `x`.
            x: Real values (T, N, features).
            grad: Gradient of the dequantized codes, same shape as `x`.
        """
        return grad * quantizer.inside(x)

    def requantize(self, seam: Seam, codes: Sequence[Tensor]) -> Tensor:
        """Requantize a layer's states to inputs of the next: weighted_sum(h - z_h) per direction.

        Args:
            seam: What converts codes of the lower layer.
            codes: Codes of each direction (T, N, H).

        Returns:
            Codes (T, N, directions * H) in their container.
        """
        found = seam.unclamped(codes).clamp(seam.sums[0].lo, seam.sums[0].hi)
        return found.to(seam.above.container)

    def masked_requantized(self, seam: Seam, codes: Sequence[Tensor], grad: Tensor) -> Tensor:
        """Set a gradient to 0 where `requantize` clamped, possibly in place.

        Args:
            seam: As for `requantize`.
            codes: As for `requantize`.
            grad: Gradient of the dequantized result (T, N, directions * H).
        """
        unclamped = seam.unclamped(codes)
        return grad * ((unclamped >= seam.sums[0].lo) & (unclamped <= seam.sums[0].hi))

    def dequantize(self, quantizer: Quantizer, codes: Tensor, nan: Tensor) -> Tensor:
        """Dequantize codes to float32.

        Args:
            quantizer: Quantizer of the codes.
            codes: Codes in their container (.., features).
            nan: bool (..): rows that become NaN.
        """
        return quantizer.dequantize(codes).masked_fill(nan[..., None], torch.nan)

    def backward_layer(
        self,
        tapes: Sequence[Tape],
        grad_out: Sequence[Tensor | None],
        grad_last: Sequence[Tensor | None],
        wanted: Sequence[Wanted],
        precision: str,
    ) -> list[Gradients]:
        """Run the straight-through backward of all directions of a layer.

        Args:
            tapes: Inputs and outputs of each direction's forward.
            grad_out: Gradients of each direction's dequantized outputs (T, N, H); None for zeros.
            grad_last: Gradients of each direction's dequantized last states (N, H); None for zeros.
            wanted: Which gradients to compute for each direction.
            precision: The precision of GEMMs on a GPU, see `PRECISIONS`.
        """
        return [
            self._straight_through(*complete(tape, out, last), want)
            for tape, out, last, want in zip(tapes, grad_out, grad_last, wanted, strict=True)
        ]

    def _straight_through(
        self, tape: Tape, grad_out: Tensor, grad_last: Tensor, wanted: Wanted
    ) -> Gradients:
        """Run the straight-through backward of one layer and direction."""
        return straight_through(tape, grad_out, grad_last, wanted)

    def events(self, seed: Tensor, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
        """Draw random events of probability `p`; see `quant_gru.integer.random.events`."""
        return random.events(seed, p, shape, stream)

    def uploaded(self, numbers: ctypes.Array[Any], device: torch.device) -> Tensor:
        """Return 64-bit integers as a tensor, int64 (count,); on a CPU it owns their memory."""
        return torch.frombuffer(numbers, dtype=torch.int64).to(device)


class CPU(Executor):
    """Native code; `QUANT_GRU_CPU` selects the instruction set, or the reference executor."""

    def stack_of(self, plan: GRUPlan) -> Stack | None:
        """See `Executor`."""
        return cpu.stack_of(plan)

    def prepared_step(
        self,
        plan: GRUPlan,
        guard: _native.WeightGuard,
        dtype: torch.dtype | None,
        update: Callable[[], None] | None,
    ) -> PreparedStep | None:
        """See `Executor`."""
        if update is not None and (stack := cpu.stack_of(plan)) is not None:
            return stack.prepared_step(guard, dtype, update), None
        if not _is_native():
            return None
        cell, count = plan.cells[0][0], sum(map(len, plan.cells))
        sizes = (-1, count, cell.input_size, cell.hidden_size)
        return _native.PreparedCheck(sizes, guard, (Tensor, torch.is_grad_enabled)), None

    def prepared_backward(self, plan: GRUPlan, precision: str) -> Prepared | None:
        """See `Executor`."""
        stack = cpu.stack_of(plan)
        return None if stack is None else stack.backward(plan)

    @property
    def cell_runner(self) -> CellRunner:
        """See `Executor`."""
        return partial(cpu.run, variant=cpu.chosen()) if _is_native() else super().cell_runner

    def quantize(self, quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Executor`."""
        if _is_native() and not quantizer.is_outside and cpu_boundary.takes(quantizer, x):
            return cpu_boundary.quantize(quantizer, x)
        return super().quantize(quantizer, x)

    def masked(self, quantizer: Quantizer, x: Tensor, grad: Tensor) -> Tensor:
        """See `Executor`."""
        takes = not quantizer.is_outside and cpu_boundary.takes(quantizer, x)
        if not takes or not _is_plain(grad) or not _is_native():
            return super().masked(quantizer, x, grad)
        cpu_boundary.mask(quantizer, x, grad)
        return grad

    def requantize(self, seam: Seam, codes: Sequence[Tensor]) -> Tensor:
        """See `Executor`."""
        if _is_native() and cpu_boundary.requantizes(seam, codes[0]):
            return cpu_boundary.requantize(seam, codes)
        return super().requantize(seam, codes)

    def masked_requantized(self, seam: Seam, codes: Sequence[Tensor], grad: Tensor) -> Tensor:
        """See `Executor`."""
        takes = cpu_boundary.requantizes(seam, codes[0])
        if not takes or not _is_plain(grad) or not _is_native():
            return super().masked_requantized(seam, codes, grad)
        cpu_boundary.mask_requantized(seam, codes, grad)
        return grad

    def _straight_through(
        self, tape: Tape, grad_out: Tensor, grad_last: Tensor, wanted: Wanted
    ) -> Gradients:
        return cpu_training.backward(tape, grad_out, grad_last, wanted, cpu.chosen())

    def events(self, seed: Tensor, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
        """See `Executor`."""
        if not _is_native():
            return super().events(seed, p, shape, stream)
        return cpu.events(seed, p, shape, stream)


class CUDA(Executor):
    """The CUDA kernels."""

    def stack_of(self, plan: GRUPlan) -> cuda_stack.Stack | None:
        """See `Executor`."""
        return None if plan.is_far else cuda_stack.stack_of(plan)

    def prepared_step(
        self,
        plan: GRUPlan,
        guard: _native.WeightGuard,
        dtype: torch.dtype | None,
        update: Callable[[], None] | None,
    ) -> PreparedStep | None:
        """See `Executor`."""
        stack = self.stack_of(plan)
        return None if stack is None else (stack.prepared_step(guard), stack.prepare)

    def prepared_backward(self, plan: GRUPlan, precision: str) -> Prepared | None:
        """See `Executor`."""
        device = plan.cells[0][0].weights.W.device
        # 'fp32' depends on PyTorch's current float32 matmul precision
        known = precision != "fp32" and not capturing(device)
        stack = self.stack_of(plan) if known else None
        return None if stack is None else PreparedBackward(plan, precision, stack.machine)

    def contents_of(self, weights: Sequence[Tensor]) -> Contents | None:
        """See `Executor`."""
        readable = [w for w in weights if w.is_contiguous()]
        return Contents(readable, machine.machine_of(weights[0].device)) if readable else None

    @property
    def cell_runner(self) -> CellRunner:
        """See `Executor`."""
        return cuda.run

    def run_layer(
        self,
        plans: Sequence[CellPlan],
        x: Sequence[Tensor],
        h0: Sequence[Tensor],
        lengths: Tensor | None = None,
        held: Sequence[Tensor | None] | None = None,
    ) -> list[tuple[Tensor, Tensor]]:
        """See `Executor`. Use one launch if possible."""
        if any(plan.x != plans[0].x for plan in plans):
            return super().run_layer(plans, x, h0, lengths, held)
        each = enumerate(zip(plans, h0, held or [None] * len(plans), strict=True))
        directions = [
            cuda.Direction(plan, state, index == 1, hold) for index, (plan, state, hold) in each
        ]
        return cuda.run_directions(directions, x[0], lengths)

    def quantize(self, quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor]:
        """See `Executor`."""
        is_taken = takes(quantizer) and not quantizer.is_outside
        if is_taken and x.dtype == torch.float32:
            return boundary.quantize(quantizer, x)
        return super().quantize(quantizer, x)

    def masked(self, quantizer: Quantizer, x: Tensor, grad: Tensor) -> Tensor:
        """See `Executor`."""
        is_taken = takes(quantizer) and not quantizer.is_outside
        if not is_taken or x.dtype != torch.float32 or not _is_plain(grad):
            return super().masked(quantizer, x, grad)
        boundary.mask(quantizer, x, grad)
        return grad

    def requantize(self, seam: Seam, codes: Sequence[Tensor]) -> Tensor:
        """See `Executor`."""
        if takes(*seam.below, seam.above):
            return boundary.requantize(seam, codes)
        return super().requantize(seam, codes)

    def masked_requantized(self, seam: Seam, codes: Sequence[Tensor], grad: Tensor) -> Tensor:
        """See `Executor`."""
        if not _is_plain(grad) or not takes(*seam.below, seam.above):
            return super().masked_requantized(seam, codes, grad)
        return boundary.requantize(seam, codes, grad)

    def dequantize(self, quantizer: Quantizer, codes: Tensor, nan: Tensor) -> Tensor:
        """See `Executor`."""
        if takes(quantizer):
            return boundary.dequantize(quantizer, codes, nan)
        return super().dequantize(quantizer, codes, nan)

    def backward_layer(
        self,
        tapes: Sequence[Tape],
        grad_out: Sequence[Tensor | None],
        grad_last: Sequence[Tensor | None],
        wanted: Sequence[Wanted],
        precision: str,
    ) -> list[Gradients]:
        """See `Executor`."""
        return cuda_backward.backward(tapes, grad_out, grad_last, union(wanted), precision)

    def events(self, seed: Tensor, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
        """See `Executor`."""
        return boundary.events(seed, p, shape, stream)

    def uploaded(self, numbers: ctypes.Array[Any], device: torch.device) -> Tensor:
        """See `Executor`."""
        return upload_on(machine.machine_of(device), device)(numbers)


_REFERENCE, _CPU, _CUDA = Executor(), CPU(), CUDA()


def executor_of(device: torch.device) -> Executor:
    """Return the executor of a device."""
    if runs_on_gpu(device):
        return _CUDA
    return _CPU if device.type == "cpu" else _REFERENCE


def executor_name(device: torch.device | str = "cpu") -> str:
    """Return the name of the executor that runs integer GRUs on `device`, for reports."""
    device = torch.device(device)
    if device.type == "cpu" and cpu.chosen() != cpu.REFERENCE:
        return f"cpu ({cpu.chosen()})"
    if _driver().available(device):
        return f"cuda ({machine.machine_of(device).arch}, NVRTC {_driver().compiler.version()})"
    return f"reference (PyTorch integers, {device.type})"


def runs_on_gpu(device: torch.device) -> bool:
    """Return whether the CUDA kernels run on `device`.

    If a CUDA device cannot run them, a `QuantGRUWarning` reports once what is missing.
    """
    if device.type != "cuda":
        return False
    reason = _driver().missing(device)
    if reason is not None:
        what = "quantized GRUs on this GPU run in the reference executor, many times slower than"
        note_once(f"{what} its kernels: {reason}", caller_stacklevel())
    return reason is None


def load(device: torch.device) -> None:
    """Load the compiler and driver of a GPU's kernels, so that the first call need not.

    Do nothing on other devices and on GPUs that cannot run the kernels.
    """
    if _driver().available(device):
        machine.machine_of(device)


def _driver() -> ModuleType:
    # Imported at its use: the error of a missing native module is to name that of this package.
    from quant_gru.kernel_runtime.cuda import driver

    return driver


def _is_native() -> bool:
    return cpu.chosen() != cpu.REFERENCE


def _is_plain(grad: Tensor) -> bool:
    return grad.dtype == torch.float32 and grad.is_contiguous()
