"""Conversion of real values between the layouts of a call and of kernels, in a single launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant_gru.integer.call_form import FLOATS
from quant_gru.kernel_runtime.cuda.ctypes_structs import structure
from quant_gru.kernel_runtime.cuda.launch import Grid, Kernel, Machine, Prepared

RowsC = structure(
    "RowsC",
    **dict.fromkeys(("real", "to", "order", "packed", "to_packed"), ctypes.c_void_p),
    **dict.fromkeys(("kind", "to_kind", "step", "next", "to_step", "to_next"), ctypes.c_int64),
    **dict.fromkeys(("T", "N", "features"), ctypes.c_int64),
)
MOST = 4
"""The most tensors that a launch converts."""
_CONVERT = Kernel.of("boundary/convert_rows", "convert", {})
_ROWS = 8  # per block


class Conversion(NamedTuple):
    """A tensor that a launch converts to another dtype or layout.

    The caller chooses the type of addresses.

    Attributes:
        shape: (T, N, features).
        source: dtype of the source.
        to: dtype of the result.
        real: Address of the source; None if the caller sets it.
        result: Address of the result.
        order: Address of the order in which rows are read; None for unchanged order.
        packed: Address of the starts of each step's rows in the source, see `Packing.layout`; None
            if the source is not packed.
        to_packed: The same for the result.
        strides: Strides of the source's steps and rows, in values; None if it is contiguous.
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
    """Prepare one launch that converts tensors; results are contiguous.

    Args:
        machine: The machine that runs the kernel.
        conversions: One to `MOST` conversions.
        point: point(record, field, address): sets a field of a record from an address.

    Returns:
        The launch, and the records that it reads at each start. The caller keeps the records as
        long as the launch.
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
    """Return a function that allocates the data of a PackedSequence for a number of rows."""

    def make(rows: int) -> Tensor:
        return torch.empty((rows, features), dtype=dtype, device=device)

    return make
