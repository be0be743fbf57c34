"""Widths of operators under a budget, from what each operator costs at each width."""

from __future__ import annotations

import bisect
import copy
import html
import itertools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from quant_gru.analysis.charts import Line, chart
from quant_gru.analysis.figures import Plotted, lines_figure
from quant_gru.analysis.fronts import Block, Front, front
from quant_gru.analysis.sizes import (
    Sizes,
    counts,
    matrix_sizes,
    operator_sizes,
    sizes_of,
    table_sizes,
)
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
from quant_gru.kernel_runtime.byte_sizes import bytes_of
from quant_gru.modules.gru import QuantGRU
from quant_gru.whole_models.convert import find_grus
from quant_gru.whole_models.selection import ModelConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Patterns = Iterable["str | Iterable[str]"]
Budget = Mapping[str, "float | str"] | float | str
Value = TypeVar("Value")
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
_OPERANDS = {"weight.W": "input.x", "weight.R": "output.h"}
_X_TITLES = {"flash": "bytes of constants in C source", "packed": "packed bytes"}
_Y_TITLE = "dB at the output"
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
        chosen: The allocation that the budget selects, predicted, and measured on `test` if given.
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
    _tested: bool = field(repr=False)

    def with_budget(self, budget: Budget, *, test: Any = None, progress: bool = True) -> Allocation:
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
            f"{sizes.flash:,} bytes of constants in C source ({sizes.packed:,} packed), "
            f"{sizes.state:,} of states, {sizes.activations:,} of codes of a step, "
            f"{sizes.average_bits:.3g} bits a weight",
            f"predicted {text_of(chosen.predicted)} dB, measured {_text(chosen.measured)} dB"
            f"{' on the test data' if self._tested else ''}; {self._claim()}",
            text_table(*_width_table(chosen.widths)),
            f"{len(self.front)} of {self.combinations} best allocations"
            f"{', measured on the data of the choice' if self._tested else ''}:",
            text_table(*self._front_table()),
        ]
        return "\n".join(lines)

    def _claim(self) -> str:
        """Return what is known of all other widths."""
        if any(point.widths == self.chosen.widths for point in self.front):
            return "no other widths have less predicted error within the budget"
        return "those that are predicted to be better are worse as measured"

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
        return chart(self._lines(), _X_TITLES[_bytes_of(self.budget)], _Y_TITLE, logarithmic=True)

    def _figure(self) -> Figure:
        """Draw the front, dB against bytes, predicted and measured."""
        return lines_figure(self._lines(), _X_TITLES[_bytes_of(self.budget)], _Y_TITLE)

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
    budget: Budget,
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
        budget: The most of one or several of 'flash' (bytes of all constants in C source, as
            `export_c` counts them), 'packed' (bytes of weights, biases and tables where codes of
            any width share bytes, as in the file of a frozen GRU), 'state' (bytes of the states of
            a sequence), 'activations' (bytes of all codes of a step) and 'bits' (average of weights
            and biases); or the least 'sqnr' in dB, which then takes as few bytes of flash as
            possible, or packed ones if 'packed' is named, with math.inf if it has no limit. Bytes
            may be a text such as "60 kB". A number, or such a text, is a budget of flash.
        widths: Widths to choose from; or operator or pattern -> those of its operators, all others
            having 4, 8 and 16. An exact name decides before patterns, and the first pattern that
            fits before others, as in `convert_model`.
        groups: Operators that share one width, on hardware with one width for them: names, patterns
            such as 'gate.*_pre', or lists of these.
        fixed: Operator or pattern -> its width; as for `widths`.
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
        ConfigError: A name or a pattern fits no operator, or decides for none.
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
    best = _search(problem, limits, progress)
    found, predicted, trials = best.front, best.predictions, problem.trials
    spread = np.unique(np.linspace(0, len(predicted) - 1, _POINTS).round().astype(int)).tolist()
    if best.index is not None:
        spread = sorted({best.index, *spread})
    points = []
    for i in with_progress(spread, "measuring", progress):
        widths = best.problem.widths(found, i)
        measured = best.problem.measure(widths)
        points.append(Point(sizes_of(trials.grus.values()), predicted[i], measured, widths))
    measured = best.problem.measure(best.widths)
    sizes = sizes_of(trials.grus.values())
    chosen = Point(sizes, best.predicted, measured, best.widths)
    _warn_if_far(chosen)
    if test is not None:
        chosen = replace(chosen, measured=decibels(*trials.noise_on(test)))
    made = copy.deepcopy(trials.model)
    configs = {}
    for name, gru in find_grus(made).items():
        if name in trials.grus:
            configs[name] = with_widths(gru.config, best.widths[name])
            gru._state.settle_on(configs[name])
    return Allocation(
        next(iter(configs.values())) if len(configs) == 1 else configs,
        chosen,
        tuple(points),
        len(predicted),
        made,
        limits,
        problem,
        test is not None,
    )


