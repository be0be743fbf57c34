"""QuantGRU: torch.nn.GRU with a quantized mode that computes only in integers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from types import EllipsisType
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.rnn import PackedSequence

from quant_gru.autograd.straight_through import Differentiated
from quant_gru.calibration.batches import gru_batches
from quant_gru.calibration.float_run import FloatWeights
from quant_gru.config import OPERATORS, QuantConfig
from quant_gru.config.choice import OneConfig, as_config, described
from quant_gru.config.files import name_of
from quant_gru.errors import (
    CalibrationError,
    ConfigError,
    QuantGRUError,
    QuantGRUWarning,
    caller_stacklevel,
)
from quant_gru.execution.integer_io import integer_forward, quantize_state, trace_codes
from quant_gru.execution.layers import Weights
from quant_gru.execution.noise import Noise
from quant_gru.execution.prepared_call import PreparedCall
from quant_gru.execution.sequence_layout import Sequence as GRUSequence
from quant_gru.execution.sequence_layout import normalize
from quant_gru.integer.plan import GRUPlan
from quant_gru.interchange.aimet import encodings
from quant_gru.interchange.aimet.versions import check_version
from quant_gru.interchange.c import CSource
from quant_gru.interchange.foreign import haste, keras, onnx_node
from quant_gru.interchange.foreign.float_gru import FloatGRU
from quant_gru.interchange.onnx import recorded
from quant_gru.interchange.onnx.profiles import PROFILES
from quant_gru.interchange.onnx.source import Source
from quant_gru.kernel_runtime.cuda.graph_capture import capturing
from quant_gru.kernels.dispatch import PRECISIONS, load
from quant_gru.kernels.live_weights import settled
from quant_gru.modules import call, checkpoints, module_weights, training_options
from quant_gru.modules.adjust import Change
from quant_gru.modules.bias_overflow import (
    Key,
    cut_biases,
    cut_biases_of,
    warn_of_cut_biases,
)
from quant_gru.modules.float_zoneout import run_float
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.near_misses import refuse_unknown, warn_of_near_miss
from quant_gru.modules.quantization_state import OperatorState, QuantState, dropped_by, summary
from quant_gru.modules.stream import Stream
from quant_gru.parameters import document as params
from quant_gru.parameters.schema import Shape
from quant_gru.torch_ops import watchers
from quant_gru.torch_ops.operators import Settings

GRU = TypeVar("GRU", bound="QuantGRU")


class QuantGRU(torch.nn.GRU):
    """A drop-in `torch.nn.GRU` with a mode that computes only in integers.

    With `use_quantization` False it equals nn.GRU bit for bit. After calibration and with
    `use_quantization` True, every operator runs on integer codes, and outputs are the real values
    of the codes. Gradients of the quantized mode are straight-through.

    Args:
        input_size: Features of an input step, C.
        hidden_size: Features of the state, H.
        num_layers: Stacked layers.
        bias: Whether the GRU has biases.
        batch_first: Whether inputs and outputs are (N, T, ..) instead of (T, N, ..).
        dropout: Probability of dropout between layers, in training.
        bidirectional: Whether each layer runs in both directions.
        device: Device of the parameters.
        dtype: dtype of the parameters.
        use_quantization: Whether forward computes in integers.
        config: Widths and kinds of the 17 operators: a QuantConfig, the name of a preset
            ('int8_wide'), the path of a file, or a dict. None for 8 bits, symmetric.
        zoneout: In training, the probability that a unit keeps its state in a step; in eval mode,
            the share of its state that a unit keeps (Krueger et al., 2017).
        recurrent_dropout: In training, the probability that a recurrent weight is zero for a whole
            sequence (DropConnect, Merity et al., 2018).
        precision: Precision of gradient products on a GPU, with sums in float32: 'bf16' (errors of
            about 1e-3), 'tf32' (1e-4) or 'fp32' (1e-6).
        learn_scales: Whether the scales of calibrated activations are parameters. The parameters
            are base-2 logarithms, `log2_scale_l0` and so on, in the order of
            `quant_gru.config.CALIBRATED`. Each quantized forward then reads them on the host.
        stash_bits: Bits of each state code that are saved for backward: 4 or 8, if the code has
            more. Gradients are then approximate. None saves all bits, as compiled graphs always do.
        proj_size: 0, as in nn.GRU; only nn.LSTM has projections.

    Attributes:
        use_quantization: Whether forward computes in integers.
        calibrating: Whether forward computes in floating point and collects statistics.
        export_mode: Whether calls compute what `export_format` says, so that
            `torch.onnx.export(..., dynamo=False)` can trace them.

    Example:
        >>> gru = QuantGRU(8, 16, config="int8_wide")
        >>> gru.calibrate(torch.randn(50, 4, 8))
        >>> gru.finalize_calibration()
        >>> gru.use_quantization = True
        >>> y, h_n = gru(torch.randn(50, 4, 8))
    """

    use_quantization: bool
    calibrating: bool
    export_mode: bool = False
    _export_format: str = "float"
    # why a forward in float mode may not be what is meant; '' if nobody expects integers
    _float_unexpected = ""
    # whether someone has set use_quantization, also to what it was
    _mode_chosen = False
    # cut biases of which a warning has told
    _told: frozenset[Key] = frozenset()

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        use_quantization: bool = False,
        config: OneConfig | None = None,
        zoneout: float = 0.0,
        recurrent_dropout: float = 0.0,
        precision: str = "bf16",
        learn_scales: bool = False,
        stash_bits: int | None = None,
        proj_size: int = 0,
        **_unknown: NoReturn,
    ) -> None:
        refuse_unknown(QuantGRU.__init__, _unknown)
        _check_sizes(num_layers, dropout, proj_size)
        # inference-mode parameters have no version, so changes would go undetected
        given = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        with torch.inference_mode(False):
            super().__init__(*given, device=device, dtype=dtype)
        self._init_quantization(config, use_quantization)
        self.zoneout = zoneout
        self.recurrent_dropout = recurrent_dropout
        self.precision = precision
        self.stash_bits = stash_bits
        self.learn_scales = learn_scales

    def _init_quantization(self, config: OneConfig | None, use_quantization: bool) -> None:
        chosen = QuantConfig() if config is None else as_config(config)
        shape = Shape(
            input_size=self.input_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            bias=self.bias,
            bidirectional=self.bidirectional,
        )
        self.use_quantization = use_quantization
        self._mode_chosen = use_quantization
        self.calibrating = False
        self._named_shapes = module_weights.names_of(shape)
        self._recurrent_dropout = 0.0
        self._precision = PRECISIONS[0]
        self._stash_bits: int | None = None
        self._log2_scales: list[str] = []
        self._state = QuantState(chosen, shape)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "use_quantization":
            if not isinstance(value, bool):
                value = _as_flag(value)
            self.__dict__.update(_mode_chosen=True, _float_unexpected="")
        elif name not in self.__dict__ and not hasattr(type(self), name):
            warn_of_near_miss(self, name, value)
        super().__setattr__(name, value)

    @overload
    def forward(
        self, input: Tensor, hx: Tensor | None = None, zoneout_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, zoneout_mask: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        zoneout_mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the GRU.

        Args:
            input: (T, N, C), (N, T, C) if `batch_first`, (T, C), or a PackedSequence. The quantized
                mode first casts it to float32, like the states.
            hx: Initial states (layers * directions, N, H), or (layers * directions, H) for
                unbatched input; None for zeros.
            zoneout_mask: In training, replaces the mask drawn with probability `zoneout`: 1 for
                units that take their new state, 0 for units that keep the old one (as in Haste).
                (T, N, H) or (layers * directions, T, N, H), always with time first.

        Returns:
            Output (T, N, directions * H), or in the input's form, and last states as `hx`.

        Raises:
            CalibrationError: Quantization is on, but neither scales nor statistics exist.
            QuantGRUError: A shape does not fit (in quantized mode; otherwise nn.GRU's errors).
        """
        if isinstance(input, Proxy) or isinstance(hx, Proxy):
            return watchers.leaf(self, input, hx, zoneout_mask)
        if self.calibrating:
            output = super().forward(input, hx)
            self._collect(input, hx)
            return output
        if (self.export_mode or recorded.exporting) and call.is_recorded(self._export_format):
            return self._record(input, hx)
        if not self.use_quantization or (self.export_mode and self._export_format == "float"):
            if self._float_unexpected:
                self._warn_of_float()
            if self._is_plain(zoneout_mask):
                return super().forward(input, hx)
            return self._forward_float(input, hx, zoneout_mask)
        if torch.compiler.is_compiling():
            return self._forward_traced(input, hx, zoneout_mask)
        if watchers.skipped_by_dynamo():
            return _uncompiled()(self, input, hx, zoneout_mask=zoneout_mask)
        if watchers.traced(input, hx, self):
            return self._forward_traced(input, hx, zoneout_mask)
        prepared = self._state.plans.prepared
        unfit = self.training and (prepared is None or not prepared.live or self._draws())
        if prepared is None or unfit or zoneout_mask is not None:
            return self._forward(input, hx, zoneout_mask, None)
        own = self._parameters.values()
        result = prepared.start(own, input, hx, None, self.batch_first)
        if result is not None:
            return result
        return self._forward(input, hx, None, prepared)

    def forward_integer(
        self, x_codes: Tensor, h_codes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run on codes: integer inputs and outputs, without any other computation.

        Args:
            x_codes: Codes of input.x of the first layer, any integer dtype, (T, N, C),
                (N, T, C) if `batch_first`, or (T, C).
            h_codes: Codes of output.h (layers * directions, N, H), or (layers * directions, H);
                None for the zero points.

        Returns:
            Codes of the output (T, N, directions * H), in the input's form, and of the last
            states, in the container of output.h.

        Raises:
            QuantGRUError: Codes have a wrong shape, dtype or range.
        """
        self._finalized()
        module_weights.compute_weights(self)
        return integer_forward(self._prepared(None).plan, x_codes, h_codes, self.batch_first)

    def quantize_state(self, hx: Tensor) -> Tensor:
        """Return the codes of real states, for `forward_integer`, step files and C.

        Args:
            hx: Real states (layers * directions, N, H) or (layers * directions, H), of any float
                dtype, on the GRU's device. They are rounded as `forward` rounds its `hx`; values
                beyond the range of output.h take its end.

        Returns:
            Codes of output.h, of the shape of `hx`, in the container of output.h.

        Raises:
            QuantGRUError: A shape, dtype or device does not fit, or a value is NaN.

        Example:
            >>> _, h_n = encoder(x)
            >>> codes = decoder.quantize_state(h_n)
        """
        return quantize_state(self._plan(), hx)

    def trace_codes(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the codes of all operators at every step (golden vectors).

        Args:
            input: As for `forward`.
            hx: As for `forward`.

        Returns:
            Operator name with the suffix of nn.GRU's parameters ('gate.z_out_l0',
            'gate.z_out_l1_reverse') -> codes on the CPU: (T, N, ..) for activations, (3H, ..) for
            weights, gates in the order update, reset, candidate. 'output.h0_l0' is the state before
            the first step. 'accumulator.bw_l0' and '.br_l0' are the biases in accumulator units (of
            2^B beyond 48 bits of operands, see docs/arithmetic.md). Rows are in the order of the
            data of a PackedSequence, if given. `numpy.savez(file, **codes)` saves them.
        """
        return trace_codes(self._plan(), self._normalize(input, hx, torch.float32))

    def stream(self, batch_size: int = 1) -> Stream:
        """Return a stream for step-by-step inference, with the state in integers.

        A step maps x (N, C) to the output of the top layer (N, H), float32.

        The stream keeps the current weights and scales. `stream.reset()` restores the zero state;
        `stream.state` contains the codes of the state, and takes codes or a real state.

        Args:
            batch_size: Rows of each step, N.

        Raises:
            QuantGRUError: The GRU is bidirectional.

        Example:
            >>> stream = gru.stream()
            >>> y = stream(torch.randn(1, gru.input_size))
        """
        return Stream(self._plan(), batch_size, self.config)

    def freeze(self) -> FrozenQuantGRU:
        """Return an inference-only module with only the integer plan, with the same codes."""
        plan = self._plan(tell_again=True)
        return FrozenQuantGRU(self._state.document(), self.batch_first, plan)

    def export_c(self, directory: str | os.PathLike[str], name: str, *, steps: int = 8) -> CSource:
        """See `FrozenQuantGRU.export_c`; the GRU must be calibrated."""
        return self.freeze().export_c(directory, name, steps=steps)

    # --- settings

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

    @property
    def zoneout(self) -> float:
        """Share of a state that is kept; in training the probability to keep it; in [0, 1]."""
        return self._state.shape.zoneout

    @zoneout.setter
    def zoneout(self, p: float) -> None:
        self._state.set_zoneout(training_options.probability("zoneout", p))

    @property
    def recurrent_dropout(self) -> float:
        """Probability that a recurrent weight is zero in training, in [0, 1)."""
        return self._recurrent_dropout

    @recurrent_dropout.setter
    def recurrent_dropout(self, p: float) -> None:
        self._recurrent_dropout = training_options.drop_probability(p)

    @property
    def precision(self) -> str:
        """Precision of gradient products on a GPU: 'bf16', 'tf32' or 'fp32'."""
        return self._precision

    @precision.setter
    def precision(self, precision: str) -> None:
        self._precision = training_options.known_precision(precision)
        self._state.plans.drop_prepared()

    @property
    def stash_bits(self) -> int | None:
        """Bits of each state code that are saved for backward: 4, 8 or None for all."""
        return self._stash_bits

    @stash_bits.setter
    def stash_bits(self, bits: int | None) -> None:
        self._stash_bits = training_options.possible_stash_bits(bits)
        self._state.plans.drop_prepared()

    @property
    def learn_scales(self) -> bool:
        """Whether the logarithms of the activations' scales are parameters.

        Setting it creates or removes these parameters; the scales do not change. Create optimizers,
        or add the parameters to them, after setting it.
        """
        return bool(self._log2_scales)

    @learn_scales.setter
    def learn_scales(self, learn: bool) -> None:
        if type(learn) is not bool:
            raise ConfigError(f"Expected learn_scales to be True or False, got {learn!r}")
        if learn and not self._log2_scales:
            names = training_options.scale_names(self._state.shape)
            training_options.add_logarithms(self, names, self._weight.device)
            self._log2_scales = names
            self._write_logarithms()
        elif self._log2_scales and not learn:
            self._follow_logarithms()
            for name in self._log2_scales:
                delattr(self, name)
            self._log2_scales = []
            self._state.settle()

    @property
    def export_format(self) -> str:
        """What `torch.onnx.export(..., dynamo=False)` writes in `export_mode`: a profile.

        One of 'float' (the standard GRU node), 'qdq', 'integer', 'node' and 'operator'; see
        docs/onnx.md.
        """
        return self._export_format

    @export_format.setter
    def export_format(self, profile: str) -> None:
        if profile not in PROFILES:
            raise QuantGRUError(f"Expected export_format to be one of {PROFILES}, got {profile!r}")
        self._export_format = profile

    # --- calibration

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
        self._float_unexpected = "" if self._mode_chosen else "the GRU was calibrated"
        self._write_logarithms()
        self._warn_of_all_cuts()
        load(next(self.parameters()).device)
        if verbose:
            print(summary(self._state, self._weights()))

    def reset_calibration(self) -> None:
        """Forget statistics and scales; the configuration does not change."""
        self._state.reset()

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

    @overload
    def get_quant_config(
        self, name: str, layer: int = 0, reverse: bool = False
    ) -> OperatorState: ...

    @overload
    def get_quant_config(
        self, name: None = None, layer: int = 0, reverse: bool = False
    ) -> dict[str, OperatorState]: ...

    def get_quant_config(
        self, name: str | None = None, layer: int = 0, reverse: bool = False
    ) -> OperatorState | dict[str, OperatorState]:
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
        self._state.check_cell(layer, reverse)
        self._follow_logarithms()
        weights = self._weights()[layer][int(reverse)]

        def of(operator: str) -> OperatorState:
            return self._state.describe(operator, layer, int(reverse), weights)

        return {each: of(each) for each in OPERATORS} if name is None else of(name)

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
        **_unknown: NoReturn,
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

        Raises:
            ConfigError: A rule is broken; nothing has changed then.
        """
        refuse_unknown(QuantGRU.adjust_quant_config, _unknown)
        bits = None if isinstance(bitwidth, EllipsisType) else bitwidth
        fused = fused or bitwidth is None
        change = Change(bits, is_symmetric, is_unsigned, scale, exp2_inv, zero_point, fused)
        self._follow_logarithms()
        self._state.adjust(name, change, layer, reverse)
        self._write_logarithms()

    # --- files, and GRUs of other frameworks

    def export_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Write configuration, scales, zero points and tables to a JSON file; no weights.

        Raises:
            CalibrationError: There are no scales.
            ConfigError: The file cannot be written.
        """
        self._finalized()
        params.write(path, self._state.document())

    def load_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Load the result of `export_quant_params`; the same weights then give the same codes.

        `use_quantization` does not change. If it is still False in the next forward, a warning says
        so. Biases that are too large for their sums cause a warning, as in `finalize_calibration`.

        Raises:
            ParameterError: The file cannot be read, has another version, or does not fit this GRU;
                nothing has changed then.
        """
        self._take(params.read(path), f"file {os.fspath(path)!r}")
        self._float_unexpected = (
            "" if self.use_quantization else "quantization parameters were loaded"
        )

    @classmethod
    def from_onnx(
        cls: type[GRU],
        model: Any,
        node: str | Sequence[str] | None = None,
        *,
        reverse: bool = False,
        config: OneConfig | None = None,
    ) -> GRU:
        """Return a GRU with the weights of GRU nodes in an ONNX model; needs the package onnx.

        `batch_first` is True if the node has `layout` 1. A constant initial state other than zero
        is not part of a QuantGRU; it causes a warning.

        Args:
            model: The path of an .onnx file, or an `onnx.ModelProto`.
            node: Name of the node or of one of its outputs; None if there is one GRU node. Several
                names, from the lowest layer to the highest, give a GRU of several layers.
            reverse: Whether to accept nodes of direction 'reverse'. The result is then a forward
                GRU: flip inputs and outputs in time.
            config: Configuration of the result, as for `QuantGRU`; None for the default.

        Raises:
            QuantGRUError: There is no such node, its attributes are not those of torch.nn.GRU
                (`linear_before_reset` 1, Sigmoid and Tanh, no clip), or its weights depend on
                inputs of the model.

        Example:
            >>> gru = QuantGRU.from_onnx("denoiser.onnx", "/encoder/GRU")
        """
        return cls._from_float(onnx_node.read(model, node, reverse), config)

    @classmethod
    def from_keras(
        cls: type[GRU],
        weights: Any,
        layer: str | Sequence[str] | None = None,
        *,
        config: OneConfig | None = None,
    ) -> GRU:
        """Return a GRU with the weights of Keras' GRU, with `batch_first` True as in Keras.

        Only `reset_after=True` is possible, Keras' default. Arrays without a bias do not show it
        and are taken to have it.

        Args:
            weights: The result of `get_weights()` of a layer GRU or Bidirectional(GRU): kernel
                (C, 3H), recurrent_kernel (H, 3H) and bias (2, 3H), for each direction. A list of
                such results gives a GRU of several layers. Or the path of a .keras, .h5 or
                .weights.h5 file, which needs the package h5py.
            layer: Name of a layer in a file; names from the lowest to the highest for several
                layers; None if the file has one GRU.
            config: Configuration of the result, as for `QuantGRU`; None for the default.

        Raises:
            QuantGRUError: The weights are not those of a GRU, or of one that computes something
                else (`reset_after=False`, other activations, another `merge_mode`).

        Example:
            >>> gru = QuantGRU.from_keras(model.get_layer("gru").get_weights())
        """
        return cls._from_float(keras.read(weights, layer), config)

    @classmethod
    def from_haste(cls: type[GRU], parameters: Any, *, config: OneConfig | None = None) -> GRU:
        """Return a GRU with the parameters of Haste's GRU.

        Args:
            parameters: 'kernel' (C, 3H), 'recurrent_kernel' (H, 3H), 'bias' (3H,) and
                'recurrent_bias' (3H,), columns in the order z, r, h: the state_dict of
                `haste_pytorch.GRU`. A sequence has one such mapping per layer, or a pair for both
                directions.
            config: Configuration of the result, as for `QuantGRU`; None for the default.

        Raises:
            QuantGRUError: A parameter is missing, unknown or of a wrong shape.
        """
        return cls._from_float(haste.read(parameters), config)

    def to_haste(self, layer: int = 0, reverse: bool = False) -> dict[str, Tensor]:
        """Return the float weights of one layer and direction as parameters of Haste's GRU.

        Args:
            layer: Index of the layer.
            reverse: Whether to return the reverse direction.

        Returns:
            'kernel' (C, 3H), 'recurrent_kernel' (H, 3H), 'bias' (3H,) and 'recurrent_bias' (3H,),
            copies with columns in the order z, r, h; zero biases for a GRU without biases.

        Raises:
            QuantGRUError: There is no such layer or direction.
        """
        self._state.check_cell(layer, reverse)
        weights = self._weights()[layer][int(reverse)]
        return haste.write(*(None if each is None else each.detach() for each in weights))  # type: ignore[arg-type]

    def export_encodings(
        self,
        path: str | os.PathLike[str],
        version: str = "1.0.0",
        *,
        onnx: Any = None,
        nodes: str | Sequence[str] | None = None,
    ) -> None:
        """Write the scales of inputs, states, outputs and weights as encodings of AIMET.

        AIMET has no place for the operators inside a GRU. A parameter file beside the encodings has
        all operators: 'gru.encodings' comes with 'gru.quant_params.json'. A warning names tensors
        whose scales do not fit the format, such as both directions of a bidirectional GRU in one
        tensor.

        Args:
            path: The file of encodings.
            version: '0.6.1', '1.0.0' or '2.0.0'.
            onnx: The path of an ONNX model, or an `onnx.ModelProto`, whose GRU nodes give the
                names of tensors; rows are then in the order of ONNX (z, r, n). None for names like
                those of nn.GRU's parameters: 'input_l0', 'output_l0', 'weight_ih_l0_reverse'.
            nodes: Names of the GRU nodes, lowest layer first; None to find them by their weights.

        Raises:
            CalibrationError: There are no scales.
            QuantGRUError: The version is unknown, the ONNX model does not fit, or a file cannot be
                written.

        Example:
            >>> gru.export_encodings("gru.encodings", "2.0.0", onnx="model.onnx")
        """
        check_version(version)
        self._finalized()
        given = None if nodes is None else {"": nodes}
        encodings.write({"": self._calibrated()}, path, version, onnx, given)

    def load_encodings(
        self,
        path: str | os.PathLike[str],
        *,
        onnx: Any = None,
        nodes: str | Sequence[str] | None = None,
    ) -> None:
        """Take the scales of inputs, states, outputs and weights from encodings of AIMET.

        Scales of other operators do not change, and tensors without an encoding keep theirs.
        Signed and unsigned codes of the same real values are equal: an operator keeps
        `is_unsigned`, unless only the other one has zero point 0 in a symmetric operator.

        Args:
            path: A file of version 0.6.1, 1.0.0, 2.0.0 or 2.1.0.
            onnx: As for `export_encodings`.
            nodes: As for `export_encodings`.

        Raises:
            CalibrationError: The GRU has no scales; encodings do not have those of its inner
                operators.
            ParameterError: The file is malformed, or an encoding does not fit: weights that are
                not symmetric, scales that are no powers of two with `scale_kind` 'pot', floating
                point, blocks. Nothing has changed then.
        """
        given = None if nodes is None else {"": nodes}
        found = encodings.read({"": self._calibrated()}, path, onnx, given)
        self._take(found[""], f"file {name_of(path)!r}")

    # --- methods of torch.nn.Module

    def train(self, mode: bool = True) -> QuantGRU:
        """Set the mode, like nn.Module; the next use quantizes the weights again."""
        self._state.plans.forget_weights()
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Draw new weights and biases, like nn.GRU; scales do not change."""
        super().reset_parameters()
        if "_log2_scales" in self.__dict__:
            self._write_logarithms()

    def extra_repr(self) -> str:
        """Return nn.GRU's text plus the settings of quantization."""
        state = "calibrated" if self.is_calibrated() else "not calibrated"
        options = (
            f"use_quantization={self.use_quantization}{training_options.described_options(self)}"
        )
        return f"{super().extra_repr()}, {options}, {described(self.config)}, {state}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # inference-mode parameters have no version, so changes would go undetected
        with torch.inference_mode(False):
            return super()._apply(fn, recurse)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_calibrated():
            self._follow_logarithms()
            entry = checkpoints.entry_of(self._state, self.use_quantization)
            destination[prefix + checkpoints.STATE_KEY] = entry

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        names = training_options.scale_names(self._state.shape)
        logarithms = dict(zip(self._log2_scales, self._logarithms(), strict=True))
        rest = checkpoints.without_scales(state_dict, prefix, names, logarithms)
        key, error_msgs = prefix + checkpoints.STATE_KEY, others[-1]
        own = {name: p for name, p in self._parameters.items() if name not in self._log2_scales}
        fitted = self.is_calibrated() or self._state.has_statistics
        former = checkpoints.copies(own) if fitted and key not in state_dict else {}
        super()._load_from_state_dict(rest, prefix, *others)
        if prefix + checkpoints.FROZEN_KEY in state_dict:
            error_msgs.append(
                f"Expected the state_dict of a {type(self).__name__} at {prefix!r}, got that of a "
                "frozen GRU; call quant_gru.load_frozen(model, state_dict)"
            )
        if key in state_dict:
            try:
                before = bool(self.use_quantization)
                found, on = checkpoints.read_entry(state_dict[key], repr(key), before)
                self._take(found, repr(key))
                self.use_quantization = on
            except QuantGRUError as error:
                error_msgs.append(f"{error}{checkpoints.hint(state_dict[key])}")
        elif checkpoints.differ(former, self._parameters):
            has = "scales" if self.is_calibrated() else "statistics"
            warnings.warn(
                f"{prefix.removesuffix('.') or 'the GRU'!r}: other weights were loaded without "
                f"{checkpoints.STATE_KEY!r} into a {type(self).__name__} with {has}, which are "
                "those of its former weights; call reset_calibration() and calibrate again, "
                "or load a checkpoint of the calibrated model",
                QuantGRUWarning,
                stacklevel=caller_stacklevel(),
            )

    def __prepare_scriptable__(self) -> NoReturn:
        watchers.refuse_script(self)

    # --- the ways of forward

    def _forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None,
        zoneout_mask: Tensor | None,
        prepared: PreparedCall | None,
    ) -> call.Result:
        """Run the quantized forward for all input forms and dtypes, differentiably if needed.

        A prepared call, if given, may run the normalized input in native code.
        """
        sequence = self._normalize(input, hx, torch.float32)
        if prepared is not None:
            own, x, h0 = self._parameters.values(), sequence.values, sequence.states
            result = prepared.start(own, x, h0, None, False, sequence.packing)
            if result is not None:
                return sequence.finish(*result)
        noise = self._noise(sequence, zoneout_mask)
        prepared = self._prepared(noise)
        weights, logarithms = prepared.weights, self._logarithms() if self._log2_scales else ()
        wanted = call.wants_gradient(sequence, weights, logarithms)
        how = self._differentiated(prepared) if wanted else None
        return call.run(prepared, sequence, noise, weights[0].dtype, how, logarithms)

    def _forward_float(
        self, input: Tensor | PackedSequence, hx: Tensor | None, zoneout_mask: Tensor | None
    ) -> call.Result:
        """Run the float mode with zoneout or recurrent dropout, step by step."""
        sequence = self._normalize(input, hx)
        x, h0, lengths = sequence.x, sequence.h0, sequence.lengths
        noise = self._noise(sequence, zoneout_mask)
        y, h_n = run_float(x, h0, lengths, self._weights(), noise, self.zoneout)
        return sequence.restore(y, h_n, y.dtype)

    def _forward_traced(
        self, input: Tensor | PackedSequence, hx: Tensor | None, zoneout_mask: Tensor | None
    ) -> call.Result:
        """Run the quantized forward as one operator that tracers and transforms can handle."""
        if torch.onnx.is_in_onnx_export():
            return self._record(input, hx)
        text = call.traceable(self._state.text, self.learn_scales)
        weights = [w for layer in self._weights() for cell in layer for w in cell if w is not None]
        sequence = self._normalize(input, hx, torch.float32)
        settings = Settings(
            self._noise(sequence, zoneout_mask),
            self.bidirectional,
            module_weights.takes_part_in_a_gradient(self),
            self.precision,
            self._state.containers if torch.is_grad_enabled() else (),
        )
        return call.run_as_operator(sequence, weights, text, settings, self._weight.dtype)

    def _record(self, input: Tensor | PackedSequence, hx: Tensor | None) -> call.Result:
        """Record a call as one operator of an ONNX file."""
        normalize, shape = partial(self._normalize, input, hx, torch.float32), self._state.shape
        dtype, profile = self._weight.dtype, self._export_format
        return call.record(self, input, hx, normalize, shape, dtype, profile)

    def _is_plain(self, zoneout_mask: Tensor | None) -> bool:
        """Return whether nn.GRU computes the result of the float mode."""
        held = zoneout_mask is not None or self.zoneout > 0
        return not held and not (self.training and self.recurrent_dropout > 0)

    # --- what the ways of forward share

    def _normalize(
        self, input: Any, hx: Tensor | None, dtype: torch.dtype | None = None
    ) -> GRUSequence:
        return normalize(input, hx, self._state.shape, self.batch_first, self._weight, dtype)

    def _draws(self) -> bool:
        """Return whether a forward in training draws random masks."""
        between = self.dropout if self.num_layers > 1 else 0.0
        return bool(between or self._recurrent_dropout or self.zoneout)

    def _noise(self, sequence: GRUSequence, zoneout_mask: Tensor | None) -> Noise | None:
        """Return the random masks of a forward in training, None otherwise."""
        shape, p, q = self._state.shape, self.dropout, self._recurrent_dropout
        return training_options.noise_of(sequence, zoneout_mask, self.training, shape, p, q)

    def _prepared(self, noise: Noise | None) -> PreparedCall:
        """Return the shared state of calls: that of the last call if it holds, or a new one."""
        state, own = self._state, self._parameters.values()
        live = module_weights.may_change_unseen(self)
        # learned scales follow their parameters at each call
        kept = None if live and self._log2_scales else state.plans.kept(self._weight.device, live)
        if kept is not None and kept.holds(own):
            kept.update(*(() if noise is None else dropped_by(noise, state.shape)))
            return kept
        if kept is not None:
            # parts of the weights have guards of their own, which may see a write later
            state.plans.forget_settled()
        self._finalized(in_forward=True)
        found = state.prepare(own, self._weights(), live, noise, kept)
        if not found.live:  # a plan of training is rewritten at each call
            self._warn_of_cuts(found.plan)
        return found

    def _differentiated(self, prepared: PreparedCall) -> Differentiated:
        """Return how calls with this shared state are differentiated."""
        how: Differentiated | None = prepared.differentiated
        if how is None or (how.precision, how.stash_bits) != (self._precision, self._stash_bits):
            how = prepared.differentiated = Differentiated(
                prepared.plan,
                self.bias,
                self._precision,
                self._stash_bits,
                self._state.cells if self._log2_scales else [],
                self._state.plan_again(),
                prepared.live,
            )
        return how

    def _plan(self, tell_again: bool = False) -> GRUPlan:
        """Return the plan of the current weights, which are read again.

        Args:
            tell_again: Whether to warn again of cut biases of which a warning has told.
        """
        module_weights.compute_weights(self)
        self._state.plans.forget_settled()
        self._finalized()
        plan = self._state.plan(self._weights(), module_weights.may_change_unseen(self))
        self._warn_of_cuts(plan, tell_again)
        return plan

    def _warn_of_cuts(self, plan: GRUPlan, tell_again: bool = False) -> None:
        """Warn of biases that a plan cuts off, but for those that have been told."""
        device = self._weight.device
        # calls on a GPU do not wait for numbers, and those of a captured graph do not exist yet
        if device.type == "cpu" or (tell_again and not capturing(device)):
            self._told = warn_of_cut_biases(cut_biases_of(plan), () if tell_again else self._told)

    def _warn_of_all_cuts(self) -> None:
        """Warn of biases that new scales cut off."""
        self._told = warn_of_cut_biases(cut_biases(self._state.scales or (), self._weights()))

    def _source(self) -> Source:
        """Return the plan, if there are scales or statistics, and the weights."""
        module_weights.compute_weights(self)
        weights = self._weights()
        with torch.no_grad():
            known = self.is_calibrated() or self._state.has_statistics
            plan = settled(self._plan()) if known else None
        sizes = (self.input_size, self.hidden_size, self.num_layers, len(weights[0]))
        return Source(
            plan, weights, *sizes, self.batch_first, self.zoneout, lambda: self.freeze()._bytes()
        )

    # --- weights and scales

    @property
    def _weight(self) -> Tensor:
        """Any weight, which has the device and dtype of the module."""
        parameter = self._parameters.get("weight_ih_l0")
        weight = self.weight_ih_l0 if parameter is None else parameter
        assert isinstance(weight, Tensor)
        return weight

    def _weights(self) -> list[list[Weights]]:
        return module_weights.weights_of(self, self._named_shapes, 2 if self.bidirectional else 1)

    def _float_weights(self) -> list[list[FloatWeights]]:
        module_weights.compute_weights(self)
        return [
            [FloatWeights(*(None if w is None else w.detach() for w in cell)) for cell in layer]  # type: ignore[arg-type]
            for layer in self._weights()
        ]

    def _collect(self, input: Tensor | PackedSequence, hx: Tensor | None) -> None:
        self._state.collect(self._normalize(input, hx), self._float_weights())

    def _finalized(self, in_forward: bool = False) -> None:
        """Ensure that scales exist: finalize pending statistics, with a single warning.

        Args:
            in_forward: Whether the float mode would do instead.
        """
        if not self.is_calibrated():
            self._state.check_statistics(in_forward)
            self.finalize_calibration()
            warnings.warn(
                "calibration was finalized by the first quantized use; call "
                "finalize_calibration() to do so explicitly",
                QuantGRUWarning,
                stacklevel=caller_stacklevel(),
            )
        self._float_unexpected = ""
        self._follow_logarithms()

    def _take(self, found: params.Parameters, where: str) -> None:
        """Set configuration and scales."""
        self._state.take(found, where)
        self._write_logarithms()
        self._warn_of_all_cuts()

    def _calibrated(self) -> encodings.Calibrated | None:
        """Return configuration, scales and weights; None without scales."""
        self._follow_logarithms()
        state = self._state
        if state.scales is None:
            return None
        found = params.Parameters(state.shape, state.config, state.scales)
        return encodings.Calibrated(found, self._weights())

    @classmethod
    def _from_float(cls: type[GRU], source: FloatGRU, config: OneConfig | None) -> GRU:
        """Return a GRU with these weights, on the CPU, in float32."""
        options: dict[str, Any] = {} if config is None else {"config": config}
        for name in ("bias", "batch_first", "bidirectional"):
            options[name] = getattr(source, name)
        sizes = (source.input_size, source.hidden_size, len(source.cells))
        gru = cls(*sizes, device="cpu", dtype=torch.float32, **options)
        gru.load_state_dict(source.parameters())
        return gru

    def _warn_of_float(self) -> None:
        """Warn, once, about a forward in float mode that is not expected.

        Before calibration only training is not: its result would know nothing of rounding.
        """
        if not self.is_calibrated() and not (self.training and torch.is_grad_enabled()):
            return
        reason, self._float_unexpected = self._float_unexpected, ""
        cure = "set use_quantization to True" if self.is_calibrated() else "calibrate the model"
        warnings.warn(
            f"{reason}, but use_quantization is False: forward computes in floating point; {cure}, "
            "or set use_quantization to False if that is meant",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )

    # --- learned scales

    def _logarithms(self) -> list[Tensor]:
        """Return log2 of the scales of each layer and direction, if they are learned."""
        return [getattr(self, name) for name in self._log2_scales]

    def _write_logarithms(self) -> None:
        """Copy the logarithms of the scales to the parameters."""
        training_options.write_logarithms(self._logarithms(), self._state.cells)

    def _follow_logarithms(self) -> None:
        """Set the scales from the parameters."""
        if self._log2_scales and self.is_calibrated():
            self._state.follow([values.tolist() for values in self._logarithms()])


