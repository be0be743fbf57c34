"""Running a model on batches of data loaders."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru._errors import CalibrationError


def to_device(value: Tensor | PackedSequence, device: torch.device) -> Tensor | PackedSequence:
    """Return `value` on `device`."""
    return value.to(device=device)  # type: ignore[call-arg]


def run_batch(
    model: torch.nn.Module,
    batch: Any,
    forward_fn: Callable[[torch.nn.Module, Any], Any] | None,
) -> Any:
    """Run a model on a batch, which is moved to the model's device.

    Args:
        model: Any model.
        batch: A tensor, a PackedSequence, a tuple or list whose first item is the input, or a dict
            of keyword arguments; entries that the model's forward does not accept are dropped.
        forward_fn: If given, `forward_fn(model, batch)` runs the batch instead.

    Raises:
        CalibrationError: The batch has an unsupported type.
    """
    parameter = next(model.parameters(), None)
    batch = _to_device(batch, None if parameter is None else parameter.device)
    if forward_fn is not None:
        return forward_fn(model, batch)
    if isinstance(batch, (torch.Tensor, PackedSequence)):
        return model(batch)
    if isinstance(batch, Mapping):
        accepted = inspect.signature(model.forward).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        return model(**{key: value for key, value in batch.items() if takes_all or key in accepted})
    if isinstance(batch, (tuple, list)) and batch:
        return model(batch[0])
    raise CalibrationError(
        "Expected a batch to be a tensor, a PackedSequence, a tuple, a list or a dict, got "
        f"{type(batch).__name__}; pass forward_fn(model, batch)"
    )


def _to_device(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, (torch.Tensor, PackedSequence)):
        return to_device(value, device)
    if isinstance(value, Mapping):
        return {key: _to_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_to_device(item, device) for item in value))
    if type(value) in (tuple, list):
        return type(value)(_to_device(item, device) for item in value)
    return value


def with_progress(batches: Iterable[Any], text: str, show: bool) -> Iterable[Any]:
    """Yield the same batches, with a progress bar on a terminal."""
    console = Console(stderr=True)
    if not (show and console.is_terminal):
        yield from batches
        return
    total = len(batches) if isinstance(batches, Sized) else None
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(batches, total=total)
