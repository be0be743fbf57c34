"""The entry of a QuantGRU's quantization in a state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.modules.quantization_state import QuantState
from quant_gru.parameters import document as params

STATE_KEY = "quantization"
FROZEN_KEY = "plan"
# of the norm of all weights: averages of training steps differ by less, other weights by more
_OTHER = 0.1


def entry_of(state: QuantState, use_quantization: bool) -> Tensor:
    """Return the entry of a calibrated GRU: its parameter document and its mode as text."""
    document = state.document()
    document["use_quantization"] = bool(use_quantization)
    return params.to_tensor(document)


def read_entry(entry: Any, where: str, use_quantization: bool) -> tuple[params.Parameters, bool]:
    """Return the contents of an entry: configuration and scales, and `use_quantization`.

    Args:
        entry: What a state_dict has at the key.
        where: The key, for messages.
        use_quantization: The mode if the entry has none.

    Raises:
        ParameterError: The entry cannot be read.
    """
    document = params.from_tensor(entry, where)
    on = params.take_flag(document, "use_quantization", use_quantization, where)
    return params.from_document(document, where), on


def without_scales(
    state_dict: Mapping[str, Any],
    prefix: str,
    names: Iterable[str],
    logarithms: Mapping[str, Tensor],
) -> dict[str, Any]:
    """Return what nn.Module loads: all but the entry, with logarithms that belong to scales.

    Args:
        state_dict: All entries.
        prefix: Start of the module's keys.
        names: Names of parameters of learned scales.
        logarithms: The module's parameters of learned scales.
    """
    key = prefix + STATE_KEY
    rest = {name: value for name, value in state_dict.items() if name != key}
    # a checkpoint without scales must not set their logarithms
    for name in names:
        if name not in logarithms:
            rest.pop(prefix + name, None)
        elif key not in state_dict or prefix + name not in state_dict:
            rest[prefix + name] = logarithms[name].detach()
    return rest


def copies(parameters: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return copies of parameters that have values."""
    return {
        name: value.detach().clone()
        for name, value in parameters.items()
        if value is not None and not value.is_meta
    }


def differ(former: Mapping[str, Tensor], parameters: Mapping[str, Tensor | None]) -> bool:
    """Return whether parameters are others than `former`, and not those a few steps later."""
    error = norm = 0.0
    for name, before in former.items():
        now = parameters.get(name)
        if now is None or now.is_meta or now.shape != before.shape:
            continue
        error += float((now.detach().to(before) - before).double().square().sum())
        norm += float(before.double().square().sum())
    return error > _OTHER**2 * norm


def hint(entry: Any) -> str:
    """Return what to do if the entry of a checkpoint was computed with, as averages are."""
    if isinstance(entry, Tensor) and entry.dtype is torch.uint8:
        try:
            params.from_tensor(entry, "")
            return ""
        except QuantGRUError:
            pass
    return (
        "; the entry is text and cannot be averaged or cast: average the results of "
        "float_state_dict(model)"
    )
