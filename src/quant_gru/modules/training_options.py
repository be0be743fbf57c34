"""Training options of a QuantGRU: noise, precision, saved states, learned scales."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real

import torch
from torch import Tensor

from quant_gru.autograd.learned_scales import COUNT, logarithms
from quant_gru.autograd.state_compression import CHOICES as STASH_BITS
from quant_gru.errors import ConfigError, QuantGRUError
from quant_gru.execution.noise import Noise, draw
from quant_gru.execution.sequence_layout import Sequence
from quant_gru.integer.qparams import QParams
from quant_gru.kernels.dispatch import PRECISIONS
from quant_gru.modules.quantization_state import QuantState


class TrainingOptions(torch.nn.Module):
    """The part of a QuantGRU that only concerns training."""

    num_layers: int
    hidden_size: int
    dropout: float
    bidirectional: bool
    _state: QuantState

    @property
    def _weight(self) -> Tensor:
        """Any weight, which has the device and dtype of the module."""
        parameter = self._parameters.get("weight_ih_l0")
        weight = self.weight_ih_l0 if parameter is None else parameter
        assert isinstance(weight, Tensor)
        return weight

    def _init_training(self) -> None:
        self._recurrent_dropout = 0.0
        self._precision = PRECISIONS[0]
        self._stash_bits: int | None = None
        self._log2_scales: list[str] = []

    @property
    def zoneout(self) -> float:
        """Share of a state that is kept; in training the probability to keep it; in [0, 1]."""
        return self._state.zoneout

    @zoneout.setter
    def zoneout(self, p: float) -> None:
        self._state.set_zoneout(_probability("zoneout", p))

    @property
    def recurrent_dropout(self) -> float:
        """Probability that a recurrent weight is zero in training, in [0, 1)."""
        return self._recurrent_dropout

    @recurrent_dropout.setter
    def recurrent_dropout(self, p: float) -> None:
        p = _probability("recurrent_dropout", p)
        if p == 1:
            raise ConfigError("Expected recurrent_dropout to be below 1, got 1")
        self._recurrent_dropout = p

    @property
    def precision(self) -> str:
        """Precision of gradient products on a GPU: 'bf16', 'tf32' or 'fp32'."""
        return self._precision

    @precision.setter
    def precision(self, precision: str) -> None:
        if precision not in PRECISIONS:
            raise ConfigError(
                f"Expected precision to be one of {', '.join(PRECISIONS)}, got {precision!r}"
            )
        self._precision = precision

    @property
    def stash_bits(self) -> int | None:
        """Bits of each state code that are saved for backward: 4, 8 or None for all."""
        return self._stash_bits

    @stash_bits.setter
    def stash_bits(self, bits: int | None) -> None:
        if bits is not None and (type(bits) is not int or bits not in STASH_BITS):
            raise ConfigError(f"Expected stash_bits to be 4, 8 or None, got {bits!r}")
        self._stash_bits = bits

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
        if learn == self.learn_scales:
            return
        if learn:
            self._init_learned_scales()
        else:
            self._remove_learned_scales()

    def _training_text(self) -> str:
        """Return the options that differ from their defaults, each as ', name=value'."""
        values = {
            "zoneout": (self.zoneout, 0.0),
            "recurrent_dropout": (self.recurrent_dropout, 0.0),
            "precision": (self.precision, PRECISIONS[0]),
            "learn_scales": (self.learn_scales, False),
            "stash_bits": (self.stash_bits, None),
        }
        return "".join(
            f", {name}={value}" for name, (value, usual) in values.items() if value != usual
        )

    @property
    def _directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _cells(self) -> Iterator[tuple[int, str]]:
        for layer in range(self.num_layers):
            for suffix in ("", "_reverse")[: self._directions]:
                yield layer, suffix

    # --- noise

    def _noise(self, sequence: Sequence, zoneout_mask: Tensor | None) -> Noise | None:
        """Return the random masks of a forward in training, None otherwise."""
        if not self.training:
            if zoneout_mask is not None:
                raise QuantGRUError(
                    "Expected zoneout_mask to be None in eval mode, where states are "
                    "interpolated, got a mask"
                )
            return None
        if zoneout_mask is not None and not isinstance(zoneout_mask, Tensor):
            raise QuantGRUError(
                f"Expected zoneout_mask to be a tensor, got {type(zoneout_mask).__name__}"
            )
        return draw(
            sequence.values.device,
            dropout=self.dropout if self.num_layers > 1 else 0.0,
            zoneout=self.zoneout,
            recurrent_dropout=self.recurrent_dropout,
            updates=None if zoneout_mask is None else self._updates(sequence, zoneout_mask),
        )

    def _updates(self, sequence: Sequence, mask: Tensor) -> Tensor:
        """Convert a caller's zoneout mask to bool (layers * directions, T, N, H)."""
        T, N = sequence.steps, sequence.zeros[1]
        cells = self.num_layers * self._directions
        shape = (T, N, self.hidden_size) if sequence.batched else (T, self.hidden_size)
        if tuple(mask.shape) not in ((cells, *shape), *([shape] if cells == 1 else [])):
            raise QuantGRUError(
                f"Expected zoneout_mask to be of shape {(cells, *shape)}, got {tuple(mask.shape)}"
            )
        if mask.device != sequence.values.device:
            raise QuantGRUError(
                f"Expected zoneout_mask to be on the input's device {sequence.values.device}, "
                f"got {mask.device}"
            )
        mask = mask.detach().reshape(cells, T, N, self.hidden_size) != 0
        packed = sequence.packed
        if packed is not None and packed.sorted_indices is not None:
            mask = mask.index_select(2, packed.sorted_indices)
        return mask

    # --- learned scales

    def _init_learned_scales(self) -> None:
        # inference-mode parameters have no version, so changes would go undetected
        with torch.inference_mode(False):
            for name in self._scale_names():
                values = torch.nn.Parameter(torch.zeros(COUNT, device=self._weight.device))
                self.register_parameter(name, values)
        self._log2_scales = self._scale_names()
        self._write_logarithms()

    def _remove_learned_scales(self) -> None:
        self._follow_logarithms()
        for name in self._log2_scales:
            delattr(self, name)
        self._log2_scales = []
        self._state.settle()

    def _scale_names(self) -> list[str]:
        """Return parameter names of the logarithms per layer and direction, learned or not."""
        return [f"log2_scale_l{layer}{suffix}" for layer, suffix in self._cells()]

    def _logarithms(self) -> list[Tensor]:
        """Return log2 of the scales of each layer and direction, if they are learned."""
        return [getattr(self, name) for name in self._log2_scales]

    def _learned(self) -> list[QParams]:
        """Return the quantization parameters of each layer and direction, if scales are learned."""
        if not self._log2_scales:
            return []
        return [cell for layer in self._state.scales or () for cell in layer]

    def _write_logarithms(self) -> None:
        """Copy the logarithms of the scales to the parameters."""
        with torch.no_grad():
            for parameter, cell in zip(self._logarithms(), self._learned(), strict=False):
                parameter.copy_(torch.tensor(logarithms(cell), device="cpu"))

    def _follow_logarithms(self) -> None:
        """Set the scales from the parameters."""
        if self._log2_scales and self._state.scales is not None:
            self._state.follow([values.tolist() for values in self._logarithms()])


def _probability(name: str, p: object) -> float:
    if isinstance(p, bool) or not isinstance(p, Real) or not 0 <= float(p) <= 1:
        raise ConfigError(f"Expected {name} to be a number in [0, 1], got {p!r}")
    return float(p)
