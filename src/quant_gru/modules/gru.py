"""QuantGRU: torch.nn.GRU whose quantized mode computes in integers only."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as TensorSequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru._errors import CalibrationError, ConfigError, QuantGRUError
from quant_gru.autograd.prepared_step import backward_for, quick_step_of
from quant_gru.autograd.straight_through import Call, run
from quant_gru.calibration.trace import FloatWeights
from quant_gru.config import OPERATORS, WEIGHTS, QuantConfig, QuantGRUWarning, canonical_name
from quant_gru.config.notes import caller_stacklevel
from quant_gru.execution.integer_io import integer_forward, trace_codes
from quant_gru.execution.layers import Weights
from quant_gru.execution.noise import Noise
from quant_gru.execution.plan_cache import PlanCache
from quant_gru.execution.prepared_call import quick_of
from quant_gru.execution.prepared_gpu_call import quick_gpu_of
from quant_gru.execution.quiet import is_nothing_at_work, is_quiet, is_quiet_in_training
from quant_gru.execution.sequence_layout import Sequence, normalize
from quant_gru.integer.plan import GRUPlan
from quant_gru.kernels.dispatch import load
from quant_gru.modules.adjust import Change
from quant_gru.modules.bias_overflow import warn_of_cut_biases
from quant_gru.modules.float_zoneout import run_float
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.quantization_state import QuantState, summary
from quant_gru.modules.stream import Stream
from quant_gru.modules.training_options import TrainingOptions
from quant_gru.parameters import document as params
from quant_gru.torch_ops import operators
from quant_gru.torch_ops.plan_sources import LivePlans

STATE_KEY = "quantization"


class QuantGRU(TrainingOptions, torch.nn.GRU):
    """A drop-in `torch.nn.GRU` with a mode that computes in integers only.

    With `use_quantization` False it is nn.GRU, to the bit. Calibrated and with `use_quantization`
    True every operator runs on integer codes; outputs are the codes' real values. Gradients of the
    quantized mode are straight-through.

    Args:
        input_size: Features of an input step, C.
        hidden_size: Features of the state, H.
        num_layers: Stacked layers.
        bias: Whether there are biases.
        batch_first: Whether inputs and outputs are (N, T, ..) instead of (T, N, ..).
        dropout: Probability of dropout between layers, in training.
        bidirectional: Whether each layer runs in both directions.
        device: Where parameters are made.
        dtype: dtype of parameters.
        use_quantization: Whether forward computes in integers.
        config: Widths and kinds of the 17 operators; None for 8 bits, symmetric.
        zoneout: In training, the probability of a unit to keep its state in a step; in eval mode,
            the share of its state that a unit keeps (Krueger et al., 2017).
        recurrent_dropout: In training, the probability of a recurrent weight to be zero for a
            whole sequence (DropConnect, Merity et al., 2018).
        precision: What gradients are multiplied in on a GPU, with sums in float32: 'bf16' (errors
            of about 1e-3), 'tf32' (1e-4) or 'fp32' (1e-6).
        learn_scales: Whether the scales of calibrated activations are parameters: their logarithms
            to base 2, `log2_scale_l0` and so on, in the order of `quant_gru.config.CALIBRATED`.
            Each forward in quantized mode then reads them on the host.
        stash_bits: 4 or 8: bits of a state's code that are kept for backward, where it has more;
            gradients are then approximate. None keeps all. Compiled graphs keep all.

    Example:
        >>> gru = QuantGRU(8, 16, config=QuantConfig.int8())
        >>> gru.calibrate(torch.randn(50, 4, 8))
        >>> gru.use_quantization = True
        >>> y, h_n = gru(torch.randn(50, 4, 8))
    """

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
        config: QuantConfig | None = None,
        zoneout: float = 0.0,
        recurrent_dropout: float = 0.0,
        precision: str = "bf16",
        learn_scales: bool = False,
        stash_bits: int | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )
        self._init_quantization(config, use_quantization)
        self.zoneout = zoneout
        self.recurrent_dropout = recurrent_dropout
        self.precision = precision
        self.stash_bits = stash_bits
        self.learn_scales = learn_scales

    def _init_quantization(self, config: QuantConfig | None, use_quantization: bool) -> None:
        if config is not None and not isinstance(config, QuantConfig):
            raise ConfigError(
                f"Expected config to be a QuantConfig or None, got {type(config).__name__}"
            )
        self.use_quantization = use_quantization
        self.calibrating = False
        self._named_shapes = _named_shapes(
            self.num_layers, self._directions, self.input_size, self.hidden_size
        )
        self._init_training()
        self._state = QuantState(config or QuantConfig(), self._shape())

    # --- forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; what is like the call before, and not watched, goes straight on."""
        # the compiler looks for the first of these
        if torch.compiler.is_dynamo_compiling() or not is_nothing_at_work():
            return super().__call__(*args, **kwargs)
        if kwargs or not 0 < len(args) < 3 or type(self) is not QuantGRU:
            return super().__call__(*args, **kwargs)
        quick = self._state.plans.quick
        if quick is not None and is_quiet(self.__dict__):
            hx = args[1] if len(args) > 1 else None
            result = quick.start(self._parameters.values(), args[0], hx, self.batch_first)
            if result is None and type(args[0]) is Tensor:
                return self._forward(args[0], hx)
            if result is not None and result is not NotImplemented:
                return result
        elif self.training and is_quiet_in_training(self.__dict__):
            result = self._step(args[0], args[1] if len(args) > 1 else None)
            if result is not None:
                return result
        return super().__call__(*args)

    @overload
    def forward(
        self, input: Tensor, hx: Tensor | None = None, *, zoneout_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, input: PackedSequence, hx: Tensor | None = None, *, zoneout_mask: Tensor | None = None
    ) -> tuple[PackedSequence, Tensor]: ...

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None = None,
        *,
        zoneout_mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """Run the GRU.

        Args:
            input: (T, N, C), (N, T, C) if `batch_first`, (T, C), or a PackedSequence.
            hx: Initial states (layers * directions, N, H), or (layers * directions, H) for
                unbatched input; None for zeros.
            zoneout_mask: In training, instead of a mask drawn with probability `zoneout`: 1 where
                a unit takes its new state, 0 where it keeps the old one (as Haste has it);
                (T, N, H), or (layers * directions, T, N, H), time first in any case.

        Returns:
            Output (T, N, directions * H), or in the input's form, and last states as `hx`.

        Raises:
            CalibrationError: Quantization is on, but there are neither scales nor statistics.
            QuantGRUError: A shape that does not fit (in quantized mode; nn.GRU's errors else).
        """
        if self.calibrating:
            output = super().forward(input, hx)
            self._collect(input, hx)
            return output
        if not self.use_quantization:
            if self._is_plain(zoneout_mask):
                return super().forward(input, hx)
            return self._forward_float(input, hx, zoneout_mask)
        if operators.traced(input, hx, self):
            return self._forward_traced(input, hx, zoneout_mask)
        plans = self._state.plans
        if self.training and zoneout_mask is None:
            result = self._step(input, hx)
            if result is not None:
                return result
        quick = plans.quick
        if quick is not None and not self.training:
            result = quick.run(self._parameters.values(), input, hx, self.batch_first)
            if result is not None:
                return result
        return self._forward(input, hx, zoneout_mask)

    def _step(self, input: object, hx: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """A call in training that is like the one before; None where it is not."""
        step = self._state.plans.step(input.device) if type(input) is Tensor else None
        if step is None:
            return None
        own = self._parameters.values()
        return step.run(own, self._step_options(), input, hx, self.batch_first)

    def _forward(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None,
        zoneout_mask: Tensor | None = None,
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """The quantized forward of a call that no quick way takes; keeps one for those like it."""
        plans = self._state.plans
        quick = plans.quick
        weights = self._weights()
        sequence = self._normalize(input, hx)
        noise = self._noise(sequence, zoneout_mask)
        plan = self._plan(weights, noise)
        if not self._may_change_unseen() and (
            quick is None or not quick.holds(self._parameters.values())
        ):
            used = [w for layer in weights for cell in layer for w in cell]
            own = self._parameters.values()
            plans.drop_quick()
            plans.quick = quick_of(plan, own, used) or quick_gpu_of(plan, own, used)
        call = Call(
            plan,
            sequence.lengths,
            noise,
            self.precision,
            self.bias,
            self._learned(),
            self.stash_bits,
            self._plan_again(noise),
        )
        if self.training:
            call.back = backward_for(call, plans.step(plan.cells[0][0].weights.W.device))
        y, h_n = run(call, sequence.x, sequence.hx, weights, self._logarithms())
        if self.training and noise is None:
            self._keep_step(call, weights)
        return sequence.restore(y, h_n, self._weight.dtype)

    def _step_options(self) -> tuple[Any, ...]:
        """What a call in training depends on, beside weights, scales and zoneout."""
        dropout = self.dropout if self.num_layers > 1 else 0.0
        return (self._precision, self._stash_bits, self._recurrent_dropout, dropout)

    def _keep_step(self, call: Call, weights: list[list[Weights]]) -> None:
        """Let calls that are like this one take the quick way, if there is one."""
        plans, own, options = self._state.plans, self._parameters.values(), self._step_options()
        device = call.plan.cells[0][0].weights.W.device
        kept = plans.step(device)
        if kept is None or not kept.holds(own, options):
            used = [w for layer in weights for cell in layer for w in cell]
            step = quick_step_of(call, own, used, options, kept)
            if step is not None:
                plans.keep_step(device, call.plan, step)

    def _forward_traced(
        self, input: Tensor | PackedSequence, hx: Tensor | None, zoneout_mask: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """The quantized forward as one operator that tracers and transforms can follow."""
        if self._log2_scales:
            raise QuantGRUError(
                "Expected learn_scales to be False for torch.compile, torch.export and torch.func, "
                "got True: scales are read on the host; freeze() the GRU for inference"
            )
        text = self._state.text
        if text is None:
            raise CalibrationError(
                "Expected a calibrated GRU to trace, got one without scales; call calibrate(data) "
                "and finalize_calibration() first"
            )
        weights = [w for layer in self._weights() for cell in layer for w in cell if w is not None]
        sequence = self._normalize(input, hx)
        settings = operators.Settings(
            self._noise(sequence, zoneout_mask),
            self.bidirectional,
            self._may_change_unseen(),
            self.precision,
            self._state.containers if torch.is_grad_enabled() else (),
        )
        y, h_n = operators.forward(
            sequence.x, sequence.h0, sequence.lengths, weights, text, settings
        )
        return sequence.restore(y, h_n, self._weight.dtype)

    def _forward_float(
        self, input: Tensor | PackedSequence, hx: Tensor | None, zoneout_mask: Tensor | None
    ) -> tuple[Tensor | PackedSequence, Tensor]:
        """The float mode with zoneout or recurrent dropout, step by step."""
        sequence = self._normalize(input, hx)
        y, h_n = run_float(
            sequence.x,
            sequence.h0,
            sequence.lengths,
            self._weights(),
            self._noise(sequence, zoneout_mask),
            self.zoneout,
        )
        return sequence.restore(y, h_n, y.dtype)

    def _is_plain(self, zoneout_mask: Tensor | None) -> bool:
        """Whether nn.GRU computes what the float mode is to compute."""
        held = zoneout_mask is not None or self.zoneout > 0
        return not held and not (self.training and self.recurrent_dropout > 0)

    def forward_integer(
        self, x_codes: Tensor, h_codes: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run on codes: integers in, integers out, nothing else computed.

        Args:
            x_codes: Codes of input.x of the first layer, any integer dtype, (T, N, C),
                (N, T, C) if `batch_first`, or (T, C).
            h_codes: Codes of output.h (layers * directions, N, H), or (layers * directions, H);
                None for the zero points.

        Returns:
            Codes of the output (T, N, directions * H), in the input's form, and of the last
            states, in the container of output.h.

        Raises:
            QuantGRUError: Codes of a wrong shape, dtype or range.
        """
        return integer_forward(self._plan(), x_codes, h_codes, self.batch_first)

    def trace_codes(
        self, input: Tensor | PackedSequence, hx: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The codes of all operators at every step: golden vectors.

        Args:
            input: As for `forward`.
            hx: As for `forward`.

        Returns:
            Operator name with the suffix of nn.GRU's parameters ('gate.z_out_l0',
            'gate.z_out_l1_reverse') -> codes on the CPU: (T, N, ..) for activations, (3H, ..) for
            weights, gates in the order update, reset, candidate; 'output.h0_l0' holds the state
            before the first step, 'accumulator.bw_l0' and '.br_l0' the biases in accumulator
            units (of 2^B beyond 48 bits of operands, see docs/arithmetic.md). Rows are in the order
            of a PackedSequence's data, if one is given.
            `numpy.savez(file, **codes)` saves them.
        """
        return trace_codes(self._plan(), self._normalize(input, hx))

    def stream(self, batch_size: int = 1) -> Stream:
        """Inference step by step, with the state kept in integers.

        A step takes x (N, C) and gives the top layer's output (N, H), float32.

        The stream keeps the weights and scales of this moment. `stream.reset()` returns to the
        zero state, `stream.state` are the state's codes.

        Args:
            batch_size: Rows of each step, N.

        Raises:
            QuantGRUError: The GRU is bidirectional.

        Example:
            >>> stream = gru.stream()
            >>> y = stream(torch.randn(1, gru.input_size))
        """
        return Stream(self._plan(), batch_size)

    def freeze(self) -> FrozenQuantGRU:
        """An inference-only module that holds the integer plan alone, giving the same codes."""
        plan = self._plan()
        return FrozenQuantGRU(self._state.document(), self.batch_first, plan)

    def train(self, mode: bool = True) -> QuantGRU:
        """Set the mode, as nn.Module does; weights are quantized anew at the next use."""
        self._state.plans.forget_weights()
        return super().train(mode)

    # --- calibration

    @property
    def config(self) -> QuantConfig:
        """Widths and kinds of the operators."""
        return self._state.config

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
        """Whether scales exist."""
        return self._state.scales is not None

    def calibrate(self, data: Tensor | PackedSequence, hx: Tensor | None = None) -> None:
        """Collect statistics of one batch; the scales are made by `finalize_calibration`.

        Args:
            data: As the input of `forward`.
            hx: As for `forward`.
        """
        self._collect(data, hx)

    def _collect(self, input: Tensor | PackedSequence, hx: Tensor | None) -> None:
        self._state.collect(self._normalize(input, hx), self._float_weights())

    def finalize_calibration(self, verbose: bool = False, *, sync: bool = True) -> None:
        """Turn the collected statistics into scales; does nothing if scales exist.

        Args:
            verbose: Whether to print the quantizer of every operator.
            sync: Whether to merge the statistics of all processes first, where
                torch.distributed is initialized; then all of them have to call this.

        Raises:
            CalibrationError: No statistics, or statistics with NaN or infinity.
        """
        if self.is_calibrated():
            return
        self._state.finalize(sync)
        self._write_logarithms()
        assert self._state.scales is not None
        warn_of_cut_biases(self._state.scales, self._weights())
        load(next(self.parameters()).device)
        if verbose:
            for layer, suffix in self._cells():
                print(f"layer {layer}{' reverse' if suffix else ''}")
                print(summary(self.get_quant_config(None, layer, bool(suffix))))

    def reset_calibration(self) -> None:
        """Forget statistics and scales; the configuration stays."""
        self._state.reset()

    # --- configuration

    def load_bitwidth_config(
        self, path: str | os.PathLike[str] | QuantConfig, verbose: bool = False
    ) -> None:
        """Take the configuration of a file, and `use_quantization` from `disable_quantization`.

        Args:
            path: A JSON file as docs/configuration.md describes it, or a QuantConfig.
            verbose: Whether to say which operators take their defaults.

        Raises:
            ConfigError: The file breaks a rule, or scales exist already.
        """
        config = path if isinstance(path, QuantConfig) else QuantConfig.from_json(path, verbose)
        self._state.set_config(config)
        self.use_quantization = not config.disable_quantization

    def set_all_bitwidth(
        self, bitwidth: int, is_symmetric: bool = True, verbose: bool = False
    ) -> None:
        """Give all operators one width, and all activations one symmetry.

        Weights and biases stay symmetric, `is_unsigned` stays as it is.

        Args:
            bitwidth: 1..32.
            is_symmetric: Whether activations have zero point 0.
            verbose: Whether to print what was set.

        Raises:
            ConfigError: A width out of range, or scales exist already.
        """
        self._state.set_config(self.config.with_all_bitwidths(bitwidth, is_symmetric))
        if verbose:
            kind = "symmetric" if is_symmetric else "asymmetric"
            print(f"all 17 operators: {bitwidth} bits; activations {kind}, weights symmetric")

    def get_quant_config(
        self, name: str | None = None, layer: int = 0, reverse: bool = False
    ) -> dict[str, Any]:
        """What is known of an operator, or of all.

        Args:
            name: Full ('gate.z_out') or short ('z_out') name; None for all operators.
            layer: Which layer.
            reverse: Whether of the reverse direction.

        Returns:
            bitwidth, is_symmetric, is_unsigned, scale, zero_point, exp2_inv (None unless the
            scale is 2^-exp2_inv); scale, zero_point and exp2_inv are None before calibration and
            for fused operators. Weights have lists of scales: one entry, three, or one per row
            of nn.GRU's parameter, by their granularity. With name None: name -> such a dict.
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
        return self._state.describe(name, layer, int(reverse), weight)

    def adjust_quant_config(
        self,
        name: str,
        bitwidth: int | None = None,
        is_symmetric: bool | None = None,
        is_unsigned: bool | None = None,
        scale: float | None = None,
        exp2_inv: int | None = None,
        zero_point: int | None = None,
        layer: int | None = None,
        reverse: bool | None = None,
    ) -> None:
        """Change one operator and rebuild everything derived from it.

        A width alone keeps the real range: exp2_inv grows by the bits gained, the zero point is
        rescaled and clamped. A change of symmetry or signedness covers the old range anew. Scales
        of gate.z_out and gate.r_out are rounded to 1 / integer.

        Args:
            name: Full or short name.
            bitwidth: New width, 1..32.
            is_symmetric: Whether the zero point is 0.
            is_unsigned: Whether codes are unsigned.
            scale: New scale; of a weight, one number or one per tensor, gate or channel, which
                then no longer follow the weight.
            exp2_inv: New scale as 2^-exp2_inv.
            zero_point: New zero point.
            layer: Which layer; None for all.
            reverse: Which direction; None for both.

        Raises:
            ConfigError: A rule is broken; nothing has changed then.
        """
        name = canonical_name(name)
        change = Change(bitwidth, is_symmetric, is_unsigned, scale, exp2_inv, zero_point)
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

    # --- parameter files and checkpoints

    def export_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Write configuration, scales, zero points and tables to a JSON file; no weights.

        Raises:
            CalibrationError: There are no scales.
            ConfigError: The file cannot be written.
        """
        self._finalized()
        params.write(path, self._state.document())

    def load_quant_params(self, path: str | os.PathLike[str]) -> None:
        """Read what `export_quant_params` wrote; with the same weights, the codes are the same.

        `use_quantization` stays as it is.

        Raises:
            ParameterError: The file cannot be read, is of another version, or does not fit this
                GRU; nothing has changed then.
        """
        self._state.take(params.read(path), f"file {os.fspath(path)!r}")
        self._write_logarithms()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_calibrated():
            self._follow_logarithms()
            document = self._state.document()
            document["use_quantization"] = bool(self.use_quantization)
            destination[prefix + STATE_KEY] = params.to_tensor(document)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + STATE_KEY
        rest = {name: value for name, value in state_dict.items() if name != key}
        # logarithms go with scales: a checkpoint without scales has none to tell
        for name in self._scale_names():
            if name not in self._log2_scales:
                rest.pop(prefix + name, None)
            elif key not in state_dict or prefix + name not in state_dict:
                rest[prefix + name] = getattr(self, name).detach()
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if key in state_dict:
            try:
                document = params.from_tensor(state_dict[key], repr(key))
                before = bool(self.use_quantization)
                use_quantization = params.take_flag(document, "use_quantization", before, repr(key))
                found = params.from_document(document, repr(key))
                self._state.take(found, repr(key))
                self._write_logarithms()
                self.use_quantization = use_quantization
            except QuantGRUError as error:
                error_msgs.append(str(error))

    # --- internals

    def _shape(self) -> params.Shape:
        return params.Shape(
            input_size=self.input_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            bias=self.bias,
            bidirectional=self.bidirectional,
        )

    def _normalize(self, input: Tensor | PackedSequence, hx: Tensor | None) -> Sequence:
        return normalize(
            input,
            hx,
            input_size=self.input_size,
            hidden_size=self.hidden_size,
            states=self.num_layers * self._directions,
            batch_first=self.batch_first,
            like=self._weight,
        )

    def _weights(self) -> list[list[Weights]]:
        D, parameters = self._directions, self._parameters
        flat: list[Weights] = []
        for cell in self._named_shapes:
            found: list[Tensor | None] = []
            for name, shape in cell:
                # where something else computes it, it is no parameter
                w = parameters.get(name)
                w = getattr(self, name, None) if w is None else w
                # what runs them takes their addresses
                if w is not None and w.shape != shape:
                    raise QuantGRUError(
                        f"Expected {name} to be of shape {shape}, got {tuple(w.shape)}"
                    )
                found.append(w)
            flat.append((found[0], found[1], found[2], found[3]))
        return [flat[i : i + D] for i in range(0, len(flat), D)]

    def _float_weights(self) -> list[list[FloatWeights]]:
        return [
            [FloatWeights(*(None if w is None else w.detach() for w in cell)) for cell in layer]  # type: ignore[arg-type]
            for layer in self._weights()
        ]

    def _finalized(self) -> None:
        """Make sure that there are scales: pending statistics are finalized, which is said once."""
        if self._state.scales is None:
            if not self._state.has_statistics:
                raise CalibrationError(
                    "Expected a calibrated GRU, got one without scales or statistics; call "
                    "calibrate(data) first, or set use_quantization = False"
                )
            self.finalize_calibration()
            warnings.warn(
                "calibration was finalized by the first quantized use; call "
                "finalize_calibration() to do so explicitly",
                QuantGRUWarning,
                stacklevel=caller_stacklevel(),
            )
        self._follow_logarithms()

    def reset_parameters(self) -> None:
        """Draw weights and biases anew, as nn.GRU does; scales stay."""
        super().reset_parameters()
        if "_log2_scales" in self.__dict__:
            self._write_logarithms()

    def _plan(
        self, weights: list[list[Weights]] | None = None, noise: Noise | None = None
    ) -> GRUPlan:
        self._finalized()
        scales = self._state.scales
        assert scales is not None
        shape = (self.num_layers, self._directions, self.hidden_size)
        dropped = noise.all_dropped(*shape) if noise else None
        p = noise.recurrent_dropout if noise else 0.0
        weights = weights or self._weights()
        return self._state.plans.plan(scales, weights, self._may_change_unseen(), dropped, p)

    def _plan_again(self, noise: Noise | None) -> Callable[[TensorSequence[Tensor]], GRUPlan]:
        """What gives the plan of a forward once more, from its weights in one list."""
        scales = self._state.scales
        assert scales is not None
        # plans are not to keep themselves alive
        kept = weakref.ref(self._state.plans)
        shape = (self.num_layers, self._directions, self.hidden_size)

        def again(weights: TensorSequence[Tensor]) -> GRUPlan:
            plans = LivePlans(scales, kept() or PlanCache())
            dropped = noise.all_dropped(*shape) if noise else None
            return plans.plan(weights, True, dropped, noise.recurrent_dropout if noise else 0.0)

        return again

    def _may_change_unseen(self) -> bool:
        # fused optimizers write weights without raising their version: what takes part in a
        # gradient is never kept
        return self.training or (
            torch.is_grad_enabled() and any(w.requires_grad for w in self.parameters())
        )

    def _check_cell(self, layer: int, reverse: bool) -> None:
        if not 0 <= layer < self.num_layers:
            raise QuantGRUError(f"Expected layer to be in 0..{self.num_layers - 1}, got {layer}")
        if reverse and not self.bidirectional:
            raise QuantGRUError("Expected reverse to be False (not bidirectional), got True")

    def extra_repr(self) -> str:
        """nn.GRU's text and what concerns quantization."""
        state = "calibrated" if self.is_calibrated() else "not calibrated"
        options = f"use_quantization={self.use_quantization}{self._training_text()}"
        return f"{super().extra_repr()}, {options}, {state}"


def _named_shapes(
    layers: int, directions: int, C: int, H: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Names and shapes of W, R, bw, br of each layer and direction."""
    return [
        [
            (f"weight_ih_l{layer}{suffix}", (3 * H, directions * H if layer else C)),
            (f"weight_hh_l{layer}{suffix}", (3 * H, H)),
            (f"bias_ih_l{layer}{suffix}", (3 * H,)),
            (f"bias_hh_l{layer}{suffix}", (3 * H,)),
        ]
        for layer in range(layers)
        for suffix in ("", "_reverse")[:directions]
    ]


def float_state_dict(module: torch.nn.Module) -> dict[str, Tensor]:
    """A state_dict without quantization: one that the float model loads strictly.

    Args:
        module: A QuantGRU, or a model that contains some.
    """
    quantized = {
        f"{name}.{key}" if name else key
        for name, child in module.named_modules()
        if isinstance(child, QuantGRU)
        for key in (STATE_KEY, *child._scale_names())
    }
    return {key: value for key, value in module.state_dict().items() if key not in quantized}
