"""CustomGRU: a QuantGRU with calibration data given at construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.calibration.batches import to_device
from quant_gru.config.choice import OneConfig, as_config
from quant_gru.errors import CalibrationError
from quant_gru.modules.checkpoints import STATE_KEY
from quant_gru.modules.gru import QuantGRU
from quant_gru.modules.near_misses import refuse_unknown


class CustomGRU(QuantGRU):
    """A `QuantGRU` with widths selected by `quant_type` and with stored calibration data.

    The first quantized forward calibrates with the data, on the module's device and with the
    current weights. After loading a float checkpoint, the next forward calibrates again. Weights
    are quantized again when they change.

    Args:
        input_size: Features of an input step, C.
        hidden_size: Features of the state, H.
        num_layers: Stacked layers.
        bias: Whether the GRU has biases.
        batch_first: Whether inputs and outputs are (N, T, ..) instead of (T, N, ..).
        dropout: Probability of dropout between layers, in training.
        bidirectional: Whether each layer runs in both directions.
        use_quantization: Whether forward computes in integers.
        quant_type: A preset: 'int8', 'int8_wide', 'w8a16' or 'int16'; or another configuration, as
            `config` of `QuantGRU`.
        calibration_data: Like an input of forward; None if `calibrate` will be called.
        device: Device of the parameters.
        dtype: dtype of the parameters.

    Example:
        >>> gru = CustomGRU(8, 16, batch_first=True, quant_type="int8_wide", calibration_data=x)
        >>> y, h = gru(x)  # calibrates, then runs in integers
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
        use_quantization: bool = False,
        quant_type: OneConfig = "int8",
        calibration_data: Tensor | PackedSequence | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        **_unknown: NoReturn,
    ) -> None:
        refuse_unknown(CustomGRU.__init__, _unknown)
        config = as_config(quant_type, "quant_type")
        given = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(*given, device, dtype, use_quantization=use_quantization, config=config)
        self.quant_type = quant_type
        self.calibration_data = calibration_data

    def _finalized(self, in_forward: bool = False) -> None:
        pending = not self.is_calibrated() and not self._state.has_statistics
        if pending and self.calibration_data is not None:
            if not isinstance(self.calibration_data, Tensor | PackedSequence):
                raise CalibrationError(
                    "Expected calibration_data to be a tensor or a PackedSequence, got "
                    f"{type(self.calibration_data).__name__}"
                )
            self.calibrate(to_device(self.calibration_data, self._weight.device))
            self.finalize_calibration()
        super()._finalized(in_forward)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *others: Any
    ) -> None:
        loaded_weights = any(key.startswith(f"{prefix}weight_ih") for key in state_dict)
        has_scales = prefix + STATE_KEY in state_dict
        if loaded_weights and not has_scales and self.calibration_data is not None:
            self.reset_calibration()
        super()._load_from_state_dict(state_dict, prefix, *others)