def _search(problem: _Problem, limits: dict[str, float], progress: bool) -> _Choice:
    """Return the best measured choice, with costs that predict it."""
    sqnr = limits.get("sqnr")
    best = choice = problem.choice(limits)
    if sqnr is None:  # large errors may cancel
        widths = problem.narrow(choice.widths)
        predicted, measured = problem.predicted(widths), problem.measure(widths)
        other = replace(choice, index=None, widths=widths, predicted=predicted, measured=measured)
        best = max(best, other, key=lambda each: each.rank(sqnr))
    for _ in range(_ROUNDS):
        if choice.is_near():
            break
        # what operators cost when the others have these widths, not the widest
        choice = problem.around(choice.widths, progress).choice(limits)
        best = max(best, choice, key=lambda each: each.rank(sqnr))
    while not best.is_near():
        problem = problem.around(best.widths, progress)
        choice = problem.choice(limits)
        if choice.rank(sqnr) <= best.rank(sqnr):
            best = replace(
                choice,
                index=choice.index if choice.widths == best.widths else None,
                widths=best.widths,
                predicted=problem.predicted(best.widths),
                measured=best.measured,
                flash=best.flash,
            )
            break
        best = choice
    if sqnr is not None and best.measured < sqnr:
        raise QuantGRUError(
            f"Expected widths that reach {sqnr:g} dB within the budget, got at most "
            f"{best.measured:.1f} dB"
        )
    return best


@dataclass(frozen=True)
class _Choice:
    """Widths that a budget selects from a front, measured.

    Attributes:
        problem: The costs that predict it.
        front: The best allocations by these costs.
        predictions: Their decibels.
        index: Of these widths in the front; None if others are predicted to be better.
        widths: GRU -> operator -> width.
        predicted: Their decibels as predicted.
        measured: The same, measured.
        flash: Their bytes, of the kind that counts.
    """

    problem: _Problem
    front: Front
    predictions: list[float]
    index: int | None
    widths: dict[str, dict[str, int]]
    predicted: float
    measured: float
    flash: float

    def is_near(self) -> bool:
        """Return whether costs predict the error."""
        return not abs(self.measured - self.predicted) > _NEAR

    def rank(self, sqnr: float | None) -> tuple[bool, float, float]:
        """Return what orders choices: enough decibels, then fewer bytes, or more decibels."""
        enough = sqnr is None or self.measured >= sqnr
        return enough, -self.flash if sqnr is not None and enough else 0.0, self.measured


