"""Conversion of whole models."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, cast, overload

import torch
from torch.nn.utils.parametrize import is_parametrized

from quant_gru.config import QuantConfig
from quant_gru.errors import QuantGRUError, QuantGRUWarning, caller_stacklevel
from quant_gru.modules.cell import QuantGRUCell
from quant_gru.modules.gru import QuantGRU
from quant_gru.modules.module_weights import compute_weights
from quant_gru.modules.near_misses import refuse_unknown
from quant_gru.whole_models.selection import ModelConfig, Selection

Model = TypeVar("Model", bound=torch.nn.Module)
GRU = TypeVar("GRU", bound=QuantGRU)

_GRUS = (torch.nn.GRU, torch.nn.GRUCell)
_RECURRENT = (torch.nn.RNNBase, torch.nn.RNNCellBase)

# What a class statement defines by itself, and a constructor, which has run by now.
_TRIVIAL = {
    "__annotations__",
    "__constants__",
    "__doc__",
    "__firstlineno__",
    "__init__",
    "__module__",
    "__orig_bases__",
    "__parameters__",
    "__qualname__",
    "__slotnames__",
    "__static_attributes__",
}

Names = dict[torch.nn.Module, list[str]]


@overload
def convert_model(
    model: torch.nn.GRUCell, config: ModelConfig = None, inplace: bool = False
) -> QuantGRUCell: ...


@overload
def convert_model(
    model: torch.nn.GRU, config: ModelConfig = None, inplace: bool = False
) -> QuantGRU: ...


@overload
def convert_model(model: Model, config: ModelConfig = None, inplace: bool = False) -> Model: ...


def convert_model(
    model: torch.nn.Module, config: ModelConfig = None, inplace: bool = False, **_unknown: NoReturn
) -> torch.nn.Module:
    """Replace every nn.GRU and nn.GRUCell of a model by a quantized one with the same parameters.

    The model's results do not change: quantization is off until `calibrate_model`. A module that is
    used twice is converted once. Hooks, names and the training mode are preserved. Subclasses that
    only add a constructor are converted, too; others stay as they are, with a warning. A QuantGRU
    in the model takes its new configuration, unless it is calibrated (a warning names it).

    Args:
        model: Any module, including an nn.GRU.
        config: A QuantConfig, the name of a preset ('int8_wide', 'int8', 'w8a16', 'int16'), or the
            path of a configuration file, for all GRUs. A dict of these by module name or glob
            pattern, or a function from a module name to one of these, for single GRUs; None in
            place of one leaves a GRU as it is. An exact name comes before a pattern, and the first
            pattern that matches decides. None for the default of all GRUs.
        inplace: True to change `model` itself, with new GRUs that share its parameters; False to
            change a deep copy and leave `model` unchanged.

    Returns:
        The converted model. Type checkers know the class of a single GRU; a model keeps its own
        class, so they need `cast(QuantGRU, model.gru)` for the methods of a GRU inside.

    Raises:
        QuantGRUError: The model has no GRU, or cannot be copied.
        ConfigError: A configuration is invalid, a key matches no GRU, or a GRU no key.

    Example:
        >>> mixed = convert_model(model, {"encoder.*": "int16", "head.gru": None, "*": "int8_wide"})
    """
    refuse_unknown(convert_model, _unknown)
    selection = Selection(config)
    _require_grus(model)
    # chosen before anything is copied or changed
    names = _names(model)
    selection.check(each for module, each in names.items())
    grus = {id(m): selection.of(each) for m, each in names.items() if isinstance(m, _GRUS)}
    order = [grus.get(id(module)) for module in model.modules()]
    model = model if inplace else _copied(model)
    names = _names(model)
    chosen = dict(zip(model.modules(), order, strict=True))
    _warn_of_others(model, names, selection)
    converted: dict[torch.nn.Module, QuantGRU] = {}
    for module, (name, *_) in names.items():
        choice = chosen[module]
        if choice is None or not isinstance(module, _GRUS):
            continue
        if isinstance(module, QuantGRU):
            if config is not None:
                _configure(name, module, choice)
        elif _is_trivial(module):
            converted[module] = _convert(module, choice)
        else:
            _warn_of_subclass(name, module)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in converted:
                parent._modules[name] = converted[child]
    return converted.get(model, model)


def require_module(model: object) -> None:
    """Raise unless this is a module, with the way to one for a class."""
    if isinstance(model, type):
        raise QuantGRUError(
            f"Expected a module, got the class {model.__name__}; pass {model.__name__}(..)"
        )
    if not isinstance(model, torch.nn.Module):
        raise QuantGRUError(f"Expected a module, got {type(model).__name__}")


def _names(model: torch.nn.Module) -> Names:
    """Return all names of each recurrent module of torch.nn, and of their subclasses."""
    require_module(model)
    found: Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, _RECURRENT):
            found.setdefault(module, []).append(name)
    return found


def _require_grus(model: torch.nn.Module) -> None:
    if not isinstance(model, torch.nn.Module):
        shown = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
        instead = ""
        if str(shown).endswith((".onnx", "ModelProto")):
            instead = "quantize_onnx(model, feeds) takes ONNX files"
        elif _is_keras(model) or str(shown).endswith((".keras", ".h5")):
            instead = "quantize_keras(model, batches) takes Keras models"
        if instead:
            raise QuantGRUError(f"Expected a torch.nn.Module, got {shown!r}; {instead}")
    names = _names(model)
    if any(isinstance(module, _GRUS) for module in names):
        return
    others = ", ".join(f"{each[0]!r} ({type(m).__name__})" for m, each in names.items() if each[0])
    raise QuantGRUError(
        "Expected a model with at least one torch.nn.GRU or GRUCell, got none in "
        f"{type(model).__name__}"
        + (f"; {others} cannot be converted" if others else "")
        + "; quantize_keras(model, batches) takes Keras models" * _is_keras(model)
    )


def _is_keras(model: object) -> bool:
    """Return whether this is a Keras model, which is a torch.nn.Module on one backend alone."""
    return any(each.__module__.partition(".")[0] == "keras" for each in type(model).__mro__)


def _warn_of_others(model: torch.nn.Module, names: Names, selection: Selection) -> None:
    """Name the recurrent modules that stay float because they are no GRUs."""
    others = [
        f"{each[0]!r} ({type(module).__name__})"
        for module, each in names.items()
        if not isinstance(module, _GRUS) and not selection.leaves(each)
    ]
    if others:
        _warn(
            f"left in floating point: {', '.join(others)}; only nn.GRU and nn.GRUCell are converted"
        )


def _configure(name: str, gru: QuantGRU, config: QuantConfig) -> None:
    """Give a QuantGRU another configuration, unless it has scales."""
    if gru.config.without_comments() == config.without_comments():
        return
    if gru.is_calibrated():
        _warn(
            f"{name or 'the model'} is calibrated and keeps its configuration; call its "
            "reset_calibration() first, or adjust_quant_config for single operators"
        )
        return
    gru._state.set_config(config)


def _warn_of_subclass(name: str, module: torch.nn.Module) -> None:
    _warn(
        f"{name or 'the model'} is a {type(module).__name__}, a subclass of "
        f"nn.{_base(module).__name__} with code of its own: left as it is"
    )


def _warn(message: str) -> None:
    warnings.warn(message, QuantGRUWarning, stacklevel=caller_stacklevel())


def _base(module: torch.nn.Module) -> type[torch.nn.Module]:
    return torch.nn.GRU if isinstance(module, torch.nn.GRU) else torch.nn.GRUCell


def _is_trivial(module: torch.nn.Module) -> bool:
    """Return whether a GRU computes what its base class in torch.nn does.

    Subclasses may have a constructor, which has run by now, but no other code or attribute. The
    class that torch gives to a parametrized module adds only the computed weights.
    """
    base = _base(module)
    own = type(module).__mro__[is_parametrized(module) : type(module).__mro__.index(base)]
    return all(issubclass(each, base) and set(vars(each)) <= _TRIVIAL for each in own)


def _copied(model: Model) -> Model:
    _forget_graphs(model)
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise QuantGRUError(
            f"Expected a model that can be copied, got {type(error).__name__} ({error}); give "
            "inplace=True"
        ) from error


def _forget_graphs(model: torch.nn.Module) -> None:
    """Compute weights that are computed from others without a graph, which cannot be copied."""
    for module in model.modules():
        compute_weights(module)
        if isinstance(module, torch.nn.GRU) and any(
            w is not None and w.grad_fn is not None for w in module._flat_weights
        ):
            with torch.no_grad():
                module._flat_weights = [
                    getattr(module, name, None) for name in module._flat_weights_names
                ]


def _convert(gru: torch.nn.Module, config: QuantConfig) -> QuantGRU:
    """Return a quantized GRU with everything that `gru` has: parameters, hooks, mode."""
    new = _converted(gru, config)
    if not config.disable_quantization:
        new._float_unexpected = "the GRU was converted and not calibrated"
    return new


def _converted(gru: torch.nn.Module, config: QuantConfig) -> QuantGRU:
    if isinstance(gru, torch.nn.GRUCell):
        return _class_like(gru, QuantGRUCell).of(gru, config)
    kind = _class_like(gru, QuantGRU)
    new = kind.__new__(kind)
    new.__dict__.update(gru.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        new.__dict__[name] = dict(gru.__dict__[name])
    new._flat_weights = list(cast(torch.nn.GRU, gru)._flat_weights)
    new._init_quantization(config, use_quantization=False)
    return new


def _class_like(gru: torch.nn.Module, kind: type[GRU]) -> type[GRU]:
    """Return `kind`, with the weights that torch's class of a parametrized GRU computes."""
    if not is_parametrized(gru):
        return kind
    return type(f"Parametrized{kind.__name__}", (kind,), dict(vars(type(gru))))


def find_grus(model: torch.nn.Module) -> dict[str, QuantGRU]:
    """Return the QuantGRUs of a model by name, typed, for type checkers and loops.

    Args:
        model: A model from `convert_model`, or a QuantGRU, whose name is then ''.

    Returns:
        Name, as in `model.named_modules()` -> the QuantGRU. Empty if the model has none.

    Raises:
        QuantGRUError: `model` is no module.

    Example:
        >>> for name, gru in find_grus(quantized).items():
        ...     gru.export_quant_params(f"{name or 'gru'}.json")
    """
    require_module(model)
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantGRU)}


def expect_grus(
    found: Mapping[str, Any], model: torch.nn.Module, error: type[QuantGRUError] = QuantGRUError
) -> None:
    """Raise an error if the GRUs that were found in a model are none."""
    if not found:
        raise error(
            f"Expected a model with at least one QuantGRU, got none in {type(model).__name__}; "
            "call convert_model(model) first"
        )
