"""Modules that run outside of the hooks: recomputed in backward, or kept as PyTorch keeps them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from actnn.errors import ActNNError
from actnn.saving.active import ACTIVE, active_step
from actnn.saving.arguments import Watched
from actnn.saving.module_classes import Swapped, is_swapped, swap, swap_back
from actnn.saving.records import Choice

# The attribute of a module whose first recomputation was right: 'part', or 'whole' if it must not
# stop early. The other one counts its runs.
_CHECKED, _RUNS = "_actnn_recomputed", "_actnn_runs"
_SAMPLE = 4096  # elements of a result that are compared
_TOLERANCE = 1e-2  # of their norm
_FILLS_LATE = "RreluWithNoise"  # saves its noise before it has been drawn
_MOST_NODES = 1000


class _Run:
    """Runs a module's forward, and runs it again without changing what it changed before.

    Args:
        module: The module, with the modules in it.
        forward: Its forward.
        places: For each positional argument of the forward, its place in those of a call.
        check: Whether it is checked that the second run does what the first one did.
        hold: Whether a check holds the arguments, so that both runs have the same. Else there is
            none where the second run gets decoded ones.

    Raises:
        ActNNError: If the forward changes buffers that its result depends on; with the check, also
            if it changes arguments or draws random numbers of Python or numpy, or if the second
            result is not the first one.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        places: Sequence[int],
        check: bool,
        hold: bool,
    ) -> None:
        self._module, self._forward, self._places = module, forward, places
        self._check, self._hold, self._ran = check, hold, False
        self._samples: list[Tensor] = []
        self._arguments: list[_Argument] = []  # of the first run
        self._whole = False

    def __call__(self, *distinct: Any, **named: Any) -> Any:
        if self._samples:
            distinct = self._first_of(distinct)
        arguments = [distinct[place] for place in self._places]
        if self._ran:
            with spare_buffers(_with_statistics(self._module)):
                result = self._forward(*arguments, **named)
            if self._samples:
                self._compare(result)
            return result
        self._ran = True
        before = buffer_versions(self._module)
        watched = Watched(tuple(arguments), named) if self._check else None
        drawn = _random_states() if self._check else ()
        result = self._forward(*arguments, **named)
        for old, new in zip(before, buffer_versions(self._module), strict=True):
            if old != new:
                raise self._error("leave its buffers as they are", f"changes {old[0]!r}")
        if watched is not None:
            changed = watched.changed()
            if changed:
                raise self._error(
                    "leave its arguments as they are",
                    f"changes {changed!r} (a cache for generation can be switched off: "
                    "use_cache=False)",
                )
            if drawn != _random_states():
                raise self._error(
                    "take random numbers of torch alone", "draws those of Python or numpy"
                )
            self._samples = _samples_of(result)
            self._arguments = [_Argument(each, self._hold) for each in distinct]
            self._whole = _fills_late(result)
        return result

    def _first_of(self, distinct: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of the first run; if they are no more, those of this one."""
        first, self._arguments = self._arguments, []
        found = tuple(each.held_or(now) for each, now in zip(first, distinct, strict=True))
        if all(each.is_still(now) for each, now in zip(first, found, strict=True)):
            return found
        self._samples = []  # another step compares
        return distinct

    def _compare(self, result: Any) -> None:
        """Compare the second result with the first one, once."""
        samples, self._samples = self._samples, []
        for first, second in zip(samples, _samples_of(result), strict=True):
            difference = float((first - second).norm())
            if not difference <= _TOLERANCE * float(first.norm()):
                raise self._error(
                    "give the same result when its forward runs again",
                    f"gives another one: it differs by {difference:.2g} where its norm is "
                    f"{float(first.norm()):.2g}",
                )
        vars(self._module)[_CHECKED] = "whole" if self._whole else "part"

    def _error(self, rule: str, got: str) -> ActNNError:
        return ActNNError(
            f"Expected a module to recompute to {rule}, got {type(self._module).__name__}, whose "
            f"forward {got}; choose 'keep' or 'compress' for it"
        )


class _Argument:
    """An argument of a run, by which it is known again."""

    def __init__(self, value: Any, hold: bool) -> None:
        self._held = value if hold else None
        self._version = value._version if isinstance(value, Tensor) else 0
        self._place, self._storage = 0, None
        if not hold and type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided:
            self._place, self._storage = value.data_ptr(), StorageWeakRef(value.untyped_storage())

    def held_or(self, value: Any) -> Any:
        """Return it if it is held, else a value."""
        return value if self._held is None else self._held

    def is_still(self, value: Any) -> bool:
        """Whether a value is this argument, with what it had then."""
        if not isinstance(value, Tensor):
            return True
        return self._is_here(value) and value._version == self._version

    def _is_here(self, x: Tensor) -> bool:
        if self._storage is None:
            return x is self._held
        # another tensor may have come to its place, but not to its storage
        return not self._storage.expired() and x.data_ptr() == self._place


def _random_states() -> tuple[object, ...]:
    """The states of the generators that a checkpoint does not restore."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, bytes(keys), *rest  # type: ignore[arg-type]


def _samples_of(result: Any) -> list[Tensor]:
    """Some elements of each tensor of real numbers in a result: float64."""
    found = []
    for each in tree_leaves(result):
        if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
            flat = each.detach().reshape(-1)
            few = flat[:: -(-len(flat) // _SAMPLE)].to(torch.float64, copy=True)
            found.append(torch.nan_to_num(few))
    return found


def _fills_late(result: Any) -> bool:
    """Whether an operation behind a result saves what it fills later."""
    left = [each.grad_fn for each in tree_leaves(result) if isinstance(each, Tensor)]
    seen: set[Any] = set()
    while left and len(seen) < _MOST_NODES:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node.name().startswith(_FILLS_LATE):
            return True
        seen.add(node)
        left += [each for each, _ in node.next_functions]
    return False


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
def spare_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let forwards change copies of the buffers that modules have themselves."""
    kept = [(each, dict(each._buffers)) for each in modules if each._buffers]
    for each, buffers in kept:
        each._buffers.update({n: None if b is None else b.clone() for n, b in buffers.items()})
    try:
        yield
    finally:
        for each, buffers in kept:
            each._buffers.update(buffers)


@contextmanager
def spare_grad(tensors: Collection[Tensor]) -> Iterator[None]:
    """Let tensors have no `grad`, and afterwards the one that they had.

    A backward may call another one, which adds to `grad`: that of reversible layers does.
    """
    kept = [x.grad for x in tensors]
    for x in tensors:
        x.grad = None
    try:
        yield
    finally:
        for x, grad in zip(tensors, kept, strict=True):
            x.grad = grad


def _with_statistics(module: nn.Module) -> list[nn.Module]:
    """The normalizations in a module that change their statistics."""
    return [each for each in module.modules() if isinstance(each, _NormBase) and each.training]


def rerun(module: nn.Module, forward: Callable[..., Any], arguments: Any, named: Any) -> Any:
    """Run a module's forward, and once more in backward, as torch.utils.checkpoint does.

    In the first, second, fourth, eighth run and so on it is checked that both do the same. After
    the first that is only where the arguments are kept as they are: no check holds them then.

    Raises:
        ActNNError: If the forward changes buffers that its result depends on, or is found to do
            something else when it runs again.
    """
    # A checkpoint makes a tensor of its own for each argument. Forwards may ask whether two are the
    # same, as that of nn.MultiheadAttention does.
    distinct = {id(each): each for each in arguments}
    order = list(distinct)
    places = [order.index(id(each)) for each in arguments]
    checked = vars(module).get(_CHECKED, "")
    check = False
    if not torch.compiler.is_compiling():
        runs = vars(module)[_RUNS] = vars(module).get(_RUNS, 0) + 1
        check = (not checked or runs & (runs - 1) == 0) and not _is_captured()
    run = _Run(module, forward, places, check, hold=not checked)
    if checked != "whole" and not check:
        return checkpoint(run, *distinct.values(), use_reentrant=False, **named)
    # Else it stops early when it has what backward needs, which may not be filled by then.
    with set_checkpoint_early_stop(False):
        return checkpoint(run, *distinct.values(), use_reentrant=False, **named)


def _is_captured() -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be compared."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


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
