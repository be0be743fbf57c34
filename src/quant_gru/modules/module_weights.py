"""The weights of a QuantGRU by layer and direction, and the normalization of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.calibration.float_run import FloatWeights
from quant_gru.errors import QuantGRUError
from quant_gru.execution.layers import Weights
from quant_gru.execution.sequence_layout import Sequence, normalize
from quant_gru.modules.computed_weights import compute_weights
from quant_gru.modules.training_options import TrainingOptions
from quant_gru.parameters.schema import Shape


class ModuleWeights(TrainingOptions, torch.nn.GRU):
    """The part of a QuantGRU that manages its parameters and shapes."""

    def _init_weights(self) -> None:
        self._named_shapes = _named_shapes(
            self.num_layers, self._directions, self.input_size, self.hidden_size
        )

    def _shape(self) -> Shape:
        return Shape(
            input_size=self.input_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            bias=self.bias,
            bidirectional=self.bidirectional,
        )

    def _normalize(
        self,
        input: Tensor | PackedSequence,
        hx: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> Sequence:
        return normalize(
            input,
            hx,
            input_size=self.input_size,
            hidden_size=self.hidden_size,
            states=self.num_layers * self._directions,
            batch_first=self.batch_first,
            like=self._weight,
            dtype=dtype,
        )

    def _weights(self) -> list[list[Weights]]:
        D, parameters = self._directions, self._parameters
        flat: list[Weights] = []
        for cell in self._named_shapes:
            found: list[Tensor | None] = []
            for name, shape in cell:
                # a computed weight (parametrization, pruning) is an attribute, not a parameter
                w = parameters.get(name)
                w = getattr(self, name, None) if w is None else w
                # native code reads weights by address, so their shapes must be right
                if w is not None and w.shape != shape:
                    raise QuantGRUError(
                        f"Expected {name} to be of shape {shape}, got {tuple(w.shape)}"
                    )
                if w is not None and w.layout is not torch.strided:
                    raise QuantGRUError(f"Expected {name} to be a dense tensor, got {w.layout}")
                found.append(w)
            flat.append((found[0], found[1], found[2], found[3]))
        return [flat[i : i + D] for i in range(0, len(flat), D)]

    def _float_weights(self) -> list[list[FloatWeights]]:
        compute_weights(self)
        return [
            [FloatWeights(*(None if w is None else w.detach() for w in cell)) for cell in layer]  # type: ignore[arg-type]
            for layer in self._weights()
        ]

    def _check_cell(self, layer: int, reverse: bool) -> None:
        if not 0 <= layer < self.num_layers:
            raise QuantGRUError(f"Expected layer to be in 0..{self.num_layers - 1}, got {layer}")
        if reverse and not self.bidirectional:
            raise QuantGRUError("Expected reverse to be False (not bidirectional), got True")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # inference-mode parameters have no version, so changes would go undetected
        with torch.inference_mode(False):
            return super()._apply(fn, recurse)


def _named_shapes(
    layers: int, directions: int, C: int, H: int
) -> list[list[tuple[str, tuple[int, ...]]]]:
    """Return names and shapes of W, R, bw, br of each layer and direction."""
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
