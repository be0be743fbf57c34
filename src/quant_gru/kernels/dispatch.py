"""Choose an executor by device, and convert real values at its boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from kernel_runtime.cuda import compiler
from kernel_runtime.cuda.graph_capture import capturing
from quant_gru.errors import QuantGRUError, caller_stacklevel, note_once
from quant_gru.integer import random, reference
from quant_gru.integer.backward import Gradients, Tape, Wanted, complete, straight_through, union
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels.cpu import backward as cpu_training
from quant_gru.kernels.cpu import boundary as cpu_boundary
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cpu.prepared_backward import PreparedBackward as PreparedBackwardCPU
from quant_gru.kernels.cuda import machine
from quant_gru.kernels.cuda.backward import inputs as cuda_call
from quant_gru.kernels.cuda.backward import layer as cuda_backward
from quant_gru.kernels.cuda.backward.prepared import PreparedBackward
from quant_gru.kernels.cuda.boundary import boundary
from quant_gru.kernels.cuda.forward import executor as cuda
from quant_gru.kernels.cuda.forward import stack as cuda_stack
from quant_gru.kernels.cuda.weights.contents import Contents

Stack: TypeAlias = cpu.Stack | cuda_stack.Stack

PRECISIONS = tuple(cuda_call.PRECISIONS)
"""Precisions of GEMMs in a GPU backward: 8, at least 11 or 24 bits. Accumulators are float32."""


def executor_name(device: torch.device | str = "cpu") -> str:
    """Return the name of the executor that runs integer GRUs on `device`, for reports."""
    device = torch.device(device)
    if device.type == "cpu" and cpu.chosen() != cpu.REFERENCE:
        return f"cpu ({cpu.chosen()})"
    if machine.available(device):
        return f"cuda ({machine.machine_of(device).arch}, NVRTC {compiler.version()})"
    return f"reference (PyTorch integers, {device.type})"


def runs_on_gpu(device: torch.device) -> bool:
    """Return whether the CUDA kernels run on `device`.

    If a CUDA device cannot run them, a `QuantGRUWarning` reports once what is missing.
    """
    if device.type != "cuda":
        return False
    reason = machine.missing(device)
    if reason is not None:
        what = "quantized GRUs on this GPU run in the reference executor, many times slower than"
        note_once(f"{what} its kernels: {reason}", caller_stacklevel())
    return reason is None


def load(device: torch.device) -> None:
    """Load the compiler and driver of a GPU's kernels, so that the first call need not.

    Do nothing on other devices and on GPUs that cannot run the kernels.
    """
    if machine.available(device):
        machine.machine_of(device)


def stack_of(plan: GRUPlan) -> Stack | None:
    """Return a stack that runs all layers and directions of a plan on real values.

    Return None if an operator has more than 16 bits, if the reference executor runs, or if the
    input has a zero point outside of its codes, which stacks do not know.

    Args:
        plan: The plan.
    """
    device = plan.cells[0][0].weights.W.device
    if plan.is_far:
        return None
    if runs_on_gpu(device):
        return cuda_stack.stack_of(plan)
    variant = cpu.chosen() if device.type == "cpu" else cpu.REFERENCE
    return None if variant == cpu.REFERENCE else cpu.stack_of(plan, variant)


def contents_of(weights: Sequence[Tensor]) -> Contents | None:
    """Return an object that finds writes to weights that no version records.

    Return None if weights are not on a GPU that runs the CUDA kernels, or none is contiguous.

    Args:
        weights: The weights, on one device.
    """
    device = weights[0].device
    readable = [w for w in weights if w.is_contiguous()]
    if not readable or not runs_on_gpu(device):
        return None
    return Contents(readable, machine.machine_of(device))


def run_cell(
    plan: CellPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None = None,
    reverse: bool = False,
    held: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one layer and direction on codes, with the fastest executor of the device.

    All executors return the same codes. `quant_gru.integer.reference.run` describes the arguments.
    """
    device = plan.weights.W.device
    if x.device != device or h0.device != device:
        raise QuantGRUError(
            f"Expected codes to be on the plan's device {device}, got {x.device} and {h0.device}"
        )
    if x.device.type == "cpu" and cpu.chosen() != cpu.REFERENCE:
        return cpu.run(plan, x, h0, lengths, reverse, cpu.chosen(), held=held)
    if runs_on_gpu(x.device):
        return cuda.run(plan, x, h0, lengths, reverse, held=held)
    return reference.run(plan, x, h0, lengths, reverse, held)


