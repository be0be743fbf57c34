"""The scales of one layer and direction from its statistics."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace

from quant_gru.calibration.effects import effective_quantizers
from quant_gru.calibration.far_range import far_quantizer
from quant_gru.calibration.float_run import FloatWeights
from quant_gru.calibration.guard import Judge, best_of
from quant_gru.calibration.input_mean import MeanObserver
from quant_gru.calibration.observers import Observer
from quant_gru.calibration.refine import refined
from quant_gru.calibration.search import choose_covering, choose_quantizer
from quant_gru.calibration.tied import TIED
from quant_gru.calibration.windows import CellSteps
from quant_gru.config import CALIBRATED, QuantConfig
from quant_gru.integer.qparams import QParams, make_qparams
from quant_gru.integer.quantizer import Quantizer


@dataclass(frozen=True)
class CellScales:
    """Statistics of one layer and direction.

    Attributes:
        observers: Operator name -> its statistics.
        mean: The mean of the input.
        is_first: Whether the cell is in the first layer.
        config: Widths and kinds of the operators.
    """

    observers: Mapping[str, Observer]
    mean: MeanObserver
    is_first: bool
    config: QuantConfig

    def by_range(self) -> QParams:
        """Return the scales that the method chooses for each operator by itself.

        Raises:
            CalibrationError: Statistics are empty or non-finite; the message names the operator.
        """
        return self._complete(self._each(choose_quantizer))

    def by_itself(self, steps: CellSteps | None) -> QParams:
        """Return the scales that each operator gets whatever the widths of the others are.

        Args:
            steps: Steps of the float cell; None for those that the method chooses by itself.

        Raises:
            CalibrationError: As for `by_range`.
        """
        return self._complete(self._each(choose_quantizer) | self._effective(steps))

    def by_effect(self, steps: CellSteps, weights: FloatWeights, refine: bool) -> QParams:
        """Return the scales whose effect on the states is least.

        Those of least squares, or of full ranges, are used if the integer cell is better with them.

        Args:
            steps: Steps of the float cell.
            weights: Its weights.
            refine: Whether to improve the scales by coordinate descent.

        Raises:
            CalibrationError: As for `by_range`.
        """
        plain = self._each(choose_quantizer)
        effective = self._effective(steps)
        covering = self._each(choose_covering, effective)
        sets = [plain | effective, plain, plain | covering]
        distinct = [each for i, each in enumerate(sets) if each not in sets[:i]]
        judge = Judge(steps, weights, self.config)
        found = best_of((self._complete(each) for each in distinct), judge)
        return refined(found, judge) if refine else found

    def _effective(self, steps: CellSteps | None) -> dict[str, Quantizer]:
        """Return the quantizers that change the states least, of operators that may have them."""
        if steps is None:
            return {}
        found = effective_quantizers(steps, self.observers, self.config)
        tied = TIED if self.config.tie_x_and_h else ()
        return {name: each for name, each in found.items() if name not in tied}

    def _each(
        self, choose: Callable[..., Quantizer], names: Container[str] = CALIBRATED
    ) -> dict[str, Quantizer]:
        """Return the quantizers of the named operators that are not fused."""
        config = self.config
        return {
            name: choose(
                observer,
                operator=name,
                bits=bits,
                signed=not config[name].is_unsigned,
                symmetric=config[name].is_symmetric,
                scale_kind=config.scale_kind,
            )
            for name, observer in self.observers.items()
            if name in names and (bits := config[name].bitwidth) is not None
        }

    def _complete(self, quantizers: Mapping[str, Quantizer]) -> QParams:
        """Return parameters with tables, with the mean of the input and a range without 0."""
        config = self.config
        made = make_qparams(config, quantizers)
        operator = config["input.x"]
        if config.input_excludes_zero and self.is_first and not operator.is_symmetric:
            assert operator.bitwidth is not None
            far = far_quantizer(
                self.observers["input.x"],
                bits=operator.bitwidth,
                signed=not operator.is_unsigned,
                scale_kind=config.scale_kind,
            )
            if far is not None:
                made = replace(made, quantizers={**made.quantizers, "input.x": far})
        return replace(made, input_mean=self.mean.mean()) if config.correct_bias else made
