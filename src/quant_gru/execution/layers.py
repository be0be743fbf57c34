"""Layers and directions of a quantized GRU, in real tensors at the border and codes inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.execution.noise import Noise
from quant_gru.integer.backward import Kept
from quant_gru.integer.border import Packing, inward, outward
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.weighted_sum import WeightedSum
from quant_gru.kernels.dispatch import (
    dequantize,
    masked,
    masked_requantized,
    quantize,
    requantize,
    run_cell,
    run_layer,
    spread_nan,
    stack_of,
)

Weights = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class CellRun:
    """What one layer and direction took in and gave, in codes.

    Attributes:
        layer: Index of the layer.
        direction: 0 forward, 1 reverse.
        plan: Its plan.
        x: Input codes (T, N, C).
        h0: State codes before the first step (N, H).
        out: State codes after each step (T, N, H).
        last: State codes after the last step processed (N, H).
    """

    layer: int
    direction: int
    plan: CellPlan
    x: Tensor
    h0: Tensor
    out: Tensor
    last: Tensor


@dataclass(eq=False)
class Below:
    """What a layer gave, as the next one takes it.

    Attributes:
        codes: Codes of output.h (T, N, H) of each direction.
        nan: bool (T, N) of each direction: rows that are NaN.
    """

    codes: Sequence[Tensor]
    nan: Sequence[Tensor]


def run_real(
    plan: GRUPlan,
    x: Tensor,
    h0: Tensor | None,
    lengths: Tensor | None,
    noise: Noise | None = None,
    kept: Kept | None = None,
    packing: Packing | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Run all layers on real values.

    Args:
        plan: The plan.
        x: (T, N, C), or (rows, C) where rows are packed, of one of `FLOATS`.
        h0: (layers * directions, N, H), likewise, or None for zeros.
        lengths: int64 (N,) or None.
        noise: What is random; None for nothing.
        kept: Takes what a backward needs.
        packing: How rows are packed; None where they are not.
        dtype: That of the results.

    Returns:
        Output (T, N, D*H), or (rows, D*H) where rows are packed, and last states
        (layers * directions, N, H).
    """
    # not of what is detached already
    x = x.detach() if x.requires_grad else x
    h0 = h0.detach() if h0 is not None and h0.requires_grad else h0
    if noise is None:
        stack = stack_of(plan)
        result = None if stack is None else stack.run(x, h0, lengths, kept, packing, dtype)
        if result is not None:
            return result
    rows = x.shape[0]
    x, h0 = inward(x, h0, packing)
    lengths = lengths if packing is None else packing.lengths
    y, h_n = _run_layers(plan, x, h0, lengths, noise, kept)
    y, h_n = outward(y, h_n, packing, rows)
    return (y, h_n) if dtype is y.dtype else (y.to(dtype), h_n.to(dtype))


def _run_layers(
    plan: GRUPlan,
    x: Tensor,
    h0: Tensor | None,
    lengths: Tensor | None,
    noise: Noise | None,
    kept: Kept | None,
) -> tuple[Tensor, Tensor]:
    """`run_real` layer after layer, in float32 and without packed rows."""
    if h0 is None:
        h0 = zero_states(plan, x)
    below: Below | None = None
    last: list[Tensor] = []
    for layer, cells in enumerate(plan.cells):
        D, T, N, H = len(cells), *x.shape[:2], cells[0].hidden_size
        inputs, nan = input_codes(plan, layer, x, below, noise)
        first = layer * D
        states = [quantize(cell.h, h0[first + d]) for d, cell in enumerate(cells)]
        held = [noise.held(layer, d, D, (T, N, H)) if noise else None for d in range(D)]
        runs = run_layer(cells, inputs, [codes for codes, _ in states], lengths, held)
        spread = [
            spread_nan(nan, h0_nan, cell, reverse=d == 1)
            for d, (cell, (_, h0_nan)) in enumerate(zip(cells, states, strict=True))
        ]
        for d, (cell, (_, codes)) in enumerate(zip(cells, runs, strict=True)):
            last.append(dequantize(cell.h, codes, spread[d][0 if d else -1]))
        # of all steps, the state before the first left out
        below = Below(
            [out for out, _ in runs],
            [each[:-1] if d else each[1:] for d, each in enumerate(spread)],
        )
        if kept is not None:
            kept.out += below.codes
    assert below is not None
    return real_output(plan, len(plan.cells) - 1, below), torch.stack(last)


def zero_states(plan: GRUPlan, x: Tensor) -> Tensor:
    """States before the first step that are zero, (layers * directions, N, H), float32."""
    cells = [cell for layer in plan.cells for cell in layer]
    return torch.zeros((len(cells), x.shape[1], cells[0].hidden_size), device=x.device)


