"""Collection of statistics: runs the float GRU layer by layer and observes every operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quant_gru.calibration.float_run import FloatRun, float_layers
from quant_gru.calibration.observers import Observer, make_observer
from quant_gru.calibration.search import choose_quantizer
from quant_gru.calibration.trace import FloatWeights, trace_blocks
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
        # statistics must describe the float GRU, not its values under autocast
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            for run in float_layers(x, h0, lengths, weights):
                self._observe(run, lengths)

    def _observe(self, run: FloatRun, lengths: Tensor | None) -> None:
        observers = self.observers[run.layer][run.direction]
        observers["output.h"].update(run.h0)
        for block in trace_blocks(run.weights, *run.rows(lengths)):
            for name, observer in observers.items():
                observer.update(block[name])
        for observer in observers.values():
            observer.end_batch()

    def all_reduce(self) -> None:
        """Merge the statistics of all processes."""
        for layer in self.observers:
            for observers in layer:
                for observer in observers.values():
                    observer.all_reduce()

    def qparams(self, config: QuantConfig) -> list[list[QParams]]:
        """Return the scales and tables of all layers and directions.

        Raises:
            CalibrationError: Statistics are empty or non-finite; the message names the operator.
        """
        return [
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
