"""A float model beside its quantized versions: outputs, a metric, bytes and times."""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quant_gru.analysis.outputs import expect_tensors, named_tensors
from quant_gru.analysis.sqnr import as_json, decibels, energies, text_of
from quant_gru.analysis.tables import percent, text_table
from quant_gru.calibration.batches import as_batches, eval_mode, run_batch, with_progress
from quant_gru.config.shown import html_table
from quant_gru.errors import (
    CalibrationError,
    QuantGRUError,
    QuantGRUWarning,
    caller_stacklevel,
)
from quant_gru.interchange.c.cell import cell_bytes
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU

_FLOAT = "float"
_TIMED = 7
Forward = Callable[[torch.nn.Module, Any], Any]


@dataclass(frozen=True)
class Bytes:
    """What a model takes.

    Attributes:
        weights: Weights and biases of its GRUs in files, with multipliers and shifts.
        tables: Tables of sigmoid and tanh and the scales of activations in files.
        files: Its GRUs in files: parameters in float; what `FrozenQuantGRU.save` writes, tables and
            document included, in integers.
        flash: Constants of its GRUs in C source, `CSource.flash_bytes`; parameters in float.
        others: Parameters and buffers of all other layers.
    """

    weights: int
    tables: int
    files: int
    flash: int
    others: int


@dataclass(frozen=True)
class Compared:
    """One model.

    Attributes:
        name: Its name; 'float' is the first one.
        metric: The metric; None without one.
        agreement: Name of an output with at least two values in its last dimension -> share of
            positions whose largest value is at the same place as in float, 0..1.
        sqnr: Name of an output -> signal over noise in dB against float.
        bytes: What it takes.
        seconds: The shortest time of the first batch.
    """

    name: str
    metric: float | None
    agreement: dict[str, float]
    sqnr: dict[str, float]
    bytes: Bytes
    seconds: float


