"""Collection of statistics: runs the float GRU layer by layer and observes every operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quant_gru.calibration.far_range import far_quantizer, note_on
from quant_gru.calibration.float_run import FloatWeights, float_layers
from quant_gru.calibration.input_mean import MeanObserver
from quant_gru.calibration.observers import Observer, make_observer
from quant_gru.calibration.search import choose_quantizer
from quant_gru.config import CALIBRATED, QuantConfig
from quant_gru.integer.qparams import QParams, make_qparams


class Collector:
    """Observers of all calibrated operators of all layers and directions.

    Args:
        num_layers: Layers.
        directions: Directions per layer.
        method: Calibration method.
        percentile_value: For the method 'percentile'.
    """

    def __init__(
        self, num_layers: int, directions: int, method: str, percentile_value: float
    ) -> None:
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
        self.means = [[MeanObserver() for _ in range(directions)] for _ in range(num_layers)]

    def collect(
        self,
        x: Tensor,
        h0: Tensor,
        lengths: Tensor | None,
        weights: Sequence[Sequence[FloatWeights]],
    ) -> None:
        """Observe one batch.

        Args:
            x: (T, N, C).
            h0: (layers * directions, N, H).
            lengths: int64 (N,), or None if all rows have T steps.
            weights: [layer][direction] -> float weights.
        """
        float_layers(x, h0, lengths, weights, self._observe)
        cells = [observers for layer in self.observers for observers in layer]
        for observers, state in zip(cells, h0, strict=True):
            observers["output.h"].update(state)
            for observer in observers.values():
                observer.end_batch()

    def _observe(self, layer: int, direction: int, values: dict[str, Tensor]) -> None:
        for name, observer in self.observers[layer][direction].items():
            observer.update(values[name].to(torch.float32))
        self.means[layer][direction].update(values["input.x"])

    def all_reduce(self) -> None:
        """Merge the statistics of all processes."""
        for layer in self.observers:
            for observers in layer:
                for observer in observers.values():
                    observer.all_reduce()
        for means in self.means:
            for mean in means:
                mean.all_reduce()

    def qparams(self, config: QuantConfig) -> list[list[QParams]]:
        """Return the scales and tables of all layers and directions.

        Raises:
            CalibrationError: Statistics are empty or non-finite; the message names the operator.
        """
        made = [
            [
                make_qparams(
                    config,
                    {
                        name: choose_quantizer(
                            observer,
                            operator=name,
                            bits=bits,
                            signed=not config[name].is_unsigned,
                            symmetric=config[name].is_symmetric,
                            scale_kind=config.scale_kind,
                        )
                        for name, observer in observers.items()
                        if (bits := config[name].bitwidth) is not None
                    },
                )
                for observers in layer
            ]
            for layer in self.observers
        ]
        if config.input_excludes_zero and not config["input.x"].is_symmetric:
            made[0] = [self._far(cell, d) for d, cell in enumerate(made[0])]
        if not config.correct_bias:
            return made
        return [
            [replace(cell, input_mean=mean.mean()) for cell, mean in zip(*layer, strict=True)]
            for layer in zip(made, self.means, strict=True)
        ]

    def _far(self, cell: QParams, direction: int) -> QParams:
        """Return parameters whose range of input.x need not contain 0."""
        operator = cell.config["input.x"]
        assert operator.bitwidth is not None
        found = far_quantizer(
            self.observers[0][direction]["input.x"],
            bits=operator.bitwidth,
            signed=not operator.is_unsigned,
            scale_kind=cell.config.scale_kind,
        )
        if found is None:
            return cell
        return replace(cell, quantizers={**cell.quantizers, "input.x": found})

    def notes(self, made: Sequence[Sequence[QParams]]) -> list[str]:
        """Return texts about the input whose range spends most of its codes to contain 0."""
        pairs = zip(self.observers[0], made[0], strict=True)
        found = (note_on(each["input.x"], cell.quantizers["input.x"]) for each, cell in pairs)
        return list(dict.fromkeys(text for text in found if text is not None))
