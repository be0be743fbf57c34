"""Parameters of Haste's GRU (github.com/lmnt-com/haste): weights from the right, gates z, r, n."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quant_gru.config.operators import suggest
from quant_gru.errors import QuantGRUError
from quant_gru.integer.plan import update_first
from quant_gru.interchange.foreign.float_gru import Cell, FloatGRU, array, cell_of_columns, stacked

DIMENSIONS = {"kernel": 2, "recurrent_kernel": 2, "bias": 1, "recurrent_bias": 1}


def read(parameters: Any) -> FloatGRU:
    """Return the GRU of Haste's parameters.

    Args:
        parameters: The mapping of one layer; or a sequence with one mapping per layer, lowest
            first. A pair of mappings in place of one has the two directions.

    Raises:
        QuantGRUError: A parameter is missing, unknown or of a wrong shape.
    """
    if isinstance(parameters, Mapping):
        return FloatGRU(((_cell(parameters, ""),),))
    if not isinstance(parameters, Sequence) or isinstance(parameters, str) or not parameters:
        raise QuantGRUError(
            "Expected a mapping of Haste's parameters, or a sequence of one per layer, got "
            f"{type(parameters).__name__}"
        )
    layers, names = [], []
    for index, layer in enumerate(parameters):
        directions = [layer] if isinstance(layer, Mapping) else layer
        if not isinstance(directions, Sequence) or len(directions) not in (1, 2):
            raise QuantGRUError(
                f"Expected layer {index} to be a mapping or a pair of mappings, got "
                f"{type(layer).__name__}"
            )
        cells = tuple(_cell(each, f"layer {index}: ") for each in directions)
        names.append(f"layer {index}")
        layers.append(checked_directions(cells, names[-1]))
    return stacked(layers, names)


def checked_directions(cells: tuple[Cell, ...], name: str) -> FloatGRU:
    """Return the GRU of one layer; raise if its directions have different sizes."""
    shapes = [tuple(cell.W.shape) for cell in cells]
    if len(set(shapes)) != 1:
        raise QuantGRUError(
            f"Expected both directions of {name} to have one shape, got {shapes[0]} and {shapes[1]}"
        )
    return FloatGRU((cells,))


def write(W: Tensor, R: Tensor, bw: Tensor | None, br: Tensor | None) -> dict[str, Tensor]:
    """Return Haste's parameters of one layer and direction.

    Args:
        W: (3H, C), rows r, z, n.
        R: (3H, H).
        bw: (3H,), or None for zeros.
        br: (3H,), or None for zeros.

    Returns:
        'kernel' (C, 3H), 'recurrent_kernel' (H, 3H), 'bias' (3H,) and 'recurrent_bias' (3H,),
        copies with columns z, r, n.
    """
    zeros = torch.zeros_like(W[:, 0])
    with torch.no_grad():
        return {
            "kernel": update_first(W).t().contiguous(),
            "recurrent_kernel": update_first(R).t().contiguous(),
            "bias": update_first(zeros if bw is None else bw),
            "recurrent_bias": update_first(zeros if br is None else br),
        }


def _cell(parameters: Any, where: str) -> Cell:
    if not isinstance(parameters, Mapping):
        raise QuantGRUError(
            f"{where}Expected a mapping of Haste's parameters, got {type(parameters).__name__}"
        )
    for name in parameters:
        if name not in DIMENSIONS:
            raise QuantGRUError(
                f"{where}Expected a parameter of Haste's GRU, got {name!r}; "
                f"{suggest(name, DIMENSIONS)}"
            )
    for name in DIMENSIONS:
        if name not in parameters:
            raise QuantGRUError(f"{where}Expected the parameter {name!r}, got none")
    found = {
        name: array(parameters[name], f"{where}{name}", count) for name, count in DIMENSIONS.items()
    }
    return cell_of_columns(
        found["kernel"], found["recurrent_kernel"], found["bias"], found["recurrent_bias"], where
    )
