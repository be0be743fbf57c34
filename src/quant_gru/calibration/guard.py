"""The choice among several sets of scales by what the integer cell computes with each."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from quant_gru.calibration.float_run import FloatWeights
from quant_gru.calibration.windows import CellSteps
from quant_gru.config import QuantConfig
from quant_gru.integer.plan import CellPlan, build_frozen, build_weights
from quant_gru.integer.qparams import QParams, finite_values, unpinned_scales
from quant_gru.kernels.dispatch import executor_of

# A later set must be better than the first one by this much, about 0.1 dB.
_BETTER = 0.98

_logger = logging.getLogger(__name__)


class Judge:
    """Runs the integer cell of some weights, with scales to compare.

    Args:
        steps: Steps of the float cell, at least one.
        weights: Its weights.
        config: Widths and kinds of the operators, equal for all scales.
    """

    def __init__(self, steps: CellSteps, weights: FloatWeights, config: QuantConfig) -> None:
        self._reverse = steps.reverse
        self._weights = weights.to(torch.float32, "cpu")
        self._scales = _weight_scales(config, self._weights)
        self._x, self._lengths = _padded(steps.x, steps.batch_sizes)
        self._h0 = _first_states(steps, self._lengths)
        self._valid = torch.arange(self._x.shape[0], device="cpu")[:, None] < self._lengths
        self._expected = steps.after.double()

    def error(self, qparams: QParams) -> float:
        """Return the summed squared error of the states of the integer cell."""
        w = self._weights
        part = build_weights(replace(qparams, pinned=self._scales), w.W, w.R, w.bw, w.br)
        plan = CellPlan(build_frozen(qparams, torch.device("cpu")), part)
        out, _ = executor_of(part.W.device).run_cell(
            plan,
            plan.border.quantize(self._x).to(plan.x.container),
            plan.h.quantize(self._h0).to(plan.h.container),
            self._lengths,
            self._reverse,
        )
        states = plan.h.dequantize(out)[self._valid].double()
        return float((states - self._expected).square().sum())


def best_of(candidates: Iterable[QParams], judge: Judge) -> QParams:
    """Return the candidate whose integer cell is closest to the float cell; the first one on ties.

    Args:
        candidates: Scales of a cell, the preferred ones first.
        judge: Runs the cell.
    """
    first, *others = candidates
    if not others:
        return first
    best, least = first, judge.error(first)
    begin, chosen = least, 1
    for number, each in enumerate(others, 2):
        found = judge.error(each)
        if found < _BETTER * least:
            best, least, chosen = each, found, number
    _logger.debug(
        "set %d of %d sets of scales: squared error of the states %.3g, %.3g with the first",
        *(chosen, len(others) + 1, least, begin),
    )
    return best


def _weight_scales(config: QuantConfig, weights: FloatWeights) -> dict[str, tuple[float, ...]]:
    """Return the scales that weights have whatever those of activations are."""
    named = {"weight.W": weights.W, "weight.R": weights.R, "weight.br": weights.br}
    return {
        name: tuple(unpinned_scales(config, name, finite_values(w)).tolist())
        for name, w in named.items()
        if w is not None
    }


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
