"""One quantizer for input.x and output.h of a GRU (`tie_x_and_h` in the configuration)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from quant_gru.calibration.observers import Observer
from quant_gru.config import QuantConfig
from quant_gru.errors import ConfigError
from quant_gru.integer.qparams import QParams

TIED = ("input.x", "output.h")

_FIELDS = ("bitwidth", "is_symmetric", "is_unsigned")


def one_for_input_and_state(cells: Sequence[Sequence[QParams]]) -> bool:
    """Return whether the inputs and states of all cells are quantized to the same real values."""
    found = [cell.quantizers[name] for layer in cells for cell in layer for name in TIED]
    return len({(q.bits, q.scale, q.zero_point - q.lo) for q in found}) == 1


def tied_observers(
    observers: Sequence[Sequence[dict[str, Observer]]], config: QuantConfig
) -> Sequence[Sequence[dict[str, Observer]]]:
    """Return observers whose input.x and output.h have the statistics of both, in all cells.

    These are the values of the input and of the states of every layer and direction. The inputs of
    the layers above are states of those below, and both directions have the same input.

    Args:
        observers: [layer][direction] -> name of the operator -> observer.
        config: Widths and kinds of the operators.

    Raises:
        ConfigError: The two operators have different widths or kinds.
    """
    x, h = ([getattr(config[name], field) for field in _FIELDS] for name in TIED)
    if x != h:
        raise ConfigError(
            f"Expected input.x and output.h to have the same {', '.join(_FIELDS)}, because "
            f"tie_x_and_h gives them one quantizer, got {x} and {h}"
        )
    both = deepcopy(observers[0][0]["input.x"])
    for layer in observers:
        for each in layer:
            both.merge(each["output.h"])
    return [[{**each, **dict.fromkeys(TIED, both)} for each in layer] for layer in observers]
