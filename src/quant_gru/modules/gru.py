"""QuantGRU: torch.nn.GRU whose quantized mode computes in integers only."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru._errors import ConfigError
from quant_gru.config import QuantConfig
from quant_gru.execution.integer_io import integer_forward, trace_codes
from quant_gru.modules.call import Calls
from quant_gru.modules.checkpoints import STATE_KEY
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.quantization_state import QuantState
from quant_gru.modules.stream import Stream


class QuantGRU(Calls):
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
        # parameters of inference mode have no version that would tell of changes
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

    def _init_quantization(self, config: QuantConfig | None, use_quantization: bool) -> None:
        if config is not None and not isinstance(config, QuantConfig):
            raise ConfigError(
                f"Expected config to be a QuantConfig or None, got {type(config).__name__}"
            )
        self.use_quantization = use_quantization
        self.calibrating = False
        self._init_weights()
        self._init_training()
        self._state = QuantState(config or QuantConfig(), self._shape())

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
        return trace_codes(self._plan(), self._normalize(input, hx, torch.float32))

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

    def reset_parameters(self) -> None:
        """Draw weights and biases anew, as nn.GRU does; scales stay."""
        super().reset_parameters()
        if "_log2_scales" in self.__dict__:
            self._write_logarithms()

    def extra_repr(self) -> str:
        """nn.GRU's text and what concerns quantization."""
        state = "calibrated" if self.is_calibrated() else "not calibrated"
        options = f"use_quantization={self.use_quantization}{self._training_text()}"
        return f"{super().extra_repr()}, {options}, {state}"


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
