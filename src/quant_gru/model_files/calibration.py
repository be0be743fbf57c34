"""Calibration of the GRUs of a model that another tool runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quant_gru.calibration.batches import with_progress
from quant_gru.errors import CalibrationError
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.calibrate import finalize_all


def calibrate_all(
    grus: Mapping[str, QuantGRU],
    run: Callable[[Any], object],
    batches: Iterable[Any],
    refine: bool,
    progress: bool,
    kind: str,
    unit: str,
) -> Any:
    """Calibrate GRUs with what reaches them in float, and put them into integers.

    Args:
        grus: The GRUs by name; one may have several names.
        run: Runs the model on a batch.
        batches: The batches.
        refine: As for `QuantGRU.finalize_calibration`.
        progress: Whether to show progress bars (only on a terminal).
        kind: What names are of, for errors.
        unit: What a batch is called, for errors.

    Returns:
        The first batch.

    Raises:
        CalibrationError: There is no batch, or statistics of a GRU are invalid.
    """
    first = None
    try:
        for gru in grus.values():
            gru.calibrating = True
        for batch in with_progress(batches, "calibrating", progress):
            first = batch if first is None else first
            run(batch)
    finally:
        for gru in grus.values():
            gru.calibrating = False
    if first is None:
        raise CalibrationError(f"Expected at least one {unit} to calibrate with, got none")
    for each in with_progress(list(grus.items()), "choosing scales", progress):
        finalize_all(dict([each]), refine, kind)
    for gru in grus.values():
        gru.use_quantization = True
    return first
