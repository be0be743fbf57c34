"""The frozen part of a plan as kernel arguments, and the form of a plan."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from quant_gru.integer.plan import CellPlan, FrozenPart
from quant_gru.integer.quantizer import Quantizer
from quant_gru.integer.tables import Table
from quant_gru.kernels._native import Form, GateNumbers
from quant_gru.kernels.cpu.plan_packing import pack_gates
from quant_gru.kernels.cuda.machine import COLD, refuse_in_capture

_TABLES = ("gate.z_out", "gate.r_out", "gate.g_out")
KINDS = {torch.int8: 0, torch.uint8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4}
"""Containers of codes in native code."""
# how kernels read a table: one entry per code in shared or global memory, quadratics, compressed
DIRECT, DIRECT_GLOBAL, QUADRATIC, COMPRESSED = 0, 1, 2, 3
NARROW_BITS = 16


class FrozenNumbers:
    """The gate arithmetic and tables, created once; piecewise tables need a host sync.

    Attributes:
        native: The same in native code, which derives them.
        places: Addresses of the tables of z, r and g, see `GateNumbers.cell`.
    """

    def __init__(self, frozen: FrozenPart) -> None:
        self._keep: list[Tensor] = []
        self.native = GateNumbers(pack_gates(frozen))
        tables = [frozen.tables[name] for name in _TABLES]
        made = zip(tables, self.native.tables(), strict=True)
        self.places = [self._places(*each) for each in made]

    def _places(self, table: Table, made: tuple[bytes | None, bytes | None]) -> tuple[int, ...]:
        device, (direct, lines) = table.bounds.device, made
        read = ((direct, torch.float32), (lines, torch.int32))
        own = [
            None if each is None else torch.frombuffer(bytearray(each), dtype=dtype).to(device)
            for each, dtype in read
        ]
        shared = [each.to(torch.int64) for each in (table.bounds, table.coefficients)]
        return tuple(0 if each is None else self._pointer(each) for each in (*own, *shared))

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()


_frozen: weakref.WeakKeyDictionary[FrozenPart, FrozenNumbers] = weakref.WeakKeyDictionary()


def frozen_numbers(frozen: FrozenPart) -> FrozenNumbers:
    """Return the numbers of a frozen part, which are created at their first use."""
    found = _frozen.get(frozen)
    if found is None:
        device = next(iter(frozen.tables.values())).bounds.device
        refuse_in_capture(device, COLD)
        found = _frozen[frozen] = FrozenNumbers(frozen)
    return found


def takes(*quantizers: Quantizer) -> bool:
    """Return whether kernels that convert real values and codes support quantizers."""
    return all(each.bits <= NARROW_BITS for each in quantizers)


def planes_of(bits: int) -> int:
    """Return the bytes of a code inside a kernel, by its width in bits."""
    return 1 if bits <= 8 else 2


def form_of(plan: CellPlan) -> Form:
    """Return the form of a plan, from its widths and frozen numbers only."""
    w, large = plan.weights, _has_large_shared_memory(plan.weights.W.device)
    sizes = (plan.input_size, plan.hidden_size)
    return frozen_numbers(plan.frozen).native.form(*sizes, w.bits_W, w.bits_R, large)


def _has_large_shared_memory(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
