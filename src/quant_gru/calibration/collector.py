"""Collection of statistics: runs the float GRU layer by layer and observes every operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quant_gru.calibration.cell_scales import CellScales
from quant_gru.calibration.far_range import note_on
from quant_gru.calibration.float_run import FloatWeights, float_layers
from quant_gru.calibration.input_mean import MeanObserver
from quant_gru.calibration.observers import Observer, make_observer
from quant_gru.calibration.tied import tied_observers
from quant_gru.calibration.windows import CellSteps, Windows, starts
from quant_gru.config import CALIBRATED, QuantConfig
from quant_gru.errors import CalibrationError
from quant_gru.integer.qparams import QParams

Weights = Sequence[Sequence[FloatWeights]]

# Zero for good reasons in single steps that begin with states of zeros.
_OF_STATES = ("matmul.Rh", "op.rRh", "op.old_contrib")


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
        means: [layer][direction] -> the mean of its input.
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
        self.means = [[MeanObserver() for _ in range(directions)] for _ in range(num_layers)]

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
        if self.windows is not None:
            self.windows.all_reduce()

    def qparams(
        self, config: QuantConfig, weights: Weights, refine: bool = False
    ) -> list[list[QParams]]:
        """Return the scales and tables of all layers and directions.

        Args:
            config: Widths and kinds of the operators.
            weights: [layer][direction] -> float weights.
            refine: Whether to improve the scales by coordinate descent.

        Raises:
            CalibrationError: Statistics are empty or non-finite, and the message names the
                operator; or `refine` with a method that keeps no data.
            ConfigError: Tied operators have different widths or kinds.
        """
        if refine and self.windows is None:
            raise CalibrationError(
                "Expected the method 'histogram' to refine scales, got one that keeps no data"
            )
        cells = self.cells(config)
        steps = self.steps(weights)
        if steps is None:
            return [[cell.by_range() for cell in layer] for layer in cells]
        return [
            [
                cell.by_effect(steps[layer][direction], weights[layer][direction], refine)
                for direction, cell in enumerate(row)
            ]
            for layer, row in enumerate(cells)
        ]

    def steps(self, weights: Weights) -> list[list[CellSteps]] | None:
        """Return steps of the float cells to judge scales by, [layer][direction], if there are.

        Args:
            weights: [layer][direction] -> float weights.
        """
        usable = self.windows is not None and self.windows.is_enough
        return self.windows.run(weights) if usable and self.windows is not None else None

    def cells(self, config: QuantConfig) -> list[list[CellScales]]:
        """Return the statistics of all layers and directions, with those of tied operators joined.

        Args:
            config: Widths and kinds of the operators.

        Raises:
            ConfigError: Tied operators have different widths or kinds.
        """
        grid = tied_observers(self.observers, config) if config.tie_x_and_h else self.observers
        return [
            [
                CellScales(observers, mean, layer == 0, config)
                for observers, mean in zip(*pair, strict=True)
            ]
            for layer, pair in enumerate(zip(grid, self.means, strict=True))
        ]

    def notes(self, made: Sequence[Sequence[QParams]]) -> Iterator[str]:
        """Yield texts about data from which scales cannot be good.

        Args:
            made: The scales, [layer][direction].
        """
        pairs = zip(self.observers[0], made[0], strict=True)
        found = (note_on(each["input.x"], cell.quantizers["input.x"]) for each, cell in pairs)
        yield from dict.fromkeys(text for text in found if text is not None)
        single = {
            f"{name}_l{layer}{'_reverse' if direction else ''}": observer.minimum
            for layer, cells in enumerate(self.observers)
            for direction, observers in enumerate(cells)
            for name, observer in observers.items()
            if name not in _OF_STATES and observer.minimum == observer.maximum
        }
        if single:
            named = ", ".join(f"'{name}' ({value:g})" for name, value in single.items())
            yield (
                "Expected calibration data with more than one value for every operator, got a "
                f"single one for {named}; their scales mean nothing for other data"
            )
