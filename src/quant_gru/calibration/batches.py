"""Running a model on batches of data loaders."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from quant_gru.errors import CalibrationError, caller_stacklevel, note_once

_logger = logging.getLogger(__name__)
_SIMILAR = 0.8
# parts of names of arguments that say which steps of a row are data
_ABOUT_ROWS = ("len", "mask", "pad")


def to_device(value: Tensor | PackedSequence, device: torch.device) -> Tensor | PackedSequence:
    """Return `value` on `device`."""
    return value.to(device=device)  # type: ignore[call-arg]


@contextmanager
def eval_mode(*models: torch.nn.Module) -> Iterator[None]:
    """Put models into eval mode, and restore the mode of each module, also after errors."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def is_batch(data: Any) -> bool:
    """Return whether data is one batch and not an iterable of them."""
    return isinstance(data, (Tensor, PackedSequence, Mapping))


def as_batches(data: Any) -> Iterable[Any]:
    """Return data as an iterable of batches; a tensor, a PackedSequence or a dict is one."""
    return [data] if is_batch(data) else data


def batches_of(data: Any) -> list[Any]:
    """Return `as_batches` as a list.

    Raises:
        CalibrationError: There is no batch.
    """
    batches = list(as_batches(data))
    if not batches:
        raise CalibrationError("Expected at least one batch, got none")
    return batches


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
        CalibrationError: The batch has an unsupported type, or forward requires other inputs.
    """
    parameter = next(model.parameters(), None)
    batch = _to_device(batch, None if parameter is None else parameter.device)
    if forward_fn is not None:
        return forward_fn(model, batch)
    if isinstance(batch, Mapping):
        return model(**_keywords(model, batch))
    if isinstance(batch, (torch.Tensor, PackedSequence)):
        return model(_only_input(model, batch))
    if isinstance(batch, (tuple, list)) and batch:
        _note_of_dropped_items(model, len(batch))
        return model(_only_input(model, batch[0]))
    got = type(batch).__name__
    array = "torch.from_numpy(batch) or " if got == "ndarray" else ""
    raise CalibrationError(
        "Expected a batch to be a tensor, a PackedSequence, a tuple, a list or a dict, got "
        f"{got}; pass {array}forward_fn(model, batch)"
    )


def _keywords(model: torch.nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a dict that a model's forward accepts; raise if one is missing."""
    accepted = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    given = {key: value for key, value in batch.items() if takes_all or key in accepted}
    missing = [name for name in _required(model) if name not in given]
    if missing:
        raise CalibrationError(
            f"Expected a dict with {', '.join(map(repr, missing))}, which forward of "
            f"{type(model).__name__} requires, got one with "
            f"{', '.join(map(repr, batch)) or 'nothing'}; pass forward_fn(model, batch)"
        )
    for key in batch:
        near = difflib.get_close_matches(key, accepted.keys() - given.keys(), 1, _SIMILAR)
        if key not in given and near:
            note_once(
                f"a batch has {key!r}, which forward of {type(model).__name__} does not take; did "
                f"you mean {near[0]!r}?",
                caller_stacklevel(),
            )
    return given


def _note_of_dropped_items(model: torch.nn.Module, items: int) -> None:
    """Note that a forward is called without its lengths or mask, if the batch may have them."""
    about_rows = [
        repr(name)
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.default is not p.empty and any(part in name.lower() for part in _ABOUT_ROWS)
    ]
    if items > 1 and about_rows:
        note_once(
            f"forward of {type(model).__name__} is called with the first item of each batch, so "
            f"that padding counts as data: {', '.join(about_rows)} keeps its default. If inference "
            "gives it, pass dicts or forward_fn, such as "
            "forward_fn=lambda model, batch: model(*batch[:2])",
            caller_stacklevel(),
        )


def _only_input(model: torch.nn.Module, value: Any) -> Any:
    """Return `value`; raise if the model's forward requires further inputs."""
    required = _required(model)
    if len(required) > 1:
        raise CalibrationError(
            f"Expected a model of one input, got {type(model).__name__}, whose forward requires "
            f"{', '.join(required)}; pass forward_fn, such as "
            "forward_fn=lambda model, batch: model(*batch), or batches that are dicts"
        )
    return value


def gru_batches(
    data: Any, device: torch.device
) -> Iterator[tuple[Tensor | PackedSequence, Tensor | None]]:
    """Yield the input and initial state of each batch of a GRU.

    Args:
        data: A dict, or an iterable of tensors, PackedSequences, tuples or lists whose first item
            is the input, or dicts with 'input' and optionally 'hx'.
        device: Where to move them.

    Raises:
        CalibrationError: `data` or a batch is of another type, or there is no batch.
    """
    if isinstance(data, Mapping):
        data = [data]
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise CalibrationError(
            "Expected data to be a tensor, a PackedSequence or an iterable of batches, got "
            f"{type(data).__name__}"
        )
    if isinstance(data, (tuple, list)) and len(data) > 1 and isinstance(data[0], Tensor):
        kind = type(data).__name__
        raise CalibrationError(
            f"Expected one batch or an iterable of batches, got a {kind} of tensors, which may be "
            "either: pass data[0] for an (input, target) pair, or iter(data) for several inputs"
        )
    count = 0
    for batch in data:
        yield _gru_batch(_to_device(batch, device))
        count += 1
    if count == 0:
        raise CalibrationError("Expected at least one batch to calibrate with, got none")


def _gru_batch(batch: Any) -> tuple[Tensor | PackedSequence, Tensor | None]:
    if isinstance(batch, Mapping):
        if "input" not in batch:
            raise CalibrationError(
                "Expected a dict with 'input', got one with "
                f"{', '.join(map(repr, batch)) or 'nothing'}"
            )
        return batch["input"], batch.get("hx")
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence) and batch:
        batch = batch[0]
    if not isinstance(batch, Tensor | PackedSequence):
        got = type(batch).__name__
        hint = "; pass torch.from_numpy(data)" if got == "ndarray" else ""
        raise CalibrationError(
            "Expected a batch to be a tensor, a PackedSequence, a tuple, a list or a dict, got "
            f"{got}{hint}"
        )
    return batch, None


def _required(model: torch.nn.Module) -> list[str]:
    """Return the names of the arguments that a model's forward cannot do without."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.default is p.empty and (p.kind in kinds or p.kind is p.KEYWORD_ONLY)
    ]


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
    total = len(batches) if isinstance(batches, Sized) else None
    if not (show and console.is_terminal):
        for number, batch in enumerate(batches, 1):
            _logger.debug("%s: batch %d of %s", text, number, total or "unknown")
            yield batch
        return
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(batches, total=total)
