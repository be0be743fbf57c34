"""The choice among several sets of scales by what the integer cell computes with each."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from quant_gru.calibration.float_run import FloatWeights
from quant_gru.calibration.windows import CellSteps
from quant_gru.integer.plan import CellPlan, build_frozen, build_weights
from quant_gru.integer.qparams import QParams
from quant_gru.kernels.dispatch import run_cell

# A later set must be better than the first one by this much, about 0.1 dB.
_BETTER = 0.98


def best_of(candidates: Iterable[QParams], steps: CellSteps, weights: FloatWeights) -> QParams:
    """Return the candidate whose integer cell is closest to the float cell; the first one on ties.

    Args:
        candidates: Scales of a cell, the preferred ones first.
        steps: Steps of the float cell.
        weights: Its weights.
    """
    first, *others = candidates
    if not others or steps.before.numel() == 0:
        return first
    on_cpu = weights.to(torch.float32, "cpu")
    best, least = first, error(first, steps, on_cpu)
    for each in others:
        found = error(each, steps, on_cpu)
        if found < _BETTER * least:
            best, least = each, found
    return best


def error(qparams: QParams, steps: CellSteps, weights: FloatWeights) -> float:
    """Return the summed squared error of the states of the integer cell.

    Args:
        qparams: Scales of the cell.
        steps: Steps of the float cell.
        weights: Its weights, float32 on the CPU.
    """
    part = build_weights(qparams, weights.W, weights.R, weights.bw, weights.br)
    plan = CellPlan(build_frozen(qparams, torch.device("cpu")), part)
    x, lengths = _padded(steps.x, steps.batch_sizes)
    out, _ = run_cell(
        plan,
        plan.border.quantize(x).to(plan.x.container),
        plan.h.quantize(_first_states(steps, lengths)).to(plan.h.container),
        lengths,
        steps.reverse,
    )
    valid = torch.arange(x.shape[0], device="cpu")[:, None] < lengths
    states = plan.h.dequantize(out)[valid].double()
    return float((states - steps.after.double()).square().sum())


def _padded(rows: Tensor, batch_sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return packed rows as (T, N, ..), and the lengths (N,)."""
    sizes = torch.tensor(batch_sizes, device="cpu")
    padded, lengths = pad_packed_sequence(PackedSequence(rows, sizes))
    return padded, lengths


def _first_states(steps: CellSteps, lengths: Tensor) -> Tensor:
    """Return the state (N, H) before the first processed step of each window."""
    if not steps.reverse:
        return steps.before[: steps.batch_sizes[0]]
    offsets = [0]
    for size in steps.batch_sizes:
        offsets.append(offsets[-1] + size)
    last = [offsets[int(length) - 1] + n for n, length in enumerate(lengths)]
    return steps.before[last]
