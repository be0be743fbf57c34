"""A float classifier versus its quantized versions: accuracy, agreement, bytes, SQNR."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

from quant_gru import (
    QuantConfig,
    QuantGRU,
    calibrate_model,
    compare,
    convert_model,
    operator_sqnr,
)
from quant_gru.demo.data import Sequences
from quant_gru.demo.model import SequenceClassifier
from quant_gru.demo.training import predict

CALIBRATION_SEQUENCES = 1024
CALIBRATION_BATCHES = 8
SQNR_SEQUENCES = 256
BATCH_SIZE = 256


@dataclass(frozen=True)
class Row:
    """The results of one version of the classifier on the test set.

    Attributes:
        name: Name of the version.
        accuracy: Share of test sequences classified correctly, 0..1.
        agreement: Share of test sequences with the same predicted class as float, 0..1.
        weight_bytes: Bytes of the GRU's parameters in float; of its frozen file otherwise, with
            tables and scales. The head is not counted.
        sqnr: dB per operator; empty for float.
    """

    name: str
    accuracy: float
    agreement: float
    weight_bytes: int
    sqnr: dict[str, float] = field(default_factory=dict)


def variants() -> dict[str, QuantConfig]:
    """Return the compared configurations by name."""
    int8 = QuantConfig.int8()
    return {
        "int8": int8,
        "int8_wide": QuantConfig.int8_wide(),
        "w8a16": QuantConfig.w8a16(),
        "int16": QuantConfig.int16(),
        "int4 weights": int8.replace("weight.W", bitwidth=4).replace("weight.R", bitwidth=4),
    }


def quantize(
    model: SequenceClassifier,
    config: QuantConfig,
    data: Sequences,
    on_batch: Callable[[], None] = lambda: None,
) -> SequenceClassifier:
    """Return an integer copy of `model`, calibrated on at most 1024 sequences of `data`.

    Args:
        model: The float classifier; not changed.
        config: Widths of all operators.
        data: Training sequences.
        on_batch: Called after every batch; there are at most 8.
    """
    quantized = convert_model(model, config)
    assert isinstance(quantized, SequenceClassifier)

    def forward(module: torch.nn.Module, batch: Sequences) -> None:
        module(batch.features, batch.lengths)
        on_batch()

    chosen = data.spread(CALIBRATION_SEQUENCES)
    batches = chosen.batches(-(-len(chosen) // CALIBRATION_BATCHES))
    calibrate_model(quantized, batches, forward_fn=forward, progress=False)
    return quantized


def rows_of(
    model: SequenceClassifier, quantized: Mapping[str, SequenceClassifier], data: Sequences
) -> list[Row]:
    """Return the rows of the float classifier and of its quantized versions, on `data`."""

    def accuracy(version: torch.nn.Module) -> float:
        return (predict(version, data) == data.labels).double().mean().item()

    def forward(version: torch.nn.Module, batch: Sequences) -> Tensor:
        scores: Tensor = version(batch.features, batch.lengths)
        return scores

    batches = data.batches(BATCH_SIZE)
    found = compare(model, quantized, batches, accuracy, forward_fn=forward, progress=False)
    return [
        Row(
            each.name,
            accuracy=each.metric or 0.0,
            agreement=each.agreement.get("output", 1.0),
            weight_bytes=each.bytes.files,
            sqnr=_sqnr(quantized_gru(quantized[each.name]), data.spread(SQNR_SEQUENCES))
            if each.name in quantized
            else {},
        )
        for each in found.rows
    ]


def quantized_gru(model: SequenceClassifier) -> QuantGRU:
    """Return the GRU of a converted classifier."""
    assert isinstance(model.gru, QuantGRU)
    return model.gru


def _sqnr(gru: QuantGRU, data: Sequences) -> dict[str, float]:
    x = pack_padded_sequence(data.features, data.lengths, batch_first=True, enforce_sorted=False)
    # With one layer and direction the suffix carries no information.
    return {name.removesuffix("_l0"): value for name, value in operator_sqnr(gru, x).items()}