def quantize(quantizer: Quantizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize real values.

    Args:
        quantizer: Quantizer of `x`.
        x: Real values (.., features).

    Returns:
        Codes in their container (.., features), and bool (..) that marks rows with NaN. The codes
        of such rows are meaningless.
    """
    if quantizer.is_outside:
        return quantizer.quantize(x).to(quantizer.container), x.isnan().any(-1)
    if runs_on_gpu(x.device) and x.dtype == torch.float32 and boundary.takes(quantizer):
        return boundary.quantize(quantizer, x)
    if cpu_boundary.takes(quantizer, x) and cpu.chosen() != cpu.REFERENCE:
        return cpu_boundary.quantize(quantizer, x)
    return quantizer.quantize(x).to(quantizer.container), x.isnan().any(-1)


def masked(quantizer: Quantizer, x: Tensor, grad: Tensor) -> Tensor:
    """Set a gradient to 0 where the codes of real values were clamped, possibly in place.

    Args:
        quantizer: Quantizer of `x`.
        x: Real values (T, N, features).
        grad: Gradient of the dequantized codes, same shape as `x`.
    """
    if quantizer.is_outside:
        return grad * quantizer.inside(x)
    fast = x.dtype == grad.dtype == torch.float32 and boundary.takes(quantizer)
    if fast and runs_on_gpu(x.device) and grad.is_contiguous():
        boundary.mask(quantizer, x, grad)
        return grad
    native = grad.dtype == torch.float32 and grad.is_contiguous() and grad.device == x.device
    if native and cpu_boundary.takes(quantizer, x) and cpu.chosen() != cpu.REFERENCE:
        cpu_boundary.mask(quantizer, x, grad)
        return grad
    return grad * quantizer.inside(x)


def requantize(
    sums: Sequence[WeightedSum],
    below: Sequence[Quantizer],
    above: Quantizer,
    codes: Sequence[Tensor],
) -> Tensor:
    """Requantize a layer's states to inputs of the next: x = weighted_sum(h - z_h) per direction.

    Args:
        sums: Weighted sum of each direction of the lower layer.
        below: Quantizer of each direction's codes.
        above: The quantizer of the result.
        codes: Codes of each direction (T, N, H).

    Returns:
        Codes (T, N, directions * H) in their container.
    """
    if cpu.chosen() != cpu.REFERENCE and cpu_boundary.requantizes(sums, below, above, codes[0]):
        return cpu_boundary.requantize(sums, below, above, codes)
    if runs_on_gpu(codes[0].device) and all(map(boundary.takes, (above, *below))):
        return boundary.requantize(sums, below, above, codes)
    unclamped = _unclamped(sums, below, codes)
    return unclamped.clamp(sums[0].lo, sums[0].hi).to(above.container)


def masked_requantized(
    sums: Sequence[WeightedSum],
    below: Sequence[Quantizer],
    above: Quantizer,
    codes: Sequence[Tensor],
    grad: Tensor,
) -> Tensor:
    """Set a gradient to 0 where `requantize` clamped, possibly in place.

    Args:
        sums: As for `requantize`.
        below: As for `requantize`.
        above: As for `requantize`.
        codes: As for `requantize`.
        grad: Gradient of the dequantized result (T, N, directions * H).
    """
    plain = grad.dtype == torch.float32 and grad.is_contiguous()
    on_cpu = grad.device.type == "cpu" and cpu.chosen() != cpu.REFERENCE
    if plain and on_cpu and cpu_boundary.requantizes(sums, below, above, codes[0]):
        cpu_boundary.mask_requantized(sums, below, above, codes, grad)
        return grad
    if plain and runs_on_gpu(grad.device) and all(map(boundary.takes, (above, *below))):
        boundary.mask_requantized(sums, below, above, codes, grad)
        return grad
    unclamped = _unclamped(sums, below, codes)
    return grad * ((unclamped >= sums[0].lo) & (unclamped <= sums[0].hi))


def _unclamped(
    sums: Sequence[WeightedSum], below: Sequence[Quantizer], codes: Sequence[Tensor]
) -> Tensor:
    return torch.cat(
        [
            weighted_sum.unclamped(half.to(torch.int64) - q.zero_point)
            for weighted_sum, half, q in zip(sums, codes, below, strict=True)
        ],
        dim=-1,
    )


def dequantize(quantizer: Quantizer, codes: Tensor, nan: Tensor) -> Tensor:
    """Dequantize codes to float32.

    Args:
        quantizer: Quantizer of the codes.
        codes: Codes in their container (.., features).
        nan: bool (..): rows that become NaN.
    """
    if runs_on_gpu(codes.device) and boundary.takes(quantizer):
        return boundary.dequantize(quantizer, codes, nan)
    return quantizer.dequantize(codes).masked_fill(nan[..., None], torch.nan)


def run_layer(
    plans: Sequence[CellPlan],
    x: Sequence[Tensor],
    h0: Sequence[Tensor],
    lengths: Tensor | None = None,
    held: Sequence[Tensor | None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Run all directions of a layer on codes. A GPU uses one launch if possible.

    Args:
        plans: One plan per direction.
        x: Input codes (T, N, C) of each direction.
        h0: State codes (N, H) of each direction.
        lengths: int64 (N,) or None.
        held: For each direction, bool (T, N, H) that marks units that keep their state, or None.

    Returns:
        For each direction, codes after each step (T, N, H) and after the last step (N, H).
    """
    held = held or [None] * len(plans)
    if runs_on_gpu(x[0].device) and all(plan.x == plans[0].x for plan in plans):
        directions = [
            cuda.Direction(plan, state, index == 1, hold)
            for index, (plan, state, hold) in enumerate(zip(plans, h0, held, strict=True))
        ]
        return cuda.run_directions(directions, x[0], lengths)
    return [
        run_cell(plan, codes, state, lengths, index == 1, hold)
        for index, (plan, codes, state, hold) in enumerate(zip(plans, x, h0, held, strict=True))
    ]


def backward_layer(
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
    device = tapes[0].x.device
    if runs_on_gpu(device):
        return cuda_backward.backward(tapes, grad_out, grad_last, union(wanted), precision)
    each = [
        (*complete(tape, out, last), want)
        for tape, out, last, want in zip(tapes, grad_out, grad_last, wanted, strict=True)
    ]
    if device.type == "cpu":
        return [cpu_training.backward(*one, cpu.chosen()) for one in each]
    return [straight_through(*one) for one in each]


def prepared_backward(
    plan: GRUPlan, precision: str
) -> PreparedBackward | PreparedBackwardCPU | None:
    """Return an object that repeats backwards of a plan faster than `backward_layer`, or None.

    Args:
        plan: The plan.
        precision: As for `backward_layer`.
    """
    device = plan.cells[0][0].weights.W.device
    if plan.is_far:
        return None
    if device.type == "cpu" and not runs_on_gpu(device):
        cells = [cell for layer in plan.cells for cell in layer]
        variant = cpu.chosen()
        if len(cells) > 1 or variant == cpu.REFERENCE or not cpu.is_narrow(cells[0], variant):
            return None
        return PreparedBackwardCPU(cells[0], variant)
    # 'fp32' depends on PyTorch's current float32 matmul precision
    if precision == "fp32" or not runs_on_gpu(device) or capturing(device):
        return None
    stack = cuda_stack.stack_of(plan)
    return None if stack is None else PreparedBackward(plan, precision, stack.machine)


def events(seed: Tensor, p: float, shape: tuple[int, int, int], stream: int) -> Tensor:
    """Draw random events of probability `p`; see `quant_gru.integer.random.events`."""
    if seed.device.type == "cpu" and cpu.chosen() != cpu.REFERENCE:
        return cpu.events(seed, p, shape, stream)
    if runs_on_gpu(seed.device):
        return boundary.events(seed, p, shape, stream)
    return random.events(seed, p, shape, stream)


def spread_nan(x_nan: Tensor, h0_nan: Tensor, plan: CellPlan, reverse: bool) -> Tensor:
    """Return which rows are NaN before the first step and after each step, bool (T + 1, N).

    Args:
        x_nan: bool (T, N): inputs with NaN.
        h0_nan: bool (N,): initial states with NaN.
        plan: The plan. A NaN in a weight makes all rows NaN.
        reverse: Steps run from the last to the first. The initial state is then the last entry,
            because entries are in order of time.
    """
    start = (h0_nan | ~plan.weights.finite)[None]
    steps = torch.cat([x_nan, start]).flip(0) if reverse else torch.cat([start, x_nan])
    spread = torch.cummax(steps.to(torch.uint8), dim=0).values.to(torch.bool)
    return spread.flip(0) if reverse else spread


__all__ = [
    "PRECISIONS",
    "Stack",
    "backward_layer",
    "contents_of",
    "dequantize",
    "events",
    "executor_name",
    "masked",
    "masked_requantized",
    "prepared_backward",
    "quantize",
    "requantize",
    "run_cell",
    "run_layer",
    "runs_on_gpu",
    "spread_nan",
    "stack_of",
]
