"""The effect of each operator of a model's GRUs on the model's output: change one, and measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant_gru.analysis.outputs import expect_tensors, named_tensors
from quant_gru.analysis.scale_use import Remark, lines_of, texts, watched, worst_first
from quant_gru.calibration.batches import batches_of, eval_mode, run_batch, with_progress
from quant_gru.config import FUSIBLE, OPERATORS
from quant_gru.errors import CalibrationError
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.observed import scales_kept

_SHOWN = 15


class Gain(NamedTuple):
    """The effect of one change.

    Attributes:
        module: Name of the GRU in the model; '' for the model itself.
        operator: The operator, in all layers and directions of the GRU.
        change: Description of the change, such as '8 -> 16 bits' or 'fused'.
        value: Difference at the model's output, in decibels or as an increase of the metric.
    """

    module: str
    operator: str
    change: str
    value: float


@dataclass(frozen=True)
class OperatorGain:
    """The effects of single-operator changes on a model; `print` it.

    Attributes:
        base: The unchanged model: output SQNR in dB, or its metric.
        rows: All tested changes: first those of operators whose scale is bad, the worst one before
            the others, then the best changes.
        unit: 'dB' or 'metric'.
        remarks: Operator with its GRU and the suffix of nn.GRU ('encoder.gate.z_pre_l0') -> what is
            wrong with its scale. Another scale helps it more than other widths.
    """

    base: float
    rows: tuple[Gain, ...]
    unit: str
    remarks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        what = "SQNR of the output" if self.unit == "dB" else "metric"
        lines = [f"as it is: {what} {self.base:.4g}{' dB' if self.unit == 'dB' else ''}"]
        shown = self.rows[:_SHOWN]
        lines += lines_of(self.remarks)
        width = max([6, *(len(row.module) for row in shown)])
        lines.append(f"{'module':{width}}  {'operator':15}  {'change':14}  {self.unit:>8}")
        lines += [
            f"{row.module:{width}}  {row.operator:15}  {row.change:14}  "
            + (f"{row.value:+8.4g}" if row.value else f"{'none':>8}")
            for row in shown
        ]
        if not all(row.value for row in shown):
            lines.append(f"none: no effect on the {what} with this data")
        if len(self.rows) > len(shown):
            lines.append(f"and {len(self.rows) - len(shown)} below")
        return "\n".join(lines)


@torch.no_grad()
def operator_gain(
    model: torch.nn.Module,
    data: Iterable[Any] | None = None,
    bits: int = 16,
    *,
    metric: Callable[[torch.nn.Module], float] | None = None,
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
    progress: bool = True,
) -> OperatorGain:
    """Change the width of each operator of each GRU, one at a time, and measure the whole model.

    `operator_sqnr` ranks operators by their own noise; this function measures the model's output.
    Ranges do not change, so no new calibration is needed. The model is restored afterwards.

    Args:
        model: A model with calibrated QuantGRUs, or a QuantGRU. It runs in eval mode.
        data: Batches as for `calibrate_model`; a tensor is one batch. They are kept in a list.
        bits: The tested width, 1..32. A larger width finds operators to widen, a smaller width
            finds operators to narrow. Products that are stored are also tested as fused.
        metric: metric(model) -> a number, the higher the better. None for the SQNR of the model's
            floating-point outputs on `data`, relative to the same model in float mode.
        forward_fn: `forward_fn(model, batch)` runs a batch and returns the outputs.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        All changes and their effects, the best first. Operators whose scale is bad come before all
        others, with `remarks` on them.

    Raises:
        CalibrationError: No calibrated QuantGRU with `use_quantization`, or no data.
        ConfigError: The width is invalid.

    Example:
        >>> print(operator_gain(quantized, batches))  # doctest: +ELLIPSIS
        as it is: SQNR of the output ... dB
        ...
    """
    grus = {
        name: gru
        for name, gru in model.named_modules()
        if isinstance(gru, QuantGRU) and gru.use_quantization and gru.is_calibrated()
    }
    if not grus:
        raise CalibrationError(
            "Expected a model with a calibrated QuantGRU whose use_quantization is True, got none "
            f"in {type(model).__name__}; call convert_model and calibrate_model first"
        )
    with eval_mode(model), scales_kept(grus):
        measure = _measure(model, grus, data, metric, forward_fn)
        with watched(grus) as uses:
            base = measure()
        remarks = {
            (name, operator): remark
            for name, use in uses.items()
            for operator, remark in use.remarks().items()
        }
        rows = []
        trials = [(name, *each) for name, gru in grus.items() for each in _changes(gru, bits)]
        for name, operator, fields, change in with_progress(trials, "changing", progress):
            gru = grus[name]
            with scales_kept({name: gru}):
                gru._state, gru._log2_scales = gru._state.copy(), []
                gru.adjust_quant_config(operator, **fields)
                rows.append(Gain(name, operator, change, measure() - base))
    named = {f"{name}.{operator}".lstrip("."): each for (name, operator), each in remarks.items()}
    unit = "dB" if metric is None else "metric"
    return OperatorGain(base, _ranked(rows, remarks), unit, texts(worst_first(named)))


def _ranked(rows: list[Gain], remarks: Mapping[tuple[str, str], Remark]) -> tuple[Gain, ...]:
    """Return the changes of operators whose scale is bad, the worst one first, then the others."""
    factors: dict[tuple[str, str], float] = {}  # the largest of all layers and directions
    for (name, operator), remark in remarks.items():
        key = name, operator.rpartition("_l")[0]
        factors[key] = max(factors.get(key, 0.0), remark.factor)

    def rank(row: Gain) -> tuple[float, float]:
        value = -math.inf if math.isnan(row.value) else row.value
        return factors.get((row.module, row.operator), 0.0), value

    return tuple(sorted(rows, key=rank, reverse=True))


def _changes(gru: QuantGRU, bits: int) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield operators, their changed fields, and a description of the change."""
    for name in OPERATORS:
        has = gru.config[name].bitwidth
        if has is None or (name.startswith("weight.b") and not gru.bias):
            continue
        if has != bits:
            yield name, {"bitwidth": bits}, f"{has} -> {bits} bits"
        if name in FUSIBLE:
            yield name, {"fused": True}, "fused"


def _measure(
    model: torch.nn.Module,
    grus: Mapping[str, QuantGRU],
    data: Iterable[Any] | None,
    metric: Callable[[torch.nn.Module], float] | None,
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None,
) -> Callable[[], float]:
    """Return measure() -> the score of the model in its current state."""
    if metric is not None:
        given = metric
        return lambda: float(given(model))
    if data is None:
        raise CalibrationError("Expected data or a metric, got neither")
    batches = batches_of(data)

    def outputs() -> list[Tensor]:
        found = [
            tensor
            for batch in batches
            for _, tensor in named_tensors(run_batch(model, batch, forward_fn))
        ]
        expect_tensors(found, "pass a metric")
        return found

    for gru in grus.values():
        gru.use_quantization = False
    real = [each.double() for each in outputs()]
    for gru in grus.values():
        gru.use_quantization = True
    signal = sum(float(each.square().sum()) for each in real)

    def measure() -> float:
        pairs = zip(real, outputs(), strict=True)
        noise = sum(float((a - b.double()).square().sum()) for a, b in pairs)
        return 10 * math.log10(signal / noise) if noise and signal else math.inf

    return measure
