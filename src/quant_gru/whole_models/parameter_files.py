"""The parameter files of all GRUs of a model, in one folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import torch

from quant_gru.config.files import name_of
from quant_gru.errors import CalibrationError, ConfigError, ParameterError
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.convert import expect_grus, find_grus

Model = TypeVar("Model", bound=torch.nn.Module)


def export_model_params(model: torch.nn.Module, folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Write a parameter file of each QuantGRU of a model; no weights.

    Args:
        model: A model whose QuantGRUs are all calibrated.
        folder: Where to write `<module name>.json`, or `model.json` if the model is a QuantGRU. It
            is created if it does not exist.

    Returns:
        Module name -> path of its file, as of `QuantGRU.export_quant_params`.

    Raises:
        CalibrationError: There is no QuantGRU, or one has no scales; nothing is written then.
        ConfigError: The folder or a file cannot be written.

    Example:
        >>> sorted(export_model_params(quantized, "params"))
        ['encoder.gru', 'head.gru']
    """
    grus = _grus(model)
    for name, gru in grus.items():
        try:
            gru._finalized()
        except CalibrationError as error:
            raise CalibrationError(f"{error} (module {name!r})") from None
    paths = _paths(grus, folder)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"Expected a folder that can be made, got {error.strerror} (folder '{folder}')"
        ) from error
    for name, gru in grus.items():
        gru.export_quant_params(paths[name])
    return paths


def load_model_params(model: Model, folder: str | os.PathLike[str]) -> Model:
    """Load the result of `export_model_params`, and switch the GRUs on.

    The same weights then give the same codes. No calibration is needed.

    Args:
        model: A model with QuantGRUs of the same names and sizes, such as the result of
            `convert_model`.
        folder: The folder of the files.

    Returns:
        `model`, with scales and `use_quantization` True (False if a configuration has
        `disable_quantization`).

    Raises:
        CalibrationError: There is no QuantGRU.
        ParameterError: A GRU has no file, a file no GRU, or one cannot be read or does not fit;
            nothing has changed then.

    Example:
        >>> files = export_model_params(quantized, "params")
        >>> other = load_model_params(convert_model(model, "int8_wide"), "params")
        >>> torch.equal(other(x), quantized(x))
        True
    """
    grus = _grus(model)
    paths = _paths(grus, folder)
    for name, path in paths.items():
        if not path.exists():
            raise ParameterError(f"Expected a parameter file of {name!r}, got none at '{path}'")
    known = set(paths.values())
    for path in sorted(Path(folder).glob("*.json")):
        if path not in known:
            raise ParameterError(
                f"Expected every file to belong to a QuantGRU of the model, got {path.name!r}; "
                f"the model has {', '.join(map(repr, grus))}"
            )
    before = [(gru, gru._state.copy()) for gru in grus.values()]
    try:
        for name, gru in grus.items():
            gru.load_quant_params(paths[name])
    except BaseException:
        for gru, state in before:
            gru._state = state
            gru._write_logarithms()
            gru._float_unexpected = ""
        raise
    for gru in grus.values():
        gru._float_unexpected = ""
        gru.use_quantization = not gru.config.disable_quantization
    return model


def _grus(model: torch.nn.Module) -> dict[str, QuantGRU]:
    grus = find_grus(model)
    expect_grus(grus, model, CalibrationError)
    return grus


def _paths(grus: dict[str, QuantGRU], folder: str | os.PathLike[str]) -> dict[str, Path]:
    """Return the file of each GRU; characters that are special in paths are quoted."""
    parent = Path(name_of(folder))
    return {name: parent / f"{quote(name, safe=' ') or 'model'}.json" for name in grus}
