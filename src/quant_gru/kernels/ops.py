"""A layer and direction as a differentiable operation: integers forward, straight-through back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant_gru._errors import QuantGRUError
from quant_gru.integer import reference
from quant_gru.integer.backward import Tape, straight_through
from quant_gru.integer.plan import CellPlan
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.cuda import border, compiler, driver
from quant_gru.kernels.cuda import executor as cuda
from quant_gru.kernels.cuda.stack import stack_of as stack_on_gpu


def executor_name(device: torch.device | str = "cpu") -> str:
    """The executor that runs integer GRUs on `device`, as text for reports."""
    device = torch.device(device)
    if device.type == "cpu" and cpu.chosen() != cpu.REFERENCE:
        return f"cpu ({cpu.chosen()})"
    if runs_on_gpu(device):
        return f"cuda ({driver.machine_of(device).arch}, NVRTC {compiler.version()})"
    return f"reference (PyTorch integers, {device.type})"


def runs_on_gpu(device: torch.device) -> bool:
    """Whether the CUDA kernels run on `device`; the reference executor does otherwise."""
    return device.type == "cuda" and driver.available(device)


def native_variant(*tensors: Tensor) -> str | None:
    """The instruction set that takes these real tensors as they are; None where none does."""
    if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in tensors):
        return None
    variant = cpu.chosen()
    return None if variant == cpu.REFERENCE else variant


def run_cell(
    plan: CellPlan, x: Tensor, h0: Tensor, lengths: Tensor | None = None, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Run one layer and direction on codes, with the fastest executor of the device.

    All executors give the same codes; see `quant_gru.integer.reference.run` for the arguments.
    """
    device = plan.weights.W.device
    if x.device != device or h0.device != device:
        raise QuantGRUError(
            f"Expected codes to be on the plan's device {device}, got {x.device} and {h0.device}"
        )
    if x.device.type == "cpu":
        variant = cpu.chosen()
        if variant != cpu.REFERENCE:
            return cpu.run(plan, x, h0, lengths, reverse, variant)
    if runs_on_gpu(x.device):
        return cuda.run(plan, x, h0, lengths, reverse)
    return reference.run(plan, x, h0, lengths, reverse)


@dataclass(frozen=True)
class Codes:
    """Codes with what has to be known of them for the gradient and for NaN.

    Attributes:
        codes: Any integer dtype.
        inside: bool, same shape: the value before the clamp was inside [lo, hi].
        nan: bool (T, N) for an input, (N,) for a state: rows to become NaN.
    """

    codes: Tensor
    inside: Tensor
    nan: Tensor


@dataclass(frozen=True)
class Run:
    """How a sequence is run.

    Attributes:
        lengths: int64 (N,), steps of each row, or None for all.
        reverse: From the last step to the first.
    """

    lengths: Tensor | None
    reverse: bool


def gru_layer(
    plan: CellPlan, x: Codes, h0: Codes, run: Run, real: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Codes, Tensor]:
    """Run one layer and direction.

    Args:
        plan: The plan.
        x: Input codes (T, N, C).
        h0: State codes (N, H).
        run: Lengths and direction.
        real: x (T, N, C), h0 (N, H), W, R, bw, br as real tensors: where gradients go.

    Returns:
        Real output (T, N, H) and last state (N, H), float32, NaN where the input says so; codes of
        the output with its NaN mask; codes of the last state (N, H).
    """
    out, last = run_cell(plan, x.codes, h0.codes, run.lengths, run.reverse)
    spread = spread_nan(x.nan, h0.nan, plan, run.reverse)
    nan, nan_last = (spread[:-1], spread[0]) if run.reverse else (spread[1:], spread[-1])
    y = plan.h.dequantize(out).masked_fill(nan[..., None], torch.nan)
    y_last = plan.h.dequantize(last).masked_fill(nan_last[..., None], torch.nan)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in real):
        saved = (plan, x, h0, run, out, nan.any(0) | nan_last)
        y, y_last = _StraightThrough.apply(y, y_last, saved, *real)
    return y, y_last, Codes(out, torch.ones((), dtype=torch.bool, device=out.device), nan), last


class _StraightThrough(torch.autograd.Function):
    """Hands on the integer forward's output and gives it the straight-through gradient."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, y_last: Tensor, saved: tuple[Any, ...], *real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, x, h0, ctx.run, out, nan_rows = saved
        ctx.save_for_backward(x.codes, x.inside, h0.codes, h0.inside, out, nan_rows)
        ctx.dtypes = [None if t is None else t.dtype for t in real]
        return y.clone(), y_last.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_last: Tensor) -> tuple[Any, ...]:
        x, x_inside, h0, h0_inside, out, nan_rows = ctx.saved_tensors
        tape = Tape(ctx.plan, x, h0, out, ctx.run.lengths, ctx.run.reverse)
        # NaN spreads from the last state to all gradients of a row
        nan = torch.where(nan_rows, torch.nan, 0.0)[:, None]
        grads = straight_through(tape, grad_out, grad_last + nan)
        assert grads.x is not None
        dx, dh0 = grads.x * x_inside, grads.h0 * h0_inside
        weights = (grads.W, grads.R, grads.bw, grads.br)
        real = (
            None if dtype is None or not needed or grad is None else grad.to(dtype)
            for grad, dtype, needed in zip(
                (dx, dh0, *weights), ctx.dtypes, ctx.needs_input_grad[3:], strict=True
            )
        )
        return (None, None, None, *real)


def run_layer_on_gpu(
    plans: Sequence[CellPlan],
    x: Sequence[Tensor],
    h0: Sequence[Tensor],
    lengths: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """All directions of a layer on codes, on a GPU, in one launch where that is possible.

    Args:
        plans: One plan per direction.
        x: Input codes (T, N, C) of each direction.
        h0: State codes (N, H) of each direction.
        lengths: int64 (N,) or None.

    Returns:
        For each direction, codes after each step (T, N, H) and after the last (N, H).
    """
    directions = [
        cuda.Direction(plan, state, index == 1)
        for index, (plan, state) in enumerate(zip(plans, h0, strict=True))
    ]
    if all(plan.x == plans[0].x for plan in plans):
        return cuda.run_directions(directions, x[0], lengths)
    return [
        cuda.run_directions([direction], codes, lengths)[0]
        for direction, codes in zip(directions, x, strict=True)
    ]


def spread_nan(x_nan: Tensor, h0_nan: Tensor, plan: CellPlan, reverse: bool) -> Tensor:
    """Rows that are NaN before the first step and after each, (T + 1, N), in order of time.

    Args:
        x_nan: bool (T, N): inputs with NaN.
        h0_nan: bool (N,): states with NaN.
        plan: The plan: NaN in a weight makes all rows NaN.
        reverse: From the last step to the first; the state before the first step then stands last.
    """
    start = (h0_nan | ~plan.weights.finite)[None]
    steps = torch.cat([x_nan, start]).flip(0) if reverse else torch.cat([start, x_nan])
    spread = torch.cummax(steps.to(torch.uint8), dim=0).values.to(torch.bool)
    return spread.flip(0) if reverse else spread


__all__ = [
    "Codes",
    "Run",
    "border",
    "executor_name",
    "gru_layer",
    "native_variant",
    "run_cell",
    "run_layer_on_gpu",
    "runs_on_gpu",
    "spread_nan",
    "stack_on_gpu",
]
