"""Steps in which a model compares its gradients at several settings, within any training loop."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from actnn.adapting.replay import Gradient, Replay
from actnn.allocation.threshold import MAX_BITS
from actnn.errors import ActNNWarning
from actnn.saving.active import ACTIVE
from actnn.saving.compiled import call
from actnn.saving.context import Saving
from actnn.saving.records import KEEP, LOSSLESS, Choice, Record
from actnn.saving.uncompiled import uncompiled

FIRST = 1  # the first forward that is kept for a trial, and the next one, for the variance
AGAIN = (20, 100, 300)  # forwards at which gradients are compared again, and every LATER after
LATER = 1000
PATIENCE = 20  # forwards without a trial after which a warning says so
SHARE = 0.1  # of the variance over batches: what compression may add
MOST = 1.0  # of the squared norm, likewise, where one batch is repeated and has no variance
WRONG = 0.1  # an error of the gradient, relative, above which codes are no stand-in for tensors
SMALL = 1 << 28  # bytes of exact tensors that a comparison may take in any case
FEW = 4  # bits at and below which the noise is worth a look
NOISE = 1 << 31  # the step whose noise the first trial has


class Trial:
    """Gradients of batches that were seen, at any setting.

    Args:
        saving: That of the model.
        forward: The model's own forward.
        replays: The batches.
    """

    def __init__(self, saving: Saving, forward: Callable[..., Any], replays: list[Replay]) -> None:
        self.saving, self._forward, self._replays = saving, forward, replays
        self.runs = 0

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self.saving.model
        assert model is not None
        return model

    def gradient(self, batch: int = 0) -> Gradient:
        """Return the gradient of a batch as the settings are now. The noise is always the same."""
        saving, model = self.saving, self.model
        self.runs += 1

        def forward(arguments: Any, named: Any) -> Any:
            with saving:
                saving.add_inputs((arguments, named))
                return call(self._forward, arguments, named)

        with saving.noise_at(NOISE):
            return self._replays[batch].run(model, forward)

    def lossless_gradient(self) -> Gradient:
        """Return the gradient of the first batch without rounding: nothing else is held, either."""
        with self.saving.lossless():
            return self.gradient()

    @contextmanager
    def few(self, samples: int) -> Iterator[Trial]:
        """Take the first samples of the batches alone."""
        replays = [each.first(samples) for each in self._replays]
        part = Trial(self.saving, self._forward, replays)
        try:
            with self.saving.part(samples / self.samples):
                yield part
        finally:
            self.runs += part.runs

    @property
    def is_repeated(self) -> bool:
        """Whether all batches are the same one, as where a model is fitted to one batch."""
        first, *others = self._replays
        return all(each.has_batch_of(first) for each in others)

    @property
    def samples(self) -> int:
        """Samples of the first batch; 0 if it is not known which they are."""
        return self._replays[0].samples


class Trials:
    """When gradients are compared, and the warning if compression adds too much noise.

    Forwards `FIRST` and the next are kept, in host memory: their inputs and the gradients of their
    outputs. The forward after these runs them again before it begins. This is repeated now and
    then.

    Args:
        average: Average bits, for advice.
        needed: Whether a warning says that there can be no trial.
        batches: How many forwards are kept.
    """

    def __init__(self, average: float, *, needed: bool = True, batches: int = 2) -> None:
        self._average, self._needed, self._batches = average, needed, batches
        self._forwards = self._steps = 0
        self._next = FIRST
        self._replays: list[Replay] = []
        self.failed = self.running = False
        self._warned: set[str] = set()
        self.runs = 0  # steps that trials have run
        self._repeated = 0  # trials that had nothing to compare
        self._compared = self._wrong = False  # codes with exact tensors, and what came of it

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies share; batches stay here."""
        return self.__dict__ | {"_replays": []}

    def begin_step(self, model: nn.Module | None) -> None:
        """Begin a step whose bits could be measured; warn if trials never come."""
        if self.running or self.failed or self.runs or model is None or not model.training:
            return
        self._steps += 1
        if capturing():
            self.warn(
                "Expected at least 3 training steps before one is captured in a CUDA graph, so "
                "that the bits of level L3 are measured, got none; bits stay equal"
            )
        elif self._steps == PATIENCE:
            self.warn(
                "Expected the outputs of the model to get a gradient, so that the bits of level "
                f"L3 can be measured, got none in {PATIENCE} steps; bits stay equal. Call the "
                "compressed model itself, and let it return tensors"
            )

    @uncompiled
    def watch(
        self,
        saving: Saving,
        forward: Callable[..., Any],
        arguments: Any,
        named: Any,
        judge: Callable[[Trial], bool],
    ) -> Replay | None:
        """Begin a forward of the model; run a trial if it is time.

        Args:
            saving: That of the model.
            forward: The model's own forward.
            arguments: Its positional arguments.
            named: Its arguments by name.
            judge: What to do in a trial; returns False if it is to be repeated soon.

        Returns:
            Where the output of this forward is to be watched, or None.
        """
        model = saving.model
        if model is None or self.failed or self.running or _is_inside(saving):
            return None
        self._forwards += 1
        if self._forwards > 1 and not saving.has_records:
            self._replays = []
            return None  # compiled code has its own hooks, and bits that are fixed
        self._replays = [each for each in self._replays if each.complete]
        if len(self._replays) == self._batches:
            replays = [each.frozen() for each in self._replays]  # other threads may go on
            self._run(Trial(saving, forward, replays), judge)
        if self._forwards >= self._next and not self.failed:
            if any(type(p) is not nn.Parameter for p in model.parameters() if p.requires_grad):
                self._give_up(
                    "Expected the parameters to be plain ones, so that gradients can be compared, "
                    "got those of another class, such as fully_shard makes. Bits stay equal; "
                    "nothing warns of noise"
                )
                return None
            replay = Replay(model, arguments, named)
            self._replays.append(replay)
            return replay
        return None

    def _run(self, trial: Trial, judge: Callable[[Trial], bool]) -> None:
        self.running = True
        try:
            done = _with_memory(trial, judge)
            now = self._forwards
            later = now + LATER - now % LATER
            after = next((step for step in AGAIN if step > now), later)
            self._repeated += not done
            self._next = after if done else now + 2**self._repeated // 2
        except Warning:  # warnings may be errors
            raise
        except Exception as e:  # what the forward raises, or no memory: training goes on
            self._give_up(
                "Expected the forward of the model to run once more with the same inputs, so that "
                f"gradients can be compared, got {type(e).__name__}: {str(e)[:200]}. Bits stay as "
                "they are; nothing warns of noise"
            )
        finally:
            self.running = False
            self.runs += trial.runs
            self._replays = []

    def compare(self, trial: Trial, bits: int, coded: Callable[[Trial], Gradient]) -> None:
        """Compare codes with exact tensors, once; warn if they cannot stand for these.

        Where exact tensors are large, they are those of a part of the batch, so that they take no
        more memory than the codes of a step.

        Args:
            trial: The batches.
            bits: Of the codes in steps.
            coded: The gradient of a trial with codes of 8 bits.
        """
        if self._compared:
            return
        n = trial.samples
        for samples in dict.fromkeys((_affordable(trial, bits), n)):
            try:
                with trial.few(samples) as few:
                    self._compare(few, bits, coded)
                return
            except (Warning, torch.OutOfMemoryError):
                raise
            except Exception:  # a forward that takes no part of a batch
                continue

    def _compare(self, trial: Trial, bits: int, coded: Callable[[Trial], Gradient]) -> None:
        exact = trial.lossless_gradient()
        if not exact.is_finite or exact.energy() == 0:
            return
        self._compared = True
        found = coded(trial)
        error = math.sqrt(found.relative(exact))
        if error <= WRONG:
            return
        self._wrong = True
        records = [r for r in trial.saving.records if r.choice.action == "compress"]
        where = ""
        if records and not distributed():  # processes must run equally many steps
            name, _ = _worst(trial, exact, coded, records, bits)
            where = f"; most comes from {name}"
        at = f"{MAX_BITS} bits"
        if not found.is_finite:
            what = (
                f"Compression makes the gradient infinite or NaN even at {at}, where it is finite "
            )
            what += "without"
        else:
            what = f"Codes of {at} change the gradient by {_percent(error)} its norm"
        self.warn(
            f"{what}{where}. A derivative may be steep there, such as that of a division or a "
            "logarithm near 0. Keep such tensors exact (model.actnn.set_choices), or use bits=32"
        )

    def judge_noise(
        self,
        trial: Trial,
        exact: Gradient,
        other: Gradient,
        found: Gradient,
        worst: Callable[[], list[tuple[str, float]]],
        raised: str = "",
    ) -> None:
        """Warn if compression adds too much noise.

        Args:
            trial: The batches.
            exact: The gradient of a batch without noise.
            other: That of another batch.
            found: That of the first batch with the noise of compression.
            worst: Returns names of tensors, as they are written, and their shares of the noise,
                the largest first.
            raised: What else to say, if anything.
        """
        if self._wrong:  # what `exact` is made of is not
            return
        energy, noise = exact.energy(), found.distance(exact)
        variance = other.distance(exact) / 2
        repeated = trial.is_repeated or not variance
        ratio, most_share = (noise / energy, MOST) if repeated else (noise / variance, SHARE)
        most = text = ""
        unknown = "noise" not in self._warned
        if unknown and ratio > most_share and (names := worst()):
            most = "; most comes from " + ", ".join(f"{n} ({s:.0%})" for n, s in names)
        if not math.isfinite(noise):
            text = f"Compression makes the gradient infinite or NaN. Expected it to be finite{most}"
        elif ratio > most_share:
            of = "squared norm of the gradient"
            if not repeated:
                of = "variance that the gradient has over batches"
            fewer = ""
            if ratio > 1:
                fewer = ", so that it drowns the gradient"
            elif not repeated:
                fewer = f", as if a batch had {ratio / (1 + ratio):.0%} fewer samples"
            text = f"Compression adds {_percent(ratio)} the {of}{fewer}. Expected at most "
            text += f"{most_share:.0%}{most}. {self._advice(ratio, most_share)}"
        if raised:
            self.warn(". ".join(filter(None, (raised, text))), "budget")
        elif text:
            self.warn(text)

    def _advice(self, ratio: float, most: float) -> str:
        levels = 2.0**self._average - 1
        for bits in range(int(self._average) + 1, MAX_BITS + 1):
            less = ratio * (levels / (2.0**bits - 1)) ** 2
            if less <= most and (bits < MAX_BITS or self._compared):
                return f"bits={bits} would add about {less:.1%}"
        return "Keep these tensors (set_choices), or use bits=32"

    def _give_up(self, why: str) -> None:
        self.failed = True
        if self._needed:
            self.warn(why)

    def warn(self, text: str, about: str = "noise") -> None:
        """Warn, once about each thing."""
        if about not in self._warned:
            self._warned.add(about)
            self._warned.add("noise")
            warnings.warn(text, ActNNWarning, stacklevel=2)


