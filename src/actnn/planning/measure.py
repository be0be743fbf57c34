"""Costs of every choice, measured by training steps on this machine."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from actnn.planning.blocks import BlockChoice
from actnn.planning.comparison import (
    KEEP,
    LOSSLESS,
    RECOMPUTE,
    SHARES,
    Apply,
    Comparison,
    exact_form,
    too_large,
)
from actnn.planning.costs import (
    Array,
    Costs,
    UnitCosts,
    UnitMemory,
    typical,
    unit_memory,
    unit_seconds,
)
from actnn.planning.meter import meter_for
from actnn.planning.progress import Measuring
from actnn.planning.timeline import Timeline, record, record_times
from actnn.planning.training_step import TrainingStep
from actnn.planning.units import Unit
from actnn.planning.verify import MOST_ROUNDED, ROUNDED, limit_of, mark_unrepeatable, text_of

LEAST = 1.002  # seconds of a choice that saves memory, as a share of those of keeping all
LITTLE = 1e-3  # noise of all units that decides nothing
MOVED = 0.1  # share of the noise that may be in other units than those that make it
GROUPS = 24  # of units, at most, whose noise is measured apart


def is_exact(choice: BlockChoice) -> bool:
    """Whether gradients are those of plain training."""
    return choice.bits in (None, 32)


class Measurement:
    """Runs a step under choices, and gathers what it costs.

    Args:
        step: The training step.
        units: The units of the model.
        apply: Sets one choice for each unit.

    Attributes:
        apply: As above.
        notes: What is left out, and why.
        compare: Compares the gradients of choices.
        compile_seconds: How long it took to compile all blocks in one form, if they are compiled.
    """

    def __init__(self, step: TrainingStep, units: list[Unit], apply: Apply) -> None:
        self._step, self._units, self.apply = step, units, apply
        self.notes: list[str] = []
        self._repeats = 3 if step.device.type == "cpu" else 7
        self.compare = Comparison(step, units, apply)
        self.compile_seconds = 0.0
        self._draws = True  # whether the forward draws random numbers
        self._same_masks = True  # whether all choices draw the same random numbers
        self._share = 1  # of the batch, for which noise was measured
        self._again = 0.0  # the difference between two equal steps
        self._base = 0
        self._loss = 0.0
        self._other = np.inf

    def costs(
        self, choices: Sequence[BlockChoice], progress: Measuring | None = None
    ) -> Costs[BlockChoice]:
        """Measure every choice, for all units at a time.

        Units are marked that cannot be recomputed, and choices without noise whose gradient is not
        that of keeping all are left out.

        Args:
            choices: The choices; the first two are always measured.
            progress: Is told what is measured, and ends it.
        """
        progress = Measuring(None, None) if progress is None else progress
        progress.next("comparing recomputation with keeping all")
        units = len(self._units)
        keep_all = [KEEP] * units
        begin = time.monotonic()
        self.apply(keep_all)
        self._draws = self._step.draws()
        self._again = mark_unrepeatable(self._units, lambda plan: self.compare(plan, keep_all))
        masks = self.compare([LOSSLESS] * units, keep_all)
        self._same_masks = masks.total <= limit_of(self._again)
        self.compile_seconds = time.monotonic() - begin
        of: dict[BlockChoice, UnitCosts] = {}
        late = []
        for index, choice in enumerate(choices):
            if index > 1 and (progress.is_over or not progress.has_time_for(self._needs(choice))):
                late.append(f"'{choice}'")
                continue
            progress.next(f"each block: {choice}")
            if self.is_right(choice):
                of[choice] = self._measured(choice)
        for choice, each in of.items():
            if each.noise.sum() <= LITTLE or np.isinf(each.noise).all():
                continue
            if progress.is_over:
                late.append(f"which blocks make the noise of '{choice}'")
                continue
            progress.next(f"which blocks make the noise of '{choice}'")
            of[choice] = replace(each, noise=self._made_by_unit(choice, each.noise))
        if late:
            self.notes.append(f"max_seconds are over: not measured: {', '.join(late)}")
        keep = of.get(KEEP)
        for choice, each in of.items():
            if keep is not None and choice.memory == 1.0:
                # Nothing but a compiler makes a unit faster than keeping all: the rest is chance.
                least = keep.seconds * (1.0 if choice == KEEP else LEAST)
                of[choice] = replace(each, seconds=np.maximum(each.seconds, least))
        return Costs(self._base, self._loss, float(self._other), of)

    def _needs(self, choice: BlockChoice) -> float:
        """Seconds that must be left for a choice: those of compiling blocks and the whole model.

        The model compiled as one gains more than compiled blocks of another form do, and takes up
        to twice as long to compile.
        """
        return 0.0 if choice.form == KEEP.form else 3 * self.compile_seconds

    def peak(self, choices: Sequence[BlockChoice]) -> int:
        """Run a step with a choice for each unit, and return its peak in bytes.

        Raises:
            torch.OutOfMemoryError: If the device's memory is not enough.
        """
        self.apply(choices)
        if choices[0].whole:
            record_times([], self._step, 0)  # this compiles
        with self._step.isolated():
            return self._memory(self._step, []).peak

    def seconds(self, choices: Sequence[BlockChoice]) -> float:
        """Seconds of a step with a choice for each unit."""
        self.apply(choices)
        steps = record_times([], self._step, self._repeats)
        return float(typical([step.seconds for step in steps]))

    def noise(self, choices: Sequence[BlockChoice]) -> float:
        """Variance that a choice for each unit adds to the gradient, as a share of its square."""
        if all(map(is_exact, choices)):
            return 0.0
        return self.compare(choices, self._exact_of(choices), self._share).total

    def _made_by_unit(self, choice: BlockChoice, found: Array) -> Array:
        """Variance that the codes of each unit add to the gradient of the whole model.

        Backward takes noise from a unit to those before it: what recomputes the last block of a
        ResNet from an input of 4 bits disturbs the first convolution, whose own input is exact. In
        other models (few norms) the noise stays where it is made; half of the units show which.

        Args:
            choice: A choice that rounds.
            found: Variance in the parameters of each unit where all units round.
        """
        units, rest = len(found), exact_form(choice)

        def made_by(group: Collection[int]) -> float:
            plan = [choice if unit in group else rest for unit in range(units)]
            return self.compare(plan, self._exact_of(plan), self._share).total

        half, is_finite = units // 2, bool(np.isfinite(found).all())
        if is_finite:
            moved = made_by(range(half, units)) - found[half:].sum()
            if abs(moved) <= MOVED * found.sum():
                return found
        made = np.zeros(units)
        for group in np.array_split(np.arange(units), min(units, GROUPS)):
            noise = made_by(group.tolist())
            weights = found[group] if is_finite and found[group].any() else np.ones(len(group))
            made[group] = noise * weights / weights.sum() if np.isfinite(noise) else np.inf
        return made

    def is_right(self, choice: BlockChoice) -> bool:
        """Whether a choice without noise has the exact gradient; a note says why not."""
        if not is_exact(choice) or choice in (exact_form(choice), RECOMPUTE):
            return True
        compiled = choice.form != KEEP.form
        # Without random numbers compiled forms differ in where they round alone, so that none needs
        # a form of its own for comparison, which takes long to compile.
        rounds = compiled and not self._draws
        exact, limit = exact_form(choice), limit_of(self._again)
        if rounds:
            exact, limit = KEEP, max(limit, ROUNDED)
        units = len(self._units)
        total, _, error = self.compare([choice] * units, [exact] * units)
        right = total <= limit or (rounds and total <= min(4 * self._rounding, MOST_ROUNDED))
        if not right:
            self.notes.append(f"'{choice}' is left out: {text_of(total, error)}")
        return right

    @cached_property
    def _rounding(self) -> float:
        """The difference between gradients of compiled and uncompiled code, which round elsewhere.

        That of ResNet-50 in bfloat16 is more than a hundredth of the squared norm.
        """
        keep = [KEEP] * len(self._units)
        self.compare(keep, keep)  # the exact gradient is of compiled code
        with torch.compiler.set_stance("force_eager"):
            return self.compare(keep, keep).total

    def _exact_of(self, choices: Sequence[BlockChoice]) -> list[BlockChoice]:
        """The choices to compare with. If no mask differs, these are the same for all."""
        if self._same_masks:
            return [KEEP] * len(choices)
        return [exact_form(choice) for choice in choices]

    def _memory(self, step: TrainingStep, units: list[Unit]) -> Timeline:
        with meter_for(step.device, step.known()) as meter:
            return record(units, step.loss, step.device, meter)

    def _measured(self, choice: BlockChoice) -> UnitCosts:
        self.apply([choice] * len(self._units))
        for share in SHARES:
            try:
                return self._measured_at(choice, share)
            except torch.OutOfMemoryError:
                pass
            torch.cuda.empty_cache()  # here the error no longer holds tensors
        raise too_large(choice)

    def _measured_at(self, choice: BlockChoice, share: int) -> UnitCosts:
        step = self._step if share == 1 else self._step.shrunk(share)
        noise = np.zeros(len(self._units))
        if not is_exact(choice):
            plan = [choice] * len(self._units)
            noise = self.compare(plan, self._exact_of(plan), share).by_unit
            self._share = max(self._share, share)
        record_times([], step, 0)  # Compilers and libraries choose their kernels.
        with step.isolated():
            memory = unit_memory(self._memory(step, self._units), len(self._units))
        timelines = record_times(self._units, step, self._repeats)
        seconds, other = unit_seconds(timelines, len(self._units))
        scale = float(share)
        if share == 1 or not self._base:
            self._note(memory, other * scale)
        return UnitCosts(
            held=memory.held * scale,
            forward=memory.forward * scale,
            backward=memory.backward * scale,
            seconds=seconds * scale,
            noise=noise,
        )

    def _note(self, memory: UnitMemory, other: float) -> None:
        self._base = max(self._base, memory.base)
        self._loss = max(self._loss, memory.loss)
        self._other = min(self._other, other)
