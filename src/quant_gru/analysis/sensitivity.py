"""What each operator of each cell costs at each width, by the model's output and by a metric."""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quant_gru.analysis.figures import Plotted, heat_figure
from quant_gru.analysis.sqnr import as_json, decibels, text_of
from quant_gru.analysis.tables import text_table
from quant_gru.analysis.trials import BASE, Forward, Place, Trials, base_for
from quant_gru.calibration.batches import with_progress
from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.modules.quantization_state import in_several_processes
from quant_gru.whole_models.selection import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metric = Callable[[torch.nn.Module], Any]
_FORMAT = "quant-gru sensitivity 1"

# A change of a metric shows if it is larger than this many standard errors, or steps.
_CLEAR = 2.0


@dataclass(frozen=True)
class Cost:
    """One operator of one layer and direction at one width, all others being finer.

    Attributes:
        place: The operator.
        bits: Its width.
        noise: Summed squared error of the outputs that it causes.
        sqnr: The same as signal over noise of the outputs, in dB.
        metric: What it adds to the metric; None without one.
        is_clear: Whether the change of the metric is larger than what its samples show by chance.
    """

    place: Place
    bits: int
    noise: float
    sqnr: float
    metric: float | None = None
    is_clear: bool = True


@dataclass(frozen=True)
class Sensitivity(Plotted):
    """Costs of all operators; `print` it, or let a notebook show it.

    Attributes:
        costs: Operator by operator, in the order of the widths.
        signal: Summed squares of the float outputs.
        metric: The metric with all operators at 16 bits; None without one.
        float_metric: The metric of the float model.
        warning: Why the metric says little; '' if it does not.
    """

    costs: tuple[Cost, ...]
    signal: float
    metric: float | None = None
    float_metric: float | None = None
    warning: str = ""

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that were tried."""
        return tuple(dict.fromkeys(each.bits for each in self.costs))

    def worst(self, bits: int) -> tuple[Cost, ...]:
        """Return the costs at a width, the largest first."""
        found = [each for each in self.costs if each.bits == bits]
        return tuple(sorted(found, key=lambda each: -each.noise))

    def __str__(self) -> str:
        lines = ["dB at the output with one operator at a width and all others finer"]
        lines.append(text_table(self._titles(), self._rows(lambda each: text_of(each.sqnr))))
        if self.metric is not None:
            lines.append(
                f"change of the metric: float {self.float_metric:.6g}, {BASE} bits "
                f"{self.metric:.6g}; in brackets what may be chance"
            )
            lines.append(text_table(self._titles(), self._rows(_change)))
        if self.warning:
            lines.append(self.warning)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return the tables in HTML, with the costs as colours."""
        lines = [_coloured(self._titles(), self._by_place(), lambda each: text_of(each.sqnr))]
        if self.metric is not None:
            lines.append(_coloured(self._titles(), self._by_place(), _change))
        if self.warning:
            lines.append(f"<p>{html.escape(self.warning)}</p>")
        return "\n".join(lines)

    def _figure(self) -> Figure:
        """Draw the decibels as a heat map."""
        rows = self._by_place()
        dB = [[costs[bits].sqnr for bits in self.widths] for costs in rows.values()]
        return heat_figure(list(map(str, rows)), self._titles()[1:], dB)

    def to_json(self) -> str:
        """Return all figures as JSON; decibels that are not finite are text."""
        rows = [
            asdict(each) | {"place": str(each.place), "sqnr": as_json(each.sqnr)}
            for each in self.costs
        ]
        fields = {"signal": self.signal, "metric": self.metric, "float_metric": self.float_metric}
        return json.dumps({**fields, "warning": self.warning, "costs": rows}, indent=2)

    def _titles(self) -> list[str]:
        return ["operator", *(f"{bits} bits" for bits in self.widths)]

    def _by_place(self) -> dict[Place, dict[int, Cost]]:
        found: dict[Place, dict[int, Cost]] = {}
        for each in self.costs:
            found.setdefault(each.place, {})[each.bits] = each
        return found

    def _rows(self, text: Callable[[Cost], str]) -> list[list[str]]:
        return [
            [str(place), *(text(costs[bits]) for bits in self.widths)]
            for place, costs in self._by_place().items()
        ]


def _change(cost: Cost) -> str:
    assert cost.metric is not None
    text = f"{cost.metric:+.3g}"
    return text if cost.is_clear else f"({text})"