def worst_of(trial: Trial, bits: int) -> list[tuple[str, float]]:
    """Return what makes most of the noise of equal bits, and its share, if that is known.

    Args:
        trial: The batches; exact tensors are those of a part of the first.
        bits: Of the codes in steps.
    """
    records = [r for r in trial.saving.records if r.choice.action == "compress"]
    samples = _affordable(trial, bits)
    if not records or not samples or distributed():  # processes must run equally many steps
        return []
    try:
        with trial.few(samples) as few:
            return [_worst(few, few.lossless_gradient(), Trial.gradient, records, bits)]
    except Warning:
        raise
    except Exception:  # a forward that takes no part of a batch, or no memory
        return []


def _affordable(trial: Trial, bits: int) -> int:
    """Return how many samples exact tensors may be of: see `Trials.compare`."""
    exact = sum(record.nbytes for record in trial.saving.records)
    share = max(bits / LOSSLESS, SMALL / max(exact, 1))
    return min(trial.samples, max(2, int(trial.samples * share)))


def _with_memory(trial: Trial, judge: Callable[[Trial], bool]) -> bool:
    """Judge a trial; take less of the batches while there is no memory for them."""
    samples = trial.samples
    while True:
        try:
            if samples == trial.samples:
                return judge(trial)
            with trial.few(samples) as few:
                return judge(few)
        except torch.OutOfMemoryError:
            if samples < 2 or distributed():  # processes must run equally many steps
                raise
        samples //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # here the error no longer holds tensors


