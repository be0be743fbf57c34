"""Calibration and configuration of a QuantGRU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from types import EllipsisType
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.calibration.batches import gru_batches
from quant_gru.config import OPERATORS, WEIGHTS, QuantConfig, canonical_name
from quant_gru.config.choice import OneConfig, as_config
from quant_gru.config.operators import suggest
from quant_gru.errors import CalibrationError, ConfigError, QuantGRUWarning, caller_stacklevel
from quant_gru.integer.weight_values import corrected_bias
from quant_gru.kernels.dispatch import load
from quant_gru.modules.adjust import Change
from quant_gru.modules.bias_overflow import warn_of_cut_biases
from quant_gru.modules.module_weights import ModuleWeights
from quant_gru.modules.quantization_state import summary


class CalibrationMethods(ModuleWeights):
    """The part of a QuantGRU that creates, reports and changes scales."""

    use_quantization: bool
    # why scales should have been used by a forward in float mode; '' if they need not
    _scales_unused = ""
    # whether someone has set use_quantization, also to what it was
    _mode_chosen = False

    @property
    def config(self) -> QuantConfig:
        """Widths and kinds of the operators."""
        return self._state.config

    @config.setter
    def config(self, config: object) -> None:
        raise ConfigError(
            "Expected the configuration to be set by load_bitwidth_config(config), which also sets "
            "use_quantization, got an assignment to config"
        )

    @property
    def calibration_method(self) -> str:
        """'histogram' (also called 'sqnr'), 'minmax', 'percentile' or 'ema'."""
        return self._state.method

    @calibration_method.setter
    def calibration_method(self, method: str) -> None:
        self._state.set_method(method)

    @property
    def percentile_value(self) -> float:
        """Percentage of values that the method 'percentile' covers, in (50, 100]."""
        return self._state.percentile_value

    @percentile_value.setter
    def percentile_value(self, value: float) -> None:
        self._state.set_percentile_value(value)

    def is_calibrated(self) -> bool:
        """Return whether scales exist."""
        return self._state.scales is not None

    def calibrate(
        self, data: Tensor | PackedSequence | Iterable[Any], hx: Tensor | None = None
    ) -> None:
        """Collect statistics of data; `finalize_calibration` converts them to scales.

        Args:
            data: Like the input of `forward`; or batches, such as a DataLoader, of inputs, of
                tuples or lists whose first item is the input, or of dicts with 'input' and
                optionally 'hx'. Batches are moved to the device of the GRU.
            hx: As for `forward`, with a single input.

        Raises:
            CalibrationError: `data` is neither, or there are scales already.
        """
        if isinstance(data, Tensor | PackedSequence):
            self._collect(data, hx)
            return
        if hx is not None:
            raise CalibrationError(
                f"Expected hx with a tensor or a PackedSequence, got {type(data).__name__}"
            )
        for input, state in gru_batches(data, self._weight.device):
            self._collect(input, state)

    def _collect(self, input: Tensor | PackedSequence, hx: Tensor | None) -> None:
        self._state.collect(self._normalize(input, hx), self._float_weights())

    def finalize_calibration(
        self, verbose: bool = False, *, sync: bool = True, refine: bool = False
    ) -> None:
        """Convert the collected statistics to scales; do nothing if scales exist.

        Args:
            verbose: Whether to print the quantizer of every operator.
            sync: Whether to merge the statistics of all processes first, if torch.distributed is
                initialized; all processes must then call this.
            refine: Whether to improve the scales by coordinate descent on the integer run of a part
                of the data; takes seconds. Only for the method 'histogram'.

        Raises:
            CalibrationError: There are no statistics, they contain NaN or infinity, or `refine` is
                given with another method.
        """
        if self.is_calibrated():
            return
        self._state.finalize(sync, self._float_weights(), refine)
        self._scales_unused = "" if self._mode_chosen else "the GRU was calibrated"
        self._write_logarithms()
        assert self._state.scales is not None
        warn_of_cut_biases(self._state.scales, self._weights())
        load(next(self.parameters()).device)
        if verbose:
            for layer, suffix in self._cells():
                print(f"layer {layer}{' reverse' if suffix else ''}")
                print(summary(self.get_quant_config(None, layer, bool(suffix))))

    def reset_calibration(self) -> None:
        """Forget statistics and scales; the configuration does not change."""
        self._state.reset()

    def _finalized(self, in_forward: bool = False) -> None:
        """Ensure that scales exist: finalize pending statistics, with a single warning.

        Args:
            in_forward: Whether the float mode would do instead.
        """
        if self._state.scales is None:
            if not self._state.has_statistics:
                instead = ", or set use_quantization = False" if in_forward else ""
                raise CalibrationError(
                    "Expected a calibrated GRU, got one without scales or statistics; call "
                    f"calibrate(data) first{instead}"
                )
            self.finalize_calibration()
            warnings.warn(
                "calibration was finalized by the first quantized use; call "
                "finalize_calibration() to do so explicitly",
                QuantGRUWarning,
                stacklevel=caller_stacklevel(),
            )
        self._scales_unused = ""
        self._follow_logarithms()

    # --- configuration

    def load_bitwidth_config(self, path: OneConfig, verbose: bool = False) -> None:
        """Load a configuration file, and set `use_quantization` from `disable_quantization`.

        Args:
            path: A JSON file as described in docs/configuration.md; or a QuantConfig, the name of a
                preset, or the contents of a file.
            verbose: Whether to print which operators use their defaults.

        Raises:
            ConfigError: The file breaks a rule, or scales already exist.
        """
        config = as_config(path, "path", verbose)
        self._state.set_config(config)
        self.use_quantization = not config.disable_quantization

    def set_all_bitwidth(
        self, bitwidth: int, is_symmetric: bool = True, verbose: bool = False
    ) -> None:
        """Set one width for all operators, and one symmetry for all activations.

        Weights and biases stay symmetric, and `is_unsigned` does not change.

        Args:
            bitwidth: 1..32.
            is_symmetric: Whether activations have zero point 0.
            verbose: Whether to print the new settings.

        Raises:
            ConfigError: The width is out of range, or scales already exist.
        """
        self._state.set_config(self.config.with_all_bitwidths(bitwidth, is_symmetric))
        if verbose:
            kind = "symmetric" if is_symmetric else "asymmetric"
            print(f"all 17 operators: {bitwidth} bits; activations {kind}, weights symmetric")

    def get_quant_config(
        self, name: str | None = None, layer: int = 0, reverse: bool = False
    ) -> dict[str, Any]:
        """Return the settings and scales of one operator, or of all.

        Args:
            name: Full ('gate.z_out') or short ('z_out') name; None for all operators.
            layer: Index of the layer.
            reverse: Whether to use the reverse direction.

        Returns:
            bitwidth, is_symmetric, is_unsigned, scale, zero_point, exp2_inv (None unless the scale
            is 2^-exp2_inv). scale, zero_point and exp2_inv are None before calibration and for
            fused operators. Weights have lists of one, three or 3H scales, by their granularity, in
            the row order of nn.GRU's parameters. With name None: name -> such a dict.
        """
        self._check_cell(layer, reverse)
        self._follow_logarithms()
        if name is None:
            return {each: self.get_quant_config(each, layer, reverse) for each in OPERATORS}
        name = canonical_name(name)
        weight = None
        if name in WEIGHTS:
            weight = self._weights()[layer][int(reverse)][WEIGHTS.index(name)]
            if weight is None:
                weight = self._weight.new_zeros(3 * self.hidden_size)
            if name == "weight.bw" and self._state.scales is not None:
                W = self._weights()[layer][int(reverse)][0]
                assert W is not None
                weight = corrected_bias(self._state.scales[layer][int(reverse)], W, weight)
        return self._state.describe(name, layer, int(reverse), weight)

    def adjust_quant_config(
        self,
        name: str,
        bitwidth: int | EllipsisType | None = ...,
        is_symmetric: bool | None = None,
        is_unsigned: bool | None = None,
        scale: float | None = None,
        exp2_inv: int | None = None,
        zero_point: int | None = None,
        layer: int | None = None,
        reverse: bool | None = None,
        fused: bool = False,
        **unknown: Any,
    ) -> None:
        """Change one operator and rebuild everything derived from it.

        A change of only the width keeps the real range: exp2_inv grows by the added bits, and the
        zero point is rescaled and clamped. A change of symmetry or signedness selects the smallest
        scale that covers the old range. Scales of gate.z_out and gate.r_out are rounded to
        1 / integer.

        Args:
            name: Full or short name.
            bitwidth: New width, 1..32; None to fuse a product, as `fused` does; `...` to leave it.
            is_symmetric: Whether the zero point is 0.
            is_unsigned: Whether codes are unsigned.
            scale: New scale. For a weight, one number or one per tensor, gate or channel; its
                scales then no longer follow the weight.
            exp2_inv: New scale as 2^-exp2_inv.
            zero_point: New zero point.
            layer: Index of the layer; None for all.
            reverse: Direction; None for both.
            fused: True to leave a product unrounded (op.rRh, op.old_contrib, op.new_contrib).
                Restoring a separate width requires a new calibration.
            **unknown: None; others are a TypeError that names the nearest.

        Raises:
            ConfigError: A rule is broken; nothing has changed then.
        """
        for each in unknown:
            known = [*Change.__dataclass_fields__, "layer", "reverse"]
            raise TypeError(
                f"adjust_quant_config() got an unexpected keyword argument {each!r}; "
                f"{suggest('bitwidth' if each == 'bits' else each, known)}"
            )
        name = canonical_name(name)
        bits = None if isinstance(bitwidth, EllipsisType) else bitwidth
        fused = fused or bitwidth is None
        change = Change(bits, is_symmetric, is_unsigned, scale, exp2_inv, zero_point, fused)
        cells = [
            (at, direction)
            for at in range(self.num_layers)
            for direction in range(self._directions)
            if layer in (None, at) and reverse in (None, direction == 1)
        ]
        if not cells:
            self._check_cell(layer or 0, bool(reverse))
        if change == Change():
            raise ConfigError(f"Expected something to change, got nothing (operator {name!r})")
        self._follow_logarithms()
        self._state.adjust(name, change, cells, self.hidden_size)
        self._write_logarithms()
