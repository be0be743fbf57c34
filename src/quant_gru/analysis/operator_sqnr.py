"""Signal-to-noise ratio of every operator of calibrated QuantGRUs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.analysis.scale_use import Remark, ScaleUse, lines_of, texts, worst_first
from quant_gru.analysis.sqnr import decibels, energies
from quant_gru.calibration.batches import as_batches, run_batch
from quant_gru.calibration.float_run import FloatWeights, float_layers, valid
from quant_gru.config import ACTIVATIONS, OPERATORS, WEIGHTS
from quant_gru.errors import CalibrationError, QuantGRUError
from quant_gru.execution.integer_io import cell_codes
from quant_gru.execution.layers import border_codes, run_codes
from quant_gru.integer.plan import update_first
from quant_gru.integer.qparams import corrected_bias
from quant_gru.interchange.plan_tensors import suffix_of
from quant_gru.modules.cell import QuantGRUCell
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.convert import find_grus
from quant_gru.whole_models.observed import observed_in_float

Energies = dict[str, tuple[float, float]]
Run = Callable[[torch.nn.Module, Any], Any]

_ROWS_AT_ONCE = 256  # of the calls of a cell; more would leave the cache


class OperatorSQNR(dict[str, float]):
    """SQNR in dB by operator; `print` it for a table.

    Operators whose scale is bad come first, the worst one before the others.

    Args:
        values: Operator -> SQNR in dB.
        remarks: See below, the worst one first.

    Attributes:
        remarks: Operator -> what is wrong with its scale, such as "scale 1.0 spends 16 of 256 codes
            where the gate is not flat". Empty if scales fit the values.
    """

    def __init__(self, values: Mapping[str, float], remarks: Mapping[str, str]) -> None:
        super().__init__({name: values[name] for name in (*remarks, *values)})
        self.remarks = dict(remarks)

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        lines = [f"{name:{width}}  {value:7.1f} dB" for name, value in self.items()]
        return "\n".join((*lines_of(self.remarks), *lines))


def operator_sqnr(
    gru: torch.nn.Module,
    input: Any,
    hx: Tensor | Run | None = None,
    *,
    forward_fn: Run | None = None,
) -> OperatorSQNR:
    """Measure how far each operator's codes are from the values of the float GRU.

    Both networks run separately, so the noise of an operator includes the noise of its inputs. What
    is wrong with a scale itself is in `remarks` of the result: few codes for the values that
    matter, or many values beyond all codes. The result does not show the effect of an operator on
    the output of a model; use `operator_gain` for that.

    Args:
        gru: A calibrated QuantGRU, with any `use_quantization`; or a model with QuantGRUs. Each of
            them then receives its inputs from the float model.
        input: As for its forward. For a model: batches as for `calibrate_model`, or a tensor.
        hx: As for its forward. For a model: `forward_fn`, as in `calibrate_model`.
        forward_fn: For a model: `forward_fn(model, batch)` runs a batch.

    Returns:
        Operator name with the suffix of nn.GRU's parameters ('gate.z_out_l0') -> SQNR in dB,
        10 log10(sum(real^2) / sum((real - quantized)^2)). For a model, the name of the GRU comes
        first ('encoder.gate.z_out_l0'). Fused operators are omitted. It is a dict, whose first
        operators are those with a bad scale, with `remarks` on these.

    Raises:
        CalibrationError: A GRU has no scales, or the model has no GRUs.
        QuantGRUError: `hx` is given for a model, or `forward_fn` for a GRU.

    Example:
        >>> found = operator_sqnr(quantized, batches)
        >>> worst = next(iter(found.remarks), min(found, key=found.get))
    """
    given = hx if callable(hx) else None
    if isinstance(gru, QuantGRU):
        if given is not None or forward_fn is not None:
            raise QuantGRUError(
                "Expected forward_fn only for a model that contains QuantGRUs, got one for a "
                f"{type(gru).__name__}"
            )
        gru._plan()  # the scales of learned logarithms
        use = ScaleUse(gru)
        found = _energies(gru, use, input, hx)  # type: ignore[arg-type]
        remarks = use.remarks()
    elif isinstance(hx, Tensor):
        raise QuantGRUError(
            "Expected hx only for a QuantGRU, got one for a model, whose GRUs get their states "
            "from it; pass forward_fn=lambda model, batch: model(batch, hx)"
        )
    else:
        found, remarks = _of_model(gru, input, forward_fn or given)
    return OperatorSQNR({name: decibels(*each) for name, each in found.items()}, texts(remarks))


def _of_model(
    model: torch.nn.Module,
    data: Iterable[Any],
    forward_fn: Run | None,
) -> tuple[Energies, dict[str, Remark]]:
    """Return the energies of all GRUs of a model, summed over batches, and remarks on scales."""
    grus = find_grus(model)
    if not grus:
        raise CalibrationError(
            f"Expected a model with at least one QuantGRU, got none in {type(model).__name__}; "
            "call convert_model and calibrate_model first"
        )
    calls = {name: _Calls(gru) for name, gru in grus.items()}
    is_empty = True
    with observed_in_float(model, grus, calls):
        for batch in as_batches(data):
            run_batch(model, batch, forward_fn)
            is_empty = False
        if is_empty:
            raise CalibrationError("Expected at least one batch, got none")
        for each in calls.values():
            each.finish()
    found = {
        f"{name}.{operator}": energy
        for name, each in calls.items()
        for operator, energy in each.found.items()
    }
    remarks = {
        f"{name}.{operator}": remark
        for name, each in calls.items()
        for operator, remark in each.remarks().items()
    }
    return found, worst_first(remarks)


class _Calls:
    """A forward pre-hook that sums the energies of the calls of a GRU.

    Each call of a cell is one step, and most of the time of one step does not depend on its rows.
    So the rows of several calls are measured together.

    Attributes:
        found: The energies, complete after `finish`.
    """

    def __init__(self, gru: QuantGRU) -> None:
        self.found: Energies = {}
        self._gru = gru
        self._use: ScaleUse | None = None
        self._inputs: list[Tensor] = []
        self._states: list[Tensor] = []

    def __call__(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("input", "hx"), args, strict=False)) | kwargs
        if not isinstance(self._gru, QuantGRUCell):
            self._measure(**given)
            return
        sequence = self._gru._normalize(given["input"], given.get("hx"))
        self._inputs.append(sequence.x[0].clone())
        self._states.append(sequence.h0[0].clone())
        if sum(map(len, self._inputs)) >= _ROWS_AT_ONCE:
            self.finish()

    def finish(self) -> None:
        """Measure the calls that wait for others."""
        if self._inputs:
            inputs, states = torch.cat(self._inputs), torch.cat(self._states)
            self._inputs, self._states = [], []
            self._measure(inputs, states)

    def remarks(self) -> dict[str, Remark]:
        """Return remarks on the scales; none if there was no call."""
        return {} if self._use is None else self._use.remarks()

    def _measure(self, input: Tensor | PackedSequence, hx: Tensor | None = None, **_: Any) -> None:
        if self._use is None:
            self._gru._plan()  # raises an error without scales
            self._use = ScaleUse(self._gru)
        for name, (signal, noise) in _energies(self._gru, self._use, input, hx).items():
            before = self.found.get(name, (0.0, 0.0))
            self.found[name] = before[0] + signal, before[1] + noise


def _energies(
    gru: QuantGRU, use: ScaleUse, input: Tensor | PackedSequence, hx: Tensor | None
) -> Energies:
    """Return the signal and noise energies of each operator of a call, and add to `use`."""
    found: Energies = {}
    for trace in traces(gru, input, hx):
        suffix = suffix_of(trace.layer, trace.direction)
        use.observe(trace.layer, trace.direction, trace.real)
        for name in OPERATORS:
            if name in trace.found:
                found[name + suffix] = energies(trace.real[name], trace.found[name])
            elif name in trace.weights:
                found[name + suffix] = energies(*trace.weights[name])
    return found


@dataclass(frozen=True)
class Trace:
    """All operators of a layer and direction in a call, in float and in integers.

    Parts of matmul.Wx and matmul.Rh are in the order of PyTorch, rows of weights in that of the
    plan: update, reset, candidate.

    Attributes:
        layer: Index of the layer.
        direction: 1 for the reverse direction.
        steps: The number of the step of each row, int64 (P,).
        real: Operator -> the values of the float GRU, (P, ..), rows of the valid steps.
        found: Operator -> the values that its codes stand for, of the same shape.
        codes: Operator -> its codes.
        weights: Weight or bias -> its values, and those that its codes stand for.
    """

    layer: int
    direction: int
    steps: Tensor
    real: dict[str, Tensor]
    found: dict[str, Tensor]
    codes: dict[str, Tensor]
    weights: dict[str, tuple[Tensor, Tensor]]


def traces(
    gru: QuantGRU, input: Tensor | PackedSequence, hx: Tensor | None = None
) -> Iterator[Trace]:
    """Yield what each layer and direction of a calibrated GRU computes in a call.

    Args:
        gru: A GRU with scales.
        input: As for its forward.
        hx: As for its forward.
    """
    plan, sequence = gru._plan(), gru._normalize(input, hx)
    x, lengths = sequence.x.detach(), sequence.lengths
    inputs, h0 = border_codes(plan, x, sequence.h0)
    weights = gru._float_weights()
    values = _float_values(x, sequence.h0, lengths, weights)
    steps = torch.arange(x.shape[0], device=x.device)[:, None].expand(x.shape[:2])
    for run in run_codes(plan, inputs, h0, lengths):
        real, cell = values[run.layer, run.direction], weights[run.layer][run.direction]
        assert gru._state.scales is not None
        qparams = gru._state.scales[run.layer][run.direction]
        every = cell_codes(run)
        for name in ("matmul.Wx", "matmul.Rh"):  # the swap of two parts is its own inverse
            every[name] = update_first(every[name].movedim(-1, 0)).movedim(0, -1)
        codes = {name: valid(every[name], lengths) for name in ACTIVATIONS if name in every}
        quantizers = {**run.plan.frozen.quantizers, "input.x": run.plan.border}
        found = {name: quantizers[name].dequantize(each) for name, each in codes.items()}
        pairs = {}
        for name, w in zip(WEIGHTS, (cell.W, cell.R, cell.bw, cell.br), strict=True):
            if w is None:
                continue
            if name == "weight.bw":
                w = corrected_bias(qparams, cell.W, w)
            s = run.plan.weights.scales[name].to(torch.float64)
            s = s[:, None] if w.dim() == 2 else s
            pairs[name] = update_first(w), every[name] * s
        at = valid(steps[..., None], lengths)[:, 0]
        yield Trace(run.layer, run.direction, at, real, found, codes, pairs)


def _float_values(
    x: Tensor, h0: Tensor, lengths: Tensor | None, weights: Sequence[Sequence[FloatWeights]]
) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Return the real values of every operator at all valid steps, by layer and direction."""
    found: defaultdict[tuple[int, int], list[dict[str, Tensor]]] = defaultdict(list)

    def keep(layer: int, direction: int, values: dict[str, Tensor]) -> None:
        # blocks of the reverse direction come from the last step to the first
        found[layer, direction].insert(0 if direction else len(found[layer, direction]), values)

    float_layers(x, h0, lengths, weights, keep)
    return {
        cell: {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        for cell, blocks in found.items()
    }