def input_codes(
    plan: GRUPlan, layer: int, x: Tensor, below: Below | None, noise: Noise | None
) -> tuple[list[Tensor], Tensor]:
    """Codes of a layer's input for each direction, and bool (T, N), rows that are NaN.

    Args:
        plan: The plan.
        layer: Which layer.
        x: Real input of the first layer (T, N, C).
        below: What the layer below gave; None for the first layer.
        noise: What is random.
    """
    cells = plan.cells[layer]
    nan = None if below is None else torch.stack(list(below.nan)).any(0)
    if below is not None and not (noise and noise.drops):
        codes = requantized(plan, layer, below)
    else:
        real = real_input(plan, layer, x, below, noise)
        first, seen = quantize(cells[0].x, real)
        nan = seen if nan is None else nan
        rest = [first if cell.x == cells[0].x else quantize(cell.x, real)[0] for cell in cells[1:]]
        codes = [first, *rest]
    assert nan is not None
    return codes, nan


def requantized(plan: GRUPlan, layer: int, below: Below) -> list[Tensor]:
    """Codes of a layer's input for each direction, from those of the layer below.

    Args:
        plan: The plan.
        layer: Which layer.
        below: What the layer below gave.
    """
    return [_requantize(plan, layer, d, below.codes) for d in range(len(plan.cells[layer]))]


def mask_input(
    plan: GRUPlan,
    layer: int,
    direction: int,
    x: Tensor,
    below: Below | None,
    noise: Noise | None,
    grad: Tensor,
) -> Tensor:
    """The gradient of a layer's input (T, N, C), 0 where its codes were clamped.

    Args:
        plan: As for `input_codes`, as are all but the last.
        layer: Which layer.
        direction: Which direction.
        x: Real input of the first layer.
        below: What the layer below gave.
        noise: What is random.
        grad: Gradient of the dequantized codes; it may be changed in place.
    """
    if below is not None and not (noise and noise.drops):
        return masked_requantized(*_between(plan, layer, direction), below.codes, grad)
    real = real_input(plan, layer, x, below, noise)
    return masked(plan.cells[layer][direction].x, real, grad)


def real_input(
    plan: GRUPlan, layer: int, x: Tensor, below: Below | None, noise: Noise | None
) -> Tensor:
    """The real input (T, N, C) of a layer, dropout applied."""
    if below is None:
        return x
    real = real_output(plan, layer - 1, below)
    T, N, features = real.shape
    return real * noise.factors(layer, (T, N, features)) if noise and noise.drops else real


def real_output(plan: GRUPlan, layer: int, below: Below) -> Tensor:
    """The real values of what a layer gave, (T, N, D*H), float32."""
    halves = [
        dequantize(cell.h, codes, nan)
        for cell, codes, nan in zip(plan.cells[layer], below.codes, below.nan, strict=True)
    ]
    return halves[0] if len(halves) == 1 else torch.cat(halves, dim=-1)


def run_codes(
    plan: GRUPlan,
    inputs: Sequence[Tensor],
    h0: Tensor | Sequence[Tensor],
    lengths: Tensor | None = None,
) -> Iterator[CellRun]:
    """Run all layers on codes, yielding each layer and direction in turn.

    Args:
        plan: The plan.
        inputs: Codes of input.x of the first layer (T, N, C), for each direction.
        h0: Codes of output.h (layers * directions, N, H).
        lengths: int64 (N,) or None.
    """
    below: list[Tensor] = []
    index = 0
    for layer, cells in enumerate(plan.cells):
        outputs: list[Tensor] = []
        for direction, cell in enumerate(cells):
            x = _requantize(plan, layer, direction, below) if layer else inputs[direction]
            out, last = run_cell(cell, x, h0[index], lengths, reverse=direction == 1)
            yield CellRun(layer, direction, cell, x, h0[index], out, last)
            outputs.append(out)
            index += 1
        below = outputs


def border_codes(plan: GRUPlan, x: Tensor, h0: Tensor) -> tuple[list[Tensor], Tensor]:
    """Real inputs and states as `run_codes` takes them.

    Args:
        plan: The plan.
        x: (T, N, C).
        h0: (layers * directions, N, H).
    """
    cells = [cell for layer in plan.cells for cell in layer]
    states = [cell.h.quantize(state) for cell, state in zip(cells, h0, strict=True)]
    return [cell.x.quantize(x) for cell in plan.cells[0]], torch.stack(states)


def _requantize(plan: GRUPlan, layer: int, direction: int, below: Sequence[Tensor]) -> Tensor:
    """X = weighted_sum(h - z_h) of the layer below, per direction half; codes."""
    return requantize(*_between(plan, layer, direction), below)


def _between(
    plan: GRUPlan, layer: int, direction: int
) -> tuple[Sequence[WeightedSum], list[Quantizer], Quantizer]:
    """What makes codes of a layer's input of those of the layer below."""
    below = [cell.h for cell in plan.cells[layer - 1]]
    return plan.between[layer - 1][direction], below, plan.cells[layer][direction].x
