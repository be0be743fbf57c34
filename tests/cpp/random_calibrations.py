"""Random GRUs with random configurations, calibrated in Python."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import QuantConfig, QuantGRU
from quant_gru.calibration.float_run import FloatWeights
from quant_gru.config import ACTIVATIONS, FUSIBLE, OPERATORS, QuantGRUWarning
from quant_gru.config.fields import ROUNDINGS
from quant_gru.parameters.schema import Shape

Batch = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Calibration:
    """A GRU and what it was calibrated with.

    Attributes:
        gru: The calibrated GRU.
        method: The method of calibration.
        batches: x (T, N, C), h0 or None, and lengths or None.
    """

    gru: QuantGRU
    method: str
    batches: list[Batch]

    @property
    def shape(self) -> Shape:
        """The shape in a parameter document."""
        gru = self.gru
        return Shape(
            input_size=gru.input_size, hidden_size=gru.hidden_size, num_layers=gru.num_layers,
            bias=gru.bias, bidirectional=gru.bidirectional, zoneout=gru.zoneout,
        )  # fmt: skip

    @property
    def weights(self) -> list[FloatWeights]:
        """The float weights of each layer and direction."""
        return float_weights(self.gru)


def float_weights(gru: torch.nn.GRU) -> list[FloatWeights]:
    """The weights of each layer and direction, contiguous."""
    found = []
    for layer in range(gru.num_layers):
        for end in ("", "_reverse")[: 1 + gru.bidirectional]:
            names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] * gru.bias)]
            values = [getattr(gru, f"{name}_l{layer}{end}").detach().contiguous() for name in names]
            values += [None] * (4 - len(values))
            found.append(FloatWeights(*values))
    return found


def random_config(rng: random.Random) -> QuantConfig:
    """Random widths and kinds of all operators: some differ from a preset, or all are random."""
    config = rng.choice((QuantConfig.int8(), QuantConfig.int16(), QuantConfig.int8_wide()))
    share, widths = rng.choice(
        ((0.3, (4, 7, 8, 11, 16, 20)), (1.0, range(1, 17)), (1.0, range(1, 33)))
    )
    for name in OPERATORS:
        if rng.random() >= share:
            continue
        config = config.replace(name, bitwidth=rng.choice(widths))
        if name in ACTIVATIONS:
            config = config.replace(name, is_symmetric=rng.random() < 0.5)
            config = config.replace(name, is_unsigned=rng.random() < 0.2)
        else:
            config = config.replace(name, granularity=rng.choice(("tensor", "gate", "channel")))
        if name in FUSIBLE and rng.random() < 0.5:
            config = config.replace(name, bitwidth=None)
    activation = rng.choice(("exact", "exact", "pwl", "quadratic"))
    config = config.replace_globals(activation=activation, scale_kind=rng.choice(("pot", "free")))
    if rng.random() < 0.7:
        return config
    kind = config["h"].model_dump(include={"bitwidth", "is_symmetric", "is_unsigned"})
    return config.replace("x", **kind).replace_globals(tie_x_and_h=True)


def random_calibration(seed: int) -> Calibration:
    """The same calibration for the same seed."""
    rng = random.Random(seed)
    config = random_config(rng)
    own = random.Random(f"{seed} far")  # what `rng` draws stays the same
    offset = own.choice((5.0, -40.0, 1000.0)) if own.random() < 0.4 else 0.0
    if offset:
        config = config.replace_globals(input_excludes_zero=True)
    rules = random.Random(f"{seed} rounding")
    if rules.random() < 0.4:
        config = config.replace_globals(
            rounding=rules.choice(ROUNDINGS), rounding_input=rules.choice((None, *ROUNDINGS[:-1]))
        )
    generator = torch.Generator().manual_seed(seed)
    C, H, layers = rng.randint(1, 20), rng.randint(1, 20), rng.choice((1, 1, 2))
    gru = QuantGRU(
        C, H, layers, bias=rng.random() < 0.8, bidirectional=rng.random() < 0.4, config=config,
        batch_first=rng.random() < 0.5, zoneout=rng.choice((0.0, 0.0, 0.0, 0.3, 1.0)),
        use_quantization=True,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in gru.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
    method = rng.choice(("histogram", "minmax", "percentile", "ema"))
    batches: list[Batch] = []
    for _ in range(2):
        T, N = rng.randint(2, 9), rng.randint(1, 5)
        x = torch.randn(T, N, C, generator=generator) + offset
        states = (layers * (1 + gru.bidirectional), N, H)
        h0 = torch.rand(states, generator=generator) if rng.random() < 0.5 else None
        lengths = None
        if rng.random() < 0.5:
            lengths = torch.tensor([T, *sorted(rng.randint(1, T) for _ in range(N - 1))[::-1]])
        batches.append((x, h0, lengths))
    return calibration(gru, method, batches)


def calibration(gru: QuantGRU, method: str, batches: list[Batch]) -> Calibration:
    """Calibrate a GRU."""
    gru.calibration_method = method
    for x, h0, lengths in batches:
        given = x.transpose(0, 1) if gru.batch_first else x
        if lengths is not None:
            given = pack_padded_sequence(given, lengths, gru.batch_first)
        gru.calibrate(given, h0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantGRUWarning)
        gru.finalize_calibration()
    return Calibration(gru, method, batches)
