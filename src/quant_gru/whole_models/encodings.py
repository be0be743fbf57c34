"""AIMET encodings of all GRUs of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quant_gru.config.files import name_of
from quant_gru.interchange.aimet import encodings
from quant_gru.interchange.aimet.versions import check_version
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.convert import expect_grus, find_grus


def export_encodings(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    version: str = "1.0.0",
    *,
    onnx: Any = None,
    nodes: Mapping[str, str | Sequence[str]] | None = None,
) -> None:
    """Write the encodings of every QuantGRU of a model to one file; see QuantGRU.export_encodings.

    Each GRU has a parameter file beside it: 'model.encodings' comes with
    'model.encoder.gru.quant_params.json' for the module 'encoder.gru'.

    Args:
        model: A model with calibrated QuantGRUs.
        path: The file of encodings.
        version: '0.6.1', '1.0.0' or '2.0.0'.
        onnx: The path of an ONNX model, or an `onnx.ModelProto`, whose GRU nodes give the names of
            tensors. None for names like those of the model's parameters
            ('encoder.gru.weight_ih_l0').
        nodes: Name of the module -> names of its GRU nodes, lowest layer first; None to find them
            by their weights.

    Raises:
        CalibrationError: A GRU has no scales.
        QuantGRUError: There is no QuantGRU, the version is unknown, the ONNX model does not fit, or
            a file cannot be written.

    Example:
        >>> tied = QuantConfig.int8_wide().replace_globals(tie_x_and_h=True)
        >>> quantized = calibrate_model(convert_model(model, tied), batches)
        >>> export_encodings(quantized, "model.encodings")
    """
    grus = _grus(model)
    check_version(version)
    for gru in grus.values():
        gru._finalized()
    given = {name: gru._calibrated() for name, gru in grus.items()}
    encodings.write(given, path, version, onnx, nodes)


def load_encodings(
    model: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    onnx: Any = None,
    nodes: Mapping[str, str | Sequence[str]] | None = None,
) -> None:
    """Take scales of every QuantGRU of a model from encodings; see QuantGRU.load_encodings.

    Args:
        model: A model with calibrated QuantGRUs.
        path: A file of version 0.6.1, 1.0.0, 2.0.0 or 2.1.0.
        onnx: As for `export_encodings`.
        nodes: As for `export_encodings`.

    Raises:
        CalibrationError: A GRU has no scales.
        ParameterError: The file is malformed, or an encoding does not fit; nothing has changed
            then.

    Example:
        >>> tied = QuantConfig.int8_wide().replace_globals(tie_x_and_h=True)
        >>> quantized = calibrate_model(convert_model(model, tied), batches)
        >>> export_encodings(quantized, "model.encodings")
        >>> load_encodings(quantized, "model.encodings")
    """
    grus = _grus(model)
    given = {name: gru._calibrated() for name, gru in grus.items()}
    for name, found in encodings.read(given, path, onnx, nodes).items():
        grus[name]._take(found, f"file {name_of(path)!r}")


def _grus(model: torch.nn.Module) -> dict[str, QuantGRU]:
    found = find_grus(model)
    expect_grus(found, model)
    return found
