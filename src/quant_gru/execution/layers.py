"""Layers and directions of a quantized GRU: real tensors at the boundary, codes inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.execution.noise import Noise
from quant_gru.integer.backward import Kept
from quant_gru.integer.call_form import Packing, inward, outward
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.kernels.dispatch import Executor, executor_of

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class CellRun:
    """The inputs and outputs of one layer and direction, in codes.

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
    """The outputs of a layer, in the form that the next layer reads.

    Attributes:
        codes: Codes of output.h (T, N, H) of each direction.
        nan: bool (T, N) of each direction, True for rows that are NaN.
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
        x: (T, N, C), or (rows, C) if packed; dtype is one of `FLOATS`.
        h0: (layers * directions, N, H), dtype likewise; None for zeros.
        lengths: int64 (N,) or None.
        noise: Random masks; None for none.
        kept: Receives the codes that a backward needs.
        packing: How rows are packed; None for padded sequences.
        dtype: dtype of the results.

    Returns:
        Output (T, N, D*H), or (rows, D*H) if packed, and last states
        (layers * directions, N, H).
    """
    # avoid the cost of detaching tensors that need no gradient
    x = x.detach() if x.requires_grad else x
    h0 = h0.detach() if h0 is not None and h0.requires_grad else h0
    if noise is None:
        stack = _executor(plan).stack_of(plan)
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
    """Run one layer after the other, in float32 and without packed rows."""
    if h0 is None:
        h0 = zero_states(plan, x)
    executor = _executor(plan)
    below: Below | None = None
    last: list[Tensor] = []
    for layer, cells in enumerate(plan.cells):
        D, T, N, H = len(cells), *x.shape[:2], cells[0].hidden_size
        inputs, nan = input_codes(plan, layer, x, below, noise)
        first = layer * D
        states = [executor.quantize(cell.h, h0[first + d]) for d, cell in enumerate(cells)]
        held = [noise.held(layer, d, D, (T, N, H)) if noise else None for d in range(D)]
        runs = executor.run_layer(cells, inputs, [codes for codes, _ in states], lengths, held)
        spread = [
            _spread_nan(nan, h0_nan, cell, reverse=d == 1)
            for d, (cell, (_, h0_nan)) in enumerate(zip(cells, states, strict=True))
        ]
        for d, (cell, (_, codes)) in enumerate(zip(cells, runs, strict=True)):
            last.append(executor.dequantize(cell.h, codes, spread[d][0 if d else -1]))
        # `spread` has T + 1 states: drop the one before the first step
        below = Below(
            [out for out, _ in runs],
            [each[:-1] if d else each[1:] for d, each in enumerate(spread)],
        )
        if kept is not None:
            kept.out += below.codes
    assert below is not None
    return real_output(plan, len(plan.cells) - 1, below), torch.stack(last)


def zero_states(plan: GRUPlan, x: Tensor) -> Tensor:
    """Return zero states before the first step, (layers * directions, N, H), float32."""
    cells = [cell for layer in plan.cells for cell in layer]
    return torch.zeros((len(cells), x.shape[1], cells[0].hidden_size), device=x.device)


def input_codes(
    plan: GRUPlan, layer: int, x: Tensor, below: Below | None, noise: Noise | None
) -> tuple[list[Tensor], Tensor]:
    """Return input codes of a layer for each direction, and bool (T, N), True for NaN rows.

    Args:
        plan: The plan.
        layer: Index of the layer.
        x: Real input of the first layer (T, N, C).
        below: Outputs of the layer below; None for the first layer.
        noise: Random masks.
    """
    cells = plan.cells[layer]
    nan = None if below is None else torch.stack(list(below.nan)).any(0)
    if below is not None and not (noise and noise.drops):
        codes = requantized(plan, layer, below)
    else:
        real = real_input(plan, layer, x, below, noise)
        executor = _executor(plan)
        first, seen = executor.quantize(cells[0].border, real)
        nan = seen if nan is None else nan
        rest = [
            first if cell.border == cells[0].border else executor.quantize(cell.border, real)[0]
            for cell in cells[1:]
        ]
        codes = [first, *rest]
    assert nan is not None
    return codes, nan


