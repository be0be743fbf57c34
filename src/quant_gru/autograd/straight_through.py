"""The quantized GRU under autograd: integer forward, straight-through backward.

Forward saves its input and the codes of the states, one byte per unit and step at 8 bits. Backward
recomputes everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quant_gru.autograd.backward_pass import (
    Asked,
    Pass,
    flat_gradients,
    gradients,
    nan_of,
    of_cells,
)
from quant_gru.autograd.state_compression import packed, unpacked
from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import run_real
from quant_gru.execution.noise import Noise
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import Packing, inward, outward
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.kernels.dispatch import Prepared, executor_of
from quant_gru.kernels.live_weights import LiveWeights, epochs

Made: TypeAlias = tuple[Tensor, Tensor, Tensor, Sequence[Tensor]]
"""Output, last states, NaN of rows (cells, N), and codes of the states of each cell (T, N, H)."""


@dataclass(eq=False)
class Differentiated:
    """How calls of a plan are differentiated.

    Attributes:
        plan: The plan.
        bias: Whether the weights include biases.
        precision: Precision of gradient products, see `quant_gru.kernels.dispatch.PRECISIONS`.
        stash_bits: Bits saved of each code of output.h; None for all.
        scales: The parameters of each layer and direction, if scales are learned.
        again: again(weights, noise) -> the plan rebuilt, for use if it has changed since.
        live: The objects that rewrite the plan's parts that follow weights.
        thread: The thread that owns the plan, if its numbers follow weights.
        back: A prepared backward, faster than the general one; None if not available.
    """

    plan: GRUPlan
    bias: bool
    precision: str
    stash_bits: int | None
    scales: Sequence[QParams]
    again: Callable[[Sequence[Tensor], Noise | None], GRUPlan]
    live: tuple[LiveWeights, ...]
    thread: int = field(default_factory=get_ident)
    back: Prepared | None = None

    def __post_init__(self) -> None:
        if not self.scales and not self.stash_bits:
            executor = executor_of(self.plan.cells[0][0].weights.W.device)
            self.back = executor.prepared_backward(self.plan, self.precision)

    def run(
        self,
        x: Tensor,
        h0: Tensor | None,
        packing: Packing | None,
        dtype: torch.dtype,
        weights: Sequence[Tensor],
        made: Made | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a call without noise, differentiably; see `run`."""
        return run(self, x, h0, Given(packing, None, dtype, made), weights)


@dataclass(eq=False, slots=True)
class Given:
    """The settings of one call besides its tensors.

    Attributes:
        packing: How rows are packed; None for padded sequences.
        noise: Random masks.
        dtype: dtype of the results.
        made: The results, if the forward has run.
    """

    packing: Packing | None = None
    noise: Noise | None = None
    dtype: torch.dtype = torch.float32
    made: Made | None = None


