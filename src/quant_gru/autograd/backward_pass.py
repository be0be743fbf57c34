"""The backward of all layers and directions, from codes that the forward saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from quant_gru.autograd.learned_scales import learned_names, to_logarithms
from quant_gru.execution.layers import Below, input_codes, mask_input, real_input, requantized
from quant_gru.execution.noise import Noise
from quant_gru.integer.backward import Gradients, Tape, Wanted, complete
from quant_gru.integer.plan import CellPlan, GRUPlan
from quant_gru.integer.qparams import QParams
from quant_gru.integer.scale_gradients import scale_gradients
from quant_gru.kernels.dispatch import executor_of, runs_on_gpu


@dataclass(eq=False)
class Pass:
    """The tensors and settings of a forward that its backward needs.

    Attributes:
        x: Input (T, N, C), real.
        h0: States before the first step (layers * directions, N, H), real; None for zeros.
        lengths: int64 (N,) or None.
        noise: Random masks.
        out: Codes of output.h (T, N, H) of each layer and direction.
        nan: Zeros (layers * directions, N), NaN for rows that are NaN.
        precision: Precision of gradient products, see `quant_gru.kernels.dispatch.PRECISIONS`.
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
    """Which gradients are needed.

    Attributes:
        x: Gradient of the input.
        h0: Gradient of the states before the first step.
        weights: Gradients of W, R, bw, br of each layer and direction.
        scales: The parameters of each layer and direction, if scales are learned.
    """

    x: bool
    h0: bool
    weights: Sequence[tuple[bool, bool, bool, bool]]
    scales: Sequence[QParams] = ()

    def below(self, first: int) -> bool:
        """Return whether the input, or any layer with cells before `first`, needs a gradient."""
        if not first:
            return self.x
        return self.x or self.h0 or bool(self.scales) or any(map(any, self.weights[:first]))


@dataclass(eq=False)
class Found:
    """Gradients of a whole GRU.

    Attributes:
        x: (T, N, C), or None if not needed.
        h0: (layers * directions, N, H), or None if not needed.
        cells: Weight gradients of each layer and direction; None if not needed.
        scales: Gradients of the logarithms of learned scales, float32, per layer and direction.
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
    for layer in reversed(range(len(plan.cells))):
        cells, first = plan.cells[layer], layer * D
        onward, learns = asked.below(first), bool(asked.scales)
        drops = noise is not None and noise.drops
        below = _below(done, first - D, D, learns or drops) if layer else None
        tapes = _tapes(plan, layer, done, below)
        results = executor_of(done.x.device).backward_layer(
            tapes,
            [None] * D if grad is None else [grad] if D == 1 else grad.chunk(2, dim=-1),
            [None if grad_last is None else grad_last[first + d] for d in range(D)],
            [
                _wanted(onward or learns, *_with_bias(cell, asked.weights[first + d]), learns)
                for d, cell in enumerate(cells)
            ],
            done.precision,
        )
        results = [_with_offset(*pair) for pair in zip(cells, results, strict=True)]
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


def _tapes(plan: GRUPlan, layer: int, done: Pass, below: Below | None) -> list[Tape]:
    """Return the data that each direction of a layer has after the forward."""
    cells, noise = plan.cells[layer], done.noise
    D, H, first = len(cells), cells[0].hidden_size, layer * len(cells)
    T, N, _ = done.x.shape
    executor = executor_of(done.x.device)
    if below is not None and not (noise is not None and noise.drops):
        inputs = requantized(plan, layer, below)
    elif (
        below is None
        and done.x.dtype is torch.float32
        and runs_on_gpu(done.x.device)
        and not plan.is_far
    ):
        # GPU kernels quantize their input while reading it
        inputs = [done.x] * D
    else:
        inputs, _ = input_codes(plan, layer, done.x, below, noise)
    return [
        Tape(
            cell,
            inputs[d],
            None if done.h0 is None else executor.quantize(cell.h, done.h0[first + d])[0],
            done.out[first + d],
            done.lengths,
            d == 1,
            noise.held(layer, d, D, (T, N, H)) if noise else None,
            done.nan[first + d],
        )
        for d, cell in enumerate(cells)
    ]


def _with_bias(
    cell: CellPlan, asked: tuple[bool, bool, bool, bool]
) -> tuple[bool, bool, bool, bool]:
    """Return which gradients `_with_offset` needs."""
    W, R, bw, br = asked
    return W, R, bw or (W and cell.border.is_outside), br


def _with_offset(cell: CellPlan, found: Gradients) -> Gradients:
    """Return the gradient of W for the real input, of which the cell has subtracted an offset."""
    if not cell.border.is_outside or found.W is None:
        return found
    assert found.bw is not None
    return replace(found, W=found.W + cell.border.offset * found.bw[:, None])


def _by_layer(grads: Sequence[Tensor], directions: int) -> Tensor:
    """Stack gradients of states in layer order; the backward computes the last layer first."""
    last_first = [grads[i : i + directions] for i in range(0, len(grads), directions)]
    return torch.stack([each for layer in reversed(last_first) for each in layer])


def _below(done: Pass, first: int, directions: int, real: bool) -> Below:
    """Return the outputs of a layer; NaN is left to the gradient of the last states.

    Args:
        done: The forward.
        first: Index of the layer's first cell.
        directions: Number of directions.
        real: Whether the caller needs its real values; otherwise `nan` is empty.
    """
    nan: list[Tensor] = []
    if real:
        T, N, _ = done.x.shape
        nan = [torch.zeros((T, N), dtype=torch.bool, device=done.x.device)] * directions
    return Below(done.out[first : first + directions], nan)


_wanted = cache(Wanted)


def nan_of(last: Tensor) -> Tensor:
    """Return zeros (layers * directions, N), NaN for rows of NaN states.

    A row of last states is NaN either completely or not at all.

    Args:
        last: (layers * directions, N, H).
    """
    return last.select(-1, 0) * 0


def flat_gradients(found: Sequence[Gradients | None], bias: bool) -> Iterator[Tensor | None]:
    """Yield gradients of W, R and, with biases, bw and br, cell by cell."""
    for each in found:
        if each is None:
            yield from [None] * (4 if bias else 2)
            continue
        yield from (each.W, each.R)
        if bias:
            yield from (each.bw, each.br)


def of_cells(needs: Sequence[bool], bias: bool) -> list[tuple[bool, bool, bool, bool]]:
    """Return whether W, R, bw, br of each cell need a gradient."""
    size = 4 if bias else 2
    cells = [needs[i : i + size] for i in range(0, len(needs), size)]
    return [(c[0], c[1], c[2], c[3]) if bias else (c[0], c[1], False, False) for c in cells]
