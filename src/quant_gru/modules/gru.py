"""QuantGRU: torch.nn.GRU with a quantized mode that computes only in integers."""

from __future__ import annotations

import os
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.config import QuantConfig
from quant_gru.config.choice import OneConfig, as_config, described
from quant_gru.errors import ConfigError
from quant_gru.execution.integer_io import integer_forward, quantize_state, trace_codes
from quant_gru.interchange.c import CSource
from quant_gru.modules.call import Calls
from quant_gru.modules.checkpoints import STATE_KEY
from quant_gru.modules.computed_weights import compute_weights
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.near_misses import warn_of_near_miss
from quant_gru.modules.quantization_state import QuantState
from quant_gru.modules.stream import Stream


class QuantGRU(Calls):
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

    Example:
        >>> gru = QuantGRU(8, 16, config="int8_wide")
        >>> gru.calibrate(torch.randn(50, 4, 8))
        >>> gru.finalize_calibration()
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
        config: OneConfig | None = None,
        zoneout: float = 0.0,
        recurrent_dropout: float = 0.0,
        precision: str = "bf16",
        learn_scales: bool = False,
        stash_bits: int | None = None,
        proj_size: int = 0,
    ) -> None:
        _check_sizes(dropout, proj_size)
        # inference-mode parameters have no version, so changes would go undetected
        with torch.inference_mode(False):
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

    def _init_quantization(self, config: OneConfig | None, use_quantization: bool) -> None:
        chosen = QuantConfig() if config is None else as_config(config)
        self.use_quantization = use_quantization
        self._mode_chosen = use_quantization
        self.calibrating = False
        self._init_weights()
        self._init_training()
        self._state = QuantState(chosen, self._shape())

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "use_quantization":
            self.__dict__.update(_mode_chosen=True, _scales_unused="")
        elif name not in self.__dict__ and not hasattr(type(self), name):
            warn_of_near_miss(self, name, value)
        super().__setattr__(name, value)

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
        compute_weights(self)
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
        plan = self._plan()
        return FrozenQuantGRU(self._state.document(), self.batch_first, plan)

    def export_c(self, directory: str | os.PathLike[str], name: str, *, steps: int = 8) -> CSource:
        """See `FrozenQuantGRU.export_c`; the GRU must be calibrated."""
        return self.freeze().export_c(directory, name, steps=steps)

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
        options = f"use_quantization={self.use_quantization}{self._training_text()}"
        return f"{super().extra_repr()}, {options}, {described(self.config)}, {state}"


def _check_sizes(dropout: object, proj_size: object) -> None:
    """Raise for arguments of other libraries' constructors, with the way to give them here."""
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
    """
    quantized = {
        f"{name}.{key}" if name else key
        for name, child in module.named_modules()
        if isinstance(child, QuantGRU)
        for key in (STATE_KEY, *child._scale_names())
    }
    return {key: value for key, value in module.state_dict().items() if key not in quantized}
