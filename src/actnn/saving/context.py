"""The context around a forward pass in which what autograd saves is compressed."""

from __future__ import annotations

import difflib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actnn.codec.arguments import check_group
from actnn.errors import ActNNError, ActNNWarning
from actnn.saving import _native
from actnn.saving.active import ACTIVE, active_step, leave_checkpoints
from actnn.saving.compiled import CompiledCall, GraphHooks
from actnn.saving.exclusions import CHECKPOINT, tensors_in
from actnn.saving.held import Held
from actnn.saving.module_paths import ModulePaths
from actnn.saving.noise_states import NoiseStates
from actnn.saving.recompute import leave_untouched, recompute_only
from actnn.saving.records import KEEP, Choice, Policy, Record, TensorInfo, checked_bits
from actnn.saving.settings import Allocator
from actnn.saving.step import Step
from actnn.saving.uncompiled import uncompiled

GROUP = 256  # elements that share a range
MIN_BYTES = 1 << 16  # below this, the launches of a codec cost more than the memory is worth
NEEDED = (2, 9)  # PyTorch; 2.6 and 2.8 fail tests of compiled code, export or checkpoints


@cache
def warn_of_older(version: str) -> None:
    """Warn once if this version of PyTorch misses what some ways of training need."""
    if tuple(map(int, version.split(".")[:2])) < NEEDED:
        warnings.warn(
            f"Expected PyTorch {NEEDED[0]}.{NEEDED[1]} or newer, got {version}: under "
            "torch.compile and torch.export, and inside checkpoints, a step may fail, save less "
            "memory or draw other dropout; eager training without checkpoints is complete",
            ActNNWarning,
            stacklevel=4,
        )


