"""Fitting a model's training step into a memory budget."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from actnn.errors import ActNNError, ActNNWarning
from actnn.layers.compress import compress, uncompress
from actnn.planning.blocks import BlockChoice, apply, as_run, compile_units
from actnn.planning.comparison import KEEP, RECOMPUTE
from actnn.planning.costs import Costs
from actnn.planning.measure import LEAST, Measurement
from actnn.planning.plan import Plan, not_recomputed
from actnn.planning.progress import Measuring, Report
from actnn.planning.sizes import format_bytes, parse_bytes
from actnn.planning.solver import smallest_budget, solve
from actnn.planning.training_step import Loss, TrainingStep
from actnn.planning.units import Unit, children_of, find_units, units_that_run
from actnn.saving import Saving

COMPILE_SECONDS = 180.0  # that measurements take at most if nobody says how long they may
ROUNDS = 6  # corrections of the prediction by a real step
MOST_NOISE = 0.1  # of the gradient's squared norm, above which a plan warns
SLACK = 0.02  # of the budget that may stay unused
WHOLE_SAVES = 0.15  # of the peak by units, where a model is compiled as one; ResNet-50 on an H200
FUSED = (4,)  # bits of codes that compiled blocks may compute themselves: each is compiled
INPUT_BITS = (4, 5, 6, 7, 8)  # that inputs of recomputed blocks may have
MEMORY_SHARES = (0.5, 0.2)  # of what a compiled block would hold
Choices: TypeAlias = tuple[BlockChoice, ...]  # one for each unit

_logger = logging.getLogger(__name__)


def fit(
    model: nn.Module,
    example: Any,
    budget: int | str,
    *,
    loss: Loss | None = None,
    bits: Sequence[int] = (8, 4, 2),
    reserve: int | str | None = None,
    noise_price: float = 1.0,
    compile: bool = False,
    seed: int = 0,
    progress: Report | None = None,
    max_seconds: float | None = None,
) -> Plan:
    """Change a model so that its training step stays within a memory budget, at the least cost.

    Training steps measure what each choice costs each block: bytes held, bytes above in forward
    and backward, time, and noise in the gradient. A dynamic program then chooses for each block:
    keep, compress to some bits, recompute, or move to host memory. A real step is compared with
    the prediction, and the choice corrected until it fits. On a CPU, memory is that of all
    tensors; what operators use inside is not seen.

    Args:
        model: The model in training mode, on its device. It is changed in place: `model.actnn` is
            its Saving; `actnn.uncompress` restores it. Parameters and gradients stay as they are.
        example: A batch: a tensor, a tuple of arguments, a mapping of keyword arguments, or
            whatever `loss` takes.
        budget: Peak of forward and backward, parameters and gradients included: bytes, or a text
            such as "6 GiB".
        loss: (model, example) -> scalar loss. Autocast belongs here.
        bits: Widths that may be used; () allows no noise at all.
        reserve: Part of the budget to leave free, such as the states that an optimizer makes in
            its first step.
        noise_price: Relative time that is as bad as a gradient variance of its squared norm.
        compile: Compile by torch.compile, too: block by block, or the model as one.
        seed: Seed of the noise of rounding.
        progress: Called before each measurement with (how many are done, how many there may be,
            what comes and how long all may take). None draws a bar if standard error is a
            terminal.
        max_seconds: After this time, the best plan of those measured by then is taken. What any
            plan needs is measured nevertheless. Compiling is not interrupted. None is no limit, but
            180 with `compile`; math.inf is none.

    Returns:
        The plan, which is in effect.

    Raises:
        ActNNError: If no plan fits; the message has the smallest budget for which there is one.

    Example:
        >>> plan = fit(network, images, "500 MB")
        >>> plan.peak < 500 * 10**6
        True
    """
    _limits(budget, reserve, noise_price)  # errors come before the measurement
    planner = Planner(
        model,
        example,
        loss=loss,
        bits=bits,
        compile=compile,
        seed=seed,
        progress=progress,
        max_seconds=max_seconds,
    )
    return planner.plan(budget, reserve=reserve, noise_price=noise_price)


class Planner:
    """Measures a model once, for plans under several budgets. Arguments are those of `fit`.

    Attributes:
        costs: What each choice costs each unit.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        *,
        loss: Loss | None = None,
        bits: Sequence[int] = (8, 4, 2),
        compile: bool = False,
        seed: int = 0,
        progress: Report | None = None,
        max_seconds: float | None = None,
    ) -> None:
        if not isinstance(bits, Sequence) or isinstance(bits, str):
            raise ActNNError(f"Expected bits to be widths such as (8, 4, 2), got {bits!r}")
        if max_seconds is None and compile:
            max_seconds = COMPILE_SECONDS
        self._progress = Measuring(progress, max_seconds)
        step = TrainingStep(model, example, loss)
        devices = sorted({str(parameter.device) for parameter in model.parameters()})
        if len(devices) > 1:
            raise ActNNError(
                "Expected the model to be on one device, got parameters on "
                f"{' and '.join(devices)}; a plan is for the memory of one"
            )
        units = find_units(model)
        self._model, self._seed, self._compile = model, seed, compile
        self._saving: Saving | None = None
        self._peaks: dict[Choices, int] = {}
        self._seconds: dict[Choices, float] = {}
        self._noises: dict[Choices, float] = {}
        self._right: dict[BlockChoice, bool] = {}
        saving = _compressed(model, seed)
        try:
            self._units = _in_order(units, step, saving)
            self._measurement = Measurement(step, self._units, self._apply)
            candidates = _candidates(step.device, bits, compile)
            self._whole = _compiled_as_one(bits) if compile else []
            self._progress.begin(2 * len(candidates) + len(self._whole) + 3 * ROUNDS)
            self.costs = self._measurement.costs(candidates, self._progress)
            plain = {choice: self.costs.of[choice] for choice in (KEEP, RECOMPUTE)}
            self._plain_costs = replace(self.costs, of=plain)
        except BaseException:
            self._progress.end()
            uncompress(model)
            raise

    def _apply(self, choices: Sequence[BlockChoice]) -> None:
        """Put choices into effect, after `uncompress`, too."""
        model: Any = self._model
        if getattr(model, "actnn", None) is not self._saving:
            self._saving = _compressed(model, self._seed)
            if self._compile:
                compile_units(model, self._units)
        apply(model.actnn, self._units, choices)

    def plan(
        self, budget: int | str, *, reserve: int | str | None = None, noise_price: float = 1.0
    ) -> Plan:
        """Find a plan for a budget and put it into effect; arguments are those of `fit`.

        Of all plans that were measured, for this budget or others before, it takes the best one
        that fits. Each choice for all units is among them if its predicted peak fits.

        After an error the model is as it was before it was measured. Plans may follow.
        """
        try:
            limit, room = _limits(budget, reserve, noise_price)
            self._progress.begin(0)
            self._late: list[str] = []
            self._try(room, noise_price)
            fitting = [plan for plan, peak in self._peaks.items() if peak <= room]
            if not fitting:
                needed = limit - room + min(self._peaks.values(), default=2 * room)
                raise ActNNError(
                    f"Expected budget to be at least {needed} bytes ({format_bytes(needed)}), got "
                    f"{limit} ({format_bytes(limit)}); a smaller batch needs less"
                )
            best = self._best(fitting, noise_price)
        except BaseException:
            uncompress(self._model)
            raise
        finally:
            self._progress.end()
        self._measurement.apply(best)
        noise = self._noise(best)
        if noise > MOST_NOISE:
            warnings.warn(
                f"The plan adds a variance of {noise:.0%} of the gradient's squared norm. "
                f"Expected at most {MOST_NOISE:.0%}; a larger budget allows more bits",
                ActNNWarning,
                stacklevel=3,
            )
        plan = Plan(
            choices={unit.path: each for unit, each in zip(self._units, best, strict=True)},
            budget=limit,
            predicted_peak=round(self._peaks[best] if best[0].whole else self.costs.peak(best)),
            peak=self._peaks[best],
            predicted_seconds=self._predicted_seconds(best),
            seconds=self._seconds[best],
            noise=noise,
            notes=(*not_recomputed(self._units), *self._measurement.notes, *self._late),
        )
        _logger.info("plan\n%s", plan)
        return plan

    def _try(self, room: int, noise_price: float) -> None:
        """Measure plans for a budget: one choice for all units, and solutions.

        Solutions are with all choices, and with plain ones only. If none fits, the last are the
        plans with the smallest peaks.
        """
        for choice in self._whole:
            if not self._may_fit(choice, room) or self._is_beaten(choice, room):
                continue
            if not self._progress.has_time_for(self._measurement.compile_seconds):
                self._late.append(f"max_seconds are over: not measured: '{choice}'")
            elif self._is_right(choice):
                self._peak_of(as_run(self._units, (choice,) * len(self._units)), room)
        for choice in self.costs.of:
            if self._progress.is_over:
                break
            if self._peak_by_unit(choice) <= room:
                self._peak_of(as_run(self._units, (choice,) * len(self._units)), room)
        for costs in (self.costs, self._plain_costs):
            self._search(costs, room, noise_price)
        if not any(peak <= room for peak in self._peaks.values()):
            for costs in (self.costs, self._plain_costs):
                smallest = solve(_by_bytes(costs), smallest_budget(costs), 0.0)
                assert smallest is not None
                self._peak_of(as_run(self._units, smallest), room)

    def _may_fit(self, choice: BlockChoice, room: int) -> bool:
        """Whether a model compiled as one probably fits, by what its blocks need."""
        # As one, codes are also of what blocks pass on, as they are by the hooks around blocks.
        by_unit = replace(choice, whole=False), replace(choice, whole=False, fused=False)
        known = [self._peak_by_unit(each) for each in by_unit if each in self.costs.of]
        if not known:  # there was no time to measure it; recomputation holds least
            base, least = self.costs.base, self._peak_by_unit(RECOMPUTE)
            share = choice.memory if choice.bits is None else 0.0
            known = [max(least, base + share * (self._peak_by_unit(KEEP) - base))]
        return min(known) * (1 - WHOLE_SAVES) <= room

    def _peak_by_unit(self, choice: BlockChoice) -> float:
        return self.costs.peak((choice,) * len(self._units))

    def _is_beaten(self, choice: BlockChoice, room: int) -> bool:
        """Whether a model compiled as one fits that does the same, and recomputes or rounds less.

        It is faster, and compiling takes longer than all other measurements.
        """
        as_one = [plan[0] for plan, peak in self._peaks.items() if plan[0].whole and peak <= room]
        exact = max((each.memory for each in as_one if each.bits is None), default=0.0)
        return exact > (choice.memory if choice.bits is None else MEMORY_SHARES[0])

    def _is_right(self, choice: BlockChoice) -> bool:
        """Whether a model that is compiled as one has the gradient of the one that keeps all."""
        if choice.memory == 1.0:
            return True
        if choice not in self._right:
            self._right[choice] = self._measurement.is_right(choice)
        return self._right[choice]

    def _search(self, costs: Costs[BlockChoice], room: int, noise_price: float) -> None:
        """Solve for a plan, measure its real peak, and correct the target by the difference."""
        target, tried = float(room), set[Choices]()
        for _ in range(ROUNDS):
            solved = solve(costs, target, noise_price)
            if solved is None:
                break
            found = as_run(self._units, solved)
            if found in tried:
                break
            tried.add(found)
            if self._progress.is_over and any(each <= room for each in self._peaks.values()):
                break
            peak = self._peak_of(found, room)
            if room * (1 - SLACK) <= peak <= room:
                break
            target = room - (peak - costs.peak(found))

    def _best(self, fitting: list[Choices], noise_price: float) -> Choices:
        """The plan of least measured cost; if the time is over, of those that were measured."""
        all_kept = (KEEP,) * len(self._units)
        if all_kept in fitting:  # only a compiler makes a step faster, whatever the clock says
            fitting = [plan for plan in fitting if plan == all_kept or _is_compiled(plan)]
        best, least, by_units = fitting[0], math.inf, 0
        # Compiling a model as one took long. Others are in the order of their predicted costs.
        for plan in sorted(fitting, key=lambda each: self._predicted_cost(each, noise_price)):
            if plan not in self._seconds:
                if self._progress.is_late and by_units:
                    self._late.append("max_seconds are over: not all plans that fit were timed")
                    break
                self._progress.next("timing a plan that fits")
            by_units += not plan[0].whole
            cost = self._cost(plan, noise_price)
            if cost < least:
                best, least = plan, cost
        return best

    def _predicted_cost(self, plan: Choices, noise_price: float) -> float:
        """Predicted time and noise of a plan; 0 for a model that is compiled as one."""
        if plan[0].whole:
            return 0.0
        scale = self.costs.seconds([KEEP] * len(plan))
        return self.costs.seconds(plan) / scale + noise_price * self.costs.noise(plan)

    def _cost(self, plan: Choices, noise_price: float) -> float:
        """Measured time and noise of a plan that fits."""
        if plan not in self._seconds:
            self._seconds[plan] = self._measurement.seconds(plan)
        scale, seconds = self.costs.seconds([KEEP] * len(plan)), self._seconds[plan]
        all_kept = (KEEP,) * len(plan)
        if plan != all_kept and not _is_compiled(plan):
            # As in the costs: only a compiler makes a step faster than keeping all.
            seconds = max(seconds, LEAST * self._seconds.get(all_kept, 0.0))
        return seconds / scale + noise_price * self._noise(plan)

    def _noise(self, plan: Choices) -> float:
        if plan not in self._noises:
            self._noises[plan] = self._measurement.noise(plan)
        return self._noises[plan]

    def _predicted_seconds(self, plan: Choices) -> float:
        return self._seconds[plan] if plan[0].whole else self.costs.seconds(plan)

    def _peak_of(self, plan: Choices, room: int) -> int:
        """The real peak of a plan, measured once; twice the room if the device is too small."""
        if plan not in self._peaks:
            kinds = set(map(str, plan))
            self._progress.next(kinds.pop() if len(kinds) == 1 else "a solution")
            try:
                self._peaks[plan] = self._measurement.peak(plan)
            except torch.OutOfMemoryError:
                pass
            else:
                _logger.info("peak %s", format_bytes(self._peaks[plan]))
                return self._peaks[plan]
            torch.cuda.empty_cache()  # here the error no longer holds tensors
        return self._peaks.get(plan, 2 * room)


