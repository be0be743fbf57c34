"""The quantized GRU under autograd: integers forward, straight-through back.

Forward keeps its input and the codes of the states, one byte per unit and step at 8 bits; backward
rebuilds all else from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant_gru._errors import QuantGRUError
from quant_gru._layers import (
    Below,
    Weights,
    input_codes,
    input_inside,
    real_input,
    run_real,
)
from quant_gru._learned import learned_names, to_logarithms
from quant_gru._noise import Noise
from quant_gru.integer.backward import Gradients, Tape, Wanted
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams
from quant_gru.integer.scale_gradients import scale_gradients
from quant_gru.kernels.live import epochs
from quant_gru.kernels.ops import backward_layer


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward, as its backward needs to know it.

    Attributes:
        x: Input (T, N, C), real.
        h0: States before the first step (layers * directions, N, H), real.
        lengths: int64 (N,) or None.
        noise: What was random.
        out: Codes of output.h (T, N, H) of each layer and direction.
        nan: Zeros (layers * directions, N), NaN where a row is.
        precision: What gradients are multiplied in, see `quant_gru.kernels.ops.PRECISIONS`.
    """

    x: Tensor
    h0: Tensor
    lengths: Tensor | None
    noise: Noise | None
    out: Sequence[Tensor]
    nan: Tensor
    precision: str


@dataclass(frozen=True)
class Asked:
    """Which gradients are wanted.

    Attributes:
        x: That of the input.
        weights: Of each layer and direction those of W, R, bw, br.
        scales: The parameters of each layer and direction, where scales are learned.
    """

    x: bool
    weights: Sequence[tuple[bool, bool, bool, bool]]
    scales: Sequence[QParams] = ()


@dataclass(frozen=True)
class Found:
    """Gradients of a whole GRU.

    Attributes:
        x: (T, N, C), or None where it was not wanted.
        h0: (layers * directions, N, H).
        cells: Of the weights of each layer and direction.
        scales: Of the logarithms of scales, float32, of each layer and direction where learned.
    """

    x: Tensor | None
    h0: Tensor
    cells: list[Gradients]
    scales: list[Tensor]


def gradients(plan: GRUPlan, done: Pass, grad_y: Tensor, grad_last: Tensor, asked: Asked) -> Found:
    """Backpropagate through all layers and directions.

    Args:
        plan: The plan of the forward.
        done: The forward.
        grad_y: Gradient of the output (T, N, D*H).
        grad_last: Gradient of the last states (layers * directions, N, H).
        asked: Which gradients to compute.
    """
    grad: Tensor | None = grad_y
    # a row that is NaN in its last state gets gradients that are NaN, all of them
    grad_last = grad_last + done.nan[..., None]
    D, noise = len(plan.cells[0]), done.noise
    T, N, _ = done.x.shape
    grad_h0: list[Tensor | None] = [None] * len(done.out)
    found: list[Gradients | None] = [None] * len(done.out)
    scales: list[Tensor | None] = [None] * len(done.out)
    for layer in reversed(range(len(plan.cells))):
        cells, first = plan.cells[layer], layer * D
        H = cells[0].hidden_size
        below = _below(done, first - D, D) if layer else None
        codes, _ = input_codes(plan, layer, done.x, below, noise)
        tapes = [
            Tape(
                cell,
                codes[d],
                cell.h.quantize(done.h0[first + d]).to(cell.h.container),
                done.out[first + d],
                done.lengths,
                d == 1,
                noise.held(layer, d, D, (T, N, H)) if noise else None,
            )
            for d, cell in enumerate(cells)
        ]
        assert grad is not None
        onward = asked.x if layer == 0 and not asked.scales else True
        results = backward_layer(
            tapes,
            [grad[..., d * H : (d + 1) * H] for d in range(D)],
            [grad_last[first + d] for d in range(D)],
            [Wanted(onward, *asked.weights[first + d], bool(asked.scales)) for d in range(D)],
            done.precision,
        )
        for d, (cell, result) in enumerate(zip(cells, results, strict=True)):
            h0 = done.h0[first + d]
            grad_h0[first + d] = result.h0 * cell.h.inside(h0)
            if asked.scales:
                qparams = asked.scales[first + d]
                real = real_input(plan, layer, done.x, below, noise)
                grad_s = scale_gradients(tapes[d], result, real, h0, learned_names(qparams))
                scales[first + d] = to_logarithms(qparams, grad_s, T * N, real.shape[2], H)
            dropped = noise.dropped_weights(layer, d, H) if noise else None
            if noise and dropped is not None and result.R is not None:
                kept = torch.where(dropped, 0.0, 1 / (1 - noise.recurrent_dropout))
                result = replace(result, R=result.R * kept)
            found[first + d] = result
        grad = None
        if onward:
            inside = input_inside(plan, layer, done.x, below, noise)
            for result, mask in zip(results, inside, strict=True):
                assert result.x is not None
                part = result.x * mask
                grad = part if grad is None else grad + part
            if layer and noise and noise.drops:
                assert grad is not None
                grad = grad * noise.factors(layer, (T, N, D * H))
    return Found(
        grad,
        torch.stack([each for each in grad_h0 if each is not None]),
        [each for each in found if each is not None],
        [each for each in scales if each is not None],
    )


