"""Compression of a model in place, and its levels."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from actnn.adapting.measured import Measured
from actnn.adapting.watched import Watched
from actnn.errors import ActNNError, ActNNWarning
from actnn.layers.chunks import as_wholes
from actnn.layers.levels import Level, level_of
from actnn.layers.registry import mixin_for
from actnn.layers.root import Root, add_root, roots_around, roots_inside
from actnn.layers.sharing import listed, undo, warn_of_others
from actnn.layers.unused import Watch
from actnn.saving.compiled import CompiledCall
from actnn.saving.context import MIN_BYTES, Saving
from actnn.saving.module_classes import is_swapped, swap
from actnn.saving.norms import NORMS
from actnn.saving.records import LOSSLESS, Choice, Policy
from actnn.saving.settings import Allocator

Model = TypeVar("Model", bound=nn.Module)


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
    dropout: Literal["seed", "torch"] = "seed",
) -> Model:
    """Compress what autograd keeps of a model for backward. The forward stays exact.

    The classes of its modules are replaced by subclasses, in place: parameters, buffers, hooks,
    `state_dict` and the identity of all modules stay. `model.actnn` is the `Saving`.

    Args:
        model: The model, on any device. A compressed one gets the new settings, and loses those of
            earlier calls, choices included.
        bits: Bits per element, 1 to 8, on average for levels that adapt; 32 uses lossless codes
            only. None leaves it to the level.
        level: 'L0' to 'L5' or a sub-level, see `Level`; None is 'L2'.
        group: Neighbouring elements that share a range; a multiple of 32.
        policy: Called for each tensor that may be compressed; None compresses all.
        min_bytes: Smaller tensors are kept.
        seed: Seed of the noise of rounding.
        stochastic: Whether rounding is random, so that its expectation is exact.
        dropout: 'seed' keeps the seed of a mask instead of the mask, which is then another than
            PyTorch would draw; 'torch' keeps PyTorch's masks, for the losses of training without
            actnn at the same seed.

    Returns:
        The model.

    Raises:
        ActNNError: If an argument is not as described.

    Warns:
        ActNNWarning: If other models were compressed that share modules with this one, and lose
            settings; in training, if nothing can be compressed because the model is not called.

    Example:
        >>> network = compress(network, bits=4)
        >>> network(images).sum().backward()
    """
    _check_module(model)
    if dropout not in ("seed", "torch"):
        raise ActNNError(f"Expected dropout to be 'seed' or 'torch', got {dropout!r}")
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
    saving.own_masks = dropout == "seed"
    warn_of_others(model)
    with as_wholes(model):
        undo(model)
        _check_model(model)
        for module in model.modules():
            mixin = mixin_for(module) if chosen.compress else None
            if mixin is not None:
                swap(module, mixin)
    swap(model, Root)
    model.actnn = saving  # type: ignore[assignment]
    saving.bind(model)
    saving.set_choices(_choices(model, chosen))
    saving.adaptive = _allocator(model, saving, chosen)
    add_root(model)
    if chosen.compress or chosen.swap:
        model.__dict__["_actnn_watch"] = Watch(model, saving)
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


def _allocator(model: nn.Module, saving: Saving, level: Level) -> Allocator | None:
    if level.adaptive and saving.bits != LOSSLESS:
        return Measured(model, saving.bits, saving.group)
    return None if saving.bits == LOSSLESS else Watched(saving.bits)


def _choices(model: nn.Module, level: Level) -> dict[str | tuple[str, int], Choice]:
    choices: dict[str | tuple[str, int], Choice] = {}
    if not level.norms:
        for path, module in model.named_modules():
            if isinstance(module, NORMS):
                choices[path] = Choice("keep")
    return choices


def uncompress(model: Model) -> Model:
    """Undo `compress`: every module gets its own class again.

    Modules that another compressed model shares keep what that one needs.

    Args:
        model: The model; one that is not compressed stays as it is.

    Returns:
        The model.

    Raises:
        ActNNError: If another wrapper has changed the class of a module since.

    Warns:
        ActNNWarning: If modules of it were compressed by themselves, or belong to another
            compressed model.

    Example:
        >>> network = uncompress(compress(network, bits=4))
    """
    _check_module(model)
    inside = roots_inside(model)
    if is_swapped(model, Root) and inside:
        warnings.warn(
            f"uncompress() of {type(model).__name__} also undoes the compression of "
            f"{listed(inside)}, which was compressed by itself",
            ActNNWarning,
            stacklevel=2,
        )
    elif not is_swapped(model, Root) and not inside:
        for other, shared in roots_around(model).items():
            warnings.warn(
                f"Expected a compressed model, got a {type(model).__name__} that has modules of "
                f"one: {listed(shared)} of a compressed {type(other).__name__}. They stay as they "
                "are; uncompress that model",
                ActNNWarning,
                stacklevel=2,
            )
        return model
    with as_wholes(model):
        undo(model)
    for module in model.modules():
        compiled = module._compiled_call_impl
        if isinstance(compiled, CompiledCall):
            module._compiled_call_impl = compiled.call
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
        >>> with compressed(bits=4):
        ...     loss = network(images).sum()
        >>> loss.backward()

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
