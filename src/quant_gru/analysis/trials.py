"""A quantized copy of a model in which single operators change their widths."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quant_gru.analysis.outputs import expect_tensors, named_tensors
from quant_gru.analysis.replay import Replay
from quant_gru.calibration.batches import batches_of, run_batch
from quant_gru.calibration.windows import CellSteps
from quant_gru.config import OPERATORS, QuantConfig
from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import CellPlan, build_frozen, build_weights
from quant_gru.integer.qparams import PRE_ACTIVATION, QParams, make_qparams
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.interchange.plan_tensors import suffix_of
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.calibrate import collect, reached
from quant_gru.whole_models.convert import convert_model, find_grus
from quant_gru.whole_models.fit_weights import (
    PRODUCTS,
    Operands,
    fitted_weight,
    is_fitted,
    operands,
)
from quant_gru.whole_models.selection import ModelConfig

_logger = logging.getLogger(__name__)

Forward = Callable[[torch.nn.Module, Any], Any]

BASE = 16
"""The width of all operators but those that are tried, unless a trial needs a wider one."""

_FINER = 4
# The share of operations that must come before the first GRU for these to be computed once: to see
# the others takes time, too.
_LEAST_REPEATED = 0.1


def base_for(bits: int) -> int:
    """Return the width of all other operators with which the error of one of `bits` bits shows."""
    return BASE if bits <= BASE - _FINER else min(bits + _FINER, 32)


Cell = tuple[str, int, bool]
"""A GRU, layer, and whether it is the reverse direction."""


@dataclass(frozen=True, order=True)
class Place:
    """An operator of one layer and direction of a GRU.

    Attributes:
        module: Name of the GRU in the model; '' for the model itself.
        layer: Index of the layer.
        reverse: Whether it is the reverse direction.
        operator: Full name of the operator.
    """

    module: str
    layer: int
    reverse: bool
    operator: str

    @property
    def cell(self) -> Cell:
        """The GRU, layer and direction."""
        return self.module, self.layer, self.reverse

    def __str__(self) -> str:
        name = f"{self.operator}{suffix_of(self.layer, self.reverse)}"
        return f"{self.module}.{name}".lstrip(".")


Widths = Mapping[Place, int]


class Trials:
    """A copy of a model that runs on the same data with any widths of its operators.

    The scale of an operator at a width does not depend on the widths of the others. The float
    outputs and the scales at each width are computed once, and the plan of a cell as long as no
    width in it changes.

    Args:
        model: A float model, or one with QuantGRUs, whose configurations then give the kinds of
            the operators. It does not change.
        data: Batches as for `calibrate_model`; a tensor is one batch.
        widths: The widths to try.
        calibration: Batches that scales are made of; None for `data`.
        config: Kinds of the operators, as for `convert_model`, for a model without QuantGRUs.
        forward_fn: `forward_fn(model, batch)` runs a batch and returns the outputs.
        fit_weights: Whether weights of few bits are fitted, see `calibrate_model`.
        progress: Whether to show a progress bar (only on a terminal).

    Attributes:
        model: The copy, in eval mode.
        grus: Its QuantGRUs by name, without those that the data do not reach.
        places: All operators that have a width.
        signal: The summed squares of the float outputs.

    Raises:
        CalibrationError: There is no batch or no GRU, or statistics are invalid.
        QuantGRUError: The model gives no tensor of floating point.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: Any,
        widths: Iterable[int],
        *,
        calibration: Any = None,
        config: ModelConfig = None,
        forward_fn: Forward | None = None,
        fit_weights: bool = False,
        progress: bool = True,
    ) -> None:
        self.batches = batches_of(data)
        self._forward = forward_fn
        self.model = _at_base(model, config)
        every = find_grus(self.model)
        given = self.batches if calibration is None else batches_of(calibration)
        collect(self.model, every, given, forward_fn, progress)
        names = reached(every)
        self.grus = {name: gru for name, gru in every.items() if name in names}
        for gru in every.values():
            gru.calibrating = gru.use_quantization = False
        self.model.eval()  # once: a change of the mode forgets plans
        wanted = sorted({check_width(each) for each in widths})
        self.widths = tuple(dict.fromkeys((BASE, *wanted, *map(base_for, wanted))))
        self._steps: dict[str, list[list[CellSteps]] | None] = {}
        self._by_width: dict[tuple[Cell, int], QParams] = {}
        self._tables: dict[tuple[Cell, str, int, int], Table] = {}
        self._configs: dict[tuple[str, tuple[int, ...]], QuantConfig] = {}
        self._kept: dict[Cell, tuple[Mapping[str, int], QParams]] = {}
        self._statistics = {name: gru._state.collector for name, gru in self.grus.items()}
        for bits in self.widths:
            self.add_base(bits)
        self.places = tuple(
            Place(name, layer, direction == 1, operator)
            for name, gru in self.grus.items()
            for layer in range(gru.num_layers)
            for direction in range(2 if gru.bidirectional else 1)
            for operator in OPERATORS
            if gru.config[operator].bitwidth is not None
            and (gru.bias or not operator.startswith("weight.b"))
        )
        self._weights: _Weights | None = None
        if fit_weights:
            _expect_powers_of_two(self.grus.values())
            found = operands(self.model, self.grus, given, forward_fn, progress)
            self._weights = _Weights(self.grus, found)
        with torch.no_grad():
            self._replay = Replay(self.model, every.values())
            self._real = list(self._all_outputs())
            self.signal = sum(float(each.square().sum()) for found in self._real for each in found)
            self.set({})
            self._check_replay()

    def add_base(self, bits: int) -> None:
        """Make scales of a width; the first one is BASE."""
        for name, gru in self.grus.items():
            collector, weights = self._statistics[name], gru._float_weights()
            if ((name, 0, False), bits) in self._by_width:
                continue
            assert collector is not None
            if name not in self._steps:
                self._steps[name] = collector.steps(weights)
            steps = self._steps[name]
            cells = [
                [
                    replace(
                        scales.by_itself(None if steps is None else steps[layer][direction]),
                        zoneout=gru.zoneout,
                    )
                    for direction, scales in enumerate(row)
                ]
                for layer, row in enumerate(collector.cells(_with_width(gru.config, bits)))
            ]
            for layer, row in enumerate(cells):
                for direction, made in enumerate(row):
                    self._by_width[(name, layer, direction == 1), bits] = made
            if not gru.is_calibrated():
                gru._state.finish(cells)

    # --- widths

    def set(self, widths: Widths, base: int = BASE) -> None:
        """Set the widths of some places, and of all others to a base.

        Args:
            widths: Place -> its width, one of those given to the constructor.
            base: The width of all others: BASE, or what `base_for` gives for a width.
        """
        self._last = widths, base
        by_cell: dict[Cell, dict[str, int]] = {}
        for place, bits in widths.items():
            by_cell.setdefault(place.cell, {})[place.operator] = bits
        for name, gru in self.grus.items():
            gru.use_quantization = True
            scales = [
                [
                    self._cell(cell := (name, layer, direction == 1), by_cell.get(cell, {}), base)
                    for direction in range(2 if gru.bidirectional else 1)
                ]
                for layer in range(gru.num_layers)
            ]
            gru._state.try_scales(scales)
            if self._weights is not None:
                self._weights.put(name, scales)

    def _cell(self, cell: Cell, widths: Mapping[str, int], base: int) -> QParams:
        whole = self._by_width[cell, base]
        bits = {name: widths.get(name, base) for name in OPERATORS}
        if all(each == base for each in bits.values()):
            return whole
        kept = self._kept.get(cell)
        if kept is not None and kept[0] == bits:
            return kept[1]
        key = cell[0], tuple(bits.values())
        if key not in self._configs:
            self._configs[key] = with_widths(whole.config, widths)
        config = self._configs[key]
        quantizers = {
            name: self._by_width[cell, bits[name]].quantizers[name] for name in whole.quantizers
        }
        keys = {out: (cell, out, bits[pre], bits[out]) for out, pre in PRE_ACTIVATION.items()}
        tables = {out: self._tables[key] for out, key in keys.items() if key in self._tables}
        made = make_qparams(config, quantizers, None, tables)
        self._tables.update({key: made.tables[out] for out, key in keys.items()})
        made = replace(made, zoneout=whole.zoneout, input_mean=whole.input_mean)
        self._kept[cell] = bits, made
        return made

    def table(self, place: Place, pre_bits: int, out_bits: int) -> tuple[Table, Quantizer]:
        """Return the table of a gate, and the quantizer of its input.

        Args:
            place: The output of the gate: operator gate.z_out, gate.r_out or gate.g_out.
            pre_bits: Width of its input.
            out_bits: Width of its output.
        """
        out, pre = place.operator, PRE_ACTIVATION[place.operator]
        key = (place.cell, out, pre_bits, out_bits)
        if key not in self._tables:
            widths = {pre: pre_bits, out: out_bits}
            self._tables[key] = self._cell(place.cell, widths, BASE).tables[out]
        return self._tables[key], self._by_width[place.cell, pre_bits].quantizers[pre]

    def plan(self, cell: Cell, widths: Mapping[str, int]) -> CellPlan:
        """Return the plan of a cell.

        Args:
            cell: Which one.
            widths: Operator -> its width; all others have BASE.
        """
        name, layer, reverse = cell
        weights, made = self.grus[name]._float_weights(), self._cell(cell, widths, BASE)
        own = weights[layer][int(reverse)]
        frozen = build_frozen(made, own.W.device)
        return CellPlan(frozen, build_weights(made, own.W, own.R, own.bw, own.br))

    # --- runs

    def noise(self) -> float:
        """Return the summed squared error of all outputs."""
        found = 0.0
        with torch.no_grad():
            for real, outputs in zip(self._real, self._all_outputs(), strict=True):
                for a, b in zip(real, outputs, strict=True):
                    found += float((a - b).square().sum())
        return found

    def noise_on(self, data: Any) -> tuple[float, float]:
        """Return signal and summed squared error of the outputs on other batches."""
        batches = batches_of(data)
        signal = noise = 0.0
        with torch.no_grad():
            found = [self._outputs(batch) for batch in batches]
            self.float_mode()
            for batch, own in zip(batches, found, strict=True):
                for a, b in zip(self._outputs(batch), own, strict=True):
                    signal += float(a.square().sum())
                    noise += float((a - b).square().sum())
        self.set(*self._last)
        return signal, noise

    def metric(self, metric: Callable[[torch.nn.Module], Any]) -> list[float]:
        """Return a metric of the model as it is: one number, or one for each sample."""
        with torch.no_grad(), self._replay.calls("metric"):
            return numbers_of(metric(self.model))

    def float_mode(self) -> None:
        """Compute in floating point until widths are set."""
        for name, gru in self.grus.items():
            gru.use_quantization = False
            if self._weights is not None:
                self._weights.put(name, None)

    def _all_outputs(self) -> Iterator[list[Tensor]]:
        """Yield the outputs of each batch; what comes before the first GRU is computed once."""
        for index, batch in enumerate(self.batches):
            with self._replay.calls(index):
                found = self._outputs(batch)
            yield found

    def _check_replay(self) -> None:
        """Compare outputs with and without repeated operations; repeat none if they differ."""
        replay = self._replay
        seen = replay.seen
        found = list(self._all_outputs())
        repeated, seen = replay.repeated, replay.seen - seen
        replay.is_on = False
        computed = list(self._all_outputs()) if repeated else found
        replay.is_on = True
        pairs = zip(found, computed, strict=True)
        told = f"{repeated} of {seen} operations outside GRUs come before the first GRU"
        if not all(torch.equal(a, b) for each in pairs for a, b in zip(*each, strict=True)):
            replay.forget()
            _logger.info("equal calls give other outputs: each trial runs the whole model")
        elif _LEAST_REPEATED * seen >= repeated:
            replay.forget()
            _logger.info("%s: each trial runs the whole model", told)
        else:
            _logger.info("%s: they are computed once", told)

    def _outputs(self, batch: Any) -> list[Tensor]:
        found = run_batch(self.model, batch, self._forward)
        tensors = [each.double() for _, each in named_tensors(found)]
        expect_tensors(tensors)
        return tensors


