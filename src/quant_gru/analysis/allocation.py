"""Widths of operators under a budget, from what each operator costs at each width."""

from __future__ import annotations

import copy
import html
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quant_gru.analysis.charts import Line, chart
from quant_gru.analysis.figures import Plotted, lines_figure
from quant_gru.analysis.fronts import Block, Front, front
from quant_gru.analysis.sizes import Sizes, counts, operator_sizes, sizes_of, table_sizes
from quant_gru.analysis.sqnr import as_json, decibels, text_of
from quant_gru.analysis.tables import text_table
from quant_gru.analysis.trials import BASE, Forward, Place, Trials, check_width, with_widths
from quant_gru.calibration.batches import with_progress
from quant_gru.calibration.tied import TIED
from quant_gru.config import OPERATORS, WEIGHTS, QuantConfig, canonical_name
from quant_gru.config.operators import suggest
from quant_gru.config.shown import html_table
from quant_gru.errors import ConfigError, QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.integer.qparams import PRE_ACTIVATION
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.convert import find_grus
from quant_gru.whole_models.selection import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Patterns = Iterable["str | Iterable[str]"]
Widths = Iterable[int] | Mapping[str, Iterable[int]]

WIDTHS = (4, 8, 16)
"""The widths to choose from."""

COSTS: dict[str, Callable[[Sizes], float]] = {
    "flash": lambda sizes: sizes.flash,
    "packed": lambda sizes: sizes.packed,
    "state": lambda sizes: sizes.state,
    "activations": lambda sizes: sizes.activations,
    "bits": lambda sizes: sizes.bits,
}
"""What a budget can limit, beside 'sqnr'. 'bits' is a sum here and an average in a budget."""

# Points of the front that are measured, and choices of operators whose widths depend on each other.
_POINTS = 12
_MOST_CHOICES = 100_000
_X_TITLE, _Y_TITLE = "bytes of weights and tables", "dB at the output"
# Beyond this many decibels between prediction and measurement a warning says so.
_FAR = 1.0
# Up to this many, costs are good enough; otherwise they are measured again, at most so many times.
_NEAR = 0.5
_ROUNDS = 3


@dataclass(frozen=True)
class Point:
    """One allocation of the Pareto front.

    Attributes:
        sizes: What it takes.
        predicted: Signal over noise of the outputs in dB, as the sum of the operators' errors.
        measured: The same, measured; None if it was not.
        widths: GRU -> operator -> width.
    """

    sizes: Sizes
    predicted: float
    measured: float | None
    widths: dict[str, dict[str, int]] = field(repr=False)