@dataclass(frozen=True)
class _Problem:
    """What each operator adds to the error and to the sizes.

    Attributes:
        trials: The model on the data.
        parts: Operators whose widths are chosen together.
        base: The widest width.
        lowest: The error with all the widest widths.
        least: The error with the widths around which costs are measured: all the widest at first.
        errors: GRU, operator, width -> what it adds to the error, in all cells at once.
        sizes: Part, choice -> what it takes, as far as it is known.
    """

    trials: Trials
    parts: tuple[_Part, ...]
    base: int
    lowest: float
    least: float
    errors: Mapping[tuple[str, str, int], float]
    sizes: dict[tuple[_Part, tuple[int, ...]], Sizes] = field(default_factory=dict)

    @classmethod
    def measured(
        cls,
        trials: Trials,
        parts: Sequence[_Part],
        base: int,
        around: Mapping[str, Mapping[str, int]],
        progress: bool,
        lowest: float = math.inf,
    ) -> _Problem:
        """Measure one operator after the other, the others having the widths `around` or `base`."""
        trials.set(_places(trials, around), base)
        least = trials.noise()
        lowest = min(lowest, least)
        found = _errors(trials, parts, base, around, least, progress)
        errors = _bounded(found, least - min(lowest, least / 2))
        return cls(trials, tuple(parts), base, lowest, least, errors)

    def around(self, widths: Mapping[str, Mapping[str, int]], progress: bool) -> _Problem:
        """Measure again around these widths."""
        trials, parts, base = self.trials, self.parts, self.base
        found = self.measured(trials, parts, base, widths, progress, self.lowest)
        return replace(found, sizes=self.sizes)

    def narrow(self, widths: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
        """Return widths with the narrowest ones where they are neither weights nor tables."""
        found = {module: dict(own) for module, own in widths.items()}
        for part in self.parts:
            name = part.operators[0]
            if len(part.operators) == 1 and not name.startswith(("weight.", "gate.")):
                found[part.module][name] = part.choices[0][0]
        return found

    def choice(self, limits: Mapping[str, float]) -> _Choice:
        """Return the least error within limits, or the fewest bytes that reach the decibels.

        Whether they are reached is measured; if they are not, it is the last one of the front.
        """
        found, predicted = self.front(limits)
        sqnr, measured = limits.get("sqnr"), dict[int, float]()

        def is_enough(at: int) -> bool:
            measured[at] = self.measure(self.widths(found, at))
            return sqnr is None or measured[at] >= sqnr

        if sqnr is None:
            at = int(found.errors.argmin())
            is_enough(at)
        else:
            rising = _rising(predicted)
            guess = bisect.bisect_left([predicted[each] for each in rising], sqnr)
            at = rising[_first(is_enough, rising, min(guess, len(rising) - 1))]
        widths, flash = self.widths(found, at), float(found.costs[at, 0])
        return _Choice(self, found, predicted, at, widths, predicted[at], measured[at], flash)

    def front(self, limits: Mapping[str, float]) -> tuple[Front, list[float]]:
        """Return the best allocations within limits, and their predicted decibels."""
        named = [name for name in limits if name in COSTS]
        kinds = list(dict.fromkeys((_bytes_of(limits), *named)))
        blocks = [self.block(part, kinds) for part in self.parts]
        numbers = sum(
            count * _directions(gru)
            for gru in self.trials.grus.values()
            for layer in range(gru.num_layers)
            for operator, count in counts(gru, layer).items()
            if operator in WEIGHTS
        )
        most = [limits.get(name, math.inf) * (numbers if name == "bits" else 1) for name in kinds]
        found = front(blocks, most, kinds)
        return found, [self._decibels(each) for each in found.errors.tolist()]

    def block(self, part: _Part, kinds: Sequence[str]) -> Block:
        """Return the costs and errors of the choices of a part."""
        costs, added = [], []
        for choice in part.choices:
            bits = dict(zip(part.operators, choice, strict=True))
            if (part, choice) not in self.sizes:
                self.sizes[part, choice] = self._sizes(part.module, bits)
            costs.append([COSTS[kind](self.sizes[part, choice]) for kind in kinds])
            added.append(sum(self.errors[part.module, name, each] for name, each in bits.items()))
        return Block(np.array(costs, dtype=np.float64), np.array(added, dtype=np.float64))

    def _sizes(self, module: str, bits: Mapping[str, int]) -> Sizes:
        """Return what operators of a GRU take: in all layers and directions."""
        gru, sizes = self.trials.grus[module], Sizes()
        for layer in range(gru.num_layers):
            number = counts(gru, layer)
            for reverse in (False, True)[: _directions(gru)]:
                for name, each in bits.items():
                    sizes += operator_sizes(name, number[name], each)
                    place = Place(module, layer, reverse, name)
                    if name in _OPERANDS:  # its form may depend on the width of the operand
                        widths = {name: each, _OPERANDS[name]: self._widest(module, name)}
                        sizes += matrix_sizes(name, self.trials.plan(place.cell, widths))
                    elif name in PRE_ACTIVATION:
                        pre = bits[PRE_ACTIVATION[name]]
                        sizes += table_sizes(*self.trials.table(place, pre, each))
        return sizes

    def _widest(self, module: str, weight: str) -> int:
        """Return the widest choice for the operand of a matrix."""
        operand = _OPERANDS[weight]
        return max(
            choice[part.operators.index(operand)]
            for part in self.parts
            if part.module == module and operand in part.operators
            for choice in part.choices
        )

    def predicted(self, widths: Mapping[str, Mapping[str, int]]) -> float:
        """Return the predicted decibels of widths; operators without one keep theirs."""
        found = (
            self.errors[m, name, bits] for m, own in widths.items() for name, bits in own.items()
        )
        return self._decibels(sum(found))

    def _decibels(self, added: float) -> float:
        return decibels(self.trials.signal, max(self.least + added, 0.0))

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

    def measure(self, widths: Mapping[str, Mapping[str, int]]) -> float:
        """Give the model these widths, and return its decibels."""
        self.trials.set(_places(self.trials, widths), self.base)
        return decibels(self.trials.signal, self.trials.noise())


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


def _budget(budget: Budget) -> dict[str, float]:
    """Return the limits by name."""
    known = [*COSTS, "sqnr"]
    given = dict(budget) if isinstance(budget, Mapping) else {"flash": budget}
    if not given:
        raise QuantGRUError(f"Expected a budget of {', '.join(known)}, got an empty one")
    found: dict[str, float] = {}
    for name, value in given.items():
        if name not in known:
            raise QuantGRUError(
                f"Expected a budget of a known kind, got {name!r}; {suggest(name, known)}"
            )
        is_size = name not in ("bits", "sqnr")
        limit = bytes_of(value) if is_size and isinstance(value, str) else value
        if isinstance(limit, bool) or not isinstance(limit, int | float) or math.isnan(limit):
            rule = "bytes: a number, or a text such as '60 kB'" if is_size else "a number"
            raise QuantGRUError(f"Expected a budget to be {rule}, got {value!r} ({name!r})")
        found[name] = limit
    return found


def _bytes_of(budget: Mapping[str, float]) -> str:
    """Return which bytes of weights and tables count beside other limits."""
    return "packed" if "packed" in budget and "flash" not in budget else "flash"


def _choices(widths: Widths) -> dict[str, tuple[int, ...]]:
    """Return the widths of each operator to choose from."""
    found: dict[str, tuple[int, ...]] = {}
    for pattern, own in (widths if isinstance(widths, Mapping) else {"*": widths}).items():
        found[pattern] = tuple(sorted({check_width(each) for each in own}))
        if not found[pattern]:
            raise QuantGRUError(f"Expected widths to choose from, got none ({pattern!r})")
    return dict.fromkeys(OPERATORS, WIDTHS) | _by_operator(found)


def _by_operator(given: Mapping[str, Value]) -> dict[str, Value]:
    """Return the values of operators: of an exact name, else of the first pattern that fits."""
    found: dict[str, Value] = {}
    for pattern in sorted(given, key=_is_pattern):
        new = [name for name in _fitting(pattern) if name not in found]
        if not new:
            raise ConfigError(
                f"Expected each name or pattern to decide for an operator, got {pattern!r} after "
                "others that fit the same operators; the first pattern that fits decides"
            )
        found |= dict.fromkeys(new, given[pattern])
    return found


def _is_pattern(name: str) -> bool:
    return any(each in name for each in "*?[")


def _fitting(pattern: str) -> list[str]:
    """Return the operators of a name or a pattern."""
    if _is_pattern(pattern):
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
    only = _by_operator(fixed)
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


def _bounded(
    errors: Mapping[tuple[str, str, int], float], most: float
) -> dict[tuple[str, str, int], float]:
    """Return what operators add to an error, with gains that together are at most `most`.

    Several operators may each take away most of an error, which exists only once. Their gains are
    made smaller by one factor, so that what remains of any widths is more than nothing.
    """
    gains: dict[tuple[str, str], float] = {}
    for (module, name, _), each in errors.items():
        gains[module, name] = max(gains.get((module, name), 0.0), -each)
    total = sum(gains.values())
    factor = most / total if total > most else 1.0
    return {key: each if each > 0 else factor * each for key, each in errors.items()}


def _directions(gru: QuantGRU) -> int:
    return 2 if gru.bidirectional else 1


def _rising(values: Sequence[float]) -> list[int]:
    """Return the indices of values that are greater than all before."""
    found: list[int] = []
    for i, each in enumerate(values):
        if not found or each > values[found[-1]]:
            found.append(i)
    return found


def _first(is_enough: Callable[[int], bool], items: Sequence[int], guess: int) -> int:
    """Return an index whose item is enough, the item before it not; the last one if none is.

    Args:
        is_enough: Whether an item is enough; called with few items near the guess.
        items: At least one.
        guess: Index of the item that is likely to be the first one.
    """
    low, high, step = -1, len(items) - 1, 1
    if is_enough(items[guess]):
        high = guess
        while high > 0 and low < 0:
            at = max(high - step, 0)
            if is_enough(items[at]):
                high, step = at, 2 * step
            else:
                low = at
    else:
        low = guess
        while low < high:
            at = min(low + step, len(items) - 1)
            if is_enough(items[at]):
                high = at
                break
            low, step = at, 2 * step
        if low == high:
            return high
    while high - low > 1:
        at = (low + high) // 2
        if is_enough(items[at]):
            high = at
        else:
            low = at
    return high


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