def _coloured(
    titles: Sequence[str], rows: Mapping[Place, Mapping[int, Cost]], text: Callable[[Cost], str]
) -> str:
    """Return a table whose cells are the redder the less dB they have: 10 dB and less to 60."""

    def cell(cost: Cost) -> str:
        share = min(max((60 - cost.sqnr) / 50, 0.0), 1.0)
        style = f"background:rgba(217,72,15,{0.6 * share:.2f});text-align:right"
        return f'<td style="{style}">{html.escape(text(cost))}</td>'

    head = "".join(f"<th>{html.escape(each)}</th>" for each in titles)
    body = "".join(
        f"<tr><td>{html.escape(str(place))}</td>{''.join(map(cell, costs.values()))}</tr>"
        for place, costs in rows.items()
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def sensitivity(
    model: torch.nn.Module,
    data: Any,
    metric: Metric | None = None,
    widths: Iterable[int] = (4, 6, 8, 12, 16),
    *,
    calibration: Any = None,
    config: ModelConfig = None,
    forward_fn: Forward | None = None,
    file: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Sensitivity:
    """Measure what each operator of each layer and direction costs at each width.

    One operator at a time gets a width, while all others have 16 bits, or 4 bits more than it from
    13 bits on. What it adds to the error of the model's outputs is its cost. Errors of operators
    are nearly independent, so that costs add up; `allocate_bits` relies on that.

    In several processes (torchrun), each measures a part, with the same data, and all get the whole
    result.

    Args:
        model: A float model, or one with QuantGRUs, calibrated or not, whose configurations then
            give the kinds of the operators. It does not change.
        data: Batches as for `calibrate_model`; a tensor is one batch. They are kept in a list.
        metric: metric(model) -> a number, or one for each sample, which tells more: the result then
            says which changes are more than chance.
        widths: Widths to try, 1..32.
        calibration: Batches that scales are made of; None for `data`.
        config: Kinds of the operators, as for `convert_model`; only for a model without QuantGRUs.
            None for those of 'int16'.
        forward_fn: `forward_fn(model, batch)` runs a batch and returns the outputs.
        file: Where to keep what has been measured. A further call with the same model, data and
            metric goes on from there. Other processes add their number to the name.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        Costs by operator and width; `print` it. GRUs that the data do not reach are left out, and a
        warning names them.

    Raises:
        CalibrationError: There is no batch or no GRU, or statistics are invalid.
        QuantGRUError: `file` is of another model or of other data; a width is no integer in 1..32.

    Example:
        >>> print(sensitivity(model, batches, widths=(4, 8)))  # doctest: +ELLIPSIS
        dB at the output ...
    """
    wanted = tuple(sorted({*widths}))
    trials = Trials(
        model,
        data,
        wanted,
        calibration=calibration,
        config=config,
        forward_fn=forward_fn,
        progress=progress,
    )
    bases = {bits: base_for(bits) for bits in wanted}
    todo: list[Key] = [(None, base) for base in dict.fromkeys((BASE, *bases.values()))]
    todo += [(place, bits) for place in trials.places for bits in wanted]
    kept = _Kept(file, trials, metric is not None)
    found = _measured(trials, todo, bases, metric, kept, progress)
    costs: list[Cost] = []
    base_metric = found[None, BASE][1]
    for place, bits in todo:
        if place is not None:
            noise, values = found[place, bits]
            own = max(noise - found[None, bases[bits]][0], 0.0)
            reference = found[None, bases[bits]][1]
            change, error = _difference(values, reference)
            clear = abs(change) > _CLEAR * error if metric is not None else True
            shown = change if metric is not None else None
            costs.append(Cost(place, bits, own, decibels(trials.signal, own), shown, clear))
    if metric is None:
        return Sensitivity(tuple(costs), trials.signal)
    trials.float_mode()
    real = trials.metric(metric)
    costs, warning = _judged(costs, [values for _, values in found.values()])
    if warning:
        warnings.warn(warning, QuantGRUWarning, stacklevel=caller_stacklevel())
    return Sensitivity(tuple(costs), trials.signal, _mean(base_metric), _mean(real), warning)


Key = tuple[Place | None, int]
Measured = tuple[float, list[float]]


def _measured(
    trials: Trials,
    todo: Sequence[Key],
    bases: Mapping[int, int],
    metric: Metric | None,
    kept: _Kept,
    progress: bool,
) -> dict[Key, Measured]:
    """Return the noise and the metric of each trial, measured by all processes together."""
    names = {_name(key): key for key in todo}
    found = {names[name]: each for name, each in kept.found.items() if name in names}
    several = in_several_processes()
    if several:
        found = _pooled(found)
    missing = [key for key in todo if key not in found]
    if several:
        distributed = torch.distributed
        missing = missing[distributed.get_rank() :: distributed.get_world_size()]
    for key in with_progress(missing, "measuring", progress):
        place, bits = key
        if place is None:
            trials.set({}, bits)
        else:
            trials.set({place: bits}, bases[bits])
        values = [] if metric is None else trials.metric(metric)
        found[key] = trials.noise(), values
        kept.add(_name(key), found[key])
    return _pooled(found) if several else found


def _pooled(found: dict[Key, Measured]) -> dict[Key, Measured]:
    """Return what all processes have measured."""
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, found)
    return {key: each for part in everywhere for key, each in part.items()}


def _name(key: Key) -> str:
    place, bits = key
    return f"{'all' if place is None else place} {bits}"


class _Kept:
    """Measured trials in a file of JSON lines, to go on with.

    Args:
        file: The file; None to keep nothing.
        trials: The model and data, which the file must be of.
        has_metric: Whether trials need a metric.

    Attributes:
        found: Name of a trial -> noise and metric.
    """

    def __init__(
        self, file: str | os.PathLike[str] | None, trials: Trials, has_metric: bool
    ) -> None:
        self.found: dict[str, Measured] = {}
        self._path: Path | None = None
        if file is None:
            return
        rank = torch.distributed.get_rank() if in_several_processes() else 0
        self._path = Path(f"{os.fspath(file)}.{rank}" if rank else file)
        header = json.dumps({"format": _FORMAT, "of": _digest(trials)})
        if not self._path.exists():
            self._path.write_text(header + "\n", encoding="utf-8")
            return
        first, *lines = self._path.read_text(encoding="utf-8").splitlines() or [""]
        if first != header:
            raise QuantGRUError(
                "Expected file to be of this model, configuration and data, got another one "
                f"(file {str(self._path)!r}); remove it, or name another file"
            )
        for line in lines:
            try:
                name, noise, values = json.loads(line)
            except ValueError:  # the line at which an earlier call was ended
                continue
            if bool(values) == has_metric:
                self.found[name] = float(noise), list(values)

    def add(self, name: str, measured: Measured) -> None:
        """Keep a trial."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps([name, *measured]) + "\n")


def _digest(trials: Trials) -> str:
    """Return a hash of the weights, the kinds of the operators, the scales and the outputs."""
    digest = hashlib.sha256()
    for name, tensor in trials.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            digest.update(name.encode())
            digest.update(
                tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
    for name, gru in trials.grus.items():
        digest.update(f"{name} {gru.config.to_dict()} {gru._state.cells}".encode())
    # sums of floats may differ in their last digits between calls
    digest.update(f"{trials.signal:.6g}".encode())
    return digest.hexdigest()


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _difference(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the mean of paired differences and its standard error, which needs two samples."""
    if len(values) != len(reference):
        raise QuantGRUError(
            f"Expected the metric to give as many numbers each time, got {len(reference)} and "
            f"{len(values)}"
        )
    if not values:
        return 0.0, 0.0
    changes = [a - b for a, b in zip(values, reference, strict=True)]
    mean, n = _mean(changes), len(changes)
    if n < 2:
        return mean, 0.0
    variance = sum((each - mean) ** 2 for each in changes) / (n - 1)
    return mean, (variance / n) ** 0.5


def _judged(costs: Sequence[Cost], values: Sequence[Sequence[float]]) -> tuple[list[Cost], str]:
    """Return the costs with `is_clear`, and a warning if most are not clear where they should be.

    Of a metric of one number, the smallest difference that occurs is its step: a share of n samples
    moves in steps of 1/n. Changes of up to two steps are those of one or two samples.
    """
    samples = len(values[0])
    judged = list(costs)
    step = 0.0
    if samples == 1:
        levels = sorted({value for (value,) in values})
        gaps = [b - a for a, b in itertools.pairwise(levels)]
        # sums of samples in another order differ in their last digits
        size = max(map(abs, levels))
        step = min((gap for gap in gaps if gap > 1e-12 * size), default=0.0)
        judged = [
            Cost(
                c.place,
                c.bits,
                c.noise,
                c.sqnr,
                c.metric,
                abs(c.metric or 0.0) > (1 + 1e-9) * _CLEAR * step,
            )
            for c in costs
        ]
    narrowest = min(each.bits for each in costs)
    hardest = [each for each in judged if each.bits == narrowest]
    clear = sum(each.is_clear for each in hardest)
    if 2 * clear >= len(hardest):
        return judged, ""
    of = f"{samples} samples" if samples > 1 else f"its samples (it moves in steps of {step:.3g})"
    return judged, (
        f"the metric on {of} tells {clear} of {len(hardest)} changes to {narrowest} bits from "
        "chance; give it more samples, or go by the decibels"
    )