class _Weights:
    """The weights of GRUs, and fitted ones for each width, of which one set is in the GRUs.

    Args:
        grus: Name -> GRU.
        found: The moments of their operands.
    """

    def __init__(self, grus: Mapping[str, QuantGRU], found: Mapping[str, Operands]) -> None:
        self._grus, self._found = grus, found
        self._original = {
            name: [
                [[each if each is None else each.detach().clone() for each in w] for w in row]
                for row in gru._weights()
            ]
            for name, gru in grus.items()
        }
        self._fitted: dict[tuple[tuple[str, int, int, str], int], tuple[Tensor, Tensor]] = {}
        self._now: dict[tuple[str, int, int, str], int | None] = {}

    @torch.no_grad()
    def put(self, name: str, scales: Sequence[Sequence[QParams]] | None) -> None:
        """Give a GRU the weights for its widths; its own ones if `scales` is None."""
        gru = self._grus[name]
        for layer, cells in enumerate(gru._weights()):
            for direction, tensors in enumerate(cells):
                for operand, weight, at, bias_at in PRODUCTS:
                    qparams = None if scales is None else scales[layer][direction]
                    few = qparams is not None and is_fitted(qparams.config, weight)
                    bits = qparams.config[weight].bitwidth if qparams and few else None
                    moments = self._found[name].get(((layer, direction), operand))
                    key = name, layer, direction, weight
                    if self._now.get(key) == bits or moments is None:
                        continue
                    self._now[key] = bits
                    own = self._original[name][layer][direction]
                    w, bias = tensors[at], tensors[bias_at]
                    values, gained = own[at], None
                    assert w is not None
                    assert values is not None
                    if bits is not None:
                        assert qparams is not None
                        if (key, bits) not in self._fitted:
                            self._fitted[key, bits] = fitted_weight(
                                qparams, values, weight, operand, moments, bias is not None
                            )
                        values, gained = self._fitted[key, bits]
                    w.copy_(values)
                    if bias is not None:
                        before = own[bias_at]
                        assert before is not None
                        bias.copy_(before if gained is None else before + gained)


