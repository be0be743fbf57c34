"""The quantized GRU under autograd: integers forward, straight-through back.

Forward keeps its input and the codes of the states, one byte per unit and step at 8 bits; backward
rebuilds all else from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from quant_gru._errors import QuantGRUError
from quant_gru.autograd.learned_scales import learned_names, to_logarithms
from quant_gru.autograd.state_compression import packed, unpacked
from quant_gru.execution.layers import (
    Below,
    Weights,
    input_codes,
    mask_input,
    real_input,
    requantized,
    run_real,
)
from quant_gru.execution.noise import Noise
from quant_gru.integer.backward import Gradients, Kept, Tape, Wanted, complete
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.scale_gradients import scale_gradients
from quant_gru.kernels.cuda.backward.prepared import PreparedBackward
from quant_gru.kernels.cuda.forward.stack import Stack
from quant_gru.kernels.dispatch import backward_layer, quantize, runs_on_gpu
from quant_gru.kernels.live_weights import LiveWeights, all_live, epochs


@dataclass(eq=False)
class Pass:
    """A forward, as its backward needs to know it.

    Attributes:
        x: Input (T, N, C), real.
        h0: States before the first step (layers * directions, N, H), real; None for zeros.
        lengths: int64 (N,) or None.
        noise: What was random.
        out: Codes of output.h (T, N, H) of each layer and direction.
        nan: Zeros (layers * directions, N), NaN where a row is.
        precision: What gradients are multiplied in, see `quant_gru.kernels.dispatch.PRECISIONS`.
    """

    x: Tensor
    h0: Tensor | None
    lengths: Tensor | None
    noise: Noise | None
    out: Sequence[Tensor]
    nan: Tensor
    precision: str


@dataclass(eq=False)
class Asked:
    """Which gradients are wanted.

    Attributes:
        x: That of the input.
        h0: That of the states before the first step.
        weights: Of each layer and direction those of W, R, bw, br.
        scales: The parameters of each layer and direction, where scales are learned.
    """

    x: bool
    h0: bool
    weights: Sequence[tuple[bool, bool, bool, bool]]
    scales: Sequence[QParams] = ()

    def below(self, first: int) -> bool:
        """Whether anything is wanted of the input, or of layers whose cells come before `first`."""
        if not first:
            return self.x
        return self.x or self.h0 or bool(self.scales) or any(map(any, self.weights[:first]))


@dataclass(eq=False)
class Found:
    """Gradients of a whole GRU.

    Attributes:
        x: (T, N, C), or None where it was not wanted.
        h0: (layers * directions, N, H), or None where it was not wanted.
        cells: Of the weights of each layer and direction; None where nothing was wanted.
        scales: Of the logarithms of scales, float32, of each layer and direction where learned.
    """

    x: Tensor | None
    h0: Tensor | None
    cells: list[Gradients | None]
    scales: list[Tensor]


def gradients(
    plan: GRUPlan, done: Pass, grad_y: Tensor | None, grad_last: Tensor | None, asked: Asked
) -> Found:
    """Backpropagate through all layers and directions.

    Args:
        plan: The plan of the forward.
        done: The forward.
        grad_y: Gradient of the output (T, N, D*H), or None for zeros.
        grad_last: Gradient of the last states (layers * directions, N, H), or None for zeros.
        asked: Which gradients to compute.
    """
    H = plan.cells[0][0].hidden_size
    D, noise = len(plan.cells[0]), done.noise
    T, N, _ = done.x.shape
    grad = grad_y
    grad_h0: list[Tensor] = []
    found: list[Gradients | None] = [None] * len(done.out)
    scales: list[Tensor | None] = [None] * len(done.out)
    nan = done.nan.unbind()
    for layer in reversed(range(len(plan.cells))):
        cells, first = plan.cells[layer], layer * D
        onward, learns = asked.below(first), bool(asked.scales)
        drops = noise is not None and noise.drops
        below = _below(done, first - D, D, learns or drops) if layer else None
        if below is not None and not drops:
            inputs = requantized(plan, layer, below)
        elif below is None and done.x.dtype is torch.float32 and runs_on_gpu(done.x.device):
            # its kernels quantize what they read
            inputs = [done.x] * D
        else:
            inputs, _ = input_codes(plan, layer, done.x, below, noise)
        tapes = [
            Tape(
                cell,
                inputs[d],
                None if done.h0 is None else quantize(cell.h, done.h0[first + d])[0],
                done.out[first + d],
                done.lengths,
                d == 1,
                noise.held(layer, d, D, (T, N, H)) if noise else None,
                nan[first + d],
            )
            for d, cell in enumerate(cells)
        ]
        results = backward_layer(
            tapes,
            [None] * D if grad is None else [grad] if D == 1 else grad.chunk(2, dim=-1),
            [None if grad_last is None else grad_last[first + d] for d in range(D)],
            [_wanted(onward or learns, *asked.weights[first + d], learns) for d in range(D)],
            done.precision,
        )
        for d, (cell, result) in enumerate(zip(cells, results, strict=True)):
            h0 = None if done.h0 is None else done.h0[first + d]
            if h0 is not None and asked.h0:
                grad_h0.append(result.h0 * cell.h.inside(h0))
            if learns:
                qparams = asked.scales[first + d]
                real = real_input(plan, layer, done.x, below, noise)
                tape, _, _ = complete(tapes[d], None, None)
                grad_s = scale_gradients(tape, result, real, h0, learned_names(qparams))
                scales[first + d] = to_logarithms(qparams, grad_s, T * N, real.shape[2], H)
            factors = noise.weight_factors(layer, d, H) if noise else None
            if factors is not None and result.R is not None:
                result = replace(result, R=result.R * factors)
            found[first + d] = result
        if not onward:
            break
        parts = [
            mask_input(plan, layer, d, done.x, below, noise, result.x)
            for d, result in enumerate(results)
            if result.x is not None
        ]
        grad = parts[0] if D == 1 else parts[0] + parts[1]
        if layer and noise and drops:
            grad = grad * noise.factors(layer, (T, N, D * H))
    return Found(
        grad if asked.x else None,
        _by_layer(grad_h0, D) if grad_h0 else None,
        found,
        [each for each in scales if each is not None],
    )


def _by_layer(grads: Sequence[Tensor], directions: int) -> Tensor:
    """Gradients of states that were found from the last layer to the first, stacked in order."""
    last_first = [grads[i : i + directions] for i in range(0, len(grads), directions)]
    return torch.stack([each for layer in reversed(last_first) for each in layer])


def _below(done: Pass, first: int, directions: int, real: bool) -> Below:
    """What a layer gave; NaN is left to the gradient of the last states.

    Args:
        done: The forward.
        first: The layer's first cell.
        directions: How many it has.
        real: Whether its real values are needed: there is no `nan` otherwise.
    """
    nan: list[Tensor] = []
    if real:
        T, N, _ = done.x.shape
        nan = [torch.zeros((T, N), dtype=torch.bool, device=done.x.device)] * directions
    return Below(done.out[first : first + directions], nan)


_wanted = cache(Wanted)


@dataclass(eq=False)
class Call:
    """A forward that is to be differentiated.

    Attributes:
        plan: The plan.
        lengths: int64 (N,) or None.
        noise: What is random.
        precision: See `Pass`.
        bias: Whether weights come with biases.
        scales: The parameters of each layer and direction, where scales are learned.
        stash_bits: Bits that are kept of each code of output.h; None for all.
        again: Called with the weights, gives the plan anew, should it have changed since.
        thread: Whose the plan is, where its numbers follow weights.
        live: What rewrites the parts of the plan that follow weights.
        stack: What runs the forward, where that is known.
        back: What may run the backward faster than the general way.
    """

    plan: GRUPlan
    lengths: Tensor | None
    noise: Noise | None
    precision: str
    bias: bool
    scales: Sequence[QParams]
    stash_bits: int | None
    again: Callable[[Sequence[Tensor]], GRUPlan]
    thread: int = field(default_factory=get_ident)
    live: tuple[LiveWeights, ...] | None = None
    stack: Stack | None = None
    back: PreparedBackward | None = None

    def __post_init__(self) -> None:
        if self.live is None:
            self.live = all_live(self.plan)

    def epochs(self) -> tuple[int, ...]:
        """How often the numbers of the plan have been rewritten."""
        assert self.live is not None
        return epochs(self.live)


def run(
    call: Call,
    x: Tensor,
    h0: Tensor | None,
    weights: Sequence[Sequence[Weights]],
    logarithms: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Run all layers; where a gradient is asked for, the result is differentiable.

    Args:
        call: The plan, and how it is run.
        x: (T, N, C), real.
        h0: (layers * directions, N, H), real; None for zeros.
        weights: [layer][direction] -> W, R, bw, br, where gradients go.
        logarithms: Those of the scales of each layer and direction, where they are learned.

    Returns:
        Output (T, N, D*H) and last states (layers * directions, N, H), float32.
    """
    flat = [w for layer in weights for cell in layer for w in cell if w is not None]
    inputs = (x, h0, *flat, *logarithms)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in inputs]):
        y, h_n = _StraightThrough.apply(call, *inputs)
        return y, h_n
    return run_real(call.plan, x, h0, call.lengths, call.noise)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, x: Tensor, h0: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = Kept()
        found = None if call.stack is None else call.stack.run(x, h0, None, kept)
        y, h_n = found or run_real(call.plan, x, h0, call.lengths, call.noise, kept)
        out = kept.out
        if call.stash_bits:
            out = [
                packed(codes, q, call.stash_bits)
                for codes, q in zip(out, _quantizers(call), strict=True)
            ]
        ctx.set_materialize_grads(False)
        ctx.call, ctx.cells, ctx.epochs = call, len(out), call.epochs()
        nan = nan_of(h_n) if kept.nan is None else kept.nan
        ctx.save_for_backward(x, h0, nan, *out, *parameters)
        return y, h_n

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_h_n: Tensor | None) -> tuple[Any, ...]:
        saved, call, needs = ctx.saved_tensors, ctx.call, ctx.needs_input_grad
        back = call.back
        if back is not None and call.epochs() == ctx.epochs and not _is_grad_enabled():
            x, h0, nan, *rest = saved
            outs = rest[: ctx.cells]
            result = back.run(x, h0, call.lengths, outs, nan, grad_y, grad_h_n, needs[1:])
            if result is not None:
                return (None, *result)
        x, h0, nan, *rest = saved
        needs, device = needs[1:], x.device
        out, parameters = rest[: ctx.cells], rest[ctx.cells :]
        if call.stash_bits:
            H = call.plan.cells[0][0].hidden_size
            out = [
                unpacked(stash, q, call.stash_bits, H)
                for stash, q in zip(out, _quantizers(call), strict=True)
            ]
        count = len(parameters) - len(call.scales)
        learns = any(needs[2 + count :])
        done = Pass(x, h0, call.lengths, call.noise, out, nan, call.precision)
        weights = of_cells(needs[2 : 2 + count], call.bias)
        asked = Asked(needs[0], needs[1], weights, call.scales if learns else ())
        with _plainly(device):
            # parts that follow weights may have been rewritten by another forward, or may be while
            # this runs: on a GPU a thread of autograd's runs it, and forward's waits
            own = device.type == "cuda" or get_ident() == call.thread
            unchanged = own and call.epochs() == ctx.epochs
            plan = call.plan if unchanged else call.again(parameters[:count])
            result = gradients(plan, done, grad_y, grad_h_n, asked)
        scales: list[Tensor | None] = [*result.scales] or [None] * len(call.scales)
        raw = (result.x, result.h0, *flat_gradients(result.cells, call.bias), *scales)
        grads = [
            None if grad is None or like is None or not needed else _to(like.dtype, grad)
            for grad, needed, like in zip(raw, needs, (x, h0, *parameters), strict=True)
        ]
        if torch.is_grad_enabled():
            of = [t for t in (grad_y, grad_h_n, x, h0, *parameters) if t is not None]
            grads = [None if g is None else _Once.apply(g, *of) for g in grads]
        return (None, *grads)


