"""Real values between the form of a call and that of kernels, all of them by one launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_runtime.cuda.ctypes_structs import structure
from kernel_runtime.cuda.launch import Grid, Kernel, Machine, Prepared
from quant_gru.integer.border import FLOATS

RowsC = structure(
    "RowsC",
    **dict.fromkeys(("real", "to", "order", "packed", "to_packed"), ctypes.c_void_p),
    **dict.fromkeys(("kind", "to_kind", "step", "next", "to_step", "to_next"), ctypes.c_int64),
    **dict.fromkeys(("T", "N", "features"), ctypes.c_int64),
)
MOST = 4
"""Tensors that one launch converts."""
_CONVERT = Kernel.of("boundary/convert_rows", "convert", {})
_ROWS = 8  # of a block


class Conversion(NamedTuple):
    """A tensor that a launch brings to another form.

    Addresses are what the caller takes for them.

    Attributes:
        shape: (T, N, features).
        source: dtype of what is read.
        to: dtype of what is written.
        real: Address of what is read; None where the caller sets it.
        result: Address of what is written.
        order: Address of the order of rows that are read; None for the same.
        packed: Address of where rows of steps start in what is read, see `Packing.layout`; None
            where they are not packed.
        to_packed: The same of what is written.
        strides: Of steps and rows of what is read, in values; None where it lies in one piece.
    """

    shape: tuple[int, int, int]
    source: torch.dtype
    to: torch.dtype
    real: Any
    result: Any
    order: Any = None
    packed: Any = None
    to_packed: Any = None
    strides: tuple[int, ...] | None = None


def convert(
    machine: Machine,
    conversions: Sequence[Conversion],
    point: Callable[[Any, str, Any], None],
) -> tuple[Prepared, list[Any]]:
    """One launch that converts tensors; results lie in one piece.

    Args:
        machine: Where it runs.
        conversions: One to `MOST` of them.
        point: point(record, field, address): lets a field of a record follow an address.

    Returns:
        The launch, and the records that it reads at each start, in order, to be kept as long.
    """
    all_rows: Any = (RowsC * MOST)()
    records = [all_rows[i] for i in range(len(conversions))]
    for record, each in zip(records, conversions, strict=True):
        _, N, features = each.shape
        record.T, record.N, record.features = each.shape
        record.kind, record.to_kind = FLOATS[each.source], FLOATS[each.to]
        record.to_step, record.to_next = N * features, features
        record.step, record.next = each.strides or (N * features, features)
        addresses = {
            "real": each.real,
            "to": each.result,
            "order": each.order,
            "packed": each.packed,
            "to_packed": each.to_packed,
        }
        for name, address in addresses.items():
            if address is not None:
                point(record, name, address)
    most = max(each.shape[0] * each.shape[1] for each in conversions)
    grid = Grid((-(-most // _ROWS), len(conversions)), 32 * _ROWS)
    return machine.prepare(_CONVERT, grid, all_rows), [all_rows, *records]


def row_maker(features: int, device: torch.device, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """What makes the data of a PackedSequence, of so many rows."""

    def make(rows: int) -> Tensor:
        return torch.empty((rows, features), dtype=dtype, device=device)

    return make