@dataclass(frozen=True)
class Comparison:
    """All models; `print` it, or let a notebook show it.

    Attributes:
        rows: The float model, then the quantized ones.
    """

    rows: tuple[Compared, ...]

    def __str__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return the table in HTML."""
        return html_table(*self._table())

    def to_json(self) -> str:
        """Return all figures as JSON; decibels that are not finite are text."""
        rows = [asdict(row) for row in self.rows]
        for row in rows:
            row["sqnr"] = {name: as_json(value) for name, value in row["sqnr"].items()}
        return json.dumps(rows, indent=2)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        first = self.rows[0]
        has_metric = first.metric is not None
        agreed = list(dict.fromkeys(name for row in self.rows for name in row.agreement))
        outputs = list(dict.fromkeys(name for row in self.rows for name in row.sqnr))
        titles = ["model", *["metric"] * has_metric]
        titles += [f"agreement{_of(name, agreed)}" for name in agreed]
        titles += [f"dB{_of(name, outputs)}" for name in outputs]
        titles += ["weights", "tables", "GRUs in files", "of float", "flash", "ms"]
        cells = []
        for row in self.rows:
            size = row.bytes
            texts = [row.name, *([] if row.metric is None else [f"{row.metric:.4g}"])]
            texts += [percent(row.agreement.get(name)) for name in agreed]
            texts += [text_of(row.sqnr[name]) if name in row.sqnr else "" for name in outputs]
            texts += [f"{size.weights:,}", f"{size.tables:,}", f"{size.files:,}"]
            texts += [percent(size.files / max(first.bytes.files, 1)), f"{size.flash:,}"]
            texts += [f"{1000 * row.seconds:.3g}"]
            cells.append(texts)
        return titles, cells


def compare(
    model: torch.nn.Module,
    quantized: torch.nn.Module | Mapping[str, torch.nn.Module],
    batches: Iterable[Any],
    metric: Callable[[torch.nn.Module], float] | None = None,
    *,
    forward_fn: Forward | None = None,
    progress: bool = True,
) -> Comparison:
    """Run a float model and quantized versions of it on the same batches.

    Models run in eval mode, which is restored, and without gradients. Outputs are compared batch by
    batch, so memory is bounded.

    Args:
        model: The float model.
        quantized: A model from `convert_model` and `calibrate_model` or from `freeze_model`, or
            several by name.
        batches: As for `calibrate_model`; data that calibration did not see.
        metric: metric(model) -> a number, such as the accuracy on a test set.
        forward_fn: `forward_fn(model, batch)` runs a batch and returns the outputs.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        Metric, agreement, decibels, bytes and time of each model; `print` it.

    Raises:
        CalibrationError: There is no batch, or one is of an unknown kind.
        QuantGRUError: Outputs have other names or shapes than in float, or none is floating point.

    Example:
        >>> print(compare(model, {"int8_wide": quantized}, batches))  # doctest: +ELLIPSIS
        model ...
    """
    if not isinstance(model, torch.nn.Module):
        raise QuantGRUError(
            f"Expected the float model first, got {type(model).__name__}; call "
            "compare(model, quantized, batches)"
        )
    others = dict(quantized) if isinstance(quantized, Mapping) else {"quantized": quantized}
    if _FLOAT in others:
        raise QuantGRUError(f"Expected other names than {_FLOAT!r}, got {list(others)}")
    _warn_of_integers(model)
    models = {_FLOAT: model, **others}
    for name, each in others.items():
        _warn_of_float(name, each)
    energy: dict[str, dict[str, list[float]]] = {name: {} for name in others}
    agreed: dict[str, dict[str, list[int]]] = {name: {} for name in others}
    first: Any = None
    with eval_mode(*models.values()), torch.no_grad():
        for count, batch in enumerate(with_progress(as_batches(batches), "comparing", progress)):
            first = batch if count == 0 else first
            real = _outputs(run_batch(model, batch, forward_fn))
            for name, each in others.items():
                found = _outputs(run_batch(each, batch, forward_fn))
                _expect_alike(name, real, found)
                for output, value in found.items():
                    sums = energy[name].setdefault(output, [0.0, 0.0])
                    for i, part in enumerate(energies(real[output], value)):
                        sums[i] += part
                    if value.dim() and value.shape[-1] > 1:
                        same = value.argmax(-1) == real[output].argmax(-1)
                        counts = agreed[name].setdefault(output, [0, 0])
                        counts[0] += int(same.sum())
                        counts[1] += same.numel()
        if first is None:
            raise CalibrationError("Expected at least one batch, got none")
        seconds = _seconds(models, first, forward_fn)
        measured = {
            name: None if metric is None else float(metric(m)) for name, m in models.items()
        }
    rows = [Compared(_FLOAT, measured[_FLOAT], {}, {}, bytes_of(model), seconds[_FLOAT])]
    for name, each in others.items():
        rows.append(
            Compared(
                name,
                measured[name],
                {output: a / max(n, 1) for output, (a, n) in agreed[name].items()},
                {output: decibels(s, n) for output, (s, n) in energy[name].items()},
                bytes_of(each),
                seconds[name],
            )
        )
    return Comparison(tuple(rows))


def bytes_of(model: torch.nn.Module) -> Bytes:
    """Return what a model takes, with its quantized GRUs as `freeze` stores them."""
    weights = tables = files = flash = 0
    inside: set[int] = set()
    for module in model.modules():
        frozen = _frozen(module)
        if frozen is None and not isinstance(module, (torch.nn.GRU, torch.nn.GRUCell)):
            continue
        inside.update(id(each) for each in (*module.parameters(), *module.buffers()))
        if frozen is None:
            size = sum(each.nbytes for each in module.parameters())
            weights, files, flash = weights + size, files + size, flash + size
            continue
        for part in frozen._parts():
            weights += part.bytes if part.is_of_weights else 0
            tables += part.bytes if part.name == "columns" else 0
            files += part.bytes
        cells = (cell for layer in frozen._plan().cells for cell in layer)
        flash += sum(sum(cell_bytes(cell).values()) for cell in cells)
    rest = (*model.parameters(), *model.buffers())
    others = {id(each): each.nbytes for each in rest if id(each) not in inside}
    return Bytes(weights, tables, files, flash, sum(others.values()))


def _frozen(module: torch.nn.Module) -> FrozenQuantGRU | None:
    if isinstance(module, QuantGRU) and module.use_quantization and module.is_calibrated():
        return module.freeze()
    return module if isinstance(module, FrozenQuantGRU) else None


def _warn_of_integers(model: torch.nn.Module) -> None:
    """Warn about GRUs of the float model that compute in integers."""
    found = [
        path or "the model"
        for path, gru in model.named_modules()
        if isinstance(gru, FrozenQuantGRU) or (isinstance(gru, QuantGRU) and gru.use_quantization)
    ]
    if found:
        warnings.warn(
            "the model that the others are compared with computes in integers in "
            f"{', '.join(map(repr, found))}; pass the float model first",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _warn_of_float(name: str, model: torch.nn.Module) -> None:
    """Warn about GRUs of a quantized model that compute in floating point."""
    left = {
        path or "the model": gru
        for path, gru in model.named_modules()
        if isinstance(gru, QuantGRU) and not gru.use_quantization
    }
    if left:
        unknown = any(not gru.is_calibrated() for gru in left.values())
        cure = "call calibrate_model(model, batches)" if unknown else "set use_quantization to True"
        warnings.warn(
            f"model {name!r} computes in floating point in {', '.join(map(repr, left))}; {cure}",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )


def _outputs(value: Any) -> dict[str, Tensor]:
    """Return the floating-point tensors in the output of a model, by name."""
    found = dict(named_tensors(value))
    expect_tensors(found)
    return found


def _expect_alike(name: str, real: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    wanted, got = ({key: tuple(v.shape) for key, v in each.items()} for each in (real, found))
    if wanted != got:
        raise QuantGRUError(f"Expected the outputs of float, {wanted}, got {got} (model {name!r})")


def _seconds(
    models: Mapping[str, torch.nn.Module], batch: Any, forward_fn: Forward | None
) -> dict[str, float]:
    """Return the shortest time of a batch; models take turns."""
    found = dict.fromkeys(models, math.inf)
    for _ in range(_TIMED):
        for name, model in models.items():
            start = time.perf_counter()
            value = run_batch(model, batch, forward_fn)
            for each in dict(named_tensors(value)).values():
                if each.is_cuda:
                    torch.cuda.synchronize(each.device)
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def _of(name: str, names: Sequence[str]) -> str:
    return "" if len(names) == 1 else f" of {name}"
