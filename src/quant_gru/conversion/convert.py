"""Conversion and calibration of whole models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence

from quant_gru._errors import CalibrationError, ConfigError, QuantGRUError
from quant_gru.calibration.batches import run_batch, with_progress
from quant_gru.config import QuantConfig, QuantGRUWarning
from quant_gru.modules.gru import QuantGRU

Model = TypeVar("Model", bound=torch.nn.Module)


def convert_model(model: Model, config: QuantConfig | None = None, inplace: bool = False) -> Model:
    """Replace every nn.GRU of a model by a QuantGRU with the same parameters.

    The model's results do not change: quantization is off until `calibrate_model`. A module that is
    used twice is converted once. Hooks, names and the training mode are preserved. Existing
    QuantGRUs are not changed, regardless of `config`.

    Args:
        model: Any module, including an nn.GRU.
        config: Configuration of all GRUs; None for the default.
        inplace: True to change `model` itself, with new GRUs that share its parameters; False to
            change a deep copy and leave `model` unchanged.

    Returns:
        The converted model.

    Raises:
        QuantGRUError: The model has no nn.GRU, or cannot be copied.
    """
    if config is not None and not isinstance(config, QuantConfig):
        raise ConfigError(
            f"Expected config to be a QuantConfig or None, got {type(config).__name__}"
        )
    if not any(isinstance(module, torch.nn.GRU) for module in model.modules()):
        raise QuantGRUError(
            f"Expected a model with at least one torch.nn.GRU, got none in {type(model).__name__}"
        )
    model = model if inplace else _copied(model)
    converted: dict[torch.nn.Module, QuantGRU] = {}
    for name, module in model.named_modules():
        if type(module) is torch.nn.GRU:
            converted[module] = _convert(module, config)
        elif isinstance(module, torch.nn.GRU) and not isinstance(module, QuantGRU):
            why = "a subclass of nn.GRU with code of its own"
            if is_parametrized(module):
                why = (
                    "a GRU whose weights are parametrized (convert it first, or call "
                    "torch.nn.utils.parametrize.remove_parametrizations)"
                )
            warnings.warn(
                f"{name or 'the model'} is a {type(module).__name__}, {why}: left as it is",
                QuantGRUWarning,
                stacklevel=2,
            )
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in converted:
                parent._modules[name] = converted[child]
    return cast(Model, converted.get(model, model))


def _copied(model: Model) -> Model:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise QuantGRUError(
            f"Expected a model that can be copied, got {type(error).__name__} ({error}); weights "
            "that are computed from others, as those of torch.nn.utils.prune are until "
            "prune.remove, cannot: give inplace=True"
        ) from error


def _convert(gru: torch.nn.GRU, config: QuantConfig | None) -> QuantGRU:
    """Return a QuantGRU with everything that `gru` has: parameters, hooks, mode."""
    new = QuantGRU.__new__(QuantGRU)
    new.__dict__.update(gru.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = dict(gru.__dict__[name])
    new._flat_weights = list(gru._flat_weights)
    new._init_quantization(config, use_quantization=False)
    return new


def calibrate_model(
    model: Model,
    batches: Iterable[Any],
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
    *,
    progress: bool = True,
) -> Model:
    """Collect statistics of every QuantGRU in a model, create their scales, and switch them on.

    Args:
        model: A model with QuantGRUs, such as the result of `convert_model`. It runs in eval mode
            and in floating point; its mode is restored.
        batches: Batches of real inputs: tensors, tuples or lists whose first item is the input
            ((x, y) pairs), PackedSequences, or dicts of keyword arguments (entries that the
            model's forward does not accept are dropped). They are moved to the model's device.
        forward_fn: `forward_fn(model, batch)` runs a batch, for other kinds of batches.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        `model`, with scales and `use_quantization` True (False if its configuration has
        `disable_quantization`).

    Raises:
        CalibrationError: There is no QuantGRU or no batch, a GRU received no batch, or its
            statistics are invalid.
    """
    grus = {name: m for name, m in model.named_modules() if isinstance(m, QuantGRU)}
    if not grus:
        raise CalibrationError(
            f"Expected a model with at least one QuantGRU, got none in {type(model).__name__}; "
            "call convert_model(model) first"
        )
    for name, gru in grus.items():
        if gru.is_calibrated():
            raise CalibrationError(
                f"Expected GRUs without scales, got a calibrated one ({name or 'the model'!r}); "
                "call its reset_calibration() first"
            )
    if isinstance(batches, (torch.Tensor, PackedSequence, Mapping)):
        raise CalibrationError(
            f"Expected batches to be an iterable of batches, got one {type(batches).__name__}; "
            "pass [batch]"
        )
    before = [(gru, gru.calibrating, gru._state.copy()) for gru in grus.values()]
    try:
        _collect(model, grus, batches, forward_fn, progress)
        _finalize(grus)
    except BaseException:
        for gru, _, state in before:
            gru._state = state
        raise
    finally:
        for gru, calibrating, _ in before:
            gru.calibrating = calibrating
    for gru in grus.values():
        gru.use_quantization = not gru.config.disable_quantization
    return model


def _collect(
    model: torch.nn.Module,
    grus: Mapping[str, QuantGRU],
    batches: Iterable[Any],
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None,
    progress: bool,
) -> None:
    """Run all batches through the float model while every QuantGRU collects statistics."""
    modes = [(module, module.training) for module in model.modules()]
    count = 0
    try:
        model.eval()
        for gru in grus.values():
            gru.calibrating = True
        with torch.no_grad():
            for batch in with_progress(batches, "calibrating", progress):
                run_batch(model, batch, forward_fn)
                count += 1
    finally:
        for module, training in modes:
            module.training = training
    if count == 0:
        raise CalibrationError("Expected at least one batch to calibrate with, got none")


def _finalize(grus: Mapping[str, QuantGRU]) -> None:
    for name, gru in grus.items():
        try:
            gru.finalize_calibration()
        except CalibrationError as error:
            raise CalibrationError(f"{error} (module {name!r})") from None