@dataclass(frozen=True)
class Allocation(Plotted):
    """Widths under a budget; `print` it, or let a notebook show it.

    Attributes:
        config: The configuration, for `convert_model`; a dict by name if the model has several
            GRUs.
        chosen: The allocation that the budget selects, predicted and measured.
        front: Allocations of which no other has less error at no more cost, by their bytes; at most
            twelve, spread over all of them.
        combinations: How many allocations the whole front has.
        model: The model with these widths, calibrated and switched on, in eval mode.
        budget: The budget.
    """

    config: QuantConfig | dict[str, QuantConfig]
    chosen: Point
    front: tuple[Point, ...]
    combinations: int
    model: torch.nn.Module = field(repr=False)
    budget: dict[str, float]
    _problem: _Problem = field(repr=False)

    def with_budget(
        self, budget: Mapping[str, float] | float, *, test: Any = None, progress: bool = True
    ) -> Allocation:
        """Choose again for another budget, from the same costs of the operators.

        Args:
            budget: As for `allocate_bits`.
            test: As for `allocate_bits`.
            progress: As for `allocate_bits`.

        Raises:
            QuantGRUError: No widths meet the budget; the message says what the least is.
        """
        return _allocation(self._problem, _budget(budget), test, progress)

    def __str__(self) -> str:
        chosen, sizes = self.chosen, self.chosen.sizes
        limits = ", ".join(f"{name} {value:g}" for name, value in self.budget.items())
        lines = [
            f"budget: {limits}",
            f"{sizes.flash:,} bytes of weights and tables ({sizes.packed:,} packed), "
            f"{sizes.state:,} of states, {sizes.activations:,} of codes of a step, "
            f"{sizes.average_bits:.3g} bits a weight",
            f"predicted {text_of(chosen.predicted)} dB, measured {_text(chosen.measured)} dB; no "
            "other widths have less predicted error within the budget",
            text_table(*_width_table(chosen.widths)),
            f"{len(self.front)} of {self.combinations} best allocations:",
            text_table(*self._front_table()),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.to_html()

    def to_html(self) -> str:
        """Return the tables, and the front as a picture, in HTML."""
        head = str(self).split("\n")[:3]
        return "\n".join(
            (
                *(f"<p>{html.escape(line)}</p>" for line in head),
                html_table(*_width_table(self.chosen.widths)),
                html_table(*self._front_table()),
                self.to_svg(),
            )
        )

    def to_svg(self) -> str:
        """Return the front as a picture: dB against bytes, predicted and measured."""
        return chart(self._lines(), _X_TITLE, _Y_TITLE, logarithmic=True)

    def _figure(self) -> Figure:
        """Draw the front, dB against bytes, predicted and measured."""
        return lines_figure(self._lines(), _X_TITLE, _Y_TITLE)

    def _lines(self) -> list[Line]:
        size = COSTS[_bytes_of(self.budget)]
        x = [size(point.sizes) for point in self.front]
        lines = [Line("predicted", x, [point.predicted for point in self.front])]
        measured = [math.nan if p.measured is None else p.measured for p in self.front]
        lines.append(Line("measured", x, measured, dots=True))
        at = [size(self.chosen.sizes)]
        shown = self.chosen.measured
        lines.append(Line("chosen", at, [math.nan if shown is None else shown], dots=True))
        return lines

    def to_json(self) -> str:
        """Return all figures as JSON; decibels that are not finite are text."""

        def point(each: Point) -> dict[str, Any]:
            dB = {"predicted": as_json(each.predicted)}
            if each.measured is not None:
                dB["measured"] = as_json(each.measured)
            sizes = {**asdict(each.sizes), "average_bits": each.sizes.average_bits}
            return {**dB, "sizes": sizes, "widths": each.widths}

        found = {"budget": self.budget, "chosen": point(self.chosen)}
        return json.dumps({**found, "front": [point(each) for each in self.front]}, indent=2)

    def _front_table(self) -> tuple[list[str], list[list[str]]]:
        titles = [
            "flash",
            "packed",
            "state",
            "activations",
            "bits a weight",
            "predicted dB",
            "measured dB",
        ]
        rows = [
            [
                f"{each.sizes.flash:,}",
                f"{each.sizes.packed:,}",
                f"{each.sizes.state:,}",
                f"{each.sizes.activations:,}",
                f"{each.sizes.average_bits:.3g}",
                text_of(each.predicted),
                _text(each.measured),
            ]
            for each in self.front
        ]
        return titles, rows


def allocate_bits(
    model: torch.nn.Module,
    data: Any,
    budget: Mapping[str, float] | float,
    widths: Widths = WIDTHS,
    *,
    groups: Patterns = (),
    fixed: Mapping[str, int] | None = None,
    test: Any = None,
    calibration: Any = None,
    config: ModelConfig = None,
    forward_fn: Forward | None = None,
    fit_weights: bool = False,
    progress: bool = True,
) -> Allocation:
    """Choose the width of each operator of each GRU under a budget, with the least error.

    The error that each operator causes at each width is measured at the model's outputs, with all
    others at the widest width. Errors add up, so that the best widths are found exactly: no other
    ones have less predicted error within the budget. Where large errors do not add up, so that the
    result is more than 0.5 dB from the prediction, operators are measured again around it. All
    layers and directions of a GRU have the same widths, as in a QuantConfig.

    Args:
        model: A float model, or one with QuantGRUs, whose configurations then give the kinds of the
            operators; their fused products stay fused. It does not change.
        data: Batches as for `calibrate_model`; a tensor is one batch.
        budget: The most of one or several of 'flash' (bytes of weights, biases and tables in C
            source, where codes of up to 4 bits share bytes), 'packed' (the same where codes of any
            width share bytes, as in the file of a frozen GRU), 'state' (bytes of the states of a
            sequence), 'activations' (bytes of all codes of a step) and 'bits' (average of weights
            and biases); or the least 'sqnr' in dB, which then takes as few bytes of flash as
            possible, or packed ones if 'packed' is named, with math.inf if it has no limit. A
            number is a budget of flash.
        widths: Widths to choose from; or operator or pattern -> those of its operators, all others
            having 4, 8 and 16.
        groups: Operators that share one width, on hardware with one width for them: names, patterns
            such as 'gate.*_pre', or lists of these.
        fixed: Operator or pattern -> its width.
        test: Batches to measure the result on; None for `data`.
        calibration: Batches that scales are made of; None for `data`.
        config: Kinds of the operators, as for `convert_model`; only for a model without QuantGRUs.
            None for those of 'int16'.
        forward_fn: `forward_fn(model, batch)` runs a batch and returns the outputs.
        fit_weights: Whether weights of up to 8 bits are fitted as by `calibrate_model`, in the
            choice and in the resulting model.
        progress: Whether to show a progress bar (only on a terminal).

    Returns:
        The configuration, the model with it, and the Pareto front. A warning says if the error is
        more than 1 dB from the predicted one, measured on `data`.

    Raises:
        CalibrationError: There is no batch or no GRU, or statistics are invalid.
        ConfigError: A name or a pattern fits no operator.
        QuantGRUError: No widths meet the budget; the message says what the least is.

    Example:
        >>> found = allocate_bits(model, batches, budget={"flash": 60_000})
        >>> small = calibrate_model(convert_model(model, found.config), batches)
    """
    limits = _budget(budget)
    choices, given = _choices(widths), dict(fixed or {})
    every = sorted({*given.values(), *(bits for own in choices.values() for bits in own)})
    trials = Trials(
        model,
        data,
        every,
        calibration=calibration,
        config=config,
        forward_fn=forward_fn,
        fit_weights=fit_weights,
        progress=progress,
    )
    parts = [
        part
        for name, gru in trials.grus.items()
        for part in _parts(name, gru, choices, list(groups), given)
    ]
    base = max(BASE, *every)
    trials.add_base(base)
    return _allocation(_Problem.measured(trials, parts, base, {}, progress), limits, test, progress)


def _allocation(
    problem: _Problem, limits: dict[str, float], test: Any, progress: bool
) -> Allocation:
    """Choose widths within limits, and measure them and some of the front."""
    trials, start = problem.trials, problem
    sqnr = limits.get("sqnr")
    tried = []
    lost = 0.0  # decibels that the last choice lacked of the predicted ones
    while True:
        found, predicted = problem.front(limits)
        at = _chosen(found, predicted, sqnr, lost)
        chosen = problem.widths(found, at)
        problem.set(chosen)
        measured = decibels(trials.signal, trials.noise())
        enough = sqnr is None or measured >= sqnr
        flash = 0.0 if sqnr is None else found.costs[at, 0]
        tried.append((enough, -flash if enough else 0.0, measured, problem, found, predicted, at))
        near = not abs(measured - predicted[at]) > _NEAR
        if len(tried) > _ROUNDS or (near and enough):
            break
        if near:
            lost = max(lost, predicted[at] - measured)
        else:  # what operators cost when the others have these widths, not the widest
            problem, lost = problem.around(chosen, progress), 0.0
    *_, problem, found, predicted, at = max(tried, key=lambda each: each[:3])
    spread = np.unique(np.linspace(0, len(predicted) - 1, _POINTS).round().astype(int)).tolist()
    points = {}
    for i in with_progress(sorted({at, *spread}), "measuring", progress):
        chosen = problem.widths(found, i)
        problem.set(chosen)
        measured = decibels(trials.signal, trials.noise())
        points[i] = Point(sizes_of(trials.grus.values()), predicted[i], measured, chosen)
    problem.set(points[at].widths)
    _warn_if_far(points[at])
    chosen_point = points[at]
    if test is not None:
        chosen_point = replace(chosen_point, measured=decibels(*trials.noise_on(test)))
    made = copy.deepcopy(trials.model)
    configs = {}
    for name, gru in find_grus(made).items():
        if name in trials.grus:
            configs[name] = with_widths(gru.config, points[at].widths[name])
            gru._state.settle_on(configs[name])
    return Allocation(
        next(iter(configs.values())) if len(configs) == 1 else configs,
        chosen_point,
        tuple(points[i] for i in sorted(points)),
        len(predicted),
        made,
        limits,
        start,
    )


@dataclass(frozen=True)
class _Problem:
    """What each operator adds to the error and to the sizes.

    Attributes:
        trials: The model on the data.
        parts: Operators whose widths are chosen together.
        base: The widest width.
        least: The error with the widths around which costs are measured: all the widest at first.
        errors: GRU, operator, width -> what it adds to the error, in all cells at once.
    """

    trials: Trials
    parts: tuple[_Part, ...]
    base: int
    least: float
    errors: Mapping[tuple[str, str, int], float]

    @classmethod
    def measured(
        cls,
        trials: Trials,
        parts: Sequence[_Part],
        base: int,
        around: Mapping[str, Mapping[str, int]],
        progress: bool,
    ) -> _Problem:
        """Measure one operator after the other, the others having the widths `around` or `base`."""
        trials.set(_places(trials, around), base)
        least = trials.noise()
        errors = _errors(trials, parts, base, around, least, progress)
        return cls(trials, tuple(parts), base, least, errors)

    def around(self, widths: Mapping[str, Mapping[str, int]], progress: bool) -> _Problem:
        """Measure again around these widths."""
        return self.measured(self.trials, self.parts, self.base, widths, progress)

    def front(self, limits: Mapping[str, float]) -> tuple[Front, list[float]]:
        """Return the best allocations within limits, and their predicted decibels."""
        named = [name for name in limits if name in COSTS]
        kinds = list(dict.fromkeys((_bytes_of(limits), *named)))
        blocks = [_block(self.trials, part, kinds, self.errors) for part in self.parts]
        numbers = sum(
            count * _directions(gru)
            for gru in self.trials.grus.values()
            for layer in range(gru.num_layers)
            for operator, count in counts(gru, layer).items()
            if operator in WEIGHTS
        )
        most = [limits.get(name, math.inf) * (numbers if name == "bits" else 1) for name in kinds]
        found = front(blocks, most, kinds)
        # a cost may be negative by chance, the whole not
        whole = (max(self.least + each, 0.0) for each in found.errors.tolist())
        return found, [decibels(self.trials.signal, each) for each in whole]

    def widths(self, found: Front, index: int) -> dict[str, dict[str, int]]:
        """Return the widths of an allocation, operators in their usual order."""
        widths: dict[str, dict[str, int]] = {}
        for part, choice in zip(self.parts, found.choices[index].tolist(), strict=True):
            bits = zip(part.operators, part.choices[choice], strict=True)
            widths.setdefault(part.module, {}).update(bits)
        return {
            module: {name: own[name] for name in OPERATORS if name in own}
            for module, own in widths.items()
        }

    def set(self, widths: Mapping[str, Mapping[str, int]]) -> None:
        """Give the model these widths."""
        self.trials.set(_places(self.trials, widths), self.base)


@dataclass(frozen=True)
class _Part:
    """Operators of a GRU whose widths are chosen together.

    Attributes:
        module: Name of the GRU.
        operators: Their names.
        choices: Widths of all of them, one tuple for each choice.
    """

    module: str
    operators: tuple[str, ...]
    choices: tuple[tuple[int, ...], ...]


def _budget(budget: Mapping[str, float] | float) -> dict[str, float]:
    """Return the limits by name."""
    known = [*COSTS, "sqnr"]
    given = dict(budget) if isinstance(budget, Mapping) else {"flash": budget}
    if not given:
        raise QuantGRUError(f"Expected a budget of {', '.join(known)}, got an empty one")
    for name, value in given.items():
        if name not in known:
            raise QuantGRUError(
                f"Expected a budget of a known kind, got {name!r}; {suggest(name, known)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise QuantGRUError(f"Expected a budget to be a number, got {value!r} ({name!r})")
    return given


def _bytes_of(budget: Mapping[str, float]) -> str:
    """Return which bytes of weights and tables count beside other limits."""
    return "packed" if "packed" in budget and "flash" not in budget else "flash"


def _choices(widths: Widths) -> dict[str, tuple[int, ...]]:
    """Return the widths of each operator to choose from."""
    found: dict[str, tuple[int, ...]] = dict.fromkeys(OPERATORS, WIDTHS)
    for pattern, own in (widths if isinstance(widths, Mapping) else {"*": widths}).items():
        choices = tuple(sorted({check_width(each) for each in own}))
        if not choices:
            raise QuantGRUError(f"Expected widths to choose from, got none ({pattern!r})")
        found |= dict.fromkeys(_fitting(pattern), choices)
    return found


def _fitting(pattern: str) -> list[str]:
    """Return the operators of a name or a pattern."""
    if any(each in pattern for each in "*?["):
        found = [name for name in OPERATORS if fnmatchcase(name, pattern)]
        if not found:
            raise ConfigError(f"Expected a pattern that fits an operator, got {pattern!r}")
        return found
    return [canonical_name(pattern)]


def _parts(
    module: str,
    gru: QuantGRU,
    widths: Mapping[str, tuple[int, ...]],
    groups: Patterns,
    fixed: Mapping[str, int],
) -> list[_Part]:
    """Return the operators of a GRU, joined where their widths depend on each other."""
    has = [
        name
        for name in OPERATORS
        if gru.config[name].bitwidth is not None and (gru.bias or not name.startswith("weight.b"))
    ]
    equal = [
        {
            name
            for pattern in ([group] if isinstance(group, str) else group)
            for name in _fitting(pattern)
        }
        for group in groups
    ]
    if gru.config.tie_x_and_h:
        equal.append({*TIED})
    only = {name: bits for pattern, bits in fixed.items() for name in _fitting(pattern)}
    same = _joined(has, equal)
    whole = _joined(has, [*equal, *({pre, out} for out, pre in PRE_ACTIVATION.items())])
    parts = []
    for operators in whole:
        own = [[name for name in group if name in operators] for group in same]
        own = [group for group in own if group]
        options: list[list[int]] = []
        for group in own:
            wanted = {only[name] for name in group if name in only}
            if len(wanted) > 1:
                raise ConfigError(
                    f"Expected one width for the operators of a group, got {sorted(wanted)} fixed "
                    f"for {', '.join(group)}"
                )
            choices = sorted(wanted or set.intersection(*(set(widths[name]) for name in group)))
            if not choices:
                raise ConfigError(
                    "Expected a width to choose from for the operators of a group, got none in "
                    "common: " + ", ".join(f"{name} {[*widths[name]]}" for name in group)
                )
            options.append(choices)
        if math.prod(map(len, options)) > _MOST_CHOICES:
            raise QuantGRUError(
                f"Expected at most {_MOST_CHOICES} choices of widths that depend on each other, "
                f"got {math.prod(map(len, options))} for {', '.join(operators)}"
            )
        index = {name: i for i, group in enumerate(own) for name in group}
        combined = tuple(
            tuple(bits[index[name]] for name in operators) for bits in itertools.product(*options)
        )
        parts.append(_Part(module, tuple(operators), combined))
    return parts


def _joined(names: Sequence[str], sets: Iterable[set[str]]) -> list[list[str]]:
    """Return names in groups: those that are in one set are in one group."""
    group = {name: {name} for name in names}
    for each in sets:
        members = [name for name in names if name in each]
        union = set().union(*(group[name] for name in members))
        group |= dict.fromkeys(union, union)
    found = []
    for name in names:
        members = [other for other in names if other in group[name]]
        if members[0] == name:
            found.append(members)
    return found


def _errors(
    trials: Trials,
    parts: Sequence[_Part],
    base: int,
    around: Mapping[str, Mapping[str, int]],
    least: float,
    progress: bool,
) -> dict[tuple[str, str, int], float]:
    """Return what each operator of a GRU adds to the error at each width: in all cells at once."""
    todo = dict.fromkeys(
        (part.module, name, bits)
        for part in parts
        for choice in part.choices
        for name, bits in zip(part.operators, choice, strict=True)
    )
    others = _places(trials, around)
    found = {}
    for module, name, bits in with_progress(list(todo), "measuring", progress):
        if bits == around.get(module, {}).get(name, base):
            found[module, name, bits] = 0.0
            continue
        trials.set(others | _places(trials, {module: {name: bits}}), base)
        found[module, name, bits] = trials.noise() - least
    return found


def _block(
    trials: Trials,
    part: _Part,
    kinds: Sequence[str],
    errors: Mapping[tuple[str, str, int], float],
) -> Block:
    """Return the costs and errors of the choices of a part."""
    gru = trials.grus[part.module]
    costs, added = [], []
    for choice in part.choices:
        bits = dict(zip(part.operators, choice, strict=True))
        sizes = Sizes()
        for layer in range(gru.num_layers):
            number = counts(gru, layer)
            for direction in range(_directions(gru)):
                for name, each in bits.items():
                    sizes += operator_sizes(name, number[name], each)
                for out, pre in PRE_ACTIVATION.items():
                    if out in bits:
                        place = Place(part.module, layer, direction == 1, out)
                        table = trials.table(place, bits[pre], bits[out])
                        sizes += table_sizes(table)
        costs.append([COSTS[kind](sizes) for kind in kinds])
        added.append(sum(errors[part.module, name, each] for name, each in bits.items()))
    return Block(np.array(costs, dtype=np.float64), np.array(added, dtype=np.float64))


def _directions(gru: QuantGRU) -> int:
    return 2 if gru.bidirectional else 1


def _chosen(found: Front, predicted: Sequence[float], sqnr: float | None, lost: float = 0.0) -> int:
    """Return the index of the allocation with the least error, or of the smallest one enough.

    Args:
        found: The allocations.
        predicted: Their decibels.
        sqnr: The least decibels; None for as many as possible.
        lost: How many less than the predicted ones are expected, if there are such allocations.
    """
    if sqnr is None:
        return int(found.errors.argmin())
    enough = [i for i, dB in enumerate(predicted) if dB - lost >= sqnr]
    enough = enough or [i for i, dB in enumerate(predicted) if dB >= sqnr]
    if not enough:
        raise QuantGRUError(
            f"Expected widths that reach {sqnr:g} dB within the budget, got at most "
            f"{max(predicted):.1f} dB"
        )
    return min(enough, key=lambda i: (found.costs[i, 0], found.errors[i]))


def _places(trials: Trials, widths: Mapping[str, Mapping[str, int]]) -> dict[Place, int]:
    """Return widths of operators in all layers and directions of their GRUs."""
    return {
        place: widths[place.module][place.operator]
        for place in trials.places
        if place.operator in widths.get(place.module, ())
    }


def _warn_if_far(point: Point) -> None:
    assert point.measured is not None
    if abs(point.measured - point.predicted) > _FAR:
        warnings.warn(
            QuantGRUWarning(
                f"predicted {text_of(point.predicted)} dB, measured {text_of(point.measured)} dB: "
                "errors of this size are not independent; compare neighbours in `front`"
            ),
            stacklevel=caller_stacklevel(),
        )


def _width_table(widths: Mapping[str, Mapping[str, int]]) -> tuple[list[str], list[list[str]]]:
    titles = ["operator", *(name or "bits" for name in widths)]
    names = [name for name in OPERATORS if any(name in own for own in widths.values())]
    rows = [[name, *(str(own.get(name, "")) for own in widths.values())] for name in names]
    return titles, rows


def _text(value: float | None) -> str:
    return "" if value is None else text_of(value)