@cache
def _uncompiled() -> Callable[..., call.Result]:
    """Return the forward for calls between graphs of a compiled model, without compilation."""
    # imports Dynamo, which takes a second
    found: Any = torch.compiler.disable(QuantGRU.forward)
    return found  # type: ignore[no-any-return]


def _as_flag(value: object) -> bool:
    """Return the bool that a value is, such as 1 or NumPy's True; text like 'no' is none."""
    if isinstance(value, str) or value is None or value not in (False, True):
        raise QuantGRUError(f"Expected use_quantization to be True or False, got {value!r}")
    return bool(value)


def _check_sizes(num_layers: object, dropout: object, proj_size: object) -> None:
    """Raise for arguments of other libraries' constructors, with the way to give them here."""
    if isinstance(num_layers, QuantConfig | str):
        raise ConfigError(
            f"Expected num_layers to be an integer, got {num_layers!r}; give a configuration by "
            "keyword: config=.."
        )
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= float(dropout) <= 1:
        raise ConfigError(
            f"Expected dropout to be a number in [0, 1], got {dropout!r}; the order is nn.GRU's: "
            "input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional; give "
            "bidirectional=True by keyword"
        )
    if proj_size != 0:
        raise ConfigError(
            f"Expected proj_size to be 0, got {proj_size!r}: only LSTM has projections; put a "
            "Linear after the GRU"
        )


def float_state_dict(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return a state_dict without quantization, which the float model loads strictly.

    Args:
        module: A QuantGRU, or a model that contains QuantGRUs.

    Example:
        >>> model.load_state_dict(float_state_dict(quantized))
        <All keys matched successfully>
    """
    quantized = {
        f"{name}.{key}" if name else key
        for name, child in module.named_modules()
        if isinstance(child, QuantGRU)
        for key in (checkpoints.STATE_KEY, *training_options.scale_names(child._state.shape))
    }
    return {key: value for key, value in module.state_dict().items() if key not in quantized}