def check_width(bits: Any) -> int:
    """Return a width; raise if it is none."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 32:
        raise QuantGRUError(f"Expected widths to be integers from 1 to 32, got {bits!r}")
    return bits


def numbers_of(value: Any) -> list[float]:
    """Return what a metric gives as a list of numbers."""
    if isinstance(value, Tensor):
        value = value.double().flatten().tolist()
    found = [float(each) for each in value] if hasattr(value, "__iter__") else [float(value)]
    if not found:
        raise QuantGRUError("Expected the metric to give a number or numbers, got none")
    return found


def with_widths(config: QuantConfig, widths: Mapping[str, int]) -> QuantConfig:
    """Return a configuration with other widths of some operators."""
    for name, bits in widths.items():
        config = config.replace(name, bitwidth=bits)
    return config


def _with_width(config: QuantConfig, bits: int) -> QuantConfig:
    """Return a configuration with one width for all operators that have one."""
    return with_widths(
        config, {name: bits for name in OPERATORS if config[name].bitwidth is not None}
    )


def _expect_powers_of_two(grus: Iterable[QuantGRU]) -> None:
    """Raise for free scales: a search would not find those of fitted weights again."""
    if any(gru.config.scale_kind != "pot" for gru in grus):
        raise QuantGRUError(
            "Expected scale_kind to be 'pot' to fit weights while widths are chosen, got 'free'; "
            "choose without, then calibrate_model(.., fit_weights=True)"
        )


def _at_base(model: torch.nn.Module, config: ModelConfig) -> torch.nn.Module:
    """Return a copy of a model whose GRUs have no scales yet and all widths at BASE."""
    if any(isinstance(module, QuantGRU) for module in model.modules()):
        if config is not None:
            raise QuantGRUError(
                "Expected config only for a model without QuantGRUs, got one for a model whose "
                "QuantGRUs have their own"
            )
        found = copy.deepcopy(model)
    else:
        found = convert_model(model, "int16" if config is None else config)
    for gru in find_grus(found).values():
        gru.learn_scales = False
        gru.reset_calibration()
        gru.load_bitwidth_config(_with_width(gru.config, BASE))
        gru.use_quantization = False
    return found
