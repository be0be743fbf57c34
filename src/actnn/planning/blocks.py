"""Choices for the units of a plan, and units that are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from actnn.layers.root import Root
from actnn.planning.units import Unit
from actnn.saving import Choice, Saving, TensorInfo, _native
from actnn.saving.active import ACTIVE, active_step, pack_in_step
from actnn.saving.compiled import CompiledCall
from actnn.saving.held import Held, View
from actnn.saving.module_classes import Swapped, as_plain, swap, swap_back
from actnn.saving.recompute import rerun
from actnn.saving.step import Opaque
from actnn.saving.uncompiled import uncompiled

ACTIVATION_SHARE = 8  # an activation of a unit has at least this part of its input's elements
RECOMPILES = 64  # units that may share one forward in different shapes
_UNPACK = _native.unpack_hook(None)

Run = Callable[..., Any]
Form = tuple[float, int | None]  # memory, bits of fused codes


@dataclass(frozen=True)
class BlockChoice(Choice):
    """A choice for a unit.

    Attributes:
        memory: Share of the saved bytes that a compiled unit holds (PyTorch's
            `activation_memory_budget`); it recomputes the rest where that is cheap.
        fused: Whether compiled code calls the codec, instead of the hooks around it. Then it
            holds codes of what is inside of the unit, too.
        whole: Whether the model is compiled as one unit. The choice is then that for all units.
    """

    memory: float = 1.0
    fused: bool = False
    whole: bool = False

    def __str__(self) -> str:
        action = "" if self.action in ("keep", "compress") else self.action
        bits = {None: "", 32: "lossless"}.get(self.bits, f"{self.bits} bits")
        fused = "fused" if self.fused else ""
        part = "" if self.memory == 1.0 else f"for {self.memory:.0%}"
        compiled = "compiled" if part or self.whole else ""
        one = "as one" if self.whole else ""
        return " ".join(filter(None, (action, bits, fused, compiled, one, part))) or "keep"

    @property
    def form(self) -> Form:
        """What makes compiled code different."""
        return self.memory, self.bits if self.fused else None


@dataclass
class _Compiled:
    """The compiled forms of one unit, and the one that runs.

    Attributes:
        path: Where the unit is in the model.
        form: The form that runs.
        forms: What torch.compile has made.
    """

    path: str
    form: Form = (1.0, None)
    forms: dict[Form, Run] = field(default_factory=dict)

    def of(self, module: nn.Module) -> Run:
        if self.form not in self.forms:
            run = as_plain(module).forward
            # Static: costs belong to one shape, and units of other shapes may share this code.
            backend = _backend(self.form)
            self.forms[self.form] = torch.compile(run, backend=backend, dynamic=False)
        return self.forms[self.form]

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; compiled code belongs to one module in one process."""
        return {"path": self.path, "form": self.form, "forms": {}}


class CompiledBlock(Swapped):
    """Goes in front of the class of a unit or a model, and runs its forward compiled."""

    _actnn_compiled: _Compiled

    def _actnn_effect(self) -> str:
        return "actnn: compiled"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the unit's own forward; its saved tensors are compressed when it has ended."""
        compiled = self._actnn_compiled
        run = compiled.of(cast(nn.Module, self))
        step = active_step()
        if step is None:
            return run(*arguments, **named)
        if compiled.form[1] is not None:
            # Those of the model would be others for each plan, and all would be compiled again.
            return CompiledCall(run, step.saving, compiled.path)(*arguments, **named)
        step.opaque = _opaque(cast(nn.Module, self), (arguments, named))
        try:
            # Hooks that are no graphs stay outside of compiled code: one code for all choices.
            with saved_tensors_hooks(_pack, _UNPACK):
                return run(*arguments, **named)
        finally:
            step.opaque = None


class Announced(Swapped):
    """Goes in front of a unit that the model runs in a checkpoint, where it leaves no records."""

    _actnn_unit: str

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the unit's own forward, and say that what is saved next belongs to the unit."""
        if ACTIVE.steps:
            step = ACTIVE.steps[-1][0]
            step.announced = self._actnn_unit, len(step.records)
        return super().forward(*arguments, **named)  # type: ignore[misc]


class Unhooked(Swapped):
    """Goes in front of a compressed model whose plan holds no codes: no hooks are installed."""

    def _actnn_effect(self) -> str:
        return "actnn: no codes"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the model's own forward."""
        return super(Root, self).forward(*arguments, **named)  # type: ignore[misc]


