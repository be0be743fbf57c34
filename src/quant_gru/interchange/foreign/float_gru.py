"""The weights of a float GRU, in the layout of torch.nn.GRU, whatever they were read from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quant_gru.errors import QuantGRUError
from quant_gru.parameters.document import is_plain


@dataclass(frozen=True)
class Cell:
    """One layer and direction; rows in the order reset, update, candidate (r, z, n).

    Attributes:
        W: float32 (3H, C).
        R: float32 (3H, H).
        bw: float32 (3H,); None without biases.
        br: float32 (3H,); None without biases.
    """

    W: Tensor
    R: Tensor
    bw: Tensor | None
    br: Tensor | None


@dataclass(frozen=True)
class FloatGRU:
    """The weights of all layers and directions of a GRU.

    Attributes:
        cells: [layer][direction] -> weights.
        batch_first: Whether the source has the batch before the time.
    """

    cells: tuple[tuple[Cell, ...], ...]
    batch_first: bool = False

    @property
    def input_size(self) -> int:
        """C, the features of an input step."""
        return int(self.cells[0][0].W.shape[1])

    @property
    def hidden_size(self) -> int:
        """H, the features of the state."""
        return int(self.cells[0][0].R.shape[1])

    @property
    def bidirectional(self) -> bool:
        """Whether each layer has two directions."""
        return len(self.cells[0]) == 2

    @property
    def bias(self) -> bool:
        """Whether any layer has biases."""
        return any(cell.bw is not None for layer in self.cells for cell in layer)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters under torch.nn.GRU's names; missing biases are zero."""
        found: dict[str, Tensor] = {}
        for layer, cells in enumerate(self.cells):
            for suffix, cell in zip(("", "_reverse"), cells, strict=False):
                end = f"l{layer}{suffix}"
                found[f"weight_ih_{end}"], found[f"weight_hh_{end}"] = cell.W, cell.R
                if self.bias:
                    zeros = torch.zeros(cell.W.shape[0], device="cpu")
                    found[f"bias_ih_{end}"] = zeros if cell.bw is None else cell.bw
                    found[f"bias_hh_{end}"] = zeros if cell.br is None else cell.br
        return found


def stacked(layers: Sequence[FloatGRU], names: Sequence[str]) -> FloatGRU:
    """Join GRUs of one layer each: the outputs of each one are the inputs of the next.

    Args:
        layers: The layers, lowest first.
        names: A name of each one, for errors.

    Raises:
        QuantGRUError: Sizes or directions do not fit together.
    """
    first = layers[0]
    H, D = first.hidden_size, len(first.cells[0])
    for layer, name in zip(layers[1:], names[1:], strict=True):
        found = (layer.hidden_size, len(layer.cells[0]), layer.input_size)
        if found != (H, D, D * H):
            raise QuantGRUError(
                f"Expected {name} to continue {names[0]}, with hidden_size={H}, {D} direction(s) "
                f"and input_size={D * H}, got {found[0]}, {found[1]} and {found[2]}"
            )
        if layer.batch_first != first.batch_first:
            raise QuantGRUError(
                f"Expected {name} to have the layout of {names[0]}, got batch_first="
                f"{layer.batch_first} and {first.batch_first}"
            )
    return FloatGRU(tuple(layer.cells[0] for layer in layers), first.batch_first)


def array(value: Any, what: str, dimensions: int) -> np.ndarray:
    """Return a float32 array of finite or infinite real numbers.

    Args:
        value: An array, a tensor or nested lists.
        what: Its name, for errors.
        dimensions: The number of dimensions that it must have.

    Raises:
        QuantGRUError: It is no such array.
    """
    if isinstance(value, Tensor):
        if value.is_meta:
            raise QuantGRUError(f"Expected {what} to have values, got a tensor on device 'meta'")
        # the storage of an expanded tensor is smaller than a copy of it
        if value.layout is torch.strided and not is_plain(value):
            raise QuantGRUError(f"Expected {what} to have values, got an expanded tensor")
        value = value.detach().cpu()
        value = value.float() if value.dtype is torch.bfloat16 else value
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        found = np.asarray(None)
    if found.dtype.kind not in "fiu" and found.dtype.name != "bfloat16":
        raise QuantGRUError(
            f"Expected {what} to be an array of real numbers, got {type(value).__name__} of dtype "
            f"{found.dtype}"
        )
    if found.ndim != dimensions or 0 in found.shape:
        raise QuantGRUError(
            f"Expected {what} to have {dimensions} dimension(s), none of them empty, got shape "
            f"{found.shape}"
        )
    return as_float32(found, what)


def as_float32(value: np.ndarray, what: str) -> np.ndarray:
    """Return an array in float32; raise if a finite number is infinite there.

    Args:
        value: Real numbers.
        what: Its name, for errors.
    """
    with np.errstate(over="ignore"):
        found = value.astype(np.float32)
    lost = np.isinf(found) & np.isfinite(value.astype(np.float64)) if value.itemsize > 4 else None
    if lost is not None and lost.any():
        raise QuantGRUError(
            f"Expected {what} to be numbers that float32 can hold, got {value[lost][0]:.4g}"
        )
    return found


def check_shape(value: np.ndarray, shape: tuple[int, ...], what: str) -> None:
    """Raise unless an array has this shape."""
    if value.shape != shape:
        raise QuantGRUError(f"Expected {what} to be of shape {shape}, got {value.shape}")


def reset_first(rows: np.ndarray) -> Tensor:
    """Reorder rows from update, reset, candidate (z, r, n) to reset, update, candidate.

    Args:
        rows: (3H, ..).

    Returns:
        float32 of the same shape, with storage of its own.
    """
    update, reset, candidate = np.split(rows, 3)
    return torch.from_numpy(np.ascontiguousarray(np.concatenate((reset, update, candidate))))


def cell_of_columns(
    kernel: np.ndarray,
    recurrent: np.ndarray,
    bias: np.ndarray | None,
    recurrent_bias: np.ndarray | None,
    where: str,
) -> Cell:
    """Return a cell of weights that multiply from the right, with columns z, r, n.

    Args:
        kernel: (C, 3H).
        recurrent: (H, 3H).
        bias: (3H,), or None.
        recurrent_bias: (3H,), or None.
        where: Prefix of names in errors.

    Raises:
        QuantGRUError: Shapes do not fit together.
    """
    H = recurrent.shape[0]
    check_shape(recurrent, (H, 3 * H), f"{where}recurrent_kernel")
    check_shape(kernel, (kernel.shape[0], 3 * H), f"{where}kernel")
    if bias is not None:
        check_shape(bias, (3 * H,), f"{where}bias")
    if recurrent_bias is not None:
        check_shape(recurrent_bias, (3 * H,), f"{where}recurrent_bias")
    return Cell(
        reset_first(kernel.T),
        reset_first(recurrent.T),
        None if bias is None else reset_first(bias),
        None if recurrent_bias is None else reset_first(recurrent_bias),
    )