def _is_compiled(plan: Choices) -> bool:
    """Whether a plan has more than the forms in which units run anyway."""
    return any(each.whole or each.form != KEEP.form for each in plan)


def _compressed(model: nn.Module, seed: int) -> Saving:
    """Compress a model for plans, whose noise is measured here."""
    saving: Saving = compress(model, seed=seed).actnn  # type: ignore[assignment]
    saving.adaptive = None
    return saving


def _limits(budget: int | str, reserve: int | str | None, noise_price: float) -> tuple[int, int]:
    """Bytes of the budget, and what is left of it for the step."""
    limit = parse_bytes(budget, "budget")
    room = limit - (0 if reserve is None else parse_bytes(reserve, "reserve"))
    if room <= 0:
        raise ActNNError(f"Expected reserve to be less than the budget {budget!r}, got {reserve!r}")
    if not isinstance(noise_price, (int, float)) or not noise_price >= 0:
        raise ActNNError(f"Expected noise_price to be a number of at least 0, got {noise_price!r}")
    return limit, room


def _by_bytes(costs: Costs[BlockChoice]) -> Costs[BlockChoice]:
    """Costs where bytes are all that counts, for results that are the same every time."""
    return replace(
        costs,
        other=0.0,
        of={choice: replace(each, seconds=1.0 + each.held) for choice, each in costs.of.items()},
    )