def _worst(
    trial: Trial,
    exact: Gradient,
    coded: Callable[[Trial], Gradient],
    records: list[Record],
    bits: int,
) -> tuple[str, float]:
    """Find the module, or the tensor of a module with children, whose codes do the most.

    Returns:
        Its name, and the share of the squared error of all codes.
    """
    codes, paths = Choice("compress", bits), list(dict.fromkeys(r.module for r in records))

    def error(names: Sequence[str | tuple[str, int]]) -> float:
        others: dict[str | tuple[str, int], Choice] = {}
        if isinstance(names[0], str):
            others.update(dict.fromkeys(paths, KEEP))
        with trial.saving.lossless({**others, **dict.fromkeys(names, codes)}):
            return coded(trial).relative(exact)

    def search(names: Sequence[str | tuple[str, int]], whole: float) -> str | tuple[str, int]:
        while len(names) > 1:  # noise is independent: one half makes what the other does not
            half = len(names) // 2
            found = error(names[:half])
            if 2 * found >= whole:
                names, whole = names[:half], found
            else:
                names, whole = names[half:], whole - found
        return names[0]

    total = error(paths)
    path = search(paths, total)
    assert isinstance(path, str)

    def named(name: str | tuple[str, int], found: float) -> tuple[str, float]:
        return repr(name), min(1.0, found / total) if total else 1.0

    if not any(trial.model.get_submodule(path).children()):
        return named(path, error([path]))
    # Where modules keep all, they save other tensors, so that indices differ from those of a step.
    real = [(path, record.index) for record in records if record.module == path]
    whole = error([path])
    inside = [
        (path, r.index)
        for r in trial.saving.records
        if r.module == path and r.choice.action == "compress"
    ]
    if len(inside) != len(real):
        return named(path, whole)
    found = search(inside, whole)
    return named(real[inside.index(found)], error([found]))  # type: ignore[arg-type]


def distributed() -> bool:
    """Whether there are several processes, whose forwards may wait for each other."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def _percent(ratio: float) -> str:
    return f"{ratio:.1%} of" if ratio < 10 else f"{ratio:.3g} times"


def _is_inside(saving: Saving) -> bool:
    """Whether a forward is not the outermost of a step in the loop of the user."""
    if any(step.saving is saving for step, _ in ACTIVE.steps):
        return True
    return capturing() or torch._C._current_graph_task_id() != -1


def capturing() -> bool:
    """Whether a CUDA graph captures what runs."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