def run(
    how: Differentiated,
    x: Tensor,
    h0: Tensor | None,
    given: Given,
    weights: Sequence[Tensor],
    logarithms: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Run all layers, differentiably. The caller ensures that no function transform is active.

    Args:
        how: The plan, and how it is differentiated.
        x: (T, N, C), or (rows, C) if packed.
        h0: (layers * directions, N, H), or None for zeros.
        given: The other settings of the call.
        weights: The tensors that receive gradients: W, R and, with biases, bw and br, per cell.
        logarithms: Logarithms of the scales of each layer and direction, if learned.

    Returns:
        Output (T, N, D*H), or (rows, D*H) if packed, and last states
        (layers * directions, N, H).
    """
    h0 = None if h0 is None else _unwrap_if_dead(h0)
    tensors = map(_unwrap_if_dead, (*weights, *logarithms))
    y, h_n = _apply(how, given, _unwrap_if_dead(x), h0, *tensors)
    return y, h_n


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: Differentiated,
        given: Given,
        x: Tensor,
        h0: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        packing, made = given.packing, given.made
        if made is None:
            kept = Kept()
            y, h_n = run_real(how.plan, x, h0, None, given.noise, kept, packing, given.dtype)
            nan, out = kept.nan, kept.out
            nan = nan_of(inward(None, h_n, packing)[1]) if nan is None else nan
        else:
            # the graph must not own its results
            given.made = None
            y, h_n, nan, codes = made
            out = list(codes)
        if how.stash_bits:
            out = [
                packed(codes, q, how.stash_bits)
                for codes, q in zip(out, _quantizers(how), strict=True)
            ]
        ctx.set_materialize_grads(False)
        ctx.how, ctx.given, ctx.cells, ctx.epochs = how, given, len(out), epochs(how.live)
        ctx.save_for_backward(x, h0, nan, *out, *parameters)
        return y, h_n

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_h_n: Tensor | None) -> tuple[Any, ...]:
        saved, how, given = ctx.saved_tensors, ctx.how, ctx.given
        needs = ctx.needs_input_grad[2:]
        back = how.back
        x, h0, nan, *rest = saved
        device = x.device
        # Another forward may have rewritten, or may be rewriting, the parts that follow weights. On
        # a GPU an autograd thread runs this backward while the thread of the forward waits.
        own = device.type == "cuda" or get_ident() == how.thread
        is_ours = not how.live or (own and epochs(how.live) == ctx.epochs)
        if back is not None and is_ours and given.noise is None and not torch.is_grad_enabled():
            outs = rest[: ctx.cells]
            form = given.packing, given.dtype
            found = back.run(x, h0, outs, nan, grad_y, grad_h_n, needs, *form)
            if found is not None:
                return (None, None, *found)
        out, parameters = rest[: ctx.cells], rest[ctx.cells :]
        if how.stash_bits:
            H = how.plan.cells[0][0].hidden_size
            out = [
                unpacked(stash, q, how.stash_bits, H)
                for stash, q in zip(out, _quantizers(how), strict=True)
            ]
        count = len(parameters) - len(how.scales)
        learns = any(needs[2 + count :])
        packing, likes, rows = given.packing, (x, h0, *parameters), x.shape[0]
        weights = of_cells(needs[2 : 2 + count], how.bias)
        asked = Asked(needs[0], needs[1], weights, how.scales if learns else ())
        with _plainly(device):
            x, h0 = inward(x, h0, packing)
            grad_y, grad_h_n = inward(grad_y, grad_h_n, packing)
            lengths = None if packing is None else packing.lengths
            done = Pass(x, h0, lengths, given.noise, out, nan, how.precision)
            plan = how.plan if is_ours else how.again(parameters[:count], given.noise)
            result = gradients(plan, done, grad_y, grad_h_n, asked)
            grad_x, grad_h0 = outward(result.x, result.h0, packing, rows)
        scales: list[Tensor | None] = [*result.scales] or [None] * len(how.scales)
        raw = (grad_x, grad_h0, *flat_gradients(result.cells, how.bias), *scales)
        grads = [
            None if grad is None or like is None or not needed else _to(like.dtype, grad)
            for grad, needed, like in zip(raw, needs, likes, strict=True)
        ]
        if torch.is_grad_enabled():
            of = [t for t in (grad_y, grad_h_n, x, h0, *parameters) if t is not None]
            grads = [None if g is None else _Once.apply(g, *of) for g in grads]
        return (None, None, *grads)


# `_StraightThrough.apply` without its handling of function transforms
_apply = super(torch.autograd.Function, _StraightThrough).apply
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def _to(dtype: torch.dtype, grad: Tensor) -> Tensor:
    return grad if grad.dtype is dtype else grad.to(dtype)


def _plainly(device: torch.device) -> AbstractContextManager[object]:
    """Disable gradients and autocast. Each is only disabled if it is enabled, to save time."""
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(device.type)
    if not (grad or autocast):
        return _PLAIN
    stack = ExitStack()
    if grad:
        stack.enter_context(torch.no_grad())
    if autocast:
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


_PLAIN: nullcontext[None] = nullcontext()


def _quantizers(how: Differentiated) -> list[Quantizer]:
    """Return the quantizers of output.h of each layer and direction."""
    return [cell.h for cells in how.plan.cells for cell in cells]


class _Once(torch.autograd.Function):
    """Passes on a gradient that must not be differentiated; `of` are the tensors it depends on."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *of: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse(ctx, *grads)
        return ()


def refuse(ctx: Any, *grads: Any) -> None:
    """Refuse the backward of a backward.

    Raises:
        QuantGRUError: Always.
    """
    raise QuantGRUError(
        "Expected a quantized GRU to be differentiated once, got a gradient of its gradient"
    )