def requantized(plan: GRUPlan, layer: int, below: Below) -> list[Tensor]:
    """Return input codes of a layer for each direction, from the codes of the layer below.

    Args:
        plan: The plan.
        layer: Index of the layer.
        below: Outputs of the layer below.
    """
    seams = [plan.seam(layer, d) for d in range(len(plan.cells[layer]))]
    return [_executor(plan).requantize(seam, below.codes) for seam in seams]


def mask_input(
    plan: GRUPlan,
    layer: int,
    direction: int,
    x: Tensor,
    below: Below | None,
    noise: Noise | None,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of a layer's input (T, N, C), 0 where its codes were clamped.

    Args:
        plan: As for `input_codes`.
        layer: Index of the layer.
        direction: 0 forward, 1 reverse.
        x: Real input of the first layer.
        below: Outputs of the layer below.
        noise: Random masks.
        grad: Gradient of the dequantized codes; it may be changed in place.
    """
    if below is not None and not (noise and noise.drops):
        seam = plan.seam(layer, direction)
        return _executor(plan).masked_requantized(seam, below.codes, grad)
    real = real_input(plan, layer, x, below, noise)
    return _executor(plan).masked(plan.cells[layer][direction].border, real, grad)


def real_input(
    plan: GRUPlan, layer: int, x: Tensor, below: Below | None, noise: Noise | None
) -> Tensor:
    """Return the real input (T, N, C) of a layer, with dropout applied."""
    if below is None:
        return x
    real = real_output(plan, layer - 1, below)
    T, N, features = real.shape
    return real * noise.factors(layer, (T, N, features)) if noise and noise.drops else real


def real_output(plan: GRUPlan, layer: int, below: Below) -> Tensor:
    """Return the outputs of a layer as real values, (T, N, D*H), float32."""
    executor = _executor(plan)
    halves = [
        executor.dequantize(cell.h, codes, nan)
        for cell, codes, nan in zip(plan.cells[layer], below.codes, below.nan, strict=True)
    ]
    return halves[0] if len(halves) == 1 else torch.cat(halves, dim=-1)


def run_codes(
    plan: GRUPlan,
    inputs: Sequence[Tensor],
    h0: Tensor | Sequence[Tensor],
    lengths: Tensor | None = None,
) -> Iterator[CellRun]:
    """Run all layers on codes and yield each layer and direction in turn.

    Args:
        plan: The plan.
        inputs: Codes of input.x of the first layer (T, N, C), for each direction.
        h0: Codes of output.h (layers * directions, N, H).
        lengths: int64 (N,) or None.
    """
    executor = _executor(plan)
    below: list[Tensor] = []
    index = 0
    for layer, cells in enumerate(plan.cells):
        outputs: list[Tensor] = []
        for direction, cell in enumerate(cells):
            x = inputs[direction]
            if layer:
                x = executor.requantize(plan.seam(layer, direction), below)
            out, last = executor.run_cell(cell, x, h0[index], lengths, reverse=direction == 1)
            yield CellRun(layer, direction, cell, x, h0[index], out, last)
            outputs.append(out)
            index += 1
        below = outputs


def border_codes(plan: GRUPlan, x: Tensor, h0: Tensor) -> tuple[list[Tensor], Tensor]:
    """Quantize real inputs and states for `run_codes`.

    Args:
        plan: The plan.
        x: (T, N, C).
        h0: (layers * directions, N, H).
    """
    cells = [cell for layer in plan.cells for cell in layer]
    states = [cell.h.quantize(state) for cell, state in zip(cells, h0, strict=True)]
    return [cell.border.quantize(x) for cell in plan.cells[0]], torch.stack(states)


def _executor(plan: GRUPlan) -> Executor:
    return executor_of(plan.cells[0][0].weights.W.device)


def _spread_nan(x_nan: Tensor, h0_nan: Tensor, plan: CellPlan, reverse: bool) -> Tensor:
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
