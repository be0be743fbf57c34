"""Bits per tensor by what they do to the whole gradient: measured costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from actnn.adapting.costs import REST, Saved, measure, observed
from actnn.adapting.layer_inputs import Layer, sampled_ranges
from actnn.adapting.replay import Gradient, Replay
from actnn.adapting.trials import Trial, Trials, distributed
from actnn.allocation.spend import spend
from actnn.allocation.threshold import MIN_BITS
from actnn.saving.context import Saving
from actnn.saving.exclusions import op_of
from actnn.saving.groups import CONVOLUTION, group_of
from actnn.saving.norms import NORM_BITS
from actnn.saving.settings import Bits
from actnn.saving.uncompiled import uncompiled

MOST_ERROR = 0.7  # of the whole gradient, relative; above, the budget rises
PLAIN_ERROR = 0.3  # likewise; below, the backward of batch norms needs no correction
RAISES, RAISE = 5, 0.05  # how often the budget may rise, and by what share
JOINT = 1.4  # errors of several tensors together, beside the sum of their costs
STALE = 2.0  # costs are measured again if the squared error is so many times the expected one


class Measured:
    """Allocates bits for the saved tensors of one model, each with one width.

    The cost of a tensor is the squared error of the whole gradient that its codes cause, with all
    others at 8 bits and the same noise, over the squared norm. That of an input of linear layers
    follows from its ranges and the layers' gradients; others are measured, in groups of neighbours
    of one kind.

    Args:
        model: The model.
        average: Average bits.
        group: Group of the codec.

    Attributes:
        bits: Bits of tensors by name, 'path:position', or 'path:d0' for codes of a derivative;
            empty until they are allocated.
        costs: Costs at 1 to 8 bits, by name.
        budget: Average bits that are spent now.
        error: The relative error of the whole gradient in the last trial, at these bits.
        corrects: Whether the backward of batch norms is corrected, which takes time.
    """

    by_sample, adapts = False, True

    def __init__(self, model: nn.Module, average: float, group: int) -> None:
        self.average, self.budget = average, average
        self.bits: dict[str, int] = {}
        self.costs: dict[str, list[float]] = {}
        self.error: float | None = None
        self.corrects = True
        self._group = group
        self._layers = Layer.all_of(model)
        self._count: Counter[str] = Counter()
        self._names: dict[int, str] = {}  # record of this step -> name
        self._saved: dict[str, Saved] = {}
        self._trial: tuple[Mapping[str, int], int] | None = None  # bits, and those of the rest
        self._observing = False  # whether ranges of inputs are of use
        self._trials = Trials(average)

    # What a step asks.

    @property
    def floor(self) -> int:
        """The fewest bits of tensors that have no bits of their own."""
        return REST if self._trial is not None and self._trial[1] == REST else 1

    @property
    def runs(self) -> int:
        """How many steps comparisons of gradients have run so far."""
        return self._trials.runs

    def begin_step(self, model: nn.Module | None) -> None:
        """Begin a forward pass."""
        if self._saved:
            self._trials.begin_step(model)
        self._count.clear()
        self._names.clear()
        self._saved.clear()

    def begin_batch(self, samples: int) -> None:
        """Do nothing: samples have no bits of their own."""

    def bits_of(self, path: str, tensor: Tensor, record: int, *, norm: bool = False) -> Bits | None:
        """Bits of a tensor that is about to be compressed.

        Args:
            path: Path of the module that saves it.
            tensor: Dense.
            record: Index of its record.
            norm: Whether a normalization saves it.
        """
        if not tensor.numel():
            return None
        name = self._names[record] = f"{path}:{self._count[path]}"
        self._count[path] += 1
        is_input = path in self._layers and name.endswith(":0")
        saved = Saved(tensor.numel(), "norm" if norm else "input" if is_input else "other")
        if self._observing and is_input:
            group = group_of(tensor, self._group, op_of(tensor) == CONVOLUTION)
            ranges = float(sampled_ranges(tensor.detach(), group))
            # a third less than the bound: the mean over the place between two codes
            saved.spread = ranges * self._layers[path].factor(group, tensor.numel()) * 4 / 6
            saved.users.append(path)
        return Bits(tensor, self._take(name, saved))

    def bits_of_derivative(self, path: str, elements: int) -> int:
        """Bits of the codes of a derivative that a module is about to save."""
        name = f"{path}:d{self._count[path + ':d']}"
        self._count[path + ":d"] += 1
        return self._take(name, Saved(elements, "derivative"))

    def record_of(self, name: str) -> int | None:
        """Return the index of the record of a tensor by its name; None if it has none."""
        return next((record for record, each in self._names.items() if each == name), None)

    def share(self, record: int, path: str) -> None:
        """Say that a module saves a tensor whose codes are held already."""
        saved = self._saved.get(self._names.get(record, ""))
        if saved is None:
            return
        if path in self._layers:
            self._count[path] += 1
            saved.users.append(path)
        elif saved.kind == "input":
            saved.kind = "other"

    def _take(self, name: str, saved: Saved) -> int:
        self._saved[name] = saved
        if self._trial is not None:
            bits, rest = self._trial
            return bits.get(name, rest)
        if not self.bits and saved.kind == "norm":
            return max(NORM_BITS, math.floor(self.average))
        return self.bits.get(name, math.floor(self.average))

    # Around a forward of the model.

    @uncompiled
    def watch(
        self, saving: Saving, forward: Callable[..., Any], arguments: Any, named: Any
    ) -> Replay | None:
        """Begin a forward of the model. See `Trials.watch`."""
        return self._trials.watch(saving, forward, arguments, named, self._judge)

    def detach(self) -> None:
        """Stop."""

    def _judge(self, trial: Trial) -> bool:
        """Allocate bits anew if those in use are not good enough; warn of noise.

        Returns:
            Whether the gradient was finite and not 0, so that there was something to compare.
        """
        self._trials.compare(
            trial, math.floor(self.average), lambda few: self._gradient(few, {}, REST)
        )
        with observed(trial.model, self._layers) as energies:
            self._observing = True
            try:
                exact = self._gradient(trial, {}, REST)
            finally:
                self._observing = False
        saved = dict(self._saved)
        if not saved:
            return True
        if not exact.is_finite:
            if trial.lossless_gradient().is_finite:
                self._trials.warn(
                    "Compression makes the gradient infinite or NaN even at 8 bits, where it is "
                    "finite without. Expected a tensor that is infinite to be kept (set_choices)"
                )
            return False
        if exact.energy() == 0:
            return False
        found = None
        if self.bits and not distributed():  # processes may have to run equally many steps
            found = self._at(trial, self.bits)
            equal = self._at(trial, self._equal(saved)).relative(exact)
            error = found.relative(exact)
            if error > 1.1 * equal or error > STALE * self._expected(self.bits):
                found = None
        if found is None:
            self.corrects = True
            self.costs = measure(
                saved,
                energies,
                exact.energy(),
                math.floor(self.average),
                lambda bits: self._gradient(trial, bits, REST).relative(exact),
            )
            found = self._allocate(trial, exact, saved)
        error = found.relative(exact)
        self.error = math.sqrt(error)
        self._warn(trial, exact, found, error)
        return True

    def _gradient(
        self, trial: Trial, bits: Mapping[str, int], rest: int, batch: int = 0
    ) -> Gradient:
        """Return the gradient at bits by name, and those of the rest."""
        self._trial = (bits, rest)
        try:
            return trial.gradient(batch)
        finally:
            self._trial = None

    def _at(self, trial: Trial, bits: Mapping[str, int]) -> Gradient:
        """Return the gradient at some bits."""
        return self._gradient(trial, bits, math.floor(self.average))

    def _equal(self, saved: Mapping[str, Saved]) -> dict[str, int]:
        return dict.fromkeys(saved, math.floor(self.average))

    def _expected(self, bits: Mapping[str, int]) -> float:
        """Return the sum of costs at some bits, and what errors together add."""
        return JOINT * sum(self.costs[name][b - MIN_BITS] for name, b in bits.items())

    def _allocate(self, trial: Trial, exact: Gradient, saved: Mapping[str, Saved]) -> Gradient:
        """Choose bits and budget; return the gradient with them."""
        weights = {name: each.elements for name, each in saved.items()}
        total, even = sum(weights.values()), self._equal(saved)
        equal = self._at(trial, even)
        if not equal.is_finite:
            self._trials.warn(
                f"Compression makes the gradient infinite or NaN at {math.floor(self.average)} bits"
                " for all tensors, with which level L3 begins. Expected it to be finite: weights"
                " may be NaN since; start again from a checkpoint, with more bits",
                "begin",
            )
        scale = 1.0
        for raises in range(RAISES + 1):
            budget = self.average * (1 + RAISE * raises)
            bits = spend(self.costs, weights, budget * total)
            expected = self._expected(bits)
            if scale * expected > MOST_ERROR**2 and raises < RAISES:
                continue
            found = self._at(trial, bits)
            error = found.relative(exact)
            if error <= MOST_ERROR**2 or distributed():
                break
            scale = max(scale, error / max(expected, 1e-30))
        if error > equal.relative(exact):
            bits, budget, found = even, self.average, equal
        self.bits, self.budget = bits, budget
        if any(isinstance(module, _NormBase) for module in trial.model.modules()):
            self.corrects = False
            plain = self._at(trial, bits)
            self.corrects = not plain.relative(exact) <= PLAIN_ERROR**2
            found = found if self.corrects else plain
        return found

    def _warn(self, trial: Trial, exact: Gradient, found: Gradient, error: float) -> None:
        """Warn of a higher budget, and of too much noise."""
        at = {name: self.costs[name][b - MIN_BITS] for name, b in self.bits.items()}
        total = sum(at.values()) or 1.0
        worst = sorted(at, key=lambda name: at[name], reverse=True)[:3]
        names = [(repr(name), at[name] / total) for name in worst]
        more = ""
        if self.budget > self.average:
            more = (
                f"Level L3 uses {self.budget:.3g} bits on average instead of {self.average:g}, for "
                f"an error of the gradient of at most {MOST_ERROR} of its norm; now it is "
                f"{math.sqrt(error):.2f}"
            )
        other = self._gradient(trial, {}, REST, batch=1)
        self._trials.judge_noise(trial, exact, other, found, lambda: names, more)
