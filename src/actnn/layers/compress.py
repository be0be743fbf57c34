"""Compression of a model in place, and its levels."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from actnn._errors import ActNNError
from actnn.adapting.measured import Measured
from actnn.adapting.watched import FEW, Watched
from actnn.layers.levels import Level, level_of
from actnn.layers.registry import mixin_for
from actnn.saving.active import transformed
from actnn.saving.compiled import call
from actnn.saving.context import MIN_BYTES, Saving
from actnn.saving.norms import NORMS
from actnn.saving.records import LOSSLESS, Choice, Policy
from actnn.saving.swapping import Swapped, is_swapped, swap, swap_back
from actnn.saving.uncompiled import uncompiled

Model = TypeVar("Model", bound=nn.Module)


class Root(Swapped):
    """A compressed model: its forward runs inside its Saving."""

    actnn: Saving

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the model's own forward; what autograd saves goes through the Saving."""
        run = super().forward  # type: ignore[misc]
        tracing = torch._C._get_tracing_state() is not None  # torch.jit.trace
        if not torch.is_grad_enabled() or tracing or transformed():
            return call(run, arguments, named)
        if getattr(self, "_is_replica", False):
            raise ActNNError(
                "Expected a compressed model itself, or DistributedDataParallel around it, got a "
                "replica that torch.nn.DataParallel has made; its weights are copies"
            )
        saving = self.actnn
        if saving.model is not cast(nn.Module, self):  # a copy of a compressed model
            saving.bind(cast(nn.Module, self))
        watch = None if saving.adaptive is None else saving.adaptive.watch
        replay = None if watch is None else watch(saving, run, arguments, named)
        with saving:
            saving.add_inputs((arguments, named))
            output = call(run, arguments, named)
        return output if replay is None else replay.watch(output)

    uncompiled(forward, callees=False)


def compress(
    model: Model,
    bits: int | None = None,
    level: str | None = None,
    *,
    group: int = 256,
    policy: Policy | None = None,
    min_bytes: int = MIN_BYTES,
    seed: int = 0,
    stochastic: bool = True,
) -> Model:
    """Compress what autograd keeps of a model for backward. The forward stays exact.

    The classes of its modules are replaced by subclasses, in place: parameters, buffers, hooks,
    `state_dict` and the identity of all modules stay. `model.actnn` is the `Saving`.

    Args:
        model: The model, on any device. A compressed one gets the new settings.
        bits: Bits per element, 1 to 8; 32 uses lossless codes only. None leaves it to the level.
        level: 'L0' to 'L5' or a sub-level, see `Level`; None is 'L2'.
        group: Neighbouring elements that share a range; a multiple of 32.
        policy: Called for each tensor that may be compressed; None compresses all.
        min_bytes: Smaller tensors are kept.
        seed: Seed of the noise of rounding.
        stochastic: Whether rounding is random, so that its expectation is exact.

    Returns:
        The model.

    Raises:
        ActNNError: If an argument is not as described.
    """
    _check_module(model)
    chosen = level_of(level or "L2")
    if not chosen.compress and bits not in (None, LOSSLESS):
        raise ActNNError(f"Expected no bits for level {level!r}, which rounds nothing, got {bits}")
    saving = Saving(
        bits=chosen.bits if bits is None else bits,
        group=group,
        policy=policy,
        min_bytes=min_bytes,
        seed=seed,
        stochastic=stochastic,
        swap=chosen.swap,
    )
    uncompress(model)
    _check_model(model)
    for module in model.modules():
        mixin = mixin_for(module) if chosen.compress else None
        if mixin is not None:
            swap(module, mixin)
    swap(model, Root)
    model.actnn = saving  # type: ignore[assignment]
    saving.bind(model)
    saving.set_choices(_choices(model, chosen))
    if chosen.adaptive and saving.bits != LOSSLESS:
        saving.adaptive = Measured(model, saving.bits, group)
    elif saving.bits <= FEW:
        saving.adaptive = Watched(saving.bits)
    return model


def _check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ActNNError(f"Expected the model to be a torch.nn.Module, got {type(model).__name__}")


def _check_model(model: nn.Module) -> None:
    """Raise if a model cannot be compressed in place."""
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ActNNError(
            f"Expected a model that Python runs, got {kind}; compress the model it was made from"
        )
    if "forward" in vars(model):
        raise ActNNError(
            f"Expected the forward of the model to be that of its class, got one that was set on "
            f"this {kind}; compress it before torch.compile or another wrapper replaces its forward"
        )
    if hasattr(model, "actnn"):
        raise ActNNError(
            f"Expected the name 'actnn' to be free for the Saving, got {kind} with an attribute "
            "of this name"
        )
    for path, module in model.named_modules():
        if any(map(is_lazy, module.parameters(recurse=False))):
            raise ActNNError(
                f"Expected all modules to know their shapes, got a lazy {type(module).__name__} at "
                f"{path!r}; run a forward first"
            )


def _choices(model: nn.Module, level: Level) -> dict[str | tuple[str, int], Choice]:
    choices: dict[str | tuple[str, int], Choice] = {}
    if not level.norms:
        for path, module in model.named_modules():
            if isinstance(module, NORMS):
                choices[path] = Choice("keep")
    return choices


def uncompress(model: Model) -> Model:
    """Undo `compress`: every module gets its own class again.

    Args:
        model: The model; one that is not compressed stays as it is.

    Returns:
        The model.

    Raises:
        ActNNError: If another wrapper has changed the class of a module since.
    """
    _check_module(model)
    for module in model.modules():
        compressed_root = is_swapped(module, Root)
        swap_back(module)
        if compressed_root:
            saving = cast(Saving, module.actnn)
            if saving.adaptive is not None:
                saving.adaptive.detach()
            del module.actnn
    return model


def compressed(
    bits: int = 4,
    *,
    group: int = 256,
    policy: Policy | None = None,
    min_bytes: int = MIN_BYTES,
    seed: int = 0,
    stochastic: bool = True,
    model: nn.Module | None = None,
) -> Saving:
    """Return a context manager that compresses what autograd saves inside of it.

    Example:
        with actnn.compressed(bits=4):
            loss = loss_function(model(x), y)
        loss.backward()

    Args:
        bits: Bits per element: 1 to 8, or 32, which rounds nothing.
        group: Neighbouring elements that share a range; a multiple of 32.
        policy: Called for each tensor that may be compressed; None compresses all.
        min_bytes: Smaller tensors are kept.
        seed: Seed of the noise of rounding.
        stochastic: Whether rounding is random, so that its expectation is exact.
        model: The model whose parameters, buffers and paths are known.

    Returns:
        A `Saving`; keep it over the steps, so that each has noise of its own.

    Raises:
        ActNNError: If an argument is not as described.
    """
    return Saving(
        bits=bits,
        group=group,
        policy=policy,
        min_bytes=min_bytes,
        seed=seed,
        stochastic=stochastic,
        model=model,
    )
