"""Whole models with frozen GRUs: making them, and loading them without float weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor

from quant_gru.errors import (
    CalibrationError,
    ParameterError,
    QuantGRUError,
    QuantGRUWarning,
    caller_stacklevel,
)
from quant_gru.modules.cell import FrozenQuantGRUCell
from quant_gru.modules.frozen import FrozenQuantGRU
from quant_gru.modules.gru import QuantGRU
from quant_gru.modules.module_weights import computes_weights
from quant_gru.whole_models.convert import find_grus

Model = TypeVar("Model", bound=torch.nn.Module)

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_SIZES = ("input_size", "hidden_size", "num_layers", "bias", "bidirectional")
_PLAN = "plan"

Frozen = dict[torch.nn.Module, FrozenQuantGRU]


def freeze_model(model: Model, inplace: bool = False) -> Model:
    """Replace every quantized GRU of a model by its integer plan, for inference with equal codes.

    GRUs whose `use_quantization` is False stay as they are; a warning names them. Forward hooks,
    names and the training mode are preserved; hooks of torch.nn.utils that compute weights are not
    needed any more. `load_frozen` reads the result's state_dict.

    Args:
        model: A model with calibrated QuantGRUs, such as the result of `calibrate_model`.
        inplace: True to change `model` itself; False to leave it unchanged and return a copy,
            which does not copy the float weights of its GRUs.

    Returns:
        The frozen model: FrozenQuantGRU and FrozenQuantGRUCell in place of the GRUs.

    Raises:
        QuantGRUError: The model has no quantized GRU, or weights are NaN or infinite.
        CalibrationError: A quantized GRU has no scales.

    Example:
        >>> frozen = freeze_model(quantized)
        >>> y = frozen(batches[0])
    """
    grus = find_grus(model)
    quantized = {name: gru for name, gru in grus.items() if gru.use_quantization}
    if not quantized:
        raise QuantGRUError(
            "Expected a model with at least one QuantGRU whose use_quantization is True, got none "
            f"in {type(model).__name__}; call convert_model and calibrate_model first"
        )
    frozen: Frozen = {gru: _freeze(name, gru) for name, gru in quantized.items()}
    left = ", ".join(repr(name) for name in grus if name not in quantized)
    if left:
        warnings.warn(
            f"left in floating point: {left}; use_quantization is False",
            QuantGRUWarning,
            stacklevel=caller_stacklevel(),
        )
    return _replaced(model, frozen, inplace)


def load_frozen(model: Model, state_dict: Mapping[str, Tensor], inplace: bool = False) -> Model:
    """Load the state_dict of a frozen model into a model of the same structure.

    The model needs no weights of value: it may be float, converted, frozen, or on the meta device.

    Args:
        model: A model made by the same code as the one that was frozen.
        state_dict: `freeze_model(...).state_dict()`.
        inplace: True to change `model` itself; False to leave it unchanged and return a copy.

    Returns:
        The frozen model. GRUs that were not frozen stay as they are in `model`.

    Raises:
        ParameterError: The state_dict is not of a frozen model, or a GRU has another size.
        RuntimeError: Other entries do not fit, as for `load_state_dict`.

    Example:
        >>> torch.save(freeze_model(quantized).state_dict(), "frozen.pt")
        >>> model = load_frozen(Model(), torch.load("frozen.pt"))
    """
    if not isinstance(state_dict, Mapping):
        raise ParameterError(
            f"Expected a state_dict, got {type(state_dict).__name__}; pass torch.load(file)"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    frozen: Frozen = {}
    for key in state_dict:
        prefix, _, last = key.rpartition(".")
        if last != _PLAN:
            continue
        module = modules.get(prefix)
        if not isinstance(module, torch.nn.GRU | torch.nn.GRUCell | FrozenQuantGRU):
            raise ParameterError(
                f"Expected a GRU for key {key!r} of the state_dict, got none: {prefix!r} "
                + ("is missing" if module is None else f"is a {type(module).__name__}")
            )
        if module not in frozen:
            frozen[module] = _load(prefix, module, state_dict)
    if not frozen:
        raise ParameterError(
            f"Expected the state_dict of a frozen model, got one without a key {_PLAN!r}; "
            "freeze_model(model).state_dict() has one for each GRU"
        )
    loaded = _replaced(model, frozen, inplace)
    tensors = [*loaded.parameters(), *loaded.buffers()]
    loaded.load_state_dict(state_dict, assign=any(tensor.is_meta for tensor in tensors))
    return loaded


def _freeze(name: str, gru: QuantGRU) -> FrozenQuantGRU:
    try:
        frozen = gru.freeze()
    except CalibrationError as error:
        raise CalibrationError(f"{error} (module {name!r})") from None
    except QuantGRUError as error:
        raise QuantGRUError(f"{error} (module {name!r})") from None
    return _dressed(frozen, gru)


def _load(name: str, module: torch.nn.Module, state_dict: Mapping[str, Tensor]) -> FrozenQuantGRU:
    """Return the frozen GRU whose entries begin with a name, to replace `module`."""
    prefix = f"{name}." if name else ""
    own = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
    is_cell = isinstance(module, torch.nn.GRUCell | FrozenQuantGRUCell)
    try:
        frozen = (FrozenQuantGRUCell if is_cell else FrozenQuantGRU).from_state_dict(own)
    except ParameterError as error:
        raise ParameterError(f"{error} (module {name!r})") from None
    expected, got = _sizes(module), _sizes(frozen)
    if expected != got:
        raise ParameterError(f"Expected {name!r} to be a GRU with {expected}, got {got}")
    device = next((t.device for t in (*module.parameters(), *module.buffers())), None)
    if device is not None and device.type != "meta":
        frozen.to(device)
    return _dressed(frozen, module)


def _sizes(module: torch.nn.Module) -> str:
    source = module.shape if isinstance(module, FrozenQuantGRU) else module
    usual = {"num_layers": 1, "bidirectional": False}  # cells have none of these
    return ", ".join(f"{name}={getattr(source, name, usual.get(name))}" for name in _SIZES)


def _dressed(frozen: FrozenQuantGRU, gru: torch.nn.Module) -> FrozenQuantGRU:
    """Give a frozen GRU the forward hooks and the mode of the module that it replaces.

    Hooks that compute weights have done their work: it is in the codes.
    """
    for name in _HOOKS:
        frozen.__dict__[name] = gru.__dict__[name].copy()
    for key, hook in gru._forward_pre_hooks.items():
        if computes_weights(hook):
            del frozen._forward_pre_hooks[key]
            frozen._forward_pre_hooks_with_kwargs.pop(key, None)
    return frozen.train(gru.training)


def _replaced(model: Model, frozen: Frozen, inplace: bool) -> Model:
    """Return a model with its GRUs replaced wherever it refers to them."""
    if not inplace:
        return copy.deepcopy(model, {id(gru): each for gru, each in frozen.items()})
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in frozen:
                parent._modules[name] = frozen[child]
    return cast(Model, frozen.get(model, model))
