"""One training step, cut at the units: memory and time of each part.

The forward of a unit lasts from its call to the next unit's call. Its backward lasts from the
moment when the gradient of its output is known to the same moment of an earlier unit. So the parts
cover the whole step, code between the units included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from actnn.planning.meter import Meter
from actnn.planning.training_step import TrainingStep
from actnn.planning.units import Unit

START, LOSS, END = -1, -2, -3  # parts of a step that belong to no unit


@dataclass
class Part:
    """A part of a step.

    Attributes:
        backward: Whether it belongs to the backward.
        unit: Index of the unit, or START, LOSS.
        start: Bytes allocated at its start.
        peak: Most bytes within it.
        seconds: Duration.
    """

    backward: bool
    unit: int
    start: int = 0
    peak: int = 0
    seconds: float = 0.0


@dataclass
class Timeline:
    """The parts of a step, in order of time."""

    parts: list[Part] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Most bytes of the step."""
        return max(part.peak for part in self.parts)


class _Recorder:
    """Marks the beginnings of parts while a step runs."""

    def __init__(self, device: torch.device, meter: Meter | None) -> None:
        self._device, self._meter = device, meter
        self.parts: list[Part] = []
        self._stamps: list[Any] = []
        self._unreached: set[int] = set()

    def mark(self, backward: bool, unit: int) -> None:
        if self._meter is not None:
            if self.parts:
                self.parts[-1].peak = self._meter.peak()
            self._meter.reset_peak()
            self.parts.append(Part(backward, unit, start=self._meter.allocated()))
        else:
            self.parts.append(Part(backward, unit))
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._stamps.append(event)
        else:
            self._stamps.append(time.perf_counter())

    def forward_hook(self, unit: int) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self.mark(False, unit)

        return enter

    def output_hook(self, unit: int) -> Callable[..., None]:
        def leave(module: object, args: object, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._unreached.add(unit)
                    leaf.register_hook(lambda _: self._reached(unit))

        return leave

    def _reached(self, unit: int) -> None:
        if unit in self._unreached:
            self._unreached.remove(unit)
            self.mark(True, unit)

    def finish(self) -> None:
        self.mark(True, END)
        last = self.parts.pop()
        self.parts[-1].peak = max(self.parts[-1].peak, last.start)

    def timeline(self) -> Timeline:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            seconds = [
                a.elapsed_time(b) / 1e3
                for a, b in zip(self._stamps, self._stamps[1:], strict=False)
            ]
        else:
            seconds = [b - a for a, b in zip(self._stamps, self._stamps[1:], strict=False)]
        for part, each in zip(self.parts, seconds, strict=True):
            part.seconds = each
        return Timeline(self.parts, sum(seconds))


@contextmanager
def _hooked(units: list[Unit], recorder: _Recorder) -> Iterator[None]:
    handles = []
    for index, unit in enumerate(units):
        handles.append(unit.module.register_forward_pre_hook(recorder.forward_hook(index)))
        handles.append(unit.module.register_forward_hook(recorder.output_hook(index)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run(
    units: list[Unit], loss: Callable[[], Tensor], device: torch.device, meter: Meter | None
) -> _Recorder:
    recorder = _Recorder(device, meter)
    with _hooked(units, recorder):
        recorder.mark(False, START)
        value = loss()
        recorder.mark(True, LOSS)
        value.backward()
        del value
        recorder.finish()
    return recorder


def record(
    units: list[Unit], loss: Callable[[], Tensor], device: torch.device, meter: Meter
) -> Timeline:
    """Run a forward and a backward, and say what memory each part took.

    Args:
        units: Where to cut.
        loss: Runs the forward and returns the loss, a scalar.
        device: Where the model is.
        meter: Measures memory, which takes time.

    Returns:
        The parts. Gradients are left in the parameters.
    """
    return _run(units, loss, device, meter).timeline()


def record_times(units: list[Unit], step: TrainingStep, repeats: int) -> list[Timeline]:
    """Run steps one after the other, and say how long each part of each took.

    Nothing waits for the device in between, so that the host works ahead as in training. The
    first step, which finds an idle device and chooses kernels, is left out.

    Args:
        units: Where to cut.
        step: The step.
        repeats: How many steps.
    """
    with step.isolated():
        recorders = []
        for _ in range(1 + repeats):
            recorders.append(_run(units, step.loss, step.device, None))
            step.model.zero_grad(set_to_none=True)
        return [recorder.timeline() for recorder in recorders[1:]]