_is_grad_enabled = torch.is_grad_enabled
# `_StraightThrough.apply` without what it does for transforms of functions
_apply = super(torch.autograd.Function, _StraightThrough).apply
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def straight_through(
    call: Call, x: Tensor, h0: Tensor | None, *weights: Tensor
) -> tuple[Tensor, Tensor]:
    """`run`, differentiable, where no transform of functions is at work and nothing is learned.

    Args:
        call: As for `run`.
        x: As for `run`.
        h0: As for `run`.
        weights: Those that are there, one after the other; no transform has made them.
    """
    x, h0 = _unwrap_if_dead(x), None if h0 is None else _unwrap_if_dead(h0)
    y, h_n = _apply(call, x, h0, *weights)
    return y, h_n


def _to(dtype: torch.dtype, grad: Tensor) -> Tensor:
    return grad if grad.dtype is dtype else grad.to(dtype)


def _plainly(device: torch.device) -> AbstractContextManager[object]:
    """Without gradients and autocast; each is turned off only where it is on, which takes time."""
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


def _quantizers(call: Call) -> list[Quantizer]:
    """Those of output.h of each layer and direction."""
    return [cell.h for cells in call.plan.cells for cell in cells]


class _Once(torch.autograd.Function):
    """Hands on a gradient that must not be differentiated; the rest is what it depends on."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *of: Tensor) -> Tensor:
        return grad.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        refuse(ctx, *grads)
        return ()


def refuse(ctx: Any, *grads: Any) -> None:
    """The backward of a backward.

    Raises:
        QuantGRUError: Always.
    """
    raise QuantGRUError(
        "Expected a quantized GRU to be differentiated once, got a gradient of its gradient"
    )


def nan_of(last: Tensor) -> Tensor:
    """Zeros (layers * directions, N), NaN where a row of last states is, which is all or nothing.

    Args:
        last: (layers * directions, N, H).
    """
    return last.select(-1, 0) * 0


def flat_gradients(found: Sequence[Gradients | None], bias: bool) -> Iterator[Tensor | None]:
    """Gradients of W, R and, with biases, bw and br, cell after cell."""
    for each in found:
        if each is None:
            yield from [None] * (4 if bias else 2)
            continue
        yield from (each.W, each.R)
        if bias:
            yield from (each.bw, each.br)


def of_cells(needs: Sequence[bool], bias: bool) -> list[tuple[bool, bool, bool, bool]]:
    """Whether W, R, bw, br of each cell need a gradient."""
    size = 4 if bias else 2
    cells = [needs[i : i + size] for i in range(0, len(needs), size)]
    return [(c[0], c[1], c[2], c[3]) if bias else (c[0], c[1], False, False) for c in cells]