def _check_paths(model: nn.Module, choices: Mapping[str | tuple[str, int], Choice]) -> None:
    """Raise an ActNNError if a choice names a module that the model does not have."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    for where in choices:
        path = where if isinstance(where, str) else where[0]
        if path not in known:
            near = difflib.get_close_matches(path, known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise ActNNError(f"Expected the path of a module inside the model, got {path!r}{hint}")


def _below(path: str, where: str | tuple[str, int]) -> tuple[Any, ...] | None:
    """What a choice names, relative to the path of a module; None if it is outside of that."""
    name, *index = (where,) if isinstance(where, str) else where
    return (name.removeprefix(path), *index) if f"{name}.".startswith(f"{path}.") else None


class Saving:
    """A context manager: what autograd saves inside is held in fewer bits.

    Each `with` is one step. Backward may run inside or outside, any number of times with
    retain_graph. Several threads may use one Saving; each has steps of its own.

    Args:
        bits: Bits per element: 1 to 8, or 32, which rounds nothing.
        group: Neighbouring elements that share a range; a multiple of 32.
        policy: Called for each tensor that may be compressed; None compresses all.
        min_bytes: Smaller tensors are kept.
        seed: Seed of the noise of rounding. Each rank of torch.distributed has noise of its own.
        stochastic: Whether rounding is random, so that its expectation is exact.
        swap: Whether codes move to host memory; with 32 bits, the tensors themselves.
        model: The model whose parameters, buffers and paths are known.

    Attributes:
        default: The choice for tensors that neither `set_choices` nor the policy names.
        adaptive: Moves bits to the tensors or samples that need them, or watches the noise of equal
            bits; None if neither is done.
        started: Whether there was a step.
        divided: Activations whose derivatives are exact, because backward divides by their results.
        own_masks: Whether dropout keeps its seed, and not the mask that PyTorch would draw.

    Raises:
        ActNNError: If an argument is not as described.

    Example:
        >>> saving = Saving(bits=4)
        >>> with saving:
        ...     loss = network(images).sum()
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        bits: int = 4,
        group: int = GROUP,
        policy: Policy | None = None,
        min_bytes: int = MIN_BYTES,
        seed: int = 0,
        stochastic: bool = True,
        swap: bool = False,
        model: nn.Module | None = None,
    ) -> None:
        warn_of_older(torch.__version__)
        check_group(group)
        if not isinstance(min_bytes, int) or min_bytes < 0:
            raise ActNNError(
                f"Expected min_bytes to be an integer of at least 0, got {min_bytes!r}"
            )
        if not isinstance(seed, int):
            raise ActNNError(f"Expected seed to be an integer, got {seed!r}")
        if not isinstance(stochastic, bool):
            raise ActNNError(f"Expected stochastic to be True or False, got {stochastic!r}")
        if policy is not None and not callable(policy):
            raise ActNNError(f"Expected policy to be a function of a TensorInfo, got {policy!r}")
        self.bits = checked_bits(bits)
        self.group, self.policy, self.min_bytes = group, policy, min_bytes
        self.stochastic = stochastic
        self._records: Any = ()
        self.counter = _native.Counter()
        self.adaptive: Allocator | None = None
        self.started, self.own_masks = False, True
        self.default = Choice("offload" if swap else "compress", bits)
        self._choices: dict[str | tuple[str, int], Choice] = {}
        self._resolved: dict[str, Choice | None] = {}
        self._isolates = self._unchecked = False
        self._noise = NoiseStates(seed)
        self._held: weakref.WeakSet[Any] = weakref.WeakSet()
        self.divided: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._paths, self._tensors = ModulePaths(None), _native.ModelTensors()
        self._decisions, self._uses = _native.Decisions(), _native.Uses()
        self._decided_for: tuple[Any, ...] = ()
        self._hooks: dict[Any, GraphHooks] = {}  # by choices
        self._hooks_at: dict[str, GraphHooks] = {}  # by path
        self._model: weakref.ref[nn.Module] | None = None
        if model is not None:
            self.bind(model)

    @property
    def model(self) -> nn.Module | None:
        """The model, while it exists."""
        return None if self._model is None else self._model()

    @property
    def records(self) -> list[Record]:
        """What the last finished step saved, in order."""
        return list(self._records)

    @records.setter
    def records(self, records: Sequence[Record]) -> None:
        self._records = records

    @property
    def has_records(self) -> bool:
        """Whether the last finished step saved anything."""
        return len(self._records) > 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now for the backward passes to come."""
        elsewhere: int = sum(held.held for held in list(self._held))
        return self.counter.bytes + elsewhere

    @property
    def is_uniform(self) -> bool:
        """Whether `default` is the choice for all tensors."""
        return self.policy is None and not self._choices

    @property
    def decides_by_kind(self) -> bool:
        """Whether all tensors of one kind that a module saves get the same choice."""
        return self.policy is None and not any(isinstance(each, tuple) for each in self._choices)

    def _refresh_decisions(self) -> None:
        """Forget the decisions of earlier steps if the settings have changed."""
        codec = (self.bits, self.group, self.stochastic)
        floor = 1 if self.adaptive is None else self.adaptive.floor
        found = (self.default, self.policy, self._choices, self.adaptive, floor, codec)
        if found != self._decided_for:
            self._decisions, self._decided_for = _native.Decisions(), found

    @property
    def adapts(self) -> bool:
        """Whether tensors may have fewer bits than with equal bits."""
        return self.adaptive is not None and self.adaptive.adapts

    def bind(self, model: nn.Module) -> None:
        """Take the parameters, buffers and paths of a model; call it again for new modules."""
        self._model = weakref.ref(model)
        self._paths, self._tensors = ModulePaths(model), _native.ModelTensors()
        self._decided_for, self._hooks, self._hooks_at = (), {}, {}

    def hooks_in(self, path: str) -> GraphHooks:
        """Return the hooks for a module that is compiled by itself; those of the model for ''.

        The same choices have the same hooks, for which code is compiled once.
        """
        found = self._hooks_at.get(path)
        if found is None:
            here = self.choice_of(path)
            choices = frozenset(self._choices.items())
            key: Any = path, choices
            if path and (here is not None or self.policy is None):  # nothing else decides inside
                inside = {(_below(path, where), choice) for where, choice in choices}
                key = here, frozenset(each for each in inside if each[0] is not None)
            found = self._hooks.get(key) or GraphHooks(self, self._paths.all, path)
            self._hooks[key] = self._hooks_at[path] = found
        return found

    def is_own(self, pack: object) -> bool:
        """Whether a function is the pack hook of a step, or of compiled code in one."""
        return any(pack is hooks.pack for hooks in self._hooks.values())

    def is_active(self) -> bool:
        """Whether the hooks of this Saving see what is saved now."""
        step = active_step()
        return step is not None and step.saving is self

    def _find_compiled(self) -> None:
        """Let modules that are compiled by themselves run inside of hooks for their choices."""
        for path, module in self._paths.modules():
            call = module._compiled_call_impl
            if call is None or (isinstance(call, CompiledCall) and call.belongs_to(self)):
                continue
            plain = call.call if isinstance(call, CompiledCall) else call
            module.__dict__["_compiled_call_impl"] = CompiledCall(plain, self, path)

    def set_choices(self, choices: Mapping[str | tuple[str, int], Choice]) -> None:
        """Replace the choices.

        Args:
            choices: Path of a module -> the choice for all that it and its children save, or
                (path, index of the record) or a name in a warning, such as 'head:0' -> the choice
                for one tensor. The more special wins;
                what none names goes to the policy. 'recompute' needs a compressed model. A
                module of several that is kept as a whole runs as if it were not compressed, and
                has no records.

        Raises:
            ActNNError: If a choice is not for what it names.
        """
        choices = {self._key(where): choice for where, choice in choices.items()}
        recomputed = []
        for where, choice in choices.items():
            if not isinstance(choice, Choice):
                raise ActNNError(f"Expected a Choice for {where!r}, got {choice!r}")
            if choice.action == "recompute":
                if not isinstance(where, str):
                    raise ActNNError(
                        f"Expected 'recompute' to be for the path of a module, got {where!r}"
                    )
                recomputed.append(where)
        model = self.model
        if model is not None:
            _check_paths(model, choices)
            recompute_only(model, recomputed)
            leave_untouched(model, choices)
        elif recomputed:
            raise ActNNError("Expected a Saving with a model for 'recompute', got one without")
        self._choices, self._resolved, self._hooks_at = dict(choices), {}, {}
        self._unchecked = not self.decides_by_kind

    def _key(self, where: str | tuple[str, int]) -> str | tuple[str, int]:
        """Return the key for the name of a tensor in a warning; other keys as they are."""
        if not isinstance(where, str):
            return where
        path, colon, place = where.rpartition(":")
        if not colon or not place.removeprefix("d").isdigit():
            return where
        if place.startswith("d"):  # codes of the derivative: all that the activation saves
            return path
        record = None if self.adaptive is None else self.adaptive.record_of(where)
        if record is None:
            rounded = [r for r in self.records if r.choice.action == "compress"]
            found = [r.index for r in rounded if r.module == path][int(place) :]
            if not found:
                raise ActNNError(
                    "Expected the name of a tensor that the last step has compressed, got "
                    f"{where!r}"
                )
            record = found[0]
        return path, record

    def _check_records(self, records: Any) -> None:
        """Raise an ActNNError if a choice names a tensor that a step has not saved."""
        for where in self._choices:
            if isinstance(where, str):
                continue
            path, index = where
            got = records[index].module if 0 <= index < len(records) else None
            if got != path:
                what = f"{len(records)} records" if got is None else f"one of {got!r}"
                raise ActNNError(
                    f"Expected the index in {where!r} to be that of a record of {path!r} "
                    f"(model.actnn.records), got {what}"
                )

    def restore_choices(self) -> None:
        """Put the choices into effect again, after another model has changed shared modules."""
        self.set_choices(self._choices)

    def choice(self, info: TensorInfo) -> Choice:
        """Return what to do with a tensor."""
        found = None if info.op == CHECKPOINT and self._isolates else self.explicit(info)
        if found is None and self.policy is not None:
            found = self.policy(info)
            if not isinstance(found, Choice):
                raise ActNNError(f"Expected policy to return a Choice, got {found!r} for {info}")
        elif found is None:
            found = self._unrounded if info.op == CHECKPOINT else self.default
        if found.action == "recompute":  # what is saved here is an input of the module
            return KEEP if found.bits is None else Choice("compress", found.bits)
        if found.action == "compress" and found.bits is None:
            return Choice("compress", self.bits)
        return found

    def explicit(self, info: TensorInfo) -> Choice | None:
        """Return what `set_choices` says of a tensor; None if it says nothing."""
        if not self._choices:
            return None
        return self._choices.get((info.module, info.index)) or self.choice_of(info.module)

    def exact(self, info: TensorInfo) -> Choice:
        """Return what to do with a tensor that is not rounded unless `set_choices` says so."""
        if self.explicit(info) is not None and not self._isolates:
            return self.choice(info)
        return self._unrounded

    @property
    def _unrounded(self) -> Choice:
        return Choice("offload") if self.default.action == "offload" else KEEP

    def choice_of(self, path: str) -> Choice | None:
        """Return what `set_choices` says of a module, or of the nearest one around it; or None."""
        if path not in self._resolved:
            found = self._choices.get(path)
            if found is None and path:
                found = self.choice_of(path.rpartition(".")[0])
            self._resolved[path] = found
        return self._resolved[path]

    def noise_state(self, device: torch.device) -> Tensor:
        """Return seed and step for the noise, on a device: int64, shape (2,)."""
        return self._noise.on(device)

    @contextmanager
    def noise_at(self, step: int) -> Iterator[None]:
        """Give the next step the noise of another one; afterwards the noise goes on as before."""
        with self._noise.at(step):
            yield

    @contextmanager
    def lossless(self, but: Mapping[str | tuple[str, int], Choice] | None = None) -> Iterator[None]:
        """Keep all tensors as they are, but those with a choice, as far as they may be rounded."""
        kept = self.default, self.policy, self._choices, self._resolved
        self.default, self.policy, self._choices, self._resolved = KEEP, None, dict(but or {}), {}
        self._isolates = True
        try:
            yield
        finally:
            self.default, self.policy, self._choices, self._resolved = kept
            self._isolates = False

    @contextmanager
    def part(self, share: float) -> Iterator[None]:
        """Take a step with a share of the batch, whose tensors are smaller."""
        kept = self.min_bytes
        self.min_bytes = int(kept * share)
        try:
            yield
        finally:
            self.min_bytes = kept

    def watch(self, held: Held) -> None:
        """Count what Python holds as long as it exists."""
        self._held.add(held)

    @uncompiled
    def add_inputs(self, values: object) -> None:
        """Say that tensors, also in tuples, lists and dictionaries, are alive anyway."""
        if ACTIVE.steps and ACTIVE.steps[-1][0].saving is self:
            tensors = list(tensors_in(values))
            for tensor in tensors:
                ACTIVE.steps[-1][0].add_known(tensor, "input")
            if self.adaptive is not None and tensors and tensors[0].ndim:
                self.adaptive.begin_batch(tensors[0].shape[0])

    @uncompiled
    def look_at(self, results: object) -> None:
        """Say what a forward returns: what backward divides by is found in its graph."""
        if ACTIVE.steps and ACTIVE.steps[-1][0].saving is self:
            ACTIVE.steps[-1][0].look_at(results)

    @uncompiled
    def __enter__(self) -> Saving:
        steps = ACTIVE.steps
        if steps and steps[-1][0].saving is self:  # a model that calls itself: the same step
            ACTIVE.begin(steps[-1][0], None)
            return self
        self._noise.advance()
        self.started = True
        if self.adaptive is not None:
            self.adaptive.begin_step(self.model)
        self._refresh_decisions()
        model = self.model
        if model is not None:
            self._tensors.read(model, self._paths)
        step = Step(self, self._paths, self._tensors, self._decisions, self._uses)
        if not self.is_uniform:
            self._find_compiled()
        both = self.hooks_in("")
        hooks = saved_tensors_hooks(both.pack, both.unpack)
        hooks.__enter__()
        ACTIVE.begin(step, hooks)
        return self

    @uncompiled
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave_checkpoints(trace)
        step, hooks = ACTIVE.end()
        if hooks is not None:
            hooks.__exit__(kind, error, trace)
            self._records = step.records
            step.forget()
            if kind is None and self._unchecked and not self._isolates and len(step.records):
                self._unchecked = False
                self._check_records(step.records)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings, for copies and files; what a step holds stays here."""
        state = self.__dict__.copy()
        names = "_held divided _paths _model _hooks _hooks_at counter _tensors _decisions _uses"
        none = dict.fromkeys(names.split())
        state.update(none, _records=(), _decided_for=())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._held = weakref.WeakSet()
        self._paths, self._tensors = ModulePaths(None), _native.ModelTensors()
        self.divided = weakref.WeakSet()
        self.counter = _native.Counter()
        self._decisions, self._uses = _native.Decisions(), _native.Uses()
        self._hooks, self._hooks_at = {}, {}