def _in_order(units: list[Unit], step: TrainingStep, saving: Saving) -> list[Unit]:
    """The units that a step runs, in order of the forward.

    A unit that is not called itself, but whose children are, is replaced by them.
    """
    calls = list[nn.Module]()
    handle = step.model.register_forward_pre_hook(lambda model, _: calls.append(model))
    try:
        ran = _called(units, step, saving)
    finally:
        handle.remove()
    if not calls:
        what = f"only a part of it, {ran[0].path!r}" if ran else "nothing of it"
        raise ActNNError(
            f"Expected loss to call the {type(step.model).__name__} that it gets, as in "
            f"model(example), got one that calls {what}; what other methods save cannot be "
            "planned. Fit that part, or let forward return the loss"
        )
    if not ran:
        raise ActNNError(
            f"Expected the forward of {type(step.model).__name__} to call submodules, got none "
            "that it calls; only what modules save can be planned"
        )
    return ran


def _called(units: list[Unit], step: TrainingStep, saving: Saving) -> list[Unit]:
    """The units that a step calls, or those inside of them that it calls instead."""
    nothing = torch.empty(0)
    while True:
        apply(saving, units, [KEEP] * len(units))
        try:
            with step.isolated(), saved_tensors_hooks(lambda _: nothing, lambda _: nothing):
                ran = units_that_run(units, step.loss)
        except RuntimeError:  # the forward needs what is saved, because it differentiates
            with step.isolated():
                ran = units_that_run(units, step.loss)
        called = {unit.path for unit in ran}
        below = children_of([unit for unit in units if unit.path not in called])
        if not below:
            return ran
        units = ran + below


def _candidates(device: torch.device, bits: Sequence[int], compile: bool) -> list[BlockChoice]:
    """What is measured for every unit; the first two are in any case."""
    candidates = [KEEP, RECOMPUTE, BlockChoice("compress", 32)]
    candidates += [BlockChoice("compress", each) for each in bits]
    candidates += [BlockChoice("recompute", each) for each in bits if each in INPUT_BITS]
    if device.type == "cuda":
        candidates.append(BlockChoice("offload"))
    if compile:  # what may be left out for lack of time comes last
        candidates += [BlockChoice("compress", each, fused=True) for each in bits if each in FUSED]
        candidates += [BlockChoice("keep", memory=share) for share in MEMORY_SHARES]
    return candidates


def _compiled_as_one(bits: Sequence[int]) -> list[BlockChoice]:
    """What is measured for the whole model, in this order while there is time."""
    every, some, *few = (BlockChoice("keep", memory=m, whole=True) for m in (1.0, *MEMORY_SHARES))
    fused = [BlockChoice("compress", b, fused=True, whole=True) for b in bits if b in FUSED]
    return [every, some, *fused, *few]
