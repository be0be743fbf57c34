"""Modules that run outside of the hooks: recomputed in backward, or kept as PyTorch keeps them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from actnn._errors import ActNNError
from actnn.saving.active import ACTIVE, active_step
from actnn.saving.records import Choice
from actnn.saving.swapping import Swapped, is_swapped, swap, swap_back


class Recomputed(Swapped):
    """A module that keeps only its inputs, and runs its forward again in backward."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's own forward, under a checkpoint while its model is compressed."""
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled() or active_step() is None:
            return run(*arguments, **named)
        return checkpoint(run, *arguments, use_reentrant=False, **named)


class Untouched(Swapped):
    """A module whose saved tensors autograd keeps, without a hook for any of them."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's own forward; hooks around those of actnn stay."""
        run = super().forward  # type: ignore[misc]
        step = active_step()
        if step is None:
            return run(*arguments, **named)
        hooks = next(hooks for _, hooks in reversed(ACTIVE.steps) if hooks is not None)
        hooks.__exit__(None, None, None)
        try:
            return run(*arguments, **named)
        finally:
            hooks.__enter__()
            step.kept_until = len(step.records)


def recompute_only(model: nn.Module, paths: Iterable[str]) -> None:
    """Let exactly the modules at some paths be recomputed.

    Raises:
        ActNNError: If there is no module at a path, or it is the model itself.
    """
    modules, wanted = dict(model.named_modules()), set(paths)
    for path in sorted(wanted):
        if path not in modules or not path:
            raise ActNNError(
                f"Expected the path of a module inside the model to recompute, got {path!r}"
            )
    _swap_only(model, Recomputed, wanted)


def leave_untouched(model: nn.Module, choices: Mapping[str | tuple[str, int], Choice]) -> None:
    """Run the modules outside of the hooks for which 'keep' is chosen as a whole.

    These contain others, so that sharing with the modules around them matters little. Choices for
    single tensors go by the position in the order of saving: then all tensors must be seen.
    """
    paths = [path for path in choices if isinstance(path, str)]
    wanted = set()
    if len(paths) == len(choices):
        for path, module in model.named_modules():
            composite = next(module.children(), None) is not None
            special = any(other.startswith(path + ".") for other in paths)
            choice = choices.get(path)
            if path and composite and not special and choice and choice.action == "keep":
                wanted.add(path)
    _swap_only(model, Untouched, wanted)


def _swap_only(model: nn.Module, mixin: type[Swapped], paths: set[str]) -> None:
    """Put a class in front of those of exactly the modules at some paths."""
    for path, module in model.named_modules():
        if path in paths:
            swap(module, mixin)
        elif is_swapped(module, mixin):
            swap_back(module, mixin)
