"""The quantization state of a QuantGRU: configuration, statistics, scales, plan."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceABC
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypedDict

import torch
from torch import Tensor

from quant_gru.autograd.learned_scales import follow
from quant_gru.calibration.collector import Collector
from quant_gru.calibration.float_run import FloatWeights
from quant_gru.calibration.observers import METHODS, make_observer
from quant_gru.config import OPERATORS, WEIGHTS, QuantConfig, canonical_name
from quant_gru.errors import (
    CalibrationError,
    ConfigError,
    ParameterError,
    QuantGRUError,
    QuantGRUWarning,
    caller_stacklevel,
    note_once,
)
from quant_gru.execution.layers import Weights
from quant_gru.execution.noise import Noise
from quant_gru.execution.plan_cache import PlanCache
from quant_gru.execution.prepared_call import PreparedCall, prepare
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.integer.plan import GRUPlan
from quant_gru.integer.qparams import QParams, corrected_bias, weight_scales
from quant_gru.modules.adjust import Change, adjust
from quant_gru.parameters import document as params
from quant_gru.parameters.checks import exponent_of
from quant_gru.parameters.schema import Shape
from quant_gru.torch_ops import plan_sources

Cells = list[list[QParams]]

_logger = logging.getLogger(__name__)


class OperatorState(TypedDict):
    """Settings and scales of one operator; see `QuantGRU.get_quant_config`."""

    bitwidth: int | None
    is_symmetric: bool
    is_unsigned: bool
    scale: float | list[float] | None
    zero_point: int | None
    exp2_inv: int | list[int] | None


class QuantState:
    """Configuration, then statistics, then scales: the stages of calibration, in this order.

    Args:
        config: Widths and kinds of the operators.
        shape: Layers, directions and sizes of the GRU.

    Attributes:
        text: The scales for `quant_gru.torch_ops.operators.forward`, uint8 (L,); None without
            scales.
        containers: dtypes of the codes of output.h of each layer and direction.
    """

    def __init__(self, config: QuantConfig, shape: Shape) -> None:
        self.config = config
        self.method = "histogram"
        self.percentile_value = 99.99
        self.plans = PlanCache()
        self.text: Tensor | None = None
        self.containers: list[torch.dtype] = []
        self._shape = shape
        self._grid = (shape.num_layers, shape.directions)
        self._collector: Collector | None = None
        self._scales: Cells | None = None

    def __getstate__(self) -> dict[str, Any]:
        # the plan can be rebuilt from parameters and scales, and may be on a device
        return {**self.__dict__, "plans": PlanCache(), "text": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._write_text()

    def copy(self) -> QuantState:
        """Return a copy for a later restore; changes of this object do not affect it."""
        return deepcopy(self)

    @property
    def scales(self) -> Cells | None:
        """[layer][direction] -> quantization parameters; None before they exist."""
        return self._scales

    @property
    def cells(self) -> list[QParams]:
        """The quantization parameters of each layer and direction in turn; empty without scales."""
        return [cell for layer in self._scales or () for cell in layer]

    @property
    def has_statistics(self) -> bool:
        """Whether there are statistics that are not yet converted to scales."""
        return self._collector is not None

    @property
    def collector(self) -> Collector | None:
        """Statistics that are not yet converted to scales."""
        return self._collector

    @property
    def shape(self) -> Shape:
        """Layers, directions and sizes of the GRU."""
        return self._shape

    def set_zoneout(self, p: float) -> None:
        """Change the share of a state that each step keeps."""
        if p != self._shape.zoneout:
            self._shape = self._shape.model_copy(update={"zoneout": p})
            if self._scales is not None:
                self._set_scales(self._scales)

    # --- plans

    def plan(self, weights: SequenceABC[SequenceABC[Weights]], live: bool) -> GRUPlan:
        """Return the plan of the scales and these weights; see `PlanCache.plan`."""
        assert self._scales is not None
        return self.plans.plan(self._scales, weights, live)

    def prepare(
        self,
        own: Collection[Tensor | None],
        weights: SequenceABC[SequenceABC[Weights]],
        live: bool,
        noise: Noise | None,
        before: PreparedCall | None,
    ) -> PreparedCall:
        """Return a new shared state of calls.

        Args:
            own: All weights of the module.
            weights: [layer][direction] -> W, R, bw, br.
            live: Whether weights may change undetected.
            noise: Random masks.
            before: The former one, which does not hold any more.
        """
        plans, scales, dropped = self.plans, self._scales, dropped_by(noise, self._shape)
        assert scales is not None
        # computed weights, as in parametrizations and pruning, may differ in each call
        cells = list(chain(*weights))
        live = live or not {id(None), *map(id, own)}.issuperset(map(id, chain(*cells)))
        build = partial(plans.plan, scales, weights, live, *dropped)
        found = prepare(build, cells, own, cells[0][0].dtype, live)
        if before is not None and before.plan is found.plan:
            # how calls are differentiated does not depend on the weights
            found.differentiated = before.differentiated
        plans.keep(found)
        if self._scales is not scales:
            # another thread changed the scales: this plan may have been cached after its clear()
            plans.clear()
        return found

    def plan_again(self) -> Callable[[SequenceABC[Tensor], Noise | None], GRUPlan]:
        """Return again(weights, noise) -> the plan of a forward, from a flat list of weights."""
        scales, shape = self._scales, self._shape
        assert scales is not None
        # a weak reference, so that plans do not keep themselves alive
        kept = weakref.ref(self.plans)

        def again(weights: SequenceABC[Tensor], noise: Noise | None) -> GRUPlan:
            plans = plan_sources.LivePlans(scales, kept() or PlanCache(), shape)
            return plans.plan(weights, True, *dropped_by(noise, shape))

        return again

    # --- scales

    def follow(self, values: SequenceABC[SequenceABC[float]]) -> None:
        """Set scales from their logarithms, one list per layer and direction."""
        assert self._scales is not None
        D = len(self._scales[0])
        new = [
            [follow(cell, values[layer * D + d]) for d, cell in enumerate(cells)]
            for layer, cells in enumerate(self._scales)
        ]
        if any(
            a is not b
            for old, now in zip(self._scales, new, strict=True)
            for a, b in zip(old, now, strict=True)
        ):
            self._scales = new
            self.plans.clear()
            self.text = None

    def try_scales(self, scales: Cells) -> None:
        """Use scales for a time; plans of cells with the same parameters stay as they are."""
        self._scales = scales
        self.containers = [cell.quantizers["output.h"].container for cell in self.cells]
        self.plans.drop_prepared()
        self.text = None

    def finish(self, scales: Cells) -> None:
        """Set scales, in place of those that the statistics would become."""
        self._set_scales(scales)

    def settle_on(self, config: QuantConfig) -> None:
        """Keep the scales that are tried, which are of this configuration."""
        self.config = config
        self.settle()

    def settle(self) -> None:
        """Turn scales that followed logarithms into fixed scales, as after a calibration."""
        if self._scales is not None:
            self._set_scales(self._scales)

    def _set_scales(self, scales: Cells | None) -> None:
        p = self._shape.zoneout
        self._scales = scales and [[replace(cell, zoneout=p) for cell in layer] for layer in scales]
        self.containers = [cell.quantizers["output.h"].container for cell in self.cells]
        self._collector = None
        self.plans.clear()
        self._write_text()

    def _write_text(self) -> None:
        self.text = None
        if self._scales is not None:
            with torch.inference_mode(False), torch.device("cpu"):
                self.text = params.to_tensor(self.document())
            source = plan_sources.LivePlans(self._scales, self.plans, self._shape)
            plan_sources.keep(self.text, source)

    # --- before calibration

    def set_config(self, config: QuantConfig) -> None:
        """Set the configuration; raise if scales exist."""
        if self._scales is not None:
            raise ConfigError(
                "Expected the configuration to be set before calibration, got a calibrated GRU; "
                "call reset_calibration() first, or adjust_quant_config for single operators"
            )
        self.config = config

    def set_method(self, method: str) -> None:
        """Set the calibration method; raise if statistics exist."""
        make_observer(method)
        if METHODS[method] != METHODS[self.method]:
            self._refuse_after_collecting("calibration_method")
        self.method = method

    def set_percentile_value(self, value: float) -> None:
        """Set the coverage of 'percentile'; raise if statistics exist."""
        make_observer("percentile", percentile_value=value)
        if value != self.percentile_value:
            self._refuse_after_collecting("percentile_value")
        self.percentile_value = float(value)

    def _refuse_after_collecting(self, what: str) -> None:
        if self._collector is not None or self._scales is not None:
            raise CalibrationError(
                f"Expected {what} to change before statistics are collected, got a change "
                "afterwards; call reset_calibration() first"
            )

    # --- calibration

    def collect(self, sequence: Sequence, weights: SequenceABC[SequenceABC[FloatWeights]]) -> None:
        """Observe one batch of the float GRU."""
        if self._scales is not None:
            raise CalibrationError(
                "Expected a GRU without scales to collect statistics, got a calibrated one; "
                "call reset_calibration() first"
            )
        collector = self._collector or self._new_collector()
        collector.collect(sequence.x, sequence.h0, sequence.lengths, weights)
        self._collector = collector

    def _new_collector(self) -> Collector:
        return Collector(*self._grid, self._shape.hidden_size, self.method, self.percentile_value)

    def finalize(
        self,
        sync: bool,
        weights: SequenceABC[SequenceABC[FloatWeights]],
        refine: bool = False,
    ) -> None:
        """Convert statistics to scales; first merge those of all processes if `sync`."""
        merge = sync and in_several_processes()
        if self._collector is None and not merge:
            raise CalibrationError(
                "Expected statistics to make scales of, got none; call calibrate(data) first"
            )
        collector = self._collector or self._new_collector()
        if merge:
            # a copy, so that the statistics survive if a scale is impossible
            collector = deepcopy(collector)
            collector.all_reduce()
        begin = time.monotonic()
        made = collector.qparams(self.config, weights, refine)
        seconds, cells = time.monotonic() - begin, sum(map(len, made))
        _logger.info("made scales of %d cells by %s in %.1f s", cells, self.method, seconds)
        self._set_scales(made)
        for text in collector.notes(made):
            warnings.warn(QuantGRUWarning(text), stacklevel=caller_stacklevel())
        for name in OPERATORS:
            operator = self.config[name]
            if operator.bitwidth == 1 and operator.is_symmetric and not operator.is_unsigned:
                note_once(f"one signed bit has the codes -1 and 0: '{name}' has no positive values")

    def check_statistics(self, in_forward: bool) -> None:
        """Raise if there are neither scales nor statistics; a forward may use the float mode."""
        if self._scales is None and self._collector is None:
            instead = ", or set use_quantization = False" if in_forward else ""
            raise CalibrationError(
                "Expected a calibrated GRU, got one without scales or statistics; call "
                f"calibrate(data) first{instead}"
            )

    def reset(self) -> None:
        """Forget statistics and scales."""
        self._set_scales(None)

    # --- after calibration

    def check_cell(self, layer: int, reverse: bool) -> None:
        """Raise if there is no such layer or direction."""
        if not 0 <= layer < self._grid[0]:
            raise QuantGRUError(f"Expected layer to be in 0..{self._grid[0] - 1}, got {layer}")
        if reverse and self._grid[1] == 1:
            raise QuantGRUError("Expected reverse to be False (not bidirectional), got True")

    def adjust(self, name: str, change: Change, layer: int | None, reverse: bool | None) -> None:
        """Change one operator; on an error nothing changes.

        Args:
            name: Full or short name.
            change: What changes.
            layer: Index of the layer; None for all.
            reverse: Direction; None for both.
        """
        name = canonical_name(name)
        num_layers, directions = self._grid
        cells = [
            (at, direction)
            for at in range(num_layers)
            for direction in range(directions)
            if layer in (None, at) and reverse in (None, direction == 1)
        ]
        if not cells:
            self.check_cell(layer or 0, bool(reverse))
        if change == Change():
            raise ConfigError(f"Expected something to change, got nothing (operator {name!r})")
        everywhere = len(cells) == num_layers * directions
        if self._scales is None and (change.touches_numbers or not everywhere):
            raise ConfigError(
                "Expected a calibrated GRU to set scales, zero points or single layers, got "
                f"one without scales; calibrate first (operator {name!r})"
            )
        config = change.apply_to_config(self.config, name) if everywhere else self.config
        adjusted = None
        if self._scales is not None:
            adjusted = [list(layer) for layer in self._scales]
            for at, direction in cells:
                old = adjusted[at][direction]
                adjusted[at][direction] = adjust(old, name, change, self._shape.hidden_size)
        self.config = config
        if adjusted is not None:
            self._set_scales(adjusted)

    def describe(self, name: str, layer: int, direction: int, weights: Weights) -> OperatorState:
        """Return settings and scales of an operator; see `QuantGRU.get_quant_config`.

        Args:
            name: Full or short name.
            layer: Index of the layer.
            direction: 0 forward, 1 reverse.
            weights: W, R, bw, br of this layer and direction.
        """
        name = canonical_name(name)
        scales = self._scales[layer][direction] if self._scales else None
        operator = (scales.config if scales else self.config)[name]
        scale: Any = None
        zero_point: int | None = None
        exponent: Any = None
        if scales and name in WEIGHTS:
            W = weights[0]
            weight = weights[WEIGHTS.index(name)]
            if weight is None:
                weight = W.new_zeros(len(W))
            if name == "weight.bw":
                weight = corrected_bias(scales, W, weight)
            scale, zero_point = weight_scales(scales, name, weight).tolist(), 0
            exponents = [exponent_of(each) for each in scale]
            exponent = None if None in exponents else exponents
        elif scales and name in scales.quantizers:
            quantizer = scales.quantizers[name]
            scale, zero_point = quantizer.scale, quantizer.zero_point
            exponent = exponent_of(scale)
        return {
            "bitwidth": operator.bitwidth,
            "is_symmetric": operator.is_symmetric,
            "is_unsigned": operator.is_unsigned,
            "scale": scale,
            "zero_point": zero_point,
            "exp2_inv": exponent if self.config.scale_kind == "pot" else None,
        }

    # --- parameter documents

    def document(self) -> dict[str, Any]:
        """Return configuration, scales and tables as JSON-compatible data."""
        assert self._scales is not None
        return params.to_document(self._shape, self.config, self._scales)

    def take(self, found: params.Parameters, where: str) -> None:
        """Set configuration and scales from a document for a GRU of this shape."""
        if found.shape != self._shape:
            raise ParameterError(
                f"Expected parameters of a GRU with {_words(self._shape)}, "
                f"got {_words(found.shape)} ({where})"
            )
        self.config = found.config
        self._set_scales(found.cells)


def dropped_by(noise: Noise | None, shape: Shape) -> tuple[list[Tensor] | None, float]:
    """Return dropped recurrent weights of each layer and direction, and their probability."""
    if noise is None:
        return None, 0.0
    sizes = (shape.num_layers, shape.directions, shape.hidden_size)
    return noise.all_dropped(*sizes), noise.recurrent_dropout


def summary(state: QuantState, weights: SequenceABC[SequenceABC[Weights]]) -> str:
    """Return a text with one line per quantizer of each layer and direction."""
    lines = []
    for layer, cells in enumerate(weights):
        for direction, cell in enumerate(cells):
            lines.append(f"layer {layer}{' reverse' if direction else ''}")
            described = {name: state.describe(name, layer, direction, cell) for name in OPERATORS}
            lines += _lines(described)
    return "\n".join(lines)


def _lines(entries: dict[str, OperatorState]) -> list[str]:
    lines = []
    for name, entry in entries.items():
        bits, scale = entry["bitwidth"], entry["scale"]
        kind = f"{'uint' if entry['is_unsigned'] else 'int'}{bits}"
        if bits is None:
            lines.append(f"  {name:<15} fused")
        elif isinstance(scale, list):
            span = f"{min(scale):.4g} .. {max(scale):.4g}"
            lines.append(f"  {name:<15} {kind:<7} scale {span} ({len(scale)})")
        else:
            lines.append(
                f"  {name:<15} {kind:<7} scale {scale:<10.4g} zero point {entry['zero_point']}"
            )
    return lines


def in_several_processes() -> bool:
    """Return whether torch.distributed has several processes."""
    distributed = torch.distributed
    return bool(
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def _words(shape: Shape) -> str:
    return ", ".join(f"{name}={value}" for name, value in shape.model_dump().items())
