"""Layers and directions of a quantized GRU, in real tensors at the border and codes inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.kernels.cpu import executor as cpu
from quant_gru.kernels.ops import (
    Codes,
    Run,
    border,
    gru_layer,
    native_variant,
    run_cell,
    run_layer_on_gpu,
    runs_on_gpu,
    spread_nan,
    stack_on_gpu,
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


def run_real(
    plan: GRUPlan,
    x: Tensor,
    h0: Tensor,
    lengths: Tensor | None,
    weights: Sequence[Sequence[Weights]],
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Run all layers on real values.

    Args:
        plan: The plan.
        x: (T, N, C).
        h0: (layers * directions, N, H).
        lengths: int64 (N,) or None.
        weights: [layer][direction] -> W, R, bw, br, where gradients go.
        dropout: Probability of a value between layers to become zero.

    Returns:
        Output (T, N, D*H) and last states (layers * directions, N, H), float32.
    """
    wanted = (x, h0, *(w for layer in weights for cell in layer for w in cell))
    gradient = torch.is_grad_enabled() and any(w is not None and w.requires_grad for w in wanted)
    if not gradient and not dropout:
        result = _run_native(plan, x, h0, lengths) or _run_on_gpu(plan, x, h0, lengths)
        if result is not None:
            return result
    real, below = x, None
    last_states: list[Tensor] = []
    for layer, cells in enumerate(plan.cells):
        outputs: list[Tensor] = []
        codes: list[Codes] = []
        if layer and dropout:
            real, below = torch.nn.functional.dropout(real, dropout), None
        for direction, cell in enumerate(cells):
            if below is None:
                x_codes = _quantize(cell, real, isnan=real.isnan().any(-1))
            else:
                x_codes = _from_below(plan, layer, direction, below)
            state = h0[len(last_states)]
            h_codes, inside = cell.h.quantize_with_mask(state)
            y, y_last, out, _ = gru_layer(
                cell,
                x_codes,
                Codes(h_codes, inside, state.isnan().any(-1)),
                Run(lengths, reverse=direction == 1),
                (real, state, *weights[layer][direction]),
            )
            outputs.append(y)
            codes.append(out)
            last_states.append(y_last)
        real, below = torch.cat(outputs, dim=-1), codes
    return real, torch.stack(last_states)


def _run_native(
    plan: GRUPlan, x: Tensor, h0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """`run_real` in native code from border to border, where that applies.

    Returns:
        The same as `run_real`, or None where it does not apply: another device or dtype, NaN, more
        than 16 bits.
    """
    variant = native_variant(x, h0)
    stack = None if variant is None else cpu.stack_of(plan, variant)
    return None if stack is None else stack.run(x, h0, lengths)


def _run_on_gpu(
    plan: GRUPlan, x: Tensor, h0: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """`run_real` with the border and both directions of a layer in CUDA kernels.

    Returns:
        The same as `run_real`, or None where it does not apply: another device or dtype, more than
        16 bits.
    """
    cells = [cell for layer in plan.cells for cell in layer]
    if (
        not runs_on_gpu(x.device)
        or x.dtype != torch.float32
        or h0.dtype != torch.float32
        or not x.shape[0]
        or not all(border.takes(q) for cell in cells for q in (cell.x, cell.h))
    ):
        return None
    whole = stack_on_gpu(plan)
    result = None if whole is None else whole.run(x, h0, lengths)
    if result is not None:
        return result
    inputs, nan = _quantized_on_gpu(plan.cells[0], x)
    last: list[Tensor] = []
    below: list[Tensor] = []
    after: list[Tensor] = []
    for layer, plans in enumerate(plan.cells):
        if layer:
            inputs = [_requantize(plan, layer, d, below)[0] for d in range(len(plans))]
        start = layer * len(plans)
        states = [
            border.quantize(cell.h, state)
            for cell, state in zip(plans, h0[start : start + len(plans)], strict=True)
        ]
        runs = run_layer_on_gpu(plans, inputs, [codes for codes, _ in states], lengths)
        spread = [
            spread_nan(nan, h0_nan, cell, reverse=d == 1)
            for d, (cell, (_, h0_nan)) in enumerate(zip(plans, states, strict=True))
        ]
        for d, (cell, (_, codes)) in enumerate(zip(plans, runs, strict=True)):
            last.append(border.dequantize(cell.h, codes, spread[d][0 if d else -1]))
        # of all steps, the state before the first left out
        after = [each[:-1] if d else each[1:] for d, each in enumerate(spread)]
        nan = after[0] if len(after) == 1 else after[0] | after[1]
        below = [out for out, _ in runs]
    top = [
        border.dequantize(cell.h, out, bad)
        for cell, out, bad in zip(plan.cells[-1], below, after, strict=True)
    ]
    return (top[0] if len(top) == 1 else torch.cat(top, dim=-1)), torch.stack(last)


def _quantized_on_gpu(plans: Sequence[CellPlan], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Codes of `x` for each direction, quantized once where the quantizers are alike, and NaN."""
    codes, nan = border.quantize(plans[0].x, x)
    rest = [codes if cell.x == plans[0].x else border.quantize(cell.x, x)[0] for cell in plans[1:]]
    return [codes, *rest], nan


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
            x = _requantize(plan, layer, direction, below)[0] if layer else inputs[direction]
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


def _quantize(cell: CellPlan, x: Tensor, isnan: Tensor) -> Codes:
    codes, inside = cell.x.quantize_with_mask(x)
    return Codes(codes.to(cell.x.container), inside, isnan)


def _from_below(plan: GRUPlan, layer: int, direction: int, below: list[Codes]) -> Codes:
    codes, inside = _requantize(plan, layer, direction, [half.codes for half in below])
    isnan = torch.stack([half.nan for half in below]).any(0)
    return Codes(codes, inside, isnan)


def _requantize(
    plan: GRUPlan, layer: int, direction: int, below: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """X = weighted_sum(h - z_h) of the layer below, per direction half; codes and masks."""
    sums = plan.between[layer - 1][direction]
    cells = plan.cells[layer - 1]
    unclamped = torch.cat(
        [
            weighted_sum.unclamped(half.to(torch.int64) - cell.h.zero_point)
            for weighted_sum, half, cell in zip(sums, below, cells, strict=True)
        ],
        dim=-1,
    )
    codes = unclamped.clamp(sums[0].lo, sums[0].hi)
    return codes.to(plan.cells[layer][direction].x.container), unclamped == codes
