"""Calibration of whole models."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from quant_gru.calibration.batches import eval_mode, is_batch, run_batch, with_progress
from quant_gru.errors import CalibrationError, QuantGRUWarning, caller_stacklevel
from quant_gru.modules.gru import QuantGRU
from quant_gru.modules.quantization_state import in_several_processes
from quant_gru.whole_models.convert import expect_grus, find_grus
from quant_gru.whole_models.fit_weights import fit_weights as fit
from quant_gru.whole_models.fit_weights import operands

Model = TypeVar("Model", bound=torch.nn.Module)

_logger = logging.getLogger(__name__)


def calibrate_model(
    model: Model,
    batches: Iterable[Any],
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None = None,
    *,
    fit_weights: bool = False,
    progress: bool = True,
) -> Model:
    """Collect statistics of every QuantGRU in a model, create their scales, and switch them on.

    GRUs that have scales keep them. A GRU that the model's forward never reached stays in floating
    point; a warning names it, and a further call calibrates it.

    Args:
        model: A model with QuantGRUs, such as the result of `convert_model`. It runs in eval mode
            and in floating point; its mode is restored.
        batches: Batches of real inputs, such as a DataLoader: tensors, tuples or lists whose first
            item is the input ((x, y) pairs), PackedSequences, or dicts of keyword arguments
            (entries that the model's forward does not accept are dropped). They are moved to the
            model's device.
        forward_fn: `forward_fn(model, batch)` runs a batch, for other kinds of batches and for
            models of several inputs.
        fit_weights: Whether to replace weight matrices of up to 8 bits, and their biases, by ones
            whose codes change the products on this data least, in place: of 4 bits they lose much
            less. The float mode then computes with them, too. The model runs twice on the batches,
            which are kept in a list.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        `model`, with scales and `use_quantization` True (False if its configuration has
        `disable_quantization`).

    Raises:
        CalibrationError: There is no QuantGRU without scales or no batch, no GRU received a batch,
            or statistics are invalid. Nothing has changed then.

    Example:
        >>> quantized = convert_model(model, "int8_wide")
        >>> quantized = calibrate_model(quantized, batches)
    """
    grus = _without_scales(model)
    if is_batch(batches):
        raise CalibrationError(
            f"Expected batches to be an iterable of batches, got one {type(batches).__name__}; "
            "pass [batch]"
        )
    if fit_weights:
        batches = list(batches)
    before = [(gru, gru.calibrating, gru._state.copy()) for gru in grus.values()]
    try:
        collect(model, grus, batches, forward_fn, progress)
        found = reached(grus)
        calibrated = {name: gru for name, gru in grus.items() if name in found}
        finalize_all(calibrated)
        if fit_weights:
            for gru in calibrated.values():
                gru.calibrating = False
            fit(calibrated, operands(model, calibrated, batches, forward_fn, progress))
    except BaseException:
        for gru, _, state in before:
            gru._state = state
        raise
    finally:
        for gru, calibrating, _ in before:
            gru.calibrating = calibrating
    for name in found:
        grus[name].use_quantization = not grus[name].config.disable_quantization
    return model


def _without_scales(model: torch.nn.Module) -> dict[str, QuantGRU]:
    """Return the QuantGRUs to calibrate, by name."""
    grus = find_grus(model)
    expect_grus(grus, model, CalibrationError)
    found = {name: gru for name, gru in grus.items() if not gru.is_calibrated()}
    if not found:
        name = next(iter(grus))
        raise CalibrationError(
            f"Expected GRUs without scales, got a calibrated one ({name or 'the model'!r}); "
            "call its reset_calibration() first"
        )
    return found


def reached(grus: Mapping[str, QuantGRU]) -> set[str]:
    """Return the names of the GRUs with statistics in any process; warn about the others."""
    found = {name for name, gru in grus.items() if gru._state.has_statistics}
    if in_several_processes():
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, found)
        found = set().union(*everywhere)
    unreached = ", ".join(repr(name) for name in grus if name not in found)
    if not found:
        raise CalibrationError(
            f"Expected batches to reach a GRU, got none: forward never reached {unreached}"
        )
    if unreached:
        warnings.warn(
            f"forward never reached {unreached}: no scales, stays in floating point; pass batches "
            "that reach it to a further calibrate_model",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )
    return found


def collect(
    model: torch.nn.Module,
    grus: Mapping[str, QuantGRU],
    batches: Iterable[Any],
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None,
    progress: bool,
) -> None:
    """Run all batches through the float model while `grus` collect statistics."""
    calibrated = [gru for name, gru in find_grus(model).items() if name not in grus]
    quantized = [(gru, gru.use_quantization) for gru in calibrated]
    count = 0
    try:
        for gru in calibrated:
            gru.use_quantization = False
        for gru in grus.values():
            gru.calibrating = True
        with eval_mode(model), torch.no_grad():
            for batch in with_progress(batches, "calibrating", progress):
                run_batch(model, batch, forward_fn)
                count += 1
    finally:
        for gru, on in quantized:
            gru.use_quantization = on
    _logger.info("%d batches observed by %s", count, ", ".join(map(repr, grus)))
    if count == 0:
        raise CalibrationError("Expected at least one batch to calibrate with, got none")


def finalize_all(grus: Mapping[str, QuantGRU], refine: bool = False, kind: str = "module") -> None:
    """Make the scales of GRUs; an error names the GRU, with `kind` before its name."""
    for name, gru in grus.items():
        try:
            gru.finalize_calibration(refine=refine)
        except CalibrationError as error:
            raise CalibrationError(f"{error} ({kind} {name!r})") from None
