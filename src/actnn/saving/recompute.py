"""Modules that run outside of the hooks: recomputed in backward, or kept as PyTorch keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from actnn._errors import ActNNError
from actnn.saving.active import ACTIVE, active_step
from actnn.saving.records import Choice
from actnn.saving.swapping import Swapped, is_swapped, swap, swap_back


class _Run:
    """Runs a module's forward, and runs it again without changing what it changed before.

    Args:
        module: The module, with the modules in it.
        forward: Its forward.
        places: For each positional argument of the forward, its place in those of a call.

    Raises:
        ActNNError: If the forward changes buffers that its result depends on.
    """

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], places: Sequence[int]
    ) -> None:
        self._module, self._forward, self._places = module, forward, places
        self._ran = False

    def __call__(self, *distinct: Any, **named: Any) -> Any:
        arguments = [distinct[place] for place in self._places]
        if self._ran:
            with _spare_statistics(self._module):
                return self._forward(*arguments, **named)
        self._ran = True
        before = buffer_versions(self._module)
        result = self._forward(*arguments, **named)
        for old, new in zip(before, buffer_versions(self._module), strict=True):
            if old != new:
                raise ActNNError(
                    "Expected a module to recompute to leave its buffers as they are, got "
                    f"{type(self._module).__name__}, whose forward changes {old[0]!r}; choose "
                    "'keep' or 'compress' for it"
                )
        return result


def buffer_versions(module: nn.Module) -> list[tuple[str, int]]:
    """Return names and versions of a module's buffers, but for the statistics of normalizations.

    In training, the result of a normalization does not depend on its statistics.
    """
    left, found = [module], []
    while left:
        each = left.pop()
        left += [child for child in each._modules.values() if child is not None]
        if each._buffers and not isinstance(each, _NormBase):
            found += [(n, b._version) for n, b in each._buffers.items() if b is not None]
    return found


@contextmanager
def _spare_statistics(module: nn.Module) -> Iterator[None]:
    """Let the normalizations in a module change copies of their statistics."""
    norms = [each for each in module.modules() if isinstance(each, _NormBase) and each.training]
    kept = [dict(each._buffers) for each in norms]
    for each in norms:
        for name, buffer in each._buffers.items():
            each._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for each, buffers in zip(norms, kept, strict=True):
            each._buffers.update(buffers)


def rerun(module: nn.Module, forward: Callable[..., Any], arguments: Any, named: Any) -> Any:
    """Run a module's forward, and once more in backward, as torch.utils.checkpoint does.

    Raises:
        ActNNError: If the forward changes buffers that its result depends on.
    """
    # A checkpoint makes a tensor of its own for each argument. Forwards may ask whether two are the
    # same, as that of nn.MultiheadAttention does.
    distinct = {id(each): each for each in arguments}
    order = list(distinct)
    run = _Run(module, forward, [order.index(id(each)) for each in arguments])
    return checkpoint(run, *distinct.values(), use_reentrant=False, **named)


class Recomputed(Swapped):
    """A module that keeps only its inputs, and runs its forward again in backward."""

    def _actnn_effect(self) -> str:
        return "actnn: recomputed in backward"

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the module's own forward, under a checkpoint while its model is compressed."""
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled() or active_step() is None:
            return run(*arguments, **named)
        return rerun(cast(nn.Module, self), run, arguments, named)


class Untouched(Swapped):
    """A module whose saved tensors autograd keeps, without a hook for any of them."""

    def _actnn_effect(self) -> str:
        return "actnn: kept"

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
        ActNNError: If a path is that of the model itself.
    """
    wanted = set(paths)
    for path in sorted(wanted):
        if not path:
            raise ActNNError(
                "Expected the path of a module inside the model to recompute, got the model itself"
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
