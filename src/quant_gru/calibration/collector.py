"""Collection of statistics: runs the float GRU layer by layer and observes every operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quant_gru.calibration.effects import effective_quantizers
from quant_gru.calibration.float_run import FloatWeights, float_layers
from quant_gru.calibration.guard import best_of
from quant_gru.calibration.observers import Observer, make_observer
from quant_gru.calibration.search import choose_covering, choose_quantizer
from quant_gru.calibration.windows import CellSteps, Windows, starts
from quant_gru.config import CALIBRATED, QuantConfig
from quant_gru.integer.qparams import QParams, make_qparams
from quant_gru.integer.quantizer import Quantizer

Weights = Sequence[Sequence[FloatWeights]]


class Collector:
    """Observers of all calibrated operators of all layers and directions.

    Args:
        num_layers: Layers.
        directions: Directions per layer.
        hidden_size: H.
        method: Calibration method.
        percentile_value: For the method 'percentile'.

    Attributes:
        observers: [layer][direction] -> operator name -> its statistics.
        windows: Parts of the data, for the method 'histogram'; None for others.
    """

    def __init__(
        self,
        num_layers: int,
        directions: int,
        hidden_size: int,
        method: str,
        percentile_value: float,
    ) -> None:
        is_searched = make_observer(method).method == "histogram"
        self.windows = Windows(hidden_size) if is_searched else None
        self.observers: list[list[dict[str, Observer]]] = [
            [
                {
                    name: make_observer(method, percentile_value=percentile_value)
                    for name in CALIBRATED
                }
                for _ in range(directions)
            ]
            for _ in range(num_layers)
        ]

    def collect(self, x: Tensor, h0: Tensor, lengths: Tensor | None, weights: Weights) -> None:
        """Observe one batch.

        Args:
            x: (T, N, C).
            h0: (layers * directions, N, H).
            lengths: int64 (N,), or None if all rows have T steps.
            weights: [layer][direction] -> float weights.
        """
        cells = [observers for layer in self.observers for observers in layer]
        first_states = iter(h0)
        before: list[Sequence[Tensor]] = []

        def finished(layer: int, direction: int, out: Tensor) -> None:
            before.append(starts(out, next(first_states), direction == 1))

        float_layers(x, h0, lengths, weights, self._observe, finished)
        if self.windows is not None:
            self.windows.add(x, lengths, before)
        for observers, state in zip(cells, h0, strict=True):
            observers["output.h"].update(state)
            for observer in observers.values():
                observer.end_batch()

    def _observe(self, layer: int, direction: int, values: dict[str, Tensor]) -> None:
        for name, observer in self.observers[layer][direction].items():
            observer.update(values[name].to(torch.float32))

    def all_reduce(self) -> None:
        """Merge the statistics of all processes."""
        for layer in self.observers:
            for observers in layer:
                for observer in observers.values():
                    observer.all_reduce()
        if self.windows is not None:
            self.windows.all_reduce()

    def single_values(self) -> dict[str, float]:
        """Return operators that saw a single value in all data, with a suffix, and the value."""
        return {
            f"{name}_l{layer}{'_reverse' if direction else ''}": observer.minimum
            for layer, cells in enumerate(self.observers)
            for direction, observers in enumerate(cells)
            for name, observer in observers.items()
            if observer.minimum == observer.maximum
        }

    def qparams(self, config: QuantConfig, weights: Weights) -> list[list[QParams]]:
        """Return the scales and tables of all layers and directions.

        Args:
            config: Widths and kinds of the operators.
            weights: [layer][direction] -> float weights.

        Raises:
            CalibrationError: Statistics are empty or non-finite; the message names the operator.
        """
        plain = [
            [self._each(choose_quantizer, observers, config) for observers in layer]
            for layer in self.observers
        ]
        if self.windows is None or self.windows.is_empty:
            return [[make_qparams(config, cell) for cell in layer] for layer in plain]
        steps = self.windows.run(weights)
        return [
            [
                self._searched(layer, direction, cell, config, steps[layer][direction], weights)
                for direction, cell in enumerate(cells)
            ]
            for layer, cells in enumerate(plain)
        ]

    def _searched(
        self,
        layer: int,
        direction: int,
        plain: dict[str, Quantizer],
        config: QuantConfig,
        steps: CellSteps,
        weights: Weights,
    ) -> QParams:
        """Return scales whose effect is least; those of least squares or full ranges if better."""
        observers = self.observers[layer][direction]
        effective = effective_quantizers(steps, observers, config)
        covering = self._each(choose_covering, observers, config)
        sets = [plain | effective, plain, plain | {n: covering[n] for n in effective}]
        distinct = [each for i, each in enumerate(sets) if each not in sets[:i]]
        return best_of(
            (make_qparams(config, each) for each in distinct), steps, weights[layer][direction]
        )

    @staticmethod
    def _each(
        choose: Callable[..., Quantizer], observers: Mapping[str, Observer], config: QuantConfig
    ) -> dict[str, Quantizer]:
        """Return the quantizers of all operators that are not fused."""
        return {
            name: choose(
                observer,
                operator=name,
                bits=bits,
                signed=not config[name].is_unsigned,
                symmetric=config[name].is_symmetric,
                scale_kind=config.scale_kind,
            )
            for name, observer in observers.items()
            if (bits := config[name].bitwidth) is not None
        }
