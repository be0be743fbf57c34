"""The units of a plan: the blocks of a model, and the modules around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from actnn.errors import ActNNError
from actnn.saving.active import in_checkpoint
from actnn.saving.arguments import Watched
from actnn.saving.held import counter_of
from actnn.saving.module_classes import own_class
from actnn.saving.recompute import buffer_versions

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """A module whose saved tensors are planned together.

    Attributes:
        path: Its name in the model.
        module: The module.
        once: Why its forward cannot run again; '' if it can.
        checkpointed: Whether the model runs it in torch.utils.checkpoint, without reentry.
    """

    path: str
    module: nn.Module
    once: str = ""
    checkpointed: bool = False

    @property
    def composite(self) -> bool:
        """Whether the module contains others."""
        return next(self.module.children(), None) is not None


def _repeated(module: nn.Module) -> set[type[nn.Module]]:
    """Classes of composite children that occur more than once in a container."""
    if not isinstance(module, _CONTAINERS):
        return set()
    kinds = Counter(own_class(child) for child in module.children() if next(child.children(), None))
    return {kind for kind, count in kinds.items() if count > 1}


def _block_classes(module: nn.Module) -> set[type[nn.Module]]:
    """Classes of blocks at or below a module, but not those inside of blocks."""
    found = {kind for kind in _repeated(module) if not issubclass(kind, _CONTAINERS)}
    for child in module.children():
        if own_class(child) not in found:
            found |= _block_classes(child)
    return found


def _holds_blocks(module: nn.Module, classes: set[type[nn.Module]]) -> bool:
    """Whether blocks, or repeated containers, are below a module."""
    if own_class(module) in classes:
        return False
    return bool(_repeated(module)) or any(
        own_class(child) in classes or _holds_blocks(child, classes) for child in module.children()
    )


def _descend(path: str, module: nn.Module, classes: set[type[nn.Module]]) -> list[Unit]:
    units = []
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if _holds_blocks(child, classes) or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            units += _descend(below, child, classes)
        else:
            units.append(Unit(below, child))
    return units


def find_units(model: nn.Module) -> list[Unit]:
    """Blocks and the modules around them, in the order of the module tree.

    Blocks are composite modules of one class in one Sequential, ModuleList or ModuleDict. All
    other modules are units at the highest level that contains no blocks; without any blocks these
    are the children of the model.

    Raises:
        ActNNError: If the model has no submodules.
    """
    distinct = _distinct(_descend("", model, _block_classes(model)))
    if not distinct:
        raise ActNNError(
            f"Expected the model to have submodules, got {type(model).__name__}, which has none; "
            "wrap it in torch.nn.Sequential"
        )
    return distinct


def children_of(units: list[Unit]) -> list[Unit]:
    """The children of units, each module once."""
    return _distinct(
        [
            Unit(f"{u.path}.{name}", child)
            for u in units
            for name, child in u.module.named_children()
        ]
    )


def units_that_run(units: list[Unit], forward: Callable[[], object]) -> list[Unit]:
    """The units that a forward calls, in the order of their first calls.

    Args:
        units: The units.
        forward: Runs the model once.
    """
    inputs: dict[int, list[tuple[Tensor, int]]] = {}
    watched: dict[int, list[Watched]] = {}
    changed: dict[int, str] = {}
    checkpointed: set[int] = set()
    buffers = [buffer_versions(unit.module) for unit in units]

    def enter(index: int, module: nn.Module, args: Any, named: Any) -> None:
        leaves = [leaf for leaf in tree_leaves((args, named)) if type(leaf) is Tensor]
        inputs.setdefault(index, []).extend((counter_of(x), x._version) for x in leaves)
        watched.setdefault(index, []).append(Watched(args, named))
        if in_checkpoint():
            checkpointed.add(index)

    def leave(index: int, module: nn.Module, args: Any, named: Any, output: Any) -> None:
        found = watched[index].pop().changed()
        if found:
            changed.setdefault(index, found)

    handles = []
    for index, unit in enumerate(units):
        register = unit.module.register_forward_hook
        handles.append(
            unit.module.register_forward_pre_hook(partial(enter, index), with_kwargs=True)
        )
        handles.append(register(partial(leave, index), with_kwargs=True))
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()

    def once(index: int) -> str:
        if any(x._version != version for x, version in inputs[index]):
            return "its input is changed in place"
        if buffers[index] != buffer_versions(units[index].module):
            return "its forward changes buffers on which its result depends"
        if index in changed:
            return (
                f"its forward changes its argument {changed[index]!r} (a cache for generation can "
                "be switched off: use_cache=False)"
            )
        return ""

    return [
        replace(units[index], once=once(index), checkpointed=index in checkpointed)
        for index in inputs
    ]


def _distinct(units: list[Unit]) -> list[Unit]:
    """Units without those whose module has occurred before."""
    return list({id(unit.module): unit for unit in reversed(units)}.values())[::-1]
