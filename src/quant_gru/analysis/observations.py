"""What the operators of a model's GRUs do on data: values, codes, errors over time and units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant_gru.analysis.operator_sqnr import Trace, traces
from quant_gru.analysis.scale_use import ScaleUse, where_bent
from quant_gru.analysis.sqnr import decibels, energies
from quant_gru.analysis.trials import Forward, Place
from quant_gru.calibration.batches import run_batch, with_progress
from quant_gru.integer.quantizer import Quantizer
from quant_gru.modules.cell import QuantGRUCell
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.observed import observed_in_float

# Values of an operator that its histogram is made of, and its bars.
_KEPT = 1 << 16
BARS = 64


@dataclass
class Seen:
    """One operator of a layer and direction.

    Attributes:
        signal: Summed squares of its float values.
        noise: Summed squared errors.
        count: Number of its values.
        clipped: How many of them are more than a step beyond the codes.
        low: The smallest value.
        high: The largest value.
        used: Codes that occur; where the gate is not flat, if that matters for this operator.
        kept: Some of the values.
    """

    signal: float = 0.0
    noise: float = 0.0
    count: int = 0
    clipped: int = 0
    low: float = math.inf
    high: float = -math.inf
    used: set[int] = field(default_factory=set)
    kept: list[Tensor] = field(default_factory=list)

    @property
    def sqnr(self) -> float:
        """Signal over noise in dB."""
        return decibels(self.signal, self.noise)

    def histogram(self, low: float, high: float) -> list[int]:
        """Return how many of the kept values are in each of BARS equal parts of a range."""
        values = torch.cat(self.kept) if self.kept else torch.empty(0)
        found: list[int] = torch.histc(values, BARS, low, high).int().tolist()
        return found


@dataclass
class Errors:
    """Errors of the states of a layer and direction.

    Attributes:
        over_time: (T, 2), signal and noise of each step.
        of_units: (H, 2), signal and noise of each unit.
    """

    over_time: Tensor
    of_units: Tensor


class Observer:
    """Collects what the operators of a calibrated GRU do.

    Args:
        name: Name of the GRU.
        gru: The GRU.

    Attributes:
        seen: Operator -> its values.
        errors: Layer, direction -> errors of the states.
        use: Values and scales, for remarks.
    """

    def __init__(self, name: str, gru: QuantGRU) -> None:
        gru._plan()  # raises an error without scales
        self.seen: dict[Place, Seen] = {}
        self.errors: dict[tuple[int, int], Errors] = {}
        self.use = ScaleUse(gru)
        self._name, self._gru = name, gru

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Observe a call, as a forward pre-hook."""
        given = dict(zip(("input", "hx"), args, strict=False)) | dict(kwargs)
        for trace in traces(self._gru, given["input"], given.get("hx")):
            self.use.observe(trace.layer, trace.direction, trace.real)
            self._add_values(trace)
            self._add_errors(trace)

    def _add_values(self, trace: Trace) -> None:
        bent = where_bent(trace.real)
        scales = self._gru._state.scales
        assert scales is not None
        quantizers = scales[trace.layer][trace.direction].quantizers
        for name, found in trace.found.items():
            seen = self.seen.setdefault(self._place(trace, name), Seen())
            real = trace.real[name]
            self._add(seen, real, found)
            seen.clipped += _beyond(real, quantizers[name])
            codes = trace.codes[name]
            matter = codes[bent[name]] if name in bent else codes
            seen.used.update(matter.unique().tolist())
        for name, (real, found) in trace.weights.items():
            place = self._place(trace, name)
            if place not in self.seen:
                seen = self.seen[place] = Seen()
                self._add(seen, real, found)

    def _place(self, trace: Trace, operator: str) -> Place:
        return Place(self._name, trace.layer, trace.direction == 1, operator)

    @staticmethod
    def _add(seen: Seen, real: Tensor, found: Tensor) -> None:
        signal, noise = energies(real, found)
        seen.signal, seen.noise = seen.signal + signal, seen.noise + noise
        if not real.numel():
            return
        seen.count += real.numel()
        seen.low, seen.high = min(seen.low, float(real.min())), max(seen.high, float(real.max()))
        kept = sum(map(len, seen.kept))
        values = real.flatten()
        if kept < _KEPT:
            seen.kept.append(values[:: -(-len(values) // (_KEPT - kept))].float().cpu())

    def _add_errors(self, trace: Trace) -> None:
        real = trace.real["output.h"]
        squares = torch.stack(
            (real.square(), (real - trace.found["output.h"].to(real.dtype)).square()), dim=-1
        )
        # each call of a cell is one step of a sequence
        cell = isinstance(self._gru, QuantGRUCell)
        length = 1 if cell or not len(trace.steps) else int(trace.steps.max()) + 1
        over_time = squares.new_zeros(length, 2)
        over_time.index_add_(0, trace.steps, squares.sum(1))
        own = Errors(over_time.cpu(), squares.sum(0).cpu())
        key = trace.layer, trace.direction
        before = self.errors.get(key)
        if before is not None and cell:
            own.over_time = torch.cat((before.over_time, own.over_time))
            own.of_units += before.of_units
        elif before is not None:
            own.over_time = _padded_sum(before.over_time, own.over_time)
            own.of_units += before.of_units
        self.errors[key] = own


def observe(
    model: torch.nn.Module,
    grus: Mapping[str, QuantGRU],
    batches: Iterable[Any],
    forward_fn: Forward | None,
    progress: bool,
) -> dict[str, Observer]:
    """Run the float model, and return what each GRU would do with the inputs that it gets there.

    Args:
        model: A model.
        grus: Name -> a calibrated GRU of it.
        batches: As for `run_batch`.
        forward_fn: As for `run_batch`.
        progress: Whether to show a progress bar (only on a terminal).
    """
    found = {name: Observer(name, gru) for name, gru in grus.items()}
    with observed_in_float(model, grus, found):
        for batch in with_progress(batches, "observing", progress):
            run_batch(model, batch, forward_fn)
    return found


def _beyond(real: Tensor, quantizer: Quantizer) -> int:
    least = quantizer.scale * (quantizer.lo - quantizer.zero_point - 1)
    most = quantizer.scale * (quantizer.hi - quantizer.zero_point + 1)
    return int(((real < least) | (real > most)).sum())


def _padded_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of (S, 2) and (T, 2), the shorter one with zeros at its end."""
    found = a.new_zeros(max(len(a), len(b)), 2)
    found[: len(a)] += a
    found[: len(b)] += b
    return found
