"""Compressed models that share modules: each keeps what it needs, or a warning says otherwise."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from actnn.errors import ActNNWarning
from actnn.layers.chunks import InChunks
from actnn.layers.registry import MIXINS, mixin_for
from actnn.layers.root import Root, roots_around, roots_inside
from actnn.saving.context import Saving
from actnn.saving.module_classes import is_swapped, swap, swap_back
from actnn.saving.recompute import Recomputed, Untouched

_LAYERS = {Root, *MIXINS.values()}
_CHOSEN = {Recomputed, Untouched}  # by the choices of a Saving, which can make them again


def undo(model: nn.Module) -> None:
    """Give every module its own class again, but for what other compressed models need."""
    others = roots_around(model)
    shared = {id(each): each for modules in others.values() for each in modules.values()}
    layers = [each for each in shared.values() if _mixins(each) & _LAYERS]
    for module in model.modules():
        compressed_root = is_swapped(module, Root)
        watch = module.__dict__.get("_actnn_watch")
        if watch is not None:
            watch.remove()
        if _is_planned(module) and id(module) in shared:
            _warn_of_plans(model, others, module)
        swap_back(module)
        if compressed_root:
            saving = cast(Saving, module.actnn)
            if saving.adaptive is not None:
                saving.adaptive.detach()
            del module.actnn
    for module in layers:
        mixin = mixin_for(module)
        if mixin is not None:
            swap(module, mixin)
    for other in others:
        cast(Saving, other.actnn).restore_choices()


def _mixins(module: Any) -> set[type]:
    return set(getattr(module, "_actnn_mixins", ()))


def _is_planned(module: nn.Module) -> bool:
    """Whether a plan of `fit` runs a module in another way, not through a Saving."""
    return bool(_mixins(module) - _LAYERS - _CHOSEN - {InChunks})


def _warn_of_plans(
    model: nn.Module, others: Mapping[nn.Module, Mapping[str, nn.Module]], module: nn.Module
) -> None:
    """Warn if the plan of another model may be that for a module."""
    for other, modules in others.items():
        if _is_planned(other) or "_actnn_compiled" in vars(other):
            paths = [path for path, each in modules.items() if each is module]
            if paths:
                _warn_of_lost(model, other, paths)


def warn_of_others(model: nn.Module) -> None:
    """Warn of other compressed models that lose settings when this one is compressed."""
    inside = roots_inside(model)
    if inside:
        warnings.warn(
            f"compress() of {type(model).__name__} replaces the settings of {listed(inside)}, "
            "which was compressed by itself; to keep them, compress it after the model around it",
            ActNNWarning,
            stacklevel=3,
        )
    for other, modules in roots_around(model).items():
        lost = [path for path, each in modules.items() if _mixins(each) & _CHOSEN]
        if lost:
            _warn_of_lost(model, other, lost)


def _warn_of_lost(model: nn.Module, other: nn.Module, paths: Iterable[str]) -> None:
    warnings.warn(
        f"A compressed {type(other).__name__} shares {listed(paths)} with {type(model).__name__}, "
        "and its choices for it no longer hold; call fit() or set_choices() for it again",
        ActNNWarning,
        stacklevel=4,
    )


def listed(paths: Iterable[str]) -> str:
    """Return the first paths, and how many there are besides."""
    names = [repr(path) for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