def _below(done: Pass, first: int, directions: int) -> Below:
    """What a layer gave; NaN is left to the gradient of the last states."""
    T, N, _ = done.x.shape
    nan = torch.zeros((T, N), dtype=torch.bool, device=done.x.device)
    return Below(done.out[first : first + directions], [nan] * directions)


@dataclass(frozen=True, eq=False)
class Call:
    """A forward that is to be differentiated.

    Attributes:
        plan: The plan.
        lengths: int64 (N,) or None.
        noise: What is random.
        precision: See `Pass`.
        bias: Whether weights come with biases.
        scales: The parameters of each layer and direction, where scales are learned.
        again: Called with the weights, gives the plan anew, should it have changed since.
    """

    plan: GRUPlan
    lengths: Tensor | None
    noise: Noise | None
    precision: str
    bias: bool
    scales: Sequence[QParams]
    again: Callable[[Sequence[Tensor]], GRUPlan]


def run(
    call: Call,
    x: Tensor,
    h0: Tensor,
    weights: Sequence[Sequence[Weights]],
    logarithms: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """Run all layers; where a gradient is asked for, the result is differentiable.

    Args:
        call: The plan, and how it is run.
        x: (T, N, C), real.
        h0: (layers * directions, N, H), real.
        weights: [layer][direction] -> W, R, bw, br, where gradients go.
        logarithms: Those of the scales of each layer and direction, where they are learned.

    Returns:
        Output (T, N, D*H) and last states (layers * directions, N, H), float32.
    """
    flat = [w for layer in weights for cell in layer for w in cell if w is not None]
    inputs = (x, h0, *flat, *logarithms)
    if torch.is_grad_enabled() and any(t.requires_grad for t in inputs):
        y, h_n = _StraightThrough.apply(call, *inputs)
        return y, h_n
    return run_real(call.plan, x, h0, call.lengths, call.noise)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, x: Tensor, h0: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        out: list[Tensor] = []
        y, h_n = run_real(call.plan, x, h0, call.lengths, call.noise, out)
        ctx.call, ctx.cells, ctx.epochs = call, len(out), epochs(call.plan)
        ctx.save_for_backward(x, h0, nan_of(h_n), *out, *parameters)
        return y, h_n

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_h_n: Tensor) -> tuple[Any, ...]:
        x, h0, nan, *rest = ctx.saved_tensors
        call, out, parameters = ctx.call, rest[: ctx.cells], rest[ctx.cells :]
        needs = ctx.needs_input_grad[1:]
        count = len(parameters) - len(call.scales)
        learns = any(needs[2 + count :])
        done = Pass(x, h0, call.lengths, call.noise, out, nan, call.precision)
        asked = Asked(
            needs[0], of_cells(needs[2 : 2 + count], call.bias), call.scales if learns else ()
        )
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            # parts that follow weights may have been rewritten by another forward
            unchanged = epochs(call.plan) == ctx.epochs
            plan = call.plan if unchanged else call.again(parameters[:count])
            found = gradients(plan, done, grad_y, grad_h_n, asked)
        scales: list[Tensor | None] = [*found.scales] or [None] * len(call.scales)
        raw = (found.x, found.h0, *flat_gradients(found.cells, call.bias), *scales)
        # of the dtypes of what they belong to
        grads = [
            None if grad is None or not needed else grad.to(like.dtype)
            for grad, needed, like in zip(raw, needs, (x, h0, *parameters), strict=True)
        ]
        if torch.is_grad_enabled():
            grads = [None if g is None else _Once.apply(g, grad_y, grad_h_n) for g in grads]
        return (None, *grads)


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


def flat_gradients(found: Sequence[Gradients], bias: bool) -> Iterator[Tensor | None]:
    """Gradients of W, R and, with biases, bw and br, cell after cell."""
    for each in found:
        yield from (each.W, each.R)
        if bias:
            yield from (each.bw, each.br)


def of_cells(needs: Sequence[bool], bias: bool) -> list[tuple[bool, bool, bool, bool]]:
    """Whether W, R, bw, br of each cell need a gradient."""
    size = 4 if bias else 2
    cells = [needs[i : i + size] for i in range(0, len(needs), size)]
    return [(c[0], c[1], c[2], c[3]) if bias else (c[0], c[1], False, False) for c in cells]
