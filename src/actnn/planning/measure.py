"""Costs of every choice, measured by training steps on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from actnn._errors import ActNNError
from actnn.planning.blocks import BlockChoice
from actnn.planning.costs import Costs, UnitCosts, UnitMemory, typical, unit_memory, unit_seconds
from actnn.planning.meter import meter_for
from actnn.planning.timeline import Timeline, record, record_times
from actnn.planning.training_step import TrainingStep
from actnn.planning.units import Unit

SHARES = (1, 2, 4, 8, 16)  # parts of the batch, for choices that do not fit
LEAST = 1.002  # seconds of a choice that saves memory, as a share of those of keeping all
KEEP, RECOMPUTE = BlockChoice("keep"), BlockChoice("recompute")
Apply = Callable[[Sequence[BlockChoice]], None]


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
    """

    def __init__(self, step: TrainingStep, units: list[Unit], apply: Apply) -> None:
        self._step, self._units, self.apply = step, units, apply
        self._repeats = 3 if step.device.type == "cpu" else 7
        # For each share of the batch: gradients, on the host, and the sum of their squares.
        self._exact: dict[int, tuple[dict[str, Tensor], float]] = {}
        self._base = 0
        self._loss = 0.0
        self._other = np.inf

    def costs(self, choices: Sequence[BlockChoice]) -> Costs[BlockChoice]:
        """Measure every choice, for all units at a time."""
        of = {choice: self._measured(choice) for choice in choices}
        keep = of.get(KEEP)
        for choice, each in of.items():
            if keep is not None and choice.memory == 1.0:
                # Nothing but a compiler makes a unit faster than keeping all: the rest is chance.
                least = keep.seconds * (1.0 if choice == KEEP else LEAST)
                of[choice] = replace(each, seconds=np.maximum(each.seconds, least))
        return Costs(self._base, self._loss, float(self._other), of)

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
        share = min(self._exact, default=1)
        step = self._step if share == 1 else self._step.shrunk(share)
        return self._noise_of(step, share, choices)[0]

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
        raise ActNNError(
            f"Expected a sixteenth of the example to fit the memory, got an error with "
            f"{choice}; make the example smaller"
        )

    def _measured_at(self, choice: BlockChoice, share: int) -> UnitCosts:
        step = self._step if share == 1 else self._step.shrunk(share)
        noise = np.zeros(len(self._units))
        if not is_exact(choice):
            noise = self._noise_of(step, share, [choice] * len(self._units))[1]
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

    def _noise_of(
        self, step: TrainingStep, share: int, choices: Sequence[BlockChoice]
    ) -> tuple[float, np.ndarray]:
        """Squared difference from the exact gradient, over its squared norm: in all, by unit."""
        if share not in self._exact:
            self.apply([RECOMPUTE] * len(self._units))
            with _gradients(step) as gradients:
                on_host = {name: each.cpu() for name, each in gradients.items()}
                self._exact[share] = on_host, sum(map(_energy, gradients.values()))
        self.apply(choices)
        exact, total = self._exact[share]
        with _gradients(step) as noisy:
            noise = {
                name: _energy(each - exact[name].to(each.device)) / max(total, 1e-300)
                for name, each in noisy.items()
                if name in exact
            }
        by_unit = np.zeros(len(self._units))
        for index, unit in enumerate(self._units):
            for name, _ in unit.module.named_parameters():
                by_unit[index] += noise.get(f"{unit.path}.{name}", 0.0)
        both = np.nan_to_num([sum(noise.values()), *by_unit], nan=np.inf)
        return float(both[0]), both[1:]


@contextmanager
def _gradients(step: TrainingStep) -> Iterator[dict[str, Tensor]]:
    with step.isolated():
        step.loss().backward()
        parameters = step.model.named_parameters()
        yield {name: each.grad for name, each in parameters if each.grad is not None}


def _energy(x: Tensor) -> float:
    """Sum of the squares of all elements, real or complex."""
    if x.is_sparse:
        x = x.coalesce().values()
    wide = torch.complex128 if x.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(x, dtype=wide).square())
