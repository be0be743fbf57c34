"""Compressed models, and which modules they share."""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn

from actnn.errors import ActNNError
from actnn.layers.unused import check_result
from actnn.saving.active import transformed
from actnn.saving.compiled import call
from actnn.saving.context import Saving
from actnn.saving.module_classes import Swapped, is_swapped
from actnn.saving.records import LOSSLESS
from actnn.saving.uncompiled import uncompiled

_LIVING: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


class Root(Swapped):
    """A compressed model: its forward runs inside its Saving."""

    actnn: Saving

    def _actnn_effect(self) -> str:
        saving = self.actnn
        if not saving.is_uniform:
            return "actnn: choices by module"
        bits = "lossless" if saving.bits == LOSSLESS else f"{saving.bits} bits"
        return f"actnn: {bits}" + (" on average" if saving.adapts else "")

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the model's own forward; what autograd saves goes through the Saving."""
        run = super().forward  # type: ignore[misc]
        if type(arguments) is not tuple:  # torch.fx gives code with such parameters other ones
            raise ActNNError(
                f"Expected a forward without *, ** or keyword-only parameters for torch.fx to "
                f"trace it compressed, got that of {type(self).__name__}; uncompress it before"
            )
        tracing = torch._C._get_tracing_state() is not None  # torch.jit.trace
        if not torch.is_grad_enabled() or tracing or transformed():
            return call(run, arguments, named)
        if getattr(self, "_is_replica", False):
            raise ActNNError(
                "Expected a compressed model itself, or DistributedDataParallel around it, got a "
                "replica that torch.nn.DataParallel has made, whose weights are copies. Start one "
                "process for each GPU with torchrun, or let this process see one GPU: where it "
                "sees several, transformers.Trainer uses DataParallel"
            )
        saving = self.actnn
        if saving.model is not cast(nn.Module, self):  # a copy of a compressed model
            saving.bind(cast(nn.Module, self))
            add_root(cast(nn.Module, self))
        watch = None if saving.adaptive is None else saving.adaptive.watch
        replay = None if watch is None else watch(saving, run, arguments, named)
        with saving:
            saving.add_inputs((arguments, named))
            result = call(run, arguments, named)
            saving.look_at(result)
        check_result(cast(nn.Module, self), result)
        return result if replay is None else replay.watch(result)

    uncompiled(forward, callees=False)


def add_root(model: nn.Module) -> None:
    """Remember a compressed model as long as it lives."""
    _LIVING[id(model)] = model


def roots_inside(model: nn.Module) -> list[str]:
    """Return the paths of modules inside of a model that were compressed by themselves."""
    return [path for path, module in model.named_modules() if path and is_swapped(module, Root)]


def roots_around(model: nn.Module) -> dict[nn.Module, dict[str, nn.Module]]:
    """Return the compressed models outside of a model that have modules of it.

    Returns:
        Compressed model -> path in it -> module that `model` has, too.
    """
    inside = {id(module) for module in model.modules()}
    found = {}
    for other in list(_LIVING.values()):
        if id(other) in inside or not is_swapped(other, Root):
            continue
        shared = {path: each for path, each in other.named_modules() if id(each) in inside}
        if shared:
            found[other] = shared
    return found