class Checkpointed(Swapped):
    """Goes in front of a unit of such a model: torch.utils.checkpoint, and nothing else."""

    def _actnn_effect(self) -> str:
        return "actnn: recomputed in backward"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the unit's own forward, again in backward."""
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*arguments, **named)
        return rerun(cast(nn.Module, self), run, arguments, named)


@uncompiled
def _pack(tensor: Tensor) -> Held | View:
    return pack_in_step(tensor)


def _opaque(module: nn.Module, inputs: object) -> Opaque:
    """What tells activations from other tensors that a compiled module saves."""
    sizes = [leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    weights = frozenset(parameter.numel() for parameter in module.parameters())
    return Opaque(max(sizes, default=0) // ACTIVATION_SHARE, weights)


@cache
def _backend(form: Form) -> Callable[..., Any]:
    """A backend of torch.compile for each form: inductor, with a budget for what it saves."""

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=form[0]):
            return compile_fx(graph, inputs)

    return backend


def compile_units(model: nn.Module, units: list[Unit]) -> None:
    """Let `apply` compile each unit that contains other modules, or the model, at its first use.

    Modules inside of units are as they were before `compress`: the compiler decides what to save,
    and the saved tensors of the whole unit are compressed.
    """
    limits = torch._dynamo.config
    name = "recompile_limit" if hasattr(limits, "recompile_limit") else "cache_size_limit"
    setattr(limits, name, max(RECOMPILES, getattr(limits, name)))
    for unit in units:
        if unit.composite:
            for module in unit.module.modules():
                swap_back(module)
            unit.module.__dict__["_actnn_compiled"] = _Compiled(unit.path)
    model.__dict__["_actnn_compiled"] = _Compiled("")


def _select_compiled(module: nn.Module, choice: BlockChoice, selected: bool) -> None:
    """Run a module in a compiled form or, if it is not selected, as it is."""
    compiled = module.__dict__.get("_actnn_compiled")
    if compiled is None:
        return
    if selected:
        compiled.form = choice.form
        swap(module, CompiledBlock, innermost=True)
    else:
        swap_back(module, CompiledBlock)


def _as_before(_: TensorInfo) -> Choice:
    """A policy: the choice for the unit that ran last."""
    step = ACTIVE.steps[-1][0]
    unit, first = step.announced
    for index in range(len(step.records) - 1, max(step.kept_until, first) - 1, -1):
        found = step.saving.choice_of(step.records[index].module)
        if found is not None:
            return found
    announced = None if step.kept_until > first else step.saving.choice_of(unit)
    return announced or Choice("keep")


def as_run(units: list[Unit], choices: Sequence[BlockChoice]) -> tuple[BlockChoice, ...]:
    """Return what `apply` puts into effect for choices.

    Units whose forward cannot run again are kept instead of recomputed, and those that are not
    compiled have no compiled form.
    """

    def one(unit: Unit, choice: BlockChoice) -> BlockChoice:
        if choice.action == "recompute" and unit.once:
            return BlockChoice("keep")
        if choice.whole or unit.composite:
            return choice
        return replace(choice, memory=1.0, fused=False)

    return tuple(map(one, units, choices))


def apply(saving: Saving, units: list[Unit], choices: Sequence[BlockChoice]) -> None:
    """Put a choice for each unit into effect, as `as_run` says.

    If all are plain ones, to keep or to recompute, the model runs without the Saving, which has no
    records then. What is saved between units belongs to the unit before, as in the measurements.
    """
    choices = as_run(units, choices)
    model = saving.model
    assert model is not None
    plain = all(each.action in ("keep", "recompute") and each.bits is None for each in choices)
    saved: dict[str | tuple[str, int], Choice] = {"": Choice("keep")} if plain else {}
    for unit, choice in zip(units, choices, strict=True):
        if plain and choice.action == "recompute":
            swap(unit.module, Checkpointed)
        else:
            swap_back(unit.module, Checkpointed)
        if unit.checkpointed and not plain:
            vars(unit.module)["_actnn_unit"] = unit.path
            swap(unit.module, Announced)
        else:
            swap_back(unit.module, Announced)
        if not plain:
            saved["" if choice.whole else unit.path] = Choice(choice.action, choice.bits)
        _select_compiled(unit.module, choice, not choice.whole)
    _select_compiled(model, choices[0], choices[0].whole)
    saving.set_choices(saved)
    saving.policy = _as_before
    if plain:
        saving.records, saving.started = [], True
        swap(model, Unhooked)
    else:
        swap_back(model, Unhooked)
